"""How does one process own a run, commit to it, and learn that it no longer owns it?

A claim at head+1 makes this process the owner; its number is the epoch. Every commit is derived from the head it is
published on. Losing the race for a number means reading what won: a newer claim ends this session for good, anything
else of our own epoch is an operator's record, and the commit is derived again on top of it. A number whose outcome is
unknown is settled before anything else is planned; nothing moves past it. A damaged number may have been a claim, so
nothing but a claim follows it.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from ckptstore.errors import (
    AlreadyExistsError,
    CkptStoreError,
    ConfigError,
    ConflictError,
    CorruptionError,
    FencedError,
    UnavailableError,
)
from ckptstore.run import changes
from ckptstore.run.alive import Pulse, owner_of
from ckptstore.run.identity import describe, from_record, this_process
from ckptstore.run.journal import Draft, Head, Journal, Pending
from ckptstore.run.layout import attempt_name
from ckptstore.run.records import Row, check_row
from ckptstore.run.runfile import RunInfo, create_run, find_run, restore_run_file
from ckptstore.seams import SYSTEM_CLOCK, SYSTEM_IDS
from ckptstore.store import Published

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckptstore.run.records import ManifestRef
    from ckptstore.seams import Clock, IdSource
    from ckptstore.store import CheckpointStore

__all__ = ["Attempt", "Lost", "Session", "open_session", "release"]

_LOG = logging.getLogger(__name__)
_KEEP_BYTES = 1024


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One try at saving a step: its own folder, never used before or after."""

    name: str
    step: int
    epoch: int
    prefix: str


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """A claim that lost its number: decide again from the head."""

    head: Head


