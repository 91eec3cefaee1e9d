"""Kill a saving process at every storage verb, before and after it took effect, and look at what it leaves.

Run as a script: prints one JSON line with the counts. torch is imported once; each victim is a fork, killed by SIGKILL.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import NoReturn

import torch

import ckptstore
from ckptstore.testing.faulty import Die, Fault, FaultPlan, FaultyStore, Torn

STEPS = (10, 20, 30)


class KillingStore(FaultyStore):
    """A faulty store whose kills are real."""

    def _kill(self) -> NoReturn:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def state_at(step: int) -> dict[str, torch.Tensor]:
    """Return the state that a step saves: recognisable, several tensors."""
    return {"a": torch.full((1000,), float(step)), "b": torch.arange(step, step + 50), "c": torch.tensor(step)}


def save_all(root: Path, plan: FaultPlan, told: int) -> dict[str, int]:
    """Save the steps one after the other and write each that is reported committed to *told*."""
    store = KillingStore(ckptstore.open_store(root), plan)
    with ckptstore.CheckpointManager(store, rng=False) as manager:
        manager.resume(state=state_at(0))
        for step in STEPS:
            manager.save(step, wait=True, state=state_at(step), metrics={"loss": 1 / step})
            os.write(told, f"{step}\n".encode())
    return store.calls


def judge(root: Path, told: list[int]) -> str:
    """Return what is wrong with what a killed process left, or nothing."""
    run = ckptstore.open_run(root)
    listed = [item.step for item in run.checkpoints(all=True)]
    if not set(told) <= set(listed):
        return f"lost: told {told}, listed {listed}"
    if not run.verify().ok:
        return f"unfinished listed: {run.verify()}"
    for step in listed:
        found = run.at(step=step).load()["state"]
        if any(not torch.equal(found[name], tensor) for name, tensor in state_at(step).items()):
            return f"step {step} is not what was saved"
    with ckptstore.CheckpointManager(root, rng=False) as manager:
        state = state_at(0)
        resumed = manager.resume(state=state)
        if resumed.step != max(listed, default=0) or resumed.skipped:
            return f"resumed from {resumed}, listed {listed}"
        manager.save(resumed.step + 5, wait=True, state=state_at(resumed.step + 5))
    after = [item.step for item in ckptstore.open_run(root).checkpoints()]
    return "" if after == [*listed, resumed.step + 5] else f"wedged: {after} after {listed}"


def in_child(root: Path, plan: FaultPlan) -> tuple[int, list[int]]:
    """Run ``save_all`` in a fork; return its wait status and the steps it reported."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            save_all(root, plan, writing)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = [int(line) for line in pipe if line.endswith("\n")]
    return os.waitpid(child, 0)[1], told


def main() -> None:
    """Kill at every point and print the counts."""
    base = Path(sys.argv[1])
    # What a run without faults calls, and how often: the points to kill at.
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        calls = save_all(base / "whole", FaultPlan(), os.open(os.devnull, os.O_WRONLY))
        os.write(writing, json.dumps(calls).encode())
        os._exit(0)
    os.waitpid(child, 0)
    calls = json.loads(os.read(reading, 65536))
    kills = 0
    wrong: list[str] = []
    for verb, count in calls.items():
        faults: list[Fault] = [Die()]
        if verb in {"publish", "put", "create", "write", "finish"}:
            faults.append(Die(after=True))
        if verb == "write":
            faults.append(Torn(kept=100, kill=True))
        for call in range(count):
            for fault in faults:
                root = base / f"{verb}-{call}-{len(faults)}"
                status, told = in_child(root, FaultPlan({(verb, call): fault}))
                killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
                kills += killed
                problem = judge(root, told)
                # The calls of the last moments (closing) may be too few to reach; every other point must kill.
                if problem or (not killed and call < count - 1):
                    wrong.append(f"{verb} {call} {fault}: {problem or 'was not killed'}")
                shutil.rmtree(root, ignore_errors=True)
    print(json.dumps({"calls": calls, "kills": kills, "wrong": wrong}))


if __name__ == "__main__":
    main()
