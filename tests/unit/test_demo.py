"""The demo really kills and really compares, and the example resumes bit for bit."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from click.testing import CliRunner

import ckptstore
from ckptstore.cli import main
from ckptstore.cli.demo import _compare

if TYPE_CHECKING:
    from ckptstore.cli._demo_process import Training

pytestmark = pytest.mark.xdist_group("demo")  # one worker: the story is told once

ROOT = Path(__file__).parents[2]
RUN_DEMO = "from ckptstore.cli import main; main()"


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A demo that was run: its folder, and what it printed."""
    folder = tmp_path_factory.mktemp("demo") / "kept"
    command = [sys.executable, "-c", RUN_DEMO, "demo", "--steps", "6", "--keep", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return folder, done.stdout


def test_the_demo_tells_a_kill_in_the_middle_of_a_save_and_equal_losses(story: tuple[Path, str]) -> None:
    _, text = story
    assert "SIGKILL, while it saved step 4" in text
    assert "checkpoints of steps 1, 2, 3;" in text
    assert "from step 3; steps to train again: 1" in text
    assert "7 of 7 losses are equal" in text
    assert "are equal" in text.split("final parameters")[1].splitlines()[0]


def test_the_kill_left_an_unfinished_save_that_no_one_lists(story: tuple[Path, str]) -> None:
    folder, _ = story
    attempts = sorted((folder / "killed" / "data").glob("*/*"))
    unfinished = [path for path in attempts if not (path / "MANIFEST.json").exists()]
    assert [path.name.split("-")[0] for path in unfinished] == ["000000000004"]
    (payload,) = unfinished[0].iterdir()
    with payload.open("rb") as file:
        assert not any(file.read()[-100:])  # its last part was never written
    with ckptstore.open_run(folder / "killed") as run:
        assert [item.step for item in run.checkpoints(all=True)] == [1, 2, 3, 4, 5, 6]
        assert run.verify().ok


def test_both_runs_end_in_the_same_state(story: tuple[Path, str]) -> None:
    import torch

    folder, _ = story
    one, other = (ckptstore.load(folder / name, only="model")["model"] for name in ("killed", "uninterrupted"))
    assert list(one) == list(other)
    assert all(torch.equal(one[name], other[name]) for name in one)


def _half(losses: dict[int, float], *, first: int = 0, digest: str | None = None) -> Training:
    return cast("Training", SimpleNamespace(losses=losses, first=first, digest=digest))


@pytest.mark.parametrize(
    "resumed,sound",
    [
        ({"losses": {3: 0.3, 4: 0.4}, "first": 2, "digest": "same"}, True),
        ({"losses": {3: 0.3, 4: 0.4}, "first": 2, "digest": "other"}, False),
        ({"losses": {3: 0.3, 4: 0.4000000000000001}, "first": 2, "digest": "same"}, False),
        ({"losses": {4: 0.4}, "first": 3, "digest": "same"}, False),
        ({"losses": {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4}, "first": 0, "digest": "same"}, False),
    ],
    ids=["equal", "another final state", "one bit of a loss", "a step that no one trained", "started anew"],
)
def test_the_comparison_accepts_nothing_but_the_same_losses_and_state(resumed: dict[str, Any], *, sound: bool) -> None:
    whole = _half({1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4}, digest="same")
    assert _compare(whole, _half({1: 0.1, 2: 0.2}), _half(**resumed), 4) is sound


def test_a_folder_that_is_not_empty_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    done = CliRunner().invoke(main, ["demo", "--keep", str(tmp_path)])
    assert done.exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_demo_that_is_interrupted_leaves_neither_process_nor_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN_DEMO, "demo", "--steps", "6000"]
    demo = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        start_new_session=True,
    )
    assert demo.stdout is not None
    assert demo.stdout.readline().startswith("Training")
    os.killpg(demo.pid, signal.SIGINT)  # what Ctrl-C on a terminal does
    _, stderr = demo.communicate(timeout=60)  # the pipes end only when every process that holds them has
    assert demo.returncode == 130
    assert stderr == "ckptstore: interrupted\n"
    assert not list(tmp_path.glob("ckptstore-demo-*"))


def test_without_torch_the_demo_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    done = CliRunner().invoke(main, ["demo"])
    assert done.exit_code == 1
    assert "pip install 'ckptstore[torch]'" in done.stderr


def test_the_example_goes_on_bit_for_bit_where_it_was_stopped(tmp_path: Path) -> None:
    example = _example()
    size = example.SMALL
    whole = example.train(str(tmp_path / "whole"), steps=8, every=2, size=size, seed=5)
    example.train(str(tmp_path / "parts"), steps=5, every=2, size=size, seed=5)
    rest = example.train(str(tmp_path / "parts"), steps=8, every=2, size=size, seed=99)  # the saved seed counts
    assert sorted(rest) == [5, 6, 7, 8]
    assert [rest[step].hex() for step in rest] == [whole[step].hex() for step in rest]
    with ckptstore.open_run(tmp_path / "parts") as run:
        assert [item.step for item in run.checkpoints()] == [2, 4, 6, 8]


def test_the_example_is_the_reference_workload() -> None:
    example = _example()
    model = example.Transformer(example.Size())
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 1) == 51.7


def test_the_lines_that_the_readme_adds_save_and_resume(tmp_path: Path) -> None:
    import torch

    text = (ROOT / "README.md").read_text()
    diff = text.partition("```diff\n")[2].partition("```")[0]
    added = "\n".join(line[1:] for line in diff.splitlines() if line[:1] == "+")
    assert "/data/runs/gpt" in added
    for total_steps in (1000, 1500):
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        names = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10),
            "scaler": torch.amp.GradScaler("cpu"),
            "train_one_step": lambda: 0.5,
            "total_steps": total_steps,
        }
        exec(added.replace("/data/runs/gpt", str(tmp_path)), names)
    with ckptstore.open_run(tmp_path) as run:
        assert [item.step for item in run.checkpoints()] == [500, 1000, 1500]


def _example() -> Any:
    path = ROOT / "examples" / "train_transformer.py"
    spec = importlib.util.spec_from_file_location("train_transformer", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
