"""Does a run that was killed in the middle of a save go on as if nothing had happened?

The demo trains it, kills it with SIGKILL while a checkpoint is half written, resumes it in a new process, and compares
every loss and the final state with a run that was never stopped: equal means equal in every bit. Each training has a
process of its own, forked from a server that has imported torch and done nothing else, so torch is loaded only once.
"""

from __future__ import annotations

import importlib.util
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckptstore.cli._output import iec
from ckptstore.cli.ls import print_checkpoints

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptstore.cli._demo_process import Training

__all__ = ["demo"]

_SAVES = 6
_KILLED_SAVE = 4


@click.command()
@click.option("--keep", metavar="DIR", type=click.Path(path_type=Path), help="Work in DIR and leave all files there.")
@click.option("--steps", type=click.IntRange(min=_SAVES), default=60, show_default=True, help="Steps to train.")
def demo(keep: Path | None, steps: int) -> None:
    """Train, kill -9 in the middle of a save, resume, compare.

    Takes some seconds, and 600 MiB of disk meanwhile. The exit code is 0 only if the run that was killed and resumed
    had exactly the losses, and reached exactly the state, of one that was never stopped.
    """
    if importlib.util.find_spec("torch") is None:
        message = "the demo trains with torch, which is not installed: pip install 'ckptstore[torch]'"
        raise click.ClickException(message)
    with _folder(keep) as folder:
        sound = _tell_story(folder, steps)
        if keep is None:
            _say("Files", "were temporary and are gone: --keep DIR leaves them, for ckptstore ls and show")
        else:
            _say("Files", f"ckptstore ls {folder / 'killed'}")
            _say("", f"ckptstore show {folder / 'killed'}@{steps // _SAVES}")
    if not sound:
        message = "the resumed run is not what the run that was never stopped is"
        raise click.ClickException(message)


def _tell_story(folder: Path, steps: int) -> bool:
    """Train three times, tell what happens, and return whether all is as promised."""
    from ckptstore.cli._demo_process import Job, Training, start_server

    every = steps // _SAVES
    victim = _KILLED_SAVE * every
    url, reference = str(folder / "killed"), str(folder / "uninterrupted")
    context = start_server()
    _say("Training", f"a transformer for {steps} steps, with a checkpoint every {every}, in {url}")
    with Training(context, Job(url=reference, steps=steps, every=every)) as whole:
        with Training(context, Job(url=url, steps=steps, every=every, hold_step=victim)) as killed:
            killed.follow()
            killed.kill()
        _say_killed(killed, victim)
        _say_found(folder / "killed", victim)
        with Training(context, Job(url=url, steps=steps, every=every)) as resumed:
            resumed.follow()
        lost = max(killed.losses) - resumed.first
        _say("Resumed", f"by process {resumed.pid} from step {resumed.first}; steps to train again: {lost}")
        whole.follow()
    equal = _compare(whole, killed, resumed, steps)
    return _verify(url) and equal


def _say_killed(killed: Training, step: int) -> None:
    saving = killed.saving
    if saving is None:
        message = f"training ended without the save of step {step}, which was to be interrupted"
        raise click.ClickException(message)
    _say("", f"{killed.n_parameters / 1e6:.1f} M parameters, dropout, AdamW, cosine schedule, gradient scaler")
    _say("Killed", f"process {killed.pid} with SIGKILL, while it saved step {step}:")
    _say("", f"{iec(saving.written)} of {iec(saving.n_bytes)} were written")


def _say_found(root: Path, step: int) -> None:
    """Tell what a reader of the run finds now, and what only a look at the disk finds."""
    from ckptstore.api import open_run
    from ckptstore.run.layout import MANIFEST_NAME

    with open_run(root) as run:
        steps = ", ".join(str(item.step) for item in run.checkpoints())
    unfinished = [path for path in (root / "data").glob("*/*") if not (path / MANIFEST_NAME).exists()]
    n_bytes = sum(file.stat().st_size for path in unfinished for file in path.iterdir())
    _say("Found", f"checkpoints of steps {steps}; on disk also {iec(n_bytes)} of an unfinished step {step},")
    _say("", "which no list shows and no resume reads")


def _compare(whole: Training, killed: Training, resumed: Training, steps: int) -> bool:
    """Compare every loss of the two halves, and the final state, with those of the whole."""
    pairs = [(step, loss, whole.losses.get(step)) for half in (killed, resumed) for step, loss in half.losses.items()]
    # Compared as hexadecimal: every bit, and a NaN equals itself.
    wrong = [step for step, loss, expected in pairs if expected is None or loss.hex() != expected.hex()]
    missing = set(range(1, steps + 1)) - killed.losses.keys() - resumed.losses.keys()
    _say("Compared", "with a run that was never stopped, bit for bit:")
    _say("", f"{len(pairs) - len(wrong)} of {len(pairs)} losses are equal; the last is {resumed.losses[steps].hex()}")
    same = whole.digest == resumed.digest
    _say("", f"final parameters, optimizer state and learning rate {'are equal' if same else 'DIFFER'}")
    if wrong:
        _say("", f"the losses differ first at step {min(wrong)}")
    return same and not wrong and not missing and resumed.first > 0


def _verify(url: str) -> bool:
    """Digest every checkpoint of the run, and list them."""
    from ckptstore.api import open_run

    with open_run(url) as run:
        report = run.verify()
        items = run.checkpoints()
        _say("Verified", f"{len(items)} checkpoints, every byte of {iec(sum(item.n_bytes for item in items))}")
        for problem in (*report.journal, *(problem.reason for part in report.checkpoints for problem in part.problems)):
            _say("", problem)
        _say("Listed", "by ckptstore ls:")
        print_checkpoints(items)
    return report.ok


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """Yield an empty folder to work in: *keep*, or a temporary one."""
    if keep is None:
        import tempfile

        with tempfile.TemporaryDirectory(prefix="ckptstore-demo-", ignore_cleanup_errors=True) as name:
            yield Path(name)
        return
    keep.mkdir(parents=True, exist_ok=True)
    if any(keep.iterdir()):
        message = f"--keep {keep}: the folder is not empty; name a new one"
        raise click.UsageError(message)
    yield keep


def _say(title: str, text: str) -> None:
    click.echo(f"{title:<10} {text}")
