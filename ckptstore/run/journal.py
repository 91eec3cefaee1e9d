"""Where is the head, and how does the next record get its number?

The records of a run form a dense sequence of numbers, each created once: so "record k exists" is monotone, the head is
found from any lower bound by doubling and halving, and the next number is a race with exactly one winner. The hint
LATEST is such a lower bound and nothing more: ignoring or corrupting it changes the cost, never the result.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

import msgspec

from ckptstore.errors import (
    CkptStoreError,
    CorruptionError,
    NotFoundError,
    OutcomeUnknownError,
    UnavailableError,
    UnsupportedError,
)
from ckptstore.run import rowsets
from ckptstore.run.changes import RunState, apply
from ckptstore.run.layout import LATEST_KEY, Layout
from ckptstore.run.records import Prev, Record, decode_record, encode_record, room_for_sets
from ckptstore.run.strict_json import MAX_INT, sha256_hex
from ckptstore.store import MAX_RECORD_BYTES, Published, settle

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ckptstore.run.records import RowSet
    from ckptstore.run.runfile import RunInfo
    from ckptstore.seams import Clock, IdSource
    from ckptstore.store import CheckpointStore, Outcome

__all__ = ["Damaged", "Draft", "Head", "Journal", "Pending"]

_LOG = logging.getLogger(__name__)
_FRESH_READS = 3
_HINT_BYTES = 512


class Damaged(msgspec.Struct, frozen=True, kw_only=True):
    """A number of the journal whose file is not a sound record, and why."""

    seq: int
    raw: bytes
    reason: str


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The newest number, and what the run is there.

    Attributes:
        seq: The newest number that exists; -1 for an empty journal.
        prev: What the next record must name; None for an empty journal.
        record: The newest sound record, or None if there is none.
        state: The run's state after it.
        damaged: Numbers above ``record`` that are not sound, ascending.
    """

    seq: int = -1
    prev: Prev | None = None
    record: Record | None = None
    state: RunState = RunState()
    damaged: tuple[Damaged, ...] = ()


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """What the next record shall do. ``epoch`` None means: a claim, whose epoch is its own number."""

    change: dict[str, object]
    epoch: int | None


class Pending(msgspec.Struct, frozen=True, kw_only=True):
    """A publish whose outcome is unknown: these bytes, under this number."""

    seq: int
    write_id: str
    record: Record


