"""A process killed in any phase of an asynchronous save loses nothing committed and lists nothing unfinished."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
import torch

import ckptstore
from tests.faults.async_child import Children, children

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(120)
PHASES = {
    "staging": [1],
    "creating": [1],
    "writing": [1],
    "finishing": [1],
    "before manifest": [1],
    "before publish": [1],
    "before hint": [1, 2],  # the commit is the publish: what comes after can't undo it
}


@pytest.fixture(scope="module")
def processes() -> Iterator[Children]:
    with children() as found:
        yield found


@pytest.mark.parametrize("staging", ["copy", "overlap"])
@pytest.mark.parametrize("phase", PHASES)
def test_killed_in_a_phase(tmp_path: Path, processes: Children, phase: str, staging: str) -> None:
    ended = processes.run(
        "killed_in", tmp_path, lambda _, pid: os.kill(pid, signal.SIGKILL), phase=phase, staging=staging
    )
    assert ended.code == -signal.SIGKILL, ended.err
    run = ckptstore.open_run(tmp_path / "run")
    assert [item.step for item in run.checkpoints()] == PHASES[phase]
    assert run.verify().ok
    for item in run.checkpoints():
        weights = item.load()["model"].values()
        assert all(bool((weight == item.step).all()) for weight in weights)

    model = torch.nn.Linear(1000, 1000)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    with ckptstore.CheckpointManager(tmp_path / "run", rng=False) as manager:
        assert manager.resume(model=model, optimizer=optimizer).step == PHASES[phase][-1]
        manager.save(3, model=model, optimizer=optimizer)
    assert [item.step for item in run.checkpoints()] == [*PHASES[phase], 3]
    assert run.verify().ok
