"""Tensors that are read when they are touched: exact, private, and of local files only."""

from __future__ import annotations

import io
import shutil
from typing import TYPE_CHECKING

import pytest
import torch

import ckptstore
from ckptstore.errors import CorruptionError, UnsupportedError

if TYPE_CHECKING:
    from pathlib import Path

    from ckptstore.checkpoint import Verify

STATE = {
    "big": torch.arange(100_000, dtype=torch.float64),
    "half": torch.arange(7, dtype=torch.bfloat16),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(5),
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    ckptstore.save(tmp_path / "run", 1, state=STATE, name="x")
    return tmp_path / "run"


@pytest.mark.parametrize("verify", ["full", "sizes"])
def test_mapped_tensors_are_those_saved(run: Path, verify: Verify) -> None:
    found = ckptstore.load(run, mmap=True, verify=verify)
    assert found["name"] == "x"
    for name, tensor in STATE.items():
        assert found["state"][name].dtype == tensor.dtype
        assert torch.equal(found["state"][name], tensor)


def test_writing_to_a_mapped_tensor_changes_no_stored_byte(run: Path) -> None:
    found = ckptstore.load(run, mmap=True)["state"]["big"]
    found.zero_()
    assert torch.equal(ckptstore.load(run)["state"]["big"], STATE["big"])
    assert ckptstore.open_run(run).verify().ok


def test_mapped_tensors_outlive_the_checkpoint(run: Path) -> None:
    found = ckptstore.load(run, mmap=True)["state"]["big"]
    shutil.rmtree(run)
    assert torch.equal(found, STATE["big"])


def test_saving_one_mapped_tensor_saves_no_other(run: Path) -> None:
    body = io.BytesIO()
    torch.save(ckptstore.load(run, mmap=True)["state"]["half"], body)
    assert len(body.getvalue()) < 10_000


def test_damage_is_found_when_verified_and_a_mapped_load_reads_nothing_when_not(run: Path) -> None:
    (container,) = run.glob("data/*/*/*.safetensors")
    body = bytearray(container.read_bytes())
    body[5000] ^= 1
    container.write_bytes(body)
    with pytest.raises(CorruptionError, match="big"):
        ckptstore.load(run, mmap=True)
    assert not torch.equal(ckptstore.load(run, mmap=True, verify="sizes")["state"]["big"], STATE["big"])


def test_a_store_without_files_says_so() -> None:
    ckptstore.save("memory://mmap", 1, state=STATE)
    with pytest.raises(UnsupportedError, match="without mmap=True"):
        ckptstore.load("memory://mmap", mmap=True)
