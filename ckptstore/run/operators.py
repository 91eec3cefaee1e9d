"""How do commands change a run beside its living trainer, without stopping or starving it?

They publish at head+1 under the head's epoch with their own writer id, never a claim or a commit, so they can't fence
anyone. After a lost race they judge again on the new head, and they wait at least a second first: the owner retries at
once, so it always gets through.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ckptstore.errors import ConflictError, NotFoundError, UnsupportedError
from ckptstore.run.identity import this_process
from ckptstore.run.journal import Draft

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptstore.run.journal import Head, Journal, Pending

__all__ = ["operate"]

_TRIES = 8


def operate(journal: Journal, judge: Callable[[Head], dict[str, Any] | None]) -> Head | None:
    """Publish one operator's record (tag, note, retire).

    Args:
        journal: The run's.
        judge: Makes the change from a head, or returns None when there is nothing (left) to do.

    Returns:
        The head with the record on top, or None if *judge* dropped it.

    Raises:
        NotFoundError: the run has no claim yet.
        UnsupportedError: the store works in single-writer mode.
        ConflictError: eight races were lost in a row.
        OutcomeUnknownError: the record may be there; look before running the command again.
    """
    if journal.store.capabilities().exclusive != "atomic":
        message = f"{journal.store.url} works in single-writer mode: only the run's own writer may change it"
        raise UnsupportedError(message, operation="publish", key=journal.store.url)
    head = journal.head()
    if head.record is None:
        message = f"{journal.store.url} was never claimed: there is nothing to change"
        raise NotFoundError(message, operation="publish", key=journal.store.url)
    write_id = journal.ids.new_id()
    writer = msgspec.to_builtins(this_process(journal.ids, job=None))
    for _ in range(_TRIES):
        number = head.seq + 1
        dropped = False

        def derive(now: Head, number: int = number) -> Draft | None:
            nonlocal dropped
            if now.seq + 1 != number:
                return None
            change = judge(now)
            dropped = change is None
            return None if change is None else Draft(change=change, epoch=now.state.epoch)

        published = journal.append(head, derive, write_id=write_id, writer=writer, on_publish=_forget)
        if published is not None or dropped:
            if published is not None:
                journal.hint(published)
            return published
        journal.clock.sleep(1.0 + int(journal.ids.new_id()[:4], 16) / 0x10000)
        head = journal.forward(head)
    message = f"{journal.store.url}: {_TRIES} races for the next record were lost; nothing was changed: try again"
    raise ConflictError(message, operation="publish", key=journal.store.url)


def _forget(_: Pending | None) -> None:
    """An operator has no memory between commands: an unknown outcome is reported, not settled later."""
