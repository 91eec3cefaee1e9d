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

__all__ = ["load", "open_run", "restore", "save"]


def open_run(url: str | os.PathLike[str] | CheckpointStore, **storage_options: object) -> Run:
    """Open the run at *url* to look at it. Publishes nothing and needs no torch.

    An address where nothing was saved yet is an empty run.

    Raises:
        NotFoundError: there is something else at the address; a folder of runs is listed.
        UnavailableError: the store can't be asked.
    """
    return Run(url if isinstance(url, CheckpointStore) else open_store(url, **storage_options))


def save(url: str | os.PathLike[str] | CheckpointStore, step: int, **state: Any) -> Checkpoint:
    """Save *state* as a checkpoint of the run at *url* and return it once it is durable.

    Args:
        url: The run; created if there is none.
        step: Above every step of the run's lineage.
        state: Anything with ``state_dict`` and ``load_state_dict``, and plain values, by name.
    """
    from ckptstore.manager import CheckpointManager

    with CheckpointManager(url, rng=False) as manager:
        return manager.save(step, wait=True, **state).result()


def load(url: str | os.PathLike[str] | CheckpointStore, step: int | None = None, **options: Any) -> dict[str, Any]:
    """Return the states saved at *step* (by default the newest) as new objects; options as ``Checkpoint.load``.

    Raises:
        NotFoundError: there is no such checkpoint.
        CorruptionError: it is damaged; an older one is not taken instead.
    """
    return _checkpoint(url, step).load(**options)


def restore(url: str | os.PathLike[str] | CheckpointStore, step: int | None = None, **state: Any) -> dict[str, Any]:
    """Fill live objects with the checkpoint at *step* (by default the newest), all or nothing; publishes nothing.

    Returns:
        The plain values that were saved.
    """
    return _checkpoint(url, step).restore(**state)


def _checkpoint(url: str | os.PathLike[str] | CheckpointStore, step: int | None) -> Checkpoint:
    run = open_run(url)
    found = run.latest() if step is None else run.at(step=step)
    if found is None:
        message = f"{run.url} holds no checkpoint"
        raise NotFoundError(message, operation="load", key=run.url)
    return found
