"""How does one process own a run, commit to it, and learn that it no longer owns it?

A claim at head+1 makes this process the owner; its number is the epoch. Every commit is derived from the head it is
published on. Losing the race for a number means reading what won: a newer claim ends this session for good, anything
else of our own epoch is an operator's record, and the commit is derived again on top of it. A number whose outcome is
unknown is settled before anything else is planned; nothing moves past it.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import msgspec

from ckptstore.errors import (
    AlreadyExistsError,
    ConfigError,
    ConflictError,
    FencedError,
    UnavailableError,
)
from ckptstore.run import changes
from ckptstore.run.alive import Pulse, owner_of
from ckptstore.run.identity import describe, this_process
from ckptstore.run.journal import Draft, Head, Journal, Pending
from ckptstore.run.layout import attempt_name
from ckptstore.run.records import Row, check_row
from ckptstore.run.runfile import RunInfo, create_run, find_run, restore_run_file
from ckptstore.seams import SYSTEM_CLOCK, SYSTEM_IDS
from ckptstore.store import Published

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptstore.run.records import ManifestRef
    from ckptstore.seams import Clock, IdSource
    from ckptstore.store import CheckpointStore

__all__ = ["Attempt", "Lost", "Session", "open_session", "release"]


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
        self._check_process()
        with self._lock:
            if self._journal is None:
                run = find_run(self.store)
                if run is None:
                    return Head()
                self._adopt(run)
            self._settle()
            if self._head is not None and self.owns:
                self._head = self.journal.forward(self._head)
            else:
                self._head = self.journal.head()
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
            head: What the decision was made on; if it is no longer the head the claim is lost.
            resume_from: The checkpoint to go on from; None starts anew.
            branch: Where the present branch was started, or None.
            reason: Why the run may be taken.
            keep: A retention policy to store with the run; None keeps the stored one.
            world_size: Number of ranks.

        Returns:
            The head with our claim on top, or Lost with the newer head to decide on.
        """
        self._check_process()
        with self._lock:
            if self._journal is None:
                self._adopt(create_run(self.store, clock=self._clock, ids=self._ids))
                head = self.journal.head()
                if head.seq >= 0:
                    return Lost(head=head)
            elif self.journal.run.lost:
                restore_run_file(self.store, self.journal.run)
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

            def derive(now: Head) -> Draft | None:
                return Draft(change=change, epoch=None) if now.seq + 1 == number else None

            self._settle()
            claimed = self._append(head, derive)
            if claimed is None:
                return Lost(head=self.journal.head())
            self._head, self.epoch, self._fenced = claimed, claimed.seq, None
            self.journal.hint(claimed)
            self._note_damage(head)
            return self._head

    def mint(self, step: int) -> Attempt:
        """Return a new attempt under our claim."""
        self._check_owner()
        name = attempt_name(step, self.epoch, self._ids.new_id()[:20])
        return Attempt(name=name, step=step, epoch=self.epoch, prefix=self.journal.layout.attempt(name))

    def tip(self) -> Row | None:
        """Return the newest checkpoint of our lineage, as far as this session knows."""
        with self._lock:
            found = [] if self._head is None else changes.lineage(self._head.state)
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
            AlreadyExistsError: the lineage has reached the step by other means.
            OutcomeUnknownError: it may be one; the next call of this session finds out first.
        """
        self._check_owner()

        def derive(head: Head) -> Draft:
            if attempt.epoch != self.epoch:
                message = f"step {attempt.step} was begun under claim {attempt.epoch}; this session is now {self.epoch}"
                raise FencedError(message, operation="commit", key=attempt.prefix)
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
        with self._lock:
            self._check_owner()
            self._settle()
            assert self._head is not None
            head = self._append(self._head, self._unless_fenced(derive))
            if head is not None:
                self._head = head
                self.journal.hint(head)
            return head

    def _unless_fenced(self, derive: Callable[[Head], Draft | None]) -> Callable[[Head], Draft | None]:
        def checked(head: Head) -> Draft | None:
            self._head = head
            self._fence(head)
            return derive(head)

        return checked

    def _append(self, head: Head, derive: Callable[[Head], Draft | None]) -> Head | None:
        return self.journal.append(
            head,
            derive,
            write_id=self._ids.new_id(),
            writer=msgspec.to_builtins(self.me),
            on_publish=self._expect,
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
        self._pending = None
        if isinstance(outcome, Published) and pending.record.kind == "claim" and pending.seq > self.epoch:
            self.epoch, self._fenced = pending.seq, None
        assert self._head is not None or pending.record.kind == "claim"
        if isinstance(outcome, Published) or self._head is not None:
            self._head = self.journal.head()
            self._fence(self._head)

    def _fence(self, head: Head) -> None:
        if head.state.epoch > self.epoch >= 0:
            owner = owner_of(self.journal, head)
            who = "another writer" if owner is None else describe(owner)
            message = (
                f"{self.store.url}: {who} took this run over (claim {head.state.epoch} is newer than ours, "
                f"{self.epoch}); this process must stop writing. What it had committed stays"
            )
            self._fenced = FencedError(message, operation="commit", key=self.store.url)
            raise self._fenced
        if head.state.epoch < self.epoch:
            message = f"{self.store.url}: our claim {self.epoch} is not in the journal: the store lost or hides it"
            raise UnavailableError(message, operation="commit", key=self.store.url)

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
        self._check_process()
        if self._fenced is not None:
            raise FencedError(str(self._fenced), operation="commit", key=self.store.url) from self._fenced
        if self.epoch < 0:
            message = f"{self.store.url} is not claimed by this session"
            raise ConflictError(message, operation="commit", key=self.store.url)

    def _check_process(self) -> None:
        if os.getpid() != self.me.pid:
            message = (
                f"this writer of {self.store.url} belongs to process {self.me.pid}; a forked child can't use it: "
                "make a new CheckpointManager in the child, on its own URL"
            )
            raise ConfigError(message, key=self.store.url)


_shared: dict[str, Session] = {}
_shared_lock = threading.Lock()


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
        # A session inherited over a fork is the parent's; a fenced one has stopped for good.
        if held is None or anew or held.fenced or held.me.pid != os.getpid():
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
