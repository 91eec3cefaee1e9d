"""How much slower does training get, beyond the stall, while checkpoints are written beside it?

    python benchmarks/loop.py                      ckptstore and the asynchronous ways of torch, 9 rounds
    python benchmarks/loop.py --every 5 --steps 10

Each subject trains the reference workload in a process of its own, taking turns. A round is the same number of steps
with a save every few steps; the slowdown is what it takes longer than the same steps without saves, less the stall
that the save calls themselves cost, for each save.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

DEFAULT = [
    "ckptstore copy",
    "ckptstore overlap",
    "clone + torch.save thread",
    "dcp.async_save thread",
    "dcp.async_save kept stager",
    "dcp.async_save process",
]


def serve(name: str, folder: str, steps: int, every: int, pipe: Any) -> None:
    """Train in this process, on command, and report seconds and stalls of each round."""
    import warnings

    warnings.simplefilter("ignore")
    import torch
    import workload
    from subjects import SUBJECTS

    torch.set_num_threads(2)
    trained = workload.reference()
    batch = torch.randint(0, 32000, (2, 64))
    subject = None if name == "none" else SUBJECTS[name](trained.states(), Path(folder))
    pipe.send("ready")
    number = 0
    while pipe.recv() == "round":
        stall = 0.0
        started = time.perf_counter()
        for step in range(1, steps + 1):
            trained.step(batch)
            if subject is not None and step % every == 0:
                if number:
                    subject.settle()
                    stall -= subject.stall_later_s  # waited for in the step, counted where it was paid
                number += 1
                before = time.perf_counter()
                subject.save(number)
                stall += time.perf_counter() - before
        seconds = time.perf_counter() - started
        later = 0.0
        if subject is not None:
            subject.settle()
            later = subject.stall_later_s
            for old in range(max(1, number - steps // every), number):
                subject.clean(number if hasattr(subject, "wait") else old)
        pipe.send((seconds, stall + later))
    if subject is not None:
        subject.close()


class Child:
    """One subject's process."""

    def __init__(self, name: str, folder: Path, steps: int, every: int) -> None:
        folder.mkdir(parents=True)
        context = multiprocessing.get_context("spawn")
        self.name = name
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(name, str(folder), steps, every, theirs))
        self._process.start()
        theirs.close()
        self._pipe.recv()

    def round(self) -> tuple[float, float]:
        """Train one round; return its seconds and its stalls."""
        self._pipe.send("round")
        found: tuple[float, float] = self._pipe.recv()
        return found

    def end(self) -> None:
        """End the process."""
        self._pipe.send("end")
        self._process.join(60)
        if self._process.is_alive():
            self._process.kill()


def main() -> None:
    """Measure and print."""
    from subjects import SUBJECTS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=6, help="steps a round")
    parser.add_argument("--every", type=int, default=3, help="steps between saves")
    parser.add_argument("--only", action="append", choices=list(SUBJECTS))
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="ckptstore-loop-", dir=options.folder))
    saves = options.steps // options.every
    try:
        children = [
            Child(name, root / f"subject_{number}", options.steps, options.every)
            for number, name in enumerate(["none", *(options.only or DEFAULT)])
        ]
        rounds = [[child.round() for child in children] for _ in range(options.rounds + 1)][1:]
        for child in children:
            child.end()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(f"{options.rounds} rounds of {options.steps} steps, {saves} saves each; seconds, medians (quartiles)")
    print(f"{'':28} {'loop':>7} {'stall a save':>13} {'slowdown beyond it, a save':>28}")
    for number, child in enumerate(children):
        loops = [found[number][0] for found in rounds]
        stalls = [found[number][1] / saves for found in rounds]
        beyond = sorted((found[number][0] - found[number][1] - found[0][0]) / saves for found in rounds)
        quartiles = statistics.quantiles(beyond, n=4)
        print(
            f"{child.name:28} {statistics.median(loops):7.2f} {statistics.median(stalls):13.3f} "
            f"{statistics.median(beyond):12.3f} ({quartiles[0]:.3f} to {quartiles[2]:.3f})"
        )


if __name__ == "__main__":
    main()