class Session:
    """The writer of this process on one run. Thread-safe: publishes are serial.

    Once it has learned of a newer claim every method raises FencedError, for good.

    Attributes:
        epoch: Our claim's number; -1 before the first claim.
        me: Who we are.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        job: str | None = None,
        restart: int | None = None,
        clock: Clock = SYSTEM_CLOCK,
        ids: IdSource = SYSTEM_IDS,
    ) -> None:
        self.store = store
        self.me = this_process(ids, job=job, restart=restart)
        self.epoch = -1
        self.users = 0
        self._clock = clock
        self._ids = ids
        self._lock = threading.RLock()
        self._journal: Journal | None = None
        self._head: Head | None = None
        self._pending: Pending | None = None
        self._fenced: FencedError | None = None
        self._pulse: Pulse | None = None

    # ── looking ──────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def journal(self) -> Journal:
        """The journal, once the run exists."""
        if self._journal is None:
            message = f"{self.store.url} holds no run yet"
            raise ConfigError(message, key=self.store.url)
        return self._journal

    @property
    def fenced(self) -> bool:
        """Whether a newer claim ended this session."""
        return self._fenced is not None

    @property
    def owns(self) -> bool:
        """Whether this session claimed the run and has not learned of a newer claim."""
        return self.epoch >= 0 and self._fenced is None

    def refresh(self) -> Head:
        """Return the newest head. Before the run exists: an empty one. An unknown number is settled first."""
        with self._serial():
            if self._journal is None:
                run = find_run(self.store)
                if run is None:
                    return Head()
                self._adopt(run)
            self._settle()
            self._head = self._newest()
            self._fence(self._head)
            return self._head

    # ── owning ───────────────────────────────────────────────────────────────────────────────────────────────────

    def claim(
        self,
        head: Head,
        *,
        resume_from: Row | None,
        branch: dict[str, int] | None,
        reason: str,
        keep: str | None = None,
        world_size: int = 1,
    ) -> Head | Lost:
        """Take the run at the number after *head*: this is the restore decision.

        Args:
            head: What the decision was made on; if it is no longer the head the claim is lost. It may be damaged: a
                claim is what repairs that.
            resume_from: The checkpoint to go on from; None starts anew.
            branch: Where the present branch was started, or None.
            reason: Why the run may be taken.
            keep: A retention policy to store with the run; None keeps the stored one.
            world_size: Number of ranks.

        Returns:
            The head with our claim on top, or Lost with the newer head to decide on.

        Raises:
            FencedError: this session owned the run, and a newer claim took it.
            OutcomeUnknownError: the claim may be there; the next call of this session finds out first.
        """
        if keep is not None and len(keep.encode()) > _KEEP_BYTES:
            message = f"the retention policy takes more than {_KEEP_BYTES} bytes: {keep!r:.80}"
            raise ConfigError(message)
        with self._serial():
            self._settle()
            self._fence(head)
            if self._journal is None:
                self._adopt(create_run(self.store, clock=self._clock, ids=self._ids))
                head = self.journal.head()
                if head.seq >= 0:
                    return Lost(head=head)
            if self._pulse is None:
                self._pulse = Pulse(self.journal, self.me)
                self._pulse.start()  # before the claim: whoever sees the claim finds a sign of life
            owner = owner_of(self.journal, head)
            fields: dict[str, Any] = {
                "branch": branch,
                "reason": reason,
                "world_size": world_size,
                "takeover_of": None if owner is None or owner.id == self.me.id else msgspec.to_builtins(owner),
                "exclusive": self.store.capabilities().exclusive,
            }
            if keep is not None:
                fields["keep"] = keep
            change = changes.claim(resume_from=resume_from, **fields)
            number = head.seq + 1
            newer = head

            def derive(now: Head) -> Draft | None:
                nonlocal newer
                newer = now
                return Draft(change=change, epoch=None) if now.seq + 1 == number else None

            claimed = self._append(head, derive)
            if claimed is None:
                return Lost(head=newer)
            self._head = claimed
            self.epoch = claimed.seq
            self._pending = None
            self.journal.hint(claimed)
            if fields["exclusive"] != "atomic":
                _LOG.warning(
                    "%s can't create a record exclusively: single-writer mode, in which a second writer is not fenced "
                    "and would do damage",
                    self.store.url,
                )
            self._restore_run_file()
            self._note_damage(head)
            return self._head

    def mint(self, step: int) -> Attempt:
        """Return a new attempt under our claim; FencedError or ConflictError if there is none."""
        with self._serial():
            self._check_owner()
        name = attempt_name(step, self.epoch, self._ids.new_id()[:20])
        return Attempt(name=name, step=step, epoch=self.epoch, prefix=self.journal.layout.attempt(name))

    def tip(self) -> Row | None:
        """Return the newest checkpoint of our lineage, as far as this session knows."""
        head = self._head
        found = [] if head is None else changes.lineage(head.state)
        return found[0] if found else None

    def commit(
        self,
        attempt: Attempt,
        *,
        manifest: ManifestRef,
        n_bytes: int,
        metrics: dict[str, float | int | str],
        tags: tuple[str, ...],
        permanent: bool,
    ) -> Row:
        """Make the attempt a checkpoint. All it names must be durable already.

        Raises:
            FencedError: a newer claim owns the run; the attempt is not, and never will be, a checkpoint.
            ConflictError: this session has claimed anew since the attempt was minted.
            AlreadyExistsError: the lineage has reached the step by other means.
            OutcomeUnknownError: it may be one; the next call of this session finds out first.
            CorruptionError: the journal's newest record is damaged: claim the run anew.
        """

        def derive(head: Head) -> Draft:
            if attempt.epoch != self.epoch:
                message = f"step {attempt.step} was begun under claim {attempt.epoch}; this session is now {self.epoch}"
                raise ConflictError(message, operation="commit", key=attempt.prefix)
            line = changes.lineage(head.state)
            if line and line[0].step >= attempt.step:
                message = f"step {attempt.step} is not above step {line[0].step}, the newest of this lineage"
                raise AlreadyExistsError(message, operation="commit", key=attempt.prefix)
            row = Row(
                seq=head.seq + 1,
                epoch=attempt.epoch,
                time=self._clock.now(),
                step=attempt.step,
                attempt=attempt.name,
                manifest=manifest,
                n_bytes=n_bytes,
                metrics=metrics,
                tags=tags,
                permanent=permanent,
                parent=line[0].seq if line else None,
            )
            return Draft(change=changes.commit(check_row(row)), epoch=attempt.epoch)

        head = self._publish(derive)
        assert head is not None  # derive never drops a commit
        return head.state.live[-1]

    def mark_damaged(self, row: Row) -> None:
        """Mark a checkpoint that was proven not loadable, so that nothing counts on it any more."""

        def derive(head: Head) -> Draft | None:
            held = next((item for item in head.state.live if item.seq == row.seq), None)
            if held is None or held.damaged:
                return None
            return Draft(change=changes.tag(row.seq, damaged=True), epoch=self.epoch)

        self._publish(derive)

    def close(self) -> None:
        """Say that this writer ended cleanly. The claim stays: the next writer takes over at once."""
        if self._pulse is not None and os.getpid() == self.me.pid:
            self._pulse.close()
            self._pulse = None

    # ── the machinery ────────────────────────────────────────────────────────────────────────────────────────────

    def _publish(self, derive: Callable[[Head], Draft | None]) -> Head | None:
        with self._serial():
            self._check_owner()
            self._settle()
            assert self._head is not None

            def owned(head: Head) -> Draft | None:
                self._head = head
                self._check_head(head)
                return derive(head)

            head = self._append(self._head, owned)
            if head is not None:
                self._head = head
                self._pending = None
                self.journal.hint(head)
            return head

    def _append(self, head: Head, derive: Callable[[Head], Draft | None]) -> Head | None:
        return self.journal.append(
            head,
            derive,
            write_id=self._ids.new_id(),
            writer=msgspec.to_builtins(self.me),
            on_publish=self._expect,
            watch=self._meet,
        )

    def _expect(self, pending: Pending | None) -> None:
        self._pending = pending

    def _settle(self) -> None:
        """Learn the fate of a number whose outcome is unknown, by that number and our write id alone.

        Publishing the same bytes again under the same number either finds them there, or another's, or creates them:
        each answer is final. A commit of ours that is there counts, even if it was retired since.
        """
        pending = self._pending
        if pending is None:
            return
        outcome = self.journal.publish(pending.record)  # raises OutcomeUnknownError again while it can't be known
        head = self._newest()
        if head.seq < pending.seq:
            message = f"{self.journal.layout.record(pending.seq)} is taken but reads as absent: the store hides it"
            raise UnavailableError(message, operation="publish", key=self.journal.layout.record(pending.seq))
        if isinstance(outcome, Published) and pending.record.kind == "claim":
            self.epoch = pending.seq
        self._head = head
        self._pending = None  # last: until all of this is known, it is asked again

    def _newest(self) -> Head:
        if self._head is None or not self.owns:
            return self.journal.head()
        return self.journal.forward(self._head, self._meet)

    def _meet(self, head: Head) -> None:
        """Judge one record that was there before ours: only this session claims and commits under our epoch."""
        record = head.record
        if record is None or head.damaged or record.epoch != self.epoch or record.kind not in ("claim", "commit"):
            return
        if record.writer.get("id") != self.me.id:
            self._stop(
                f"{self.store.url}: record {record.seq} is a {record.kind} by {describe(from_record(record.writer))} "
                f"under our own claim {self.epoch}: this store lets two writers win one number, so no one is safe here"
            )

    def _fence(self, head: Head) -> None:
        """Stop for good if a newer claim owns the run."""
        if not head.state.epoch > self.epoch >= 0:
            return
        who = "another writer"
        try:
            owner = owner_of(self.journal, head)
        except CkptStoreError:  # the name is for people; that it is over does not depend on it
            owner = None
        if owner is not None:
            who = describe(owner)
        self._stop(
            f"{self.store.url}: {who} took this run over (claim {head.state.epoch} is newer than ours, "
            f"{self.epoch}); this process must stop writing. What it had committed stays"
        )

    def _stop(self, message: str) -> NoReturn:
        self._fenced = FencedError(message, operation="commit", key=self.store.url)
        if self._pulse is not None:
            self._pulse.stop()
        raise self._fenced

    def _check_head(self, head: Head) -> None:
        """Raise unless a record of ours may follow *head*."""
        self._fence(head)
        if head.damaged:
            key = self.journal.layout.record(head.damaged[-1].seq)
            message = (
                f"{key} is damaged ({head.damaged[-1].reason}) and may have been a claim: nothing is published after "
                "it before resume() has claimed the run anew"
            )
            raise CorruptionError(message, operation="commit", key=key)
        if head.state.epoch < self.epoch:
            message = f"{self.store.url}: our claim {self.epoch} is not in the journal: the store lost or hides it"
            raise UnavailableError(message, operation="commit", key=self.store.url)

    def _restore_run_file(self) -> None:
        if not self.journal.run.lost:
            return
        try:
            self.journal.run = restore_run_file(self.store, self.journal.run)
        except CkptStoreError:
            _LOG.warning("%s: RUN.json is lost and could not be written again", self.store.url, exc_info=True)

    def _note_damage(self, head: Head) -> None:
        """Name damaged records in a note, so that people and gc know which numbers may have held a commit."""
        if not head.damaged:
            return
        numbers = [item.seq for item in head.damaged]
        change = changes.note("damaged journal records found when the run was claimed", damaged=numbers[:100])
        self._publish(lambda _: Draft(change=change, epoch=self.epoch))

    def _adopt(self, run: RunInfo) -> None:
        self._journal = Journal(self.store, run, clock=self._clock, ids=self._ids)

    def _check_owner(self) -> None:
        if self.epoch < 0:
            message = f"{self.store.url} is not claimed by this session"
            raise ConflictError(message, operation="commit", key=self.store.url)

    @contextmanager
    def _serial(self) -> Iterator[None]:
        """One caller at a time, none once the session is over, and none in a forked child.

        The child is refused before it takes the lock: the thread that holds it may be one of the parent's.
        """
        if os.getpid() != self.me.pid:
            message = (
                f"this writer of {self.store.url} belongs to process {self.me.pid}; a forked child can't use it: "
                "make a new CheckpointManager in the child, on its own URL"
            )
            raise ConfigError(message, key=self.store.url)
        with self._lock:
            if self._fenced is not None:
                raise FencedError(str(self._fenced), operation="commit", key=self.store.url) from self._fenced
            yield


_shared: dict[str, Session] = {}
_shared_lock = threading.Lock()


def _forget_after_fork() -> None:
    """In a forked child: the sessions are its parent's, and the lock may be held by a thread that is not here."""
    global _shared_lock  # noqa: PLW0603 - replaced before the child runs anything else
    _shared_lock = threading.Lock()
    _shared.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


def open_session(store: CheckpointStore, *, anew: bool, job: str | None, restart: int | None = None) -> Session:
    """Return this process's session on the run at *store*, shared by all who ask; each must ``release`` it once.

    Args:
        store: Where the run is.
        anew: Make a new session even if one is open, which its claim will then fence.
        job: The scheduler's id of this job, for a session that is made now.
        restart: How often the scheduler restarted it.
    """
    with _shared_lock:
        held = _shared.get(store.url)
        if held is None or anew or held.fenced:
            held = _shared[store.url] = Session(store, job=job, restart=restart)
        held.users += 1
        return held


def release(session: Session) -> None:
    """Give back what ``open_session`` returned; the last user closes the session."""
    with _shared_lock:
        session.users -= 1
        if session.users > 0:
            return
        if _shared.get(session.store.url) is session:
            del _shared[session.store.url]
    session.close()
