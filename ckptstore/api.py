"""How does someone use ckptstore in one line?

``save``, ``load`` and ``restore`` open what they need and close it again; a training loop holds a CheckpointManager
instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptstore.checkpoint import Checkpoint, Run
from ckptstore.errors import NotFoundError
from ckptstore.opening import open_store
from ckptstore.store import CheckpointStore

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    import torch

    from ckptstore.checkpoint import Verify

__all__ = ["load", "open_run", "restore", "save"]


def open_run(url: str | os.PathLike[str] | CheckpointStore, **storage_options: object) -> Run:
    """Open the run at *url* to look at it. Publishes nothing and needs no torch.

    An address where nothing was saved yet is an empty run. A folder that holds a single checkpoint, copied out of a
    run, opens too.

    Raises:
        NotFoundError: there is something else at the address; a folder of runs is listed.
        CorruptionError: RUN.json is damaged, and no journal can stand in for it.
        UnsupportedError: a newer version wrote it.
        UnavailableError: the store can't be asked.
    """
    if isinstance(url, CheckpointStore):
        return Run(url)
    store = open_store(url, **storage_options)
    try:
        return Run(store, owns_store=True)
    except BaseException:
        store.close()
        raise


def save(url: str | os.PathLike[str] | CheckpointStore, step: int, **state: Any) -> Checkpoint:
    """Save *state* as a checkpoint of the run at *url* and return it once it is durable.

    Args:
        url: The run; created if there is none.
        step: Above every step of the run's lineage.
        state: Anything with ``state_dict`` and ``load_state_dict``, and plain values, by name; besides, the options of
            ``CheckpointManager.save``.

    Raises:
        UnstorableError: something in the state can't be stored exactly; nothing was written.
        AlreadyExistsError: the step is not above the newest of the lineage; nothing was written.
        ConflictError: another writer lives; the message says who.
    """
    from ckptstore.manager import CheckpointManager

    with CheckpointManager(url, rng=False) as manager:
        return manager.save(step, **{**state, "wait": True}).result()


def load(
    url: str | os.PathLike[str] | CheckpointStore,
    step: int | None = None,
    *,
    only: str | Sequence[str] | None = None,
    skip: str | Sequence[str] | None = None,
    map_location: str | torch.device = "cpu",
    mmap: bool = False,
    verify: Verify = "full",
) -> dict[str, Any]:
    """Return the states saved at *step* (by default the newest) as new objects; arguments as ``Checkpoint.load``.

    Raises:
        NotFoundError: there is no such checkpoint.
        CorruptionError: it is damaged; an older one is not taken instead.
    """
    with open_run(url) as run:
        return _checkpoint(run, step).load(only=only, skip=skip, map_location=map_location, mmap=mmap, verify=verify)


def restore(url: str | os.PathLike[str] | CheckpointStore, step: int | None = None, **state: Any) -> dict[str, Any]:
    """Fill live objects with the checkpoint at *step* (by default the newest), all or nothing; publishes nothing.

    Args:
        url: The run.
        step: Which checkpoint.
        state: The objects, by the names they were saved under; besides, the options of ``Checkpoint.restore``.

    Returns:
        The plain values that were saved.

    Raises:
        NotFoundError: there is no such checkpoint.
        MismatchError: the objects do not fit; they are unchanged.
        CorruptionError: it is damaged; the objects are unchanged.
    """
    with open_run(url) as run:
        return _checkpoint(run, step).restore(**state)


def _checkpoint(run: Run, step: int | None) -> Checkpoint:
    found = run.latest() if step is None else run.at(step=step)
    if found is None:
        message = f"{run.url} holds no checkpoint"
        raise NotFoundError(message, operation="load", key=run.url)
    return found
