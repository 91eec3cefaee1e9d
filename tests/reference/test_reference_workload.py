"""The reference workload, at its full size, saved and resumed: every bit, and the losses that follow."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import ckptstore

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from workload import Reference, reference


def batches(seed: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 32000, (2, 64), generator=generator) for _ in range(count)]


def flat(workload: Reference) -> dict[str, Any]:
    """Return every tensor and number that training goes on with."""
    found: dict[str, Any] = dict(workload.model.state_dict())
    for number, state in workload.optimizer.state_dict()["state"].items():
        found |= {f"{number}.{key}": value for key, value in state.items()}
    found["lr"] = workload.optimizer.param_groups[0]["lr"]
    found["scheduler"] = workload.scheduler.state_dict()
    found["scaler"] = workload.scaler.state_dict()
    return found


@pytest.mark.timeout(600)
def test_the_reference_workload_resumes_bit_for_bit_and_safetensors_reads_its_weights(tmp_path: Path) -> None:
    first, second, third = batches(5, 3)
    trained = reference(seed=1)
    assert sum(parameter.numel() for parameter in trained.model.parameters()) == 51_714_304
    trained.step(first)
    with ckptstore.CheckpointManager(tmp_path) as manager:
        manager.resume(**trained.states())
        checkpoint = manager.save(2, wait=True, **trained.states()).result()
    saved = {name: value.clone() if torch.is_tensor(value) else value for name, value in flat(trained).items()}
    expected = [trained.step(second), trained.step(third)]  # the run that was never stopped

    fresh = reference(seed=99)
    with ckptstore.CheckpointManager(tmp_path) as manager:
        resumed = manager.resume(**fresh.states())
    assert resumed.step == 2
    assert resumed.values["data_seed"] == 17
    found = flat(fresh)
    assert found.keys() == saved.keys()
    for name, value in saved.items():
        if torch.is_tensor(value):
            assert value.dtype == found[name].dtype
            assert torch.equal(value.view(-1).view(torch.uint8), found[name].view(-1).view(torch.uint8)), name
        else:
            assert value == found[name], name
    assert [loss.hex() for loss in expected] == [fresh.step(second).hex(), fresh.step(third).hex()]

    (container,) = tmp_path.glob("data/*/*/*.safetensors")
    assert container.stat().st_size == checkpoint.manifest().files[0].size > 620_000_000
    with safe_open(container, "pt") as file:
        names = set(file.keys())
        for key in trained.model.state_dict():
            assert f"model/{key}" in names
            assert torch.equal(file.get_tensor(f"model/{key}"), saved[key])
