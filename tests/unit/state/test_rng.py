"""The next random numbers after restore are those that would have come after capture."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from ckptstore.errors import CorruptionError
from ckptstore.state import rng
from tests.unit.state.same import assert_same, through_bytes


def draw() -> tuple[Any, ...]:
    return (
        random.random(),  # noqa: TID251  # the global generators are what is tested
        random.gauss(0, 1),  # noqa: TID251
        torch.rand(3).tolist(),
        torch.randn(1).tolist(),
        torch.nn.functional.dropout(torch.ones(9)).tolist(),
        np.random.rand(2).tolist(),  # noqa: NPY002
        np.random.standard_normal(),  # noqa: NPY002
    )


@pytest.fixture(autouse=True)
def _kept() -> Any:
    before = rng.capture()
    yield
    assert rng.restore(before) == []


def test_the_next_numbers_are_the_same_after_a_way_through_bytes() -> None:
    draw()
    captured = rng.capture()
    first = draw()
    assert draw() != first
    assert rng.restore(through_bytes(captured)) == []
    assert draw() == first


def test_capturing_draws_nothing_and_is_not_changed_by_later_draws() -> None:
    captured = rng.capture()
    kept = through_bytes(captured)
    draw()
    assert_same(captured, kept)


@pytest.mark.parametrize("name", ["torch", "python", "numpy"])
@pytest.mark.parametrize(
    "bad",
    [None, 3, "x", (), {}, [], torch.zeros(3), torch.zeros(3, dtype=torch.uint8), (3, (1,) * 625, "x")],
    ids=range(9),
)
def test_a_state_that_is_none_sets_nothing_at_all(name: str, bad: Any) -> None:
    captured = rng.capture()
    draw()
    now = rng.capture()
    captured[name] = bad
    with pytest.raises(CorruptionError, match=f"'{name}'"):
        rng.restore(captured)
    assert_same(rng.capture(), now)


def test_a_position_outside_numpys_key_is_refused() -> None:
    captured = rng.capture()
    for pos in (-1, 625, 10**6):
        captured["numpy"]["state"]["pos"] = pos
        with pytest.raises(CorruptionError, match="outside its key"):
            rng.restore(captured)


def test_another_kind_of_numpy_generator_is_reported_not_forced() -> None:
    captured = rng.capture()
    captured["numpy"]["bit_generator"] = "PCG64"
    assert rng.restore(captured) == ["numpy's generator state: saved of PCG64, while this process uses MT19937"]


class FakeCuda:
    """Two devices of what torch.cuda would be; the states are those of CPU generators."""

    def __init__(self, n_devices: int) -> None:
        self.generators = [torch.Generator().manual_seed(n) for n in range(n_devices)]

    def device_count(self) -> int:
        return len(self.generators)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self.generators]

    def set_rng_state(self, state: torch.Tensor, device: str) -> None:
        self.generators[int(device.partition(":")[2])].set_state(state)


def use_cuda(monkeypatch: pytest.MonkeyPatch, n_devices: int) -> FakeCuda:
    fake, generator = FakeCuda(n_devices), torch.Generator
    monkeypatch.setattr(rng, "_accelerators", lambda: {"cuda": fake})
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": generator())
    return fake


def test_generators_of_every_device_in_use_are_captured_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use_cuda(monkeypatch, 2)
    captured = through_bytes(rng.capture())
    first = [torch.rand(2, generator=generator).tolist() for generator in fake.generators]
    assert rng.restore(captured) == []
    assert [torch.rand(2, generator=generator).tolist() for generator in fake.generators] == first


def test_devices_that_are_not_here_are_reported_and_the_others_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    use_cuda(monkeypatch, 3)
    captured = rng.capture()
    fake = use_cuda(monkeypatch, 1)
    fake.generators[0].manual_seed(9)
    assert rng.restore(captured) == [
        "the generator state of cuda:1: only 1 here",
        "the generator state of cuda:2: only 1 here",
    ]
    assert_same(fake.get_rng_state_all()[0], captured["cuda"][0])
    monkeypatch.setattr(rng, "_accelerators", dict)
    assert rng.restore(captured) == ["the cuda generator's state: cuda isn't in use in this process"]


def test_numpy_is_asked_only_if_it_is_loaded_and_no_accelerator_is_started() -> None:
    script = (
        "import sys, torch\n"
        "from ckptstore.state import rng\n"
        "sys.modules.pop('numpy', None)\n"
        "captured = rng.capture()\n"
        "assert 'numpy' not in captured and 'numpy' not in sys.modules, captured.keys()\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
