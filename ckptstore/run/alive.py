"""May this process take the run over?

Take-over is always safe: the newer claim fences the older writer, whatever anyone believed. The question is only
whether it is polite, since a wrong guess stops a living training run. So: at once when the last writer closed cleanly,
belongs to the same job, or is proven gone on this host; else watch its sign of life on our own clock, and give way if
it moves.
"""

from __future__ import annotations

import json
import logging
import threading
from typing import TYPE_CHECKING, Literal

import msgspec

from ckptstore.errors import ConfigError, ConflictError, CorruptionError, NotFoundError
from ckptstore.run.identity import WriterIdentity, describe, from_record, is_gone
from ckptstore.run.records import Record

if TYPE_CHECKING:
    from ckptstore.run.journal import Head, Journal

__all__ = ["Pulse", "Takeover", "owner_of", "permit"]

Takeover = Literal["auto"] | bool

BEAT_S = 5.0
WATCH_S = 15.0
_POLL_S = 1.0
_ALIVE_BYTES = 4096
_LOG = logging.getLogger(__name__)


class Pulse:
    """Writes this writer's sign of life: before its claim, then every 5 s, and ``closed`` at a clean end. Advisory."""

    def __init__(self, journal: Journal, me: WriterIdentity) -> None:
        self._journal = journal
        self._key = journal.layout.alive(me.id)
        self._me = me
        self._beat = 0
        self._stop = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Write the first sign and keep refreshing it from a daemon thread."""
        self._write(closed=False)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ckptstore-alive", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Write no further sign: another writer owns the run."""
        self._stop.set()

    def close(self) -> None:
        """Write ``closed``, so that the next writer need not wait; a storage that does not answer is left alone."""
        self._closing = True
        self.stop()
        if self._thread is not None:
            self._thread.join(BEAT_S)

    def _run(self) -> None:
        while not self._stop.wait(BEAT_S):
            self._write(closed=False)
        if self._closing:
            self._write(closed=True)

    def _write(self, *, closed: bool) -> None:
        self._beat += 1
        sign = {"writer": msgspec.to_builtins(self._me), "beat": self._beat, "closed": closed}
        sign["time"] = self._journal.clock.now()
        try:
            self._journal.store.put(self._key, json.dumps(sign).encode() + b"\n")
        except Exception:  # noqa: BLE001 - advisory: neither a store nor the end of the interpreter may make it more
            _LOG.debug("the sign of life could not be written", exc_info=True)


def owner_of(journal: Journal, head: Head) -> WriterIdentity | None:
    """Return the writer of the newest claim, or None if there is none or nothing readable names it."""
    if head.record is None:
        return None
    # The claim says it, and since only the owner commits, so does its newest commit where the claim is damaged.
    commits = [row.seq for row in head.state.live if row.epoch == head.state.epoch]
    for seq in (head.state.epoch, *commits[-1:]):
        try:
            found = head.record if head.record.seq == seq else journal.read(seq)
        except NotFoundError:
            continue
        if isinstance(found, Record):
            return from_record(found.writer)
    return None


def permit(journal: Journal, head: Head, me: WriterIdentity, takeover: Takeover) -> str:
    """Return the reason why *me* may claim the run now.

    Takes up to 15 s when the last writer may still live.

    Raises:
        ConflictError: it lives, or *takeover* is False and it is not proven gone.
    """
    owner = owner_of(journal, head)
    if owner is None:
        return "nothing names an owner"
    if owner.id == me.id:
        return "the run is ours"
    if takeover is True:
        return f"take-over from {describe(owner)} was asked for"
    seen = _sign_of(journal, owner)
    if seen is not None and seen.get("closed") is True:
        return f"{describe(owner)} closed it"
    if is_gone(owner, me):
        return f"{describe(owner)} is gone"
    if takeover is False:
        message = (
            f"{journal.store.url} belongs to {describe(owner)}, which did not close it and can't be proven gone; "
            'takeover=False forbids to claim it: use takeover="auto" to watch for its sign of life, or takeover=True'
        )
        raise ConflictError(message, operation="claim", key=journal.store.url)
    if owner.job is not None and owner.job == me.job:
        return f"{describe(owner)} belongs to the same job"
    return _watch(journal, owner, seen)


def _watch(journal: Journal, owner: WriterIdentity, seen: dict[str, object] | None) -> str:
    _LOG.info("%s: watching up to %.0f s whether %s still lives", journal.store.url, WATCH_S, describe(owner))
    clock = journal.clock
    started = clock.monotonic()
    while clock.monotonic() - started < WATCH_S:
        clock.sleep(_POLL_S)
        now = _sign_of(journal, owner)
        if now is not None and now.get("closed") is True:
            return f"{describe(owner)} closed it"
        if now is not None and now != seen:
            age = clock.monotonic() - started
            message = (
                f"{journal.store.url} is being written by {describe(owner)}, whose last sign of life is {age:.0f} s "
                "old or younger: stop it first, use another URL, or pass takeover=True to take the run from it"
            )
            raise ConflictError(message, operation="claim", key=journal.store.url)
    return f"{describe(owner)} gave no sign of life for {WATCH_S:.0f} s"


def _sign_of(journal: Journal, owner: WriterIdentity) -> dict[str, object] | None:
    try:
        found = json.loads(journal.store.get(journal.layout.alive(owner.id), max_bytes=_ALIVE_BYTES))
    except (NotFoundError, CorruptionError, ConfigError, ValueError, RecursionError):  # ConfigError: an impossible id
        return None
    return found if isinstance(found, dict) else None
