"""The public API as a type checker sees it. Checked by pyright and mypy, never run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_type

import torch
from torch import nn

import ckptstore
from ckptstore import errors
from ckptstore.checkpoint import Checkpoint, Run, RunReport
from ckptstore.manager import CheckpointManager, Resumed, SaveHandle
from ckptstore.reader.verify import VerifyReport
from ckptstore.run.manifest import Manifest
from ckptstore.store import CheckpointStore


def the_loop(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, total: int) -> None:
    with ckptstore.CheckpointManager("file:///runs/gpt", every="500 steps", metadata={"lr": 0.1}) as manager:
        assert_type(manager, CheckpointManager)
        resumed = manager.resume(model=model, optimizer=optimizer, scaler=scaler, data_seed=1)
        assert_type(resumed, Resumed)
        assert_type(resumed.step, int)
        assert_type(resumed.fresh, bool)
        assert_type(resumed.lost_steps, int)
        assert_type(resumed.values, dict[str, Any])
        for skipped in resumed.skipped:
            assert_type(skipped.reason, str)
        seed = resumed.values["data_seed"]
        for step in range(resumed.step + 1, total):
            loss = torch.ones(())
            handle = manager.step(step, model=model, data_seed=seed, metrics={"val_loss": loss})
            assert_type(handle, SaveHandle | None)
        handle = manager.save(total, model=model, tags=["last"], permanent=True, if_exists="skip", wait=True)
        assert_type(handle, SaveHandle)
        assert_type(handle.result(timeout_s=10.0), Checkpoint)
        assert_type(handle.done(), bool)
        assert_type(manager.latest(), Checkpoint | None)


def every_kind_of_address(store: CheckpointStore) -> None:
    for address in ("/runs/gpt", Path("/runs/gpt"), store):
        assert_type(ckptstore.open_run(address), Run)
        CheckpointManager(address)
    assert_type(ckptstore.open_store(Path("/runs/gpt")), CheckpointStore)
    assert_type(ckptstore.open_store("memory://x", option=3), CheckpointStore)


def looking(run: Run) -> None:
    assert_type(run.checkpoints(), list[Checkpoint])
    assert_type(run.checkpoints(all=True), list[Checkpoint])
    assert_type(run.latest(), Checkpoint | None)
    assert_type(run.verify(), RunReport)
    assert_type(run.verify(deep=False).ok, bool)
    found = run.at(step=3)
    assert_type(found, Checkpoint)
    assert_type(run.at(seq=3), Checkpoint)
    assert_type(found.step, int)
    assert_type(found.seq, int)
    assert_type(found.n_bytes, int)
    assert_type(found.metrics, dict[str, float])
    assert_type(found.tags, tuple[str, ...])
    assert_type(found.permanent, bool)
    assert_type(found.damaged, bool)
    assert_type(found.on_lineage, bool)
    assert_type(found.created.year, int)
    assert_type(found.manifest(), Manifest)
    assert_type(found.verify(deep=False), VerifyReport)


def reading(found: Checkpoint, model: nn.Module) -> None:
    assert_type(found.load(), dict[str, Any])
    found.load(only="model", skip=["model/head"], map_location=torch.device("cpu"), verify="inline")
    assert_type(found.restore(model=model, strict=False, verify="sizes", strip_prefix="module."), dict[str, Any])
    assert_type(found.tensor("model/weight"), torch.Tensor)


def in_one_line(model: nn.Module) -> None:
    assert_type(ckptstore.save("/runs/x", 3, model=model), Checkpoint)
    assert_type(ckptstore.load("/runs/x", 3, only=["model"]), dict[str, Any])
    assert_type(ckptstore.restore("/runs/x", model=model), dict[str, Any])


def errors_are_grouped_by_what_to_do_next(error: errors.CkptStoreError) -> None:
    assert_type(error.operation, str)
    assert_type(error.key, str)
    assert_type(error.retryable, bool)
    wrong_call: ValueError = errors.MismatchError("")
    not_there: LookupError = errors.NotFoundError("")
    conflict: errors.ConflictError = errors.FencedError("")
    del wrong_call, not_there, conflict


def slips_are_found(found: Checkpoint, manager: CheckpointManager) -> None:
    found.load(verify="fast")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    found.step = 4  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
    manager.save("3")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    manager.save(3, if_exists="overwrite")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    manager.resume(fallback="older")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ckptstore.lode("/runs/x")  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
