"""A disk that fills in the middle of a save: one clear error, the space given back, earlier checkpoints usable."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest
import torch

import ckptstore
from ckptstore.errors import PermissionDeniedError, StorageFullError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount 16 MiB of memory as a disk."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def used(folder: Path) -> int:
    found = os.statvfs(folder)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def test_a_full_disk_fails_one_save_and_nothing_else(small_disk: Path) -> None:
    state = {"weights": torch.randn(1 << 20)}  # 4 MiB
    with ckptstore.CheckpointManager(small_disk / "run", rng=False) as manager:
        manager.resume(state=state)
        manager.save(1, wait=True, state=state)
        before = used(small_disk)
        big = {"weights": torch.randn(5 << 20)}  # 20 MiB
        with pytest.raises(StorageFullError, match=r"run/data.*no space left"):
            manager.save(2, wait=True, state=big)
        assert used(small_disk) - before < 1 << 20  # what was written is gone
        assert [item.step for item in ckptstore.open_run(small_disk / "run").checkpoints()] == [1]
        assert torch.equal(ckptstore.load(small_disk / "run")["state"]["weights"], state["weights"])
        assert manager.save(3, wait=True, state=state).result().step == 3  # the next save works


def test_a_read_only_disk_is_a_clear_error(small_disk: Path) -> None:
    state = {"weights": torch.ones(10)}
    ckptstore.save(small_disk / "run", 1, state=state)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    try:
        with pytest.raises(PermissionDeniedError, match="run"):
            ckptstore.save(small_disk / "run", 2, state=state)
        assert torch.equal(ckptstore.load(small_disk / "run", 1)["state"]["weights"], state["weights"])
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
