"""A thousand saves on a disk leave memory, threads and descriptors where they were."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest
import torch

import ckptstore

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

WARM_UP = 100
N_SAVES = 1000


def used() -> tuple[int, set[threading.Thread], int]:
    """Resident bytes, threads and open descriptors of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), set(threading.enumerate()), len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize("staging", ["copy", "overlap"])
def test_a_thousand_saves(tmp_path: Path, staging: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(250, 200)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(250)).sum().backward()
    optimizer.step()
    with ckptstore.CheckpointManager(tmp_path / "run", staging=staging, max_pending=2) as manager:  # type: ignore[arg-type]

        def save(first: int, last: int) -> None:
            for step in range(first, last + 1):
                manager.save(step, model=model, optimizer=optimizer)
                optimizer.step()
            manager.wait()

        save(1, WARM_UP)
        before_bytes, before_threads, before_files = used()
        save(WARM_UP + 1, N_SAVES)
        now_bytes, now_threads, now_files = used()
        assert now_threads <= before_threads
        # The sign of life is written every few seconds, with a few descriptors for a moment.
        assert any(len(list(Path("/proc/self/fd").iterdir())) <= before_files for _ in range(5000)), now_files
        grown = now_bytes - before_bytes
        # The process knows the rows of 900 more checkpoints, a few KB each; a state or an image is 600 KB.
        assert grown < 8_000_000, grown
    assert ckptstore.open_run(tmp_path / "run").checkpoints()[-1].load()["model"]["weight"].shape == (200, 250)