class Journal:
    """The records of one run on a store. Thread-safe as far as the store is: it keeps a small cache and no position."""

    def __init__(self, store: CheckpointStore, run: RunInfo, *, clock: Clock, ids: IdSource) -> None:
        self.store = store
        self.run = run
        self.run_uid = run.run_uid
        self.layout = Layout(run.run_uid)
        self.clock = clock
        self.ids = ids
        self._bases = rowsets.BaseCache(store)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────

    def read(self, seq: int) -> Record | Damaged:
        """Return record *seq*, or Damaged after three fresh reads that found no sound one.

        Raises:
            NotFoundError: there is no such number yet.
            UnavailableError: the store can't say.
        """
        key = self.layout.record(seq)
        raw = b""
        reason = ""
        for _ in range(_FRESH_READS):
            try:
                raw = self.store.get(key, max_bytes=MAX_RECORD_BYTES)
                return decode_record(raw, run_uid=self.run_uid, seq=seq, what=key)
            except CorruptionError as error:
                reason = str(error)
        return Damaged(seq=seq, raw=raw, reason=reason)

    def head(self) -> Head:
        """Return the newest number and its state, from the hint on. A read that starts after a publish sees it."""
        low = self._hint()
        found = None
        if low >= 0:
            try:
                found = self.read(low)
            except NotFoundError:
                low = -1
        step = 1
        while self._exists(low + step):
            low += step
            step *= 2
        high = low + step
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._exists(middle) else (low, middle)
        if low >= 0 and (found is None or found.seq < low):
            try:
                found = self.read(low)
            except NotFoundError as error:
                message = f"{self.layout.record(low)} is there and yet can't be read: the store contradicts itself"
                raise UnavailableError(message, operation="get", key=self.layout.record(low)) from error
        return self._head_at(low, found)

    def forward(self, head: Head, watch: Callable[[Head], None] | None = None) -> Head:
        """Return the head, read record by record from a known one; each must name its predecessor's bytes.

        Args:
            head: Where to start.
            watch: Told of each record on the way.
        """
        while True:
            try:
                found = self.read(head.seq + 1)
            except NotFoundError:
                return head
            head = self._follow(head, found)
            if watch is not None:
                watch(head)

    def state_of(self, record: Record) -> RunState:
        """Return the run's state after *record*; its sets may have to be fetched or rebuilt."""
        try:
            live, retired = self._bases.rows(record.live), self._bases.rows(record.retired)
        except (CorruptionError, NotFoundError) as error:
            return self._rebuild(record, str(error))
        return RunState(
            epoch=record.epoch, live=live, retired=retired, resume_from=record.resume_from, keep=record.keep
        )

    def lost_bases(self, record: Record) -> list[str]:
        """Return the keys of the sets that *record* names and that can't be read."""
        lost = []
        for rows in (record.live, record.retired):
            try:
                self._bases.rows(rows)
            except (CorruptionError, NotFoundError) as error:
                lost.append(error.key)
        return lost

    def _hint(self) -> int:
        """Return the number that the hint names, or -1. No content of it, and no error, changes which head is found."""
        try:
            found = json.loads(self.store.get(LATEST_KEY, max_bytes=_HINT_BYTES))
            seq = found["seq"]
        except (CkptStoreError, ValueError, TypeError, KeyError, RecursionError):
            return -1
        return seq if found.get("run_uid") == self.run_uid and type(seq) is int and 0 <= seq < MAX_INT else -1

    def _exists(self, seq: int) -> bool:
        try:
            self.store.stat(self.layout.record(seq))
        except NotFoundError:
            return False
        return True

    def _head_at(self, seq: int, newest: Record | Damaged | None) -> Head:
        damaged: list[Damaged] = []
        for at in range(seq, -1, -1):
            found = newest if at == seq and newest is not None else self._read_known(at)
            if isinstance(found, Record):
                try:
                    state = self.state_of(found)
                except CorruptionError as error:
                    found = Damaged(seq=at, raw=found.raw, reason=str(error))
                else:
                    top = _prev_of(damaged[0]) if damaged else Prev(write_id=found.write_id, sha256=found.sha256)
                    _warn(damaged, at)
                    return Head(seq=seq, prev=top, record=found, state=state, damaged=tuple(reversed(damaged)))
            damaged.append(found)
        _warn(damaged, -1)
        return Head(seq=seq, prev=_prev_of(damaged[0]) if damaged else None, damaged=tuple(reversed(damaged)))

    def _read_known(self, seq: int) -> Record | Damaged:
        """Read a number that must be there, since a later one is: its absence is damage, not the end."""
        try:
            return self.read(seq)
        except NotFoundError as error:
            return Damaged(seq=seq, raw=b"", reason=str(error))

    def _follow(self, head: Head, found: Record | Damaged) -> Head:
        if isinstance(found, Record):
            if found.prev is not None and head.prev is not None and found.prev.sha256 != head.prev.sha256:
                found = Damaged(
                    seq=found.seq, raw=found.raw, reason=f"record {found.seq} was not computed from record {head.seq}"
                )
            else:
                try:
                    state = self.state_of(found)
                except CorruptionError as error:
                    found = Damaged(seq=found.seq, raw=found.raw, reason=str(error))
                else:
                    prev = Prev(write_id=found.write_id, sha256=found.sha256)
                    return Head(seq=found.seq, prev=prev, record=found, state=state)
        return msgspec.structs.replace(head, seq=found.seq, prev=_prev_of(found), damaged=(*head.damaged, found))

    def _rebuild(self, record: Record, reason: str) -> RunState:
        """Rebuild a state whose base is lost: from the newest record below with a readable set, change by change."""
        _LOG.warning("record %d: %s; rebuilding the list of checkpoints from the journal", record.seq, reason)
        changes = [record]
        for seq in range(record.seq - 1, -1, -1):
            found = self._read_known(seq)
            if isinstance(found, Damaged):
                break
            try:
                state = RunState(
                    epoch=found.epoch,
                    live=self._bases.rows(found.live),
                    retired=self._bases.rows(found.retired),
                    resume_from=found.resume_from,
                    keep=found.keep,
                )
            except (CorruptionError, NotFoundError):
                changes.append(found)
                continue
            for later in reversed(changes):
                state = apply(state, later.change, later.seq, self.layout.record(later.seq))
            return state
        message = f"{self.layout.record(record.seq)}: its list of checkpoints can't be read or rebuilt: {reason}"
        raise CorruptionError(message, key=self.layout.record(record.seq))

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────

    def append(
        self,
        head: Head,
        derive: Callable[[Head], Draft | None],
        *,
        write_id: str,
        writer: dict[str, Any],
        on_publish: Callable[[Pending | None], None],
        watch: Callable[[Head], None] | None = None,
    ) -> Head | None:
        """Publish one change at the first free number: derive it from the head, again after each lost race.

        The same write id is used at a higher number only once the lower one is known to hold another's record, and
        the body is computed afresh there: sending the same body again would erase what the winner did.

        Args:
            head: Where to start; may be stale.
            derive: Makes the change from a head; None drops it; an exception stops it.
            write_id: Unique for this one logical change.
            writer: Who publishes, for people and for take-over.
            on_publish: Told what is about to be published, and None once it is certain that it was not. After a success
                it is the caller who forgets, having taken the new head: so an interrupt in between loses nothing.
            watch: Told of each record that was there first.

        Returns:
            The head with our record on top, or None if *derive* dropped it.

        Raises:
            OutcomeUnknownError: our record may be there; settle that number before anything else.
        """
        while True:
            draft = derive(head)
            if draft is None:
                return None
            record, state = self._build(head, draft, write_id, writer)
            on_publish(Pending(seq=record.seq, write_id=write_id, record=record))
            try:
                outcome = self.publish(record)
            except OutcomeUnknownError:
                raise
            except CkptStoreError:  # certainly not written; anything else (an interrupt) leaves the outcome unknown
                on_publish(None)
                raise
            if isinstance(outcome, Published):
                prev = Prev(write_id=write_id, sha256=record.sha256)
                return Head(seq=record.seq, prev=prev, record=record, state=state)
            on_publish(None)
            head = self.forward(head, watch)
            if head.seq < record.seq:
                # Told that the number is taken, and it reads as absent: a delete marker over it, or a stale read.
                message = (
                    f"{self.layout.record(record.seq)} is taken but reads as absent: the store hides a written record"
                )
                raise UnavailableError(message, operation="publish", key=self.layout.record(record.seq))

    def publish(self, record: Record) -> Outcome:
        """Publish the bytes of *record* under its number; the same record may be published again to learn its fate."""
        key = self.layout.record(record.seq)
        if self.store.capabilities().exclusive == "atomic":
            return self.store.publish(key, record.raw, write_id=record.write_id)
        # Single-writer mode, said loudly when the claim was made: no one else may write, so looking first is enough.
        try:
            return settle(self.store.get(key, max_bytes=MAX_RECORD_BYTES), record.write_id)
        except NotFoundError:
            try:
                self.store.put(key, record.raw)
            except CkptStoreError as error:  # unlike publish, put does not say whether it happened
                message = f"{key}: it is not known whether this record was written: {error}"
                raise OutcomeUnknownError(message, operation="publish", key=key) from error
            return Published()

    def hint(self, head: Head) -> None:
        """Point LATEST at *head*. Losing it loses nothing, so a failure is logged and forgotten."""
        line = {"run_uid": self.run_uid, "seq": head.seq, "step": _step(head)}
        try:
            self.store.put(LATEST_KEY, json.dumps(line).encode() + b"\n")
        except Exception:  # noqa: BLE001 - a hint: no failure of it may fail a commit that is already durable
            _LOG.debug("the hint LATEST could not be written", exc_info=True)

    def _build(self, head: Head, draft: Draft, write_id: str, writer: dict[str, Any]) -> tuple[Record, RunState]:
        seq = head.seq + 1
        epoch = seq if draft.epoch is None else draft.epoch
        key = self.layout.record(seq)
        state = apply(head.state, draft.change, seq, key)
        if state.epoch != epoch:
            message = f"{key}: a change of epoch {epoch} can't follow epoch {head.state.epoch}"
            raise UnsupportedError(message, operation="publish", key=key)
        before = head.record

        def record(live: RowSet, retired: RowSet) -> Record:
            return Record(
                run_uid=self.run_uid,
                seq=seq,
                write_id=write_id,
                prev=head.prev,
                epoch=epoch,
                writer=writer,
                time=self.clock.now(),
                change=draft.change,
                live=live,
                retired=retired,
                resume_from=state.resume_from,
                keep=state.keep,
                run=self.run.file if seq == 0 else None,
                requires=() if before is None else before.requires,
                extra={} if before is None else before.extra,
            )

        live, retired = rowsets.fit(
            self._bases,
            (state.live, state.retired),
            ((), ()) if before is None else (before.live, before.retired),
            room=room_for_sets(record((), ())),
            new_key=lambda: self.layout.index(seq, self.ids.new_id()[:12]),
        )
        return encode_record(record(live, retired)), state


def _step(head: Head) -> int | None:
    own = [row for row in head.state.live if row.epoch == head.state.epoch]
    row = own[-1] if own else head.state.resume_from
    return None if row is None else row.step


def _prev_of(damaged: Damaged) -> Prev:
    return Prev(write_id=None, sha256=sha256_hex(damaged.raw))


def _warn(damaged: list[Damaged], below: int) -> None:
    for item in damaged:
        _LOG.warning("journal record %d is damaged (%s); using record %d below it", item.seq, item.reason, below)
