"""How do commands change a run beside its living trainer, without stopping or starving it?

They publish at head+1 under the head's epoch with their own writer id, never a claim or a commit, so they can't fence
anyone. After a lost race they judge again on the new head, and they wait at least a second first: the owner retries at
once, so it always gets through.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ckptstore.errors import ConfigError, ConflictError, CorruptionError, NotFoundError, UnsupportedError
from ckptstore.run.identity import this_process
from ckptstore.run.journal import Draft

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptstore.run.journal import Head, Journal, Pending

__all__ = ["operate"]

_TRIES = 8
_KINDS = frozenset({"retire", "tag", "note"})


def operate(journal: Journal, judge: Callable[[Head], dict[str, Any] | None]) -> Head | None:
    """Publish one operator's record (tag, note, retire).

    Args:
        journal: The run's.
        judge: Makes the change from a head, or returns None when there is nothing (left) to do.

    Returns:
        The head with the record on top, or None if *judge* dropped it.

    Raises:
        ConfigError: *judge* made a change that only an owner may make.
        NotFoundError: the run has no claim yet.
        CorruptionError: the newest record is damaged: it may be a claim, so only a claim may follow it.
        UnsupportedError: the store works in single-writer mode.
        ConflictError: eight races were lost in a row.
        OutcomeUnknownError: the record may be there; look before running the command again.
    """
    if journal.store.capabilities().exclusive != "atomic":
        message = f"{journal.store.url} works in single-writer mode: only the run's own writer may change it"
        raise UnsupportedError(message, operation="publish", key=journal.store.url)
    head = journal.head()
    if head.seq < 0:
        message = f"{journal.store.url} was never claimed: there is nothing to change"
        raise NotFoundError(message, operation="publish", key=journal.store.url)
    write_id = journal.ids.new_id()
    writer = msgspec.to_builtins(this_process(journal.ids, job=None))
    for lost in range(_TRIES):
        if lost:
            journal.clock.sleep(1.0 + int(journal.ids.new_id()[:4], 16) / 0x10000)
            head = journal.forward(head)
        _check_sound(journal, head)
        number = head.seq + 1
        dropped = False

        def derive(now: Head, number: int = number) -> Draft | None:
            nonlocal dropped
            if now.seq + 1 != number:
                return None
            change = judge(now)
            dropped = change is None
            if change is None:
                return None
            if change.get("kind") not in _KINDS:
                message = f"a command can't publish a {change.get('kind')!r:.40}; only the run's owner can"
                raise ConfigError(message, operation="publish", key=journal.store.url)
            return Draft(change=change, epoch=now.state.epoch)

        published = journal.append(head, derive, write_id=write_id, writer=writer, on_publish=_forget)
        if published is not None or dropped:
            if published is not None:
                journal.hint(published)
            return published
    message = f"{journal.store.url}: {_TRIES} races for the next record were lost; nothing was changed: try again"
    raise ConflictError(message, operation="publish", key=journal.store.url)


def _check_sound(journal: Journal, head: Head) -> None:
    if head.damaged:
        message = (
            f"{journal.layout.record(head.damaged[-1].seq)} is damaged ({head.damaged[-1].reason}): it may be a claim, "
            "so nothing can be changed before a writer has claimed the run anew"
        )
        raise CorruptionError(message, operation="publish", key=journal.layout.record(head.damaged[-1].seq))


def _forget(_: Pending | None) -> None:
    """An operator has no memory between commands: an unknown outcome is reported, not settled later."""
