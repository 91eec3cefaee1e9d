"""How do saves go on while training does, in order, in bounded memory, and without losing a failure?

The training thread waits for a free image, copies the state into it, and goes on. One publisher thread takes the saves
in the order they were made and brings each to its commit; parts are written by a few more. What fails in the background
is kept until a call on the training thread raises it.

One line of saves says what is in use: a save that stands in it owns its image until it needs none any more. No counter
and no list of free images has to agree with it, so an interrupt on the training thread, wherever it comes, can neither
lose an image nor hand one out twice.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
from typing import TYPE_CHECKING, Literal

from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckptstore.checkpoint import Checkpoint
from ckptstore.engine.overlap import Later
from ckptstore.engine.saver import Save
from ckptstore.engine.staging import COPY_THREADS, Image, SavePlan, signature_of
from ckptstore.engine.workers import Workers
from ckptstore.errors import OutcomeUnknownError, UnavailableError
from ckptstore.events import Committed, SaveFailed, SaveSkipped, StagingDone

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from torch.utils.hooks import RemovableHandle

    from ckptstore.engine.capture import Captured
    from ckptstore.engine.saver import SaveRequest
    from ckptstore.events import Event
    from ckptstore.handles import SaveHandle
    from ckptstore.run.records import Row
    from ckptstore.run.session import Session
    from ckptstore.seams import Clock

__all__ = ["Engine", "OnBusy"]

OnBusy = Literal["wait", "skip", "replace"]

WRITE_THREADS = 4
BUSY_WARNING_S = 1.0
_LOG = logging.getLogger(__name__)


class _Entry:
    """A save in the line, and who waits for it.

    Attributes:
        image: The memory it owns; None once it needs none, which makes room for the next: it was committed, failed, or
            gave way to a newer one, and stays in the line only until that was told.
        staged: Nothing copies into the image any more.
        started: The publisher has begun it.
        seen: The caller of save got its error.
    """

    def __init__(self, save: Save, handle: SaveHandle, image: Image) -> None:
        self.save = save
        self.handle = handle
        self.image: Image | None = image
        self.staged = False
        self.started = False
        self.seen = False


class Engine:
    """Saves states of one run in the background. One training thread calls it; handles may be used from any.

    Args:
        session: Owns the run.
        clock: For timings.
        on_busy: What a save does while *max_pending* saves are in flight: "wait"; "skip"; or "replace": supersede the
            newest one that has not begun to be written.
        max_pending: How many saves may be in flight, staged or being written.
        memory_bytes: Bound of all staging memory; None: as much as *max_pending* states take.
        keep_failures: Keep what fails in the background until a call raises it; else it is only counted.
        observe: Told of each event, on the thread where it happens; must not raise.

    Attributes:
        committed_s: When the last commit was, on *clock*'s steady time; None before the first.
        unsettled: Whether the last commit's outcome is unknown.
        uncleaned: How many objects of failed saves could not be removed.
    """

    def __init__(
        self,
        session: Session,
        *,
        clock: Clock,
        on_busy: OnBusy = "wait",
        max_pending: int = 1,
        memory_bytes: int | None = None,
        keep_failures: bool = True,
        observe: Callable[[Event], None],
    ) -> None:
        self._observe = observe
        self.committed_s: float | None = None
        self.unsettled = False
        self.uncleaned = 0
        self._session = session
        self._clock = clock
        self._on_busy = on_busy
        self._max_pending = max_pending
        self._memory_bytes = memory_bytes
        self._keep_failures = keep_failures
        self._plan: SavePlan | None = None
        self._images: list[Image] = []
        self._line: collections.deque[_Entry] = collections.deque()
        # Taken as the bare lock: an interrupt may come within a Condition's own enter and exit, and leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._failures: list[tuple[SaveHandle, BaseException]] = []
        self._n_dropped = 0
        self._stopping = False
        self._warned_busy = False
        self._warned_streaming = False
        self._later: Later | None = None
        self._copier: Workers | None = None
        self._hook: RemovableHandle | None = None
        self._workers = Workers(WRITE_THREADS, "ckptstore-write")
        self._publisher = threading.Thread(target=self._publish, name="ckptstore-publish", daemon=True)
        self._publisher.start()

    # ── from the training thread ─────────────────────────────────────────────────────────────────────────────────

    @property
    def pending(self) -> list[SaveHandle]:
        """The saves in flight, oldest first."""
        with self._lock:
            return [entry.handle for entry in self._line if entry.image is not None]

    @property
    def bytes_in_flight(self) -> int:
        """Bytes that are staged, or being staged, and not durable."""
        with self._lock:
            return sum(image.plan.n_bytes for image in self._owned())

    def save(
        self,
        captured: Captured,
        request: SaveRequest,
        handle: SaveHandle,
        *,
        patient: bool = False,
        eager: bool = False,
    ) -> bool:
        """Stage *captured* and return; it is written and committed in the background, after those before it.

        Args:
            captured: The state.
            request: What is saved beside it.
            handle: The save's.
            patient: Wait for room, whatever the policy.
            eager: The caller waits for the commit: write as early as possible, at the cost of the copy.

        Returns:
            False if the policy is to skip, and there was no room.

        Raises:
            CkptStoreError: an earlier save failed meanwhile; this one was not begun.
        """
        started = self._clock.monotonic()
        self.wait_staged()
        plan = self._plan_of(captured)
        if not self._make_room(plan, handle, "wait" if patient else self._on_busy):
            return False
        self.raise_failure()
        image = self._image(plan)
        image.begin()
        guarded = captured.guarded if image.holds_all else ()
        eager = eager or bool(guarded)  # a copy beside training keeps no one waiting
        save = Save(self._session, captured, request, image, self._workers.submit, self._clock, eager=eager)
        save.timings.wait_s = self._clock.monotonic() - started
        entry = _Entry(save, handle, image)
        beside = {name: tensor for name, tensor in captured.tensors.items() if name in guarded}
        later = Later(beside, handle, self._clock) if beside else None
        try:
            with self._lock:
                self._line.append(entry)
                self._changed.notify_all()
            if later is None:
                image.stage(captured.tensors, save.part_staged, threads=COPY_THREADS)
                self._staged(entry)
            else:
                image.copy_now({name: tensor for name, tensor in captured.tensors.items() if name not in beside})
                self._copy_beside_training(entry, later)
        except BaseException as error:
            before = save.failure
            try:
                entry.seen = save.fail(error) is error is not before
            finally:
                if later is None or later.take():
                    self._give_up_copy(entry, later)
            # What failed in the background stops the copy too, with the very same error: that one is kept for the next
            # call, as it would have been a moment later.
            if error is not before:
                raise
        return True

    def wait_staged(self, timeout_s: float | None = None) -> None:
        """Return when every save has its own copy of the state; UnavailableError if not within *timeout_s* seconds."""
        if self._later is not None:
            self._later.wait(timeout_s)

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when no save is in flight; UnavailableError names those that are after *timeout_s* seconds."""
        with self._lock:
            done = self._changed.wait_for(lambda: not self._line, timeout_s)
            steps = [entry.handle.step for entry in self._line]
        if not done:
            message = (
                f"step {', '.join(map(str, steps))} is not durable after {timeout_s} s: the storage has not answered"
            )
            raise UnavailableError(message, operation="wait")

    def raise_failure(self) -> None:
        """Raise the oldest failure of a background save that no call has raised yet."""
        with self._lock:
            oldest = self._failures[0] if self._failures else None
        if oldest is not None:
            try:
                raise oldest[1]
            finally:  # only now: whatever interrupts the call before this, the failure is raised by the next one
                self.forget_failure(*oldest)

    def forget_failure(self, handle: SaveHandle, error: BaseException) -> None:
        """Keep *error* no longer, if it is this save's failure: its caller has seen it."""
        with self._lock:
            self._failures = [item for item in self._failures if item[0] is not handle or item[1] is not error]

    @property
    def failures(self) -> int:
        """How many failures no call has raised yet."""
        return len(self._failures) + self._n_dropped

    def close(self, timeout_s: float) -> None:
        """Drain for at most *timeout_s* seconds, then stop.

        Raises:
            UnavailableError: naming what is not durable; it is still being written, and may never be.
            CkptStoreError: a failure that no call has raised yet. Of several errors the others are notes.
        """
        errors: list[BaseException] = []
        try:
            self.wait(timeout_s)
        except UnavailableError as error:
            errors.append(error)
        finally:
            with self._lock:
                self._stopping = True
                drained = not self._line
                self._changed.notify_all()
            if self._hook is not None:
                self._hook.remove()
            if drained:
                self._publisher.join(timeout_s)
                self._workers.stop(timeout_s)
                if self._copier is not None:
                    self._copier.stop(timeout_s)
                self._images.clear()
        errors += [error for _, error in self._failures]
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"also: {' '.join([str(other), *getattr(other, '__notes__', [])])}")
            raise errors[0]

    # ── room and memory ──────────────────────────────────────────────────────────────────────────────────────────

    def _make_room(self, plan: SavePlan, handle: SaveHandle, policy: OnBusy) -> bool:
        """Wait until one more save fits, as *policy* says; False if it is to be skipped."""
        with self._lock:
            busy = not self._has_room(plan)
            replaced = self._replaceable() if busy and policy == "replace" else None
            if replaced is not None:
                replaced.image = None  # first: from here on the publisher drops it, should we be interrupted
                replaced.save.let_go()
        if busy and policy == "skip":
            return False
        if replaced is not None:
            self._tell_superseded(replaced)
            self._leave(replaced)
        started = self._clock.monotonic()
        with self._lock:
            while not self._has_room(plan):
                self._changed.wait(BUSY_WARNING_S)
                if self._clock.monotonic() - started >= BUSY_WARNING_S and not self._warned_busy:
                    self._warned_busy = True
                    _LOG.warning(
                        "step %d waits for the save of step %d to be written; save less often, or choose "
                        'on_busy="skip" or on_busy="replace" with max_pending=2',
                        handle.step,
                        self._line[0].handle.step if self._line else handle.step,
                    )
        return True

    def _owned(self) -> list[Image]:
        return [entry.image for entry in self._line if entry.image is not None]

    def _has_room(self, plan: SavePlan) -> bool:
        owned = self._owned()
        if len(owned) >= self._max_pending:
            return False
        if self._memory_bytes is None or not owned:
            return True
        return sum(image.n_bytes for image in owned) + plan.staging_bytes <= self._memory_bytes

    def _replaceable(self) -> _Entry | None:
        for entry in reversed(self._line):
            if entry.image is not None and entry.staged and not entry.started:
                return entry
        return None

    def _plan_of(self, captured: Captured) -> SavePlan:
        """Return the plan of this state; it, and with it the images, are kept while the state's form is."""
        if self._plan is None or self._plan.signature != signature_of(captured.tensors):
            self._plan = SavePlan(captured.tensors)
        return self._plan

    def _image(self, plan: SavePlan) -> Image:
        """Return an image that no save in the line owns. Memory of other forms goes back before any is taken."""
        with self._lock:
            owned = {id(image) for image in self._owned()}
        self._images = [image for image in self._images if id(image) in owned or image.plan is plan]
        free = next((image for image in self._images if id(image) not in owned), None)
        if free is not None:
            return free
        image = Image(plan, self._memory_bytes)
        self._images.append(image)
        if not image.holds_all and not self._warned_streaming:
            self._warned_streaming = True
            _LOG.warning(
                "the state takes %d bytes of staging memory and memory_bytes allows %d: saves stream through it, so "
                "training waits for the storage",
                plan.staging_bytes,
                image.n_bytes,
            )
        return image

    # ── copying ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _copy_beside_training(self, entry: _Entry, later: Later) -> None:
        if self._copier is None:
            self._copier = Workers(1, "ckptstore-copy")
        if self._hook is None:
            # For good: taking a hook away while an optimizer walks through its hooks would end that step with an error.
            self._hook = register_optimizer_step_pre_hook(self._before_step)
        self._later = later  # before the copy begins, so that no step can overtake it
        self._copier.submit(lambda: self._copy_later(entry, later))

    def _before_step(self, *_: Any) -> None:
        if self._later is not None:
            self._later.hold_step()

    def _copy_later(self, entry: _Entry, later: Later) -> None:
        if not later.take():
            return
        save, image = entry.save, entry.image
        assert image is not None  # it is ours until the copy ends
        parts = [[copy.name for copy in part.copies] for part in image.plan.parts]

        def part_staged(number: int) -> None:
            save.part_staged(number)
            later.check(parts[number + 1] if number + 1 < len(parts) else ())

        try:
            later.check(later.tensors)
            image.stage(later.tensors, part_staged, threads=1)
            later.check(later.tensors)
            later.end()
            self._staged(entry)
        except BaseException as error:  # noqa: BLE001 - kept for the training thread
            save.fail(error)
            self._give_up_copy(entry, later)

    def _staged(self, entry: _Entry) -> None:
        """Say that the copy is complete and consistent."""
        save, handle = entry.save, entry.handle
        save.staged()
        handle.staged()
        timings = save.timings
        n_bytes = save.plan.n_bytes
        self._observe(
            StagingDone(step=handle.step, n_bytes=n_bytes, wait_s=timings.wait_s, staging_s=timings.staging_s)
        )
        with self._lock:  # last: so "staged" is told before "committed"
            entry.staged = True
            self._changed.notify_all()

    def _give_up_copy(self, entry: _Entry, later: Later | None) -> None:
        if later is not None:
            later.end()
        with self._lock:
            entry.staged = True
            self._changed.notify_all()

    # ── the publisher ────────────────────────────────────────────────────────────────────────────────────────────

    def _publish(self) -> None:
        while True:
            with self._lock:
                while not self._line and not self._stopping:
                    self._changed.wait()
                if not self._line:
                    return
                entry = self._line[0]
                entry.started = True
            if entry.image is None:
                with contextlib.suppress(BaseException):  # logged where it can be told; this thread must go on
                    self._tell_superseded(entry)
                self._leave(entry)
            else:
                self._bring_home(entry)
            del entry  # its memory must not be held until the next save

    def _bring_home(self, entry: _Entry) -> None:
        save = entry.save
        row: Row | None = None
        failure: BaseException | None = None
        try:
            row = save.run()
        except BaseException as error:  # noqa: BLE001 - kept for the training thread
            failure = error
        with self._lock:
            while not entry.staged:  # the image is copied into until the copying threads have noticed
                self._changed.wait()
            self.unsettled = isinstance(failure, OutcomeUnknownError)
            self.uncleaned += save.uncleaned
            if row is not None:
                self.committed_s = self._clock.monotonic()
            if failure is not None and not entry.seen:
                failure.add_note(f"this is the failure of the save of step {entry.handle.step}, in the background")
                if self._keep_failures:
                    self._failures.append((entry.handle, failure))
                else:
                    self._n_dropped += 1
            save.let_go()  # first: what makes room for new memory must not be what keeps the old
            entry.image = None
            self._changed.notify_all()
        try:
            self._tell(entry, row, failure)
        except BaseException:  # noqa: BLE001 - a caller's code must not end the publisher
            _LOG.exception("telling how the save of step %d ended failed", entry.handle.step)
        self._leave(entry)  # last: who waits for the line to be empty finds every handle settled

    def _tell(self, entry: _Entry, row: Row | None, failure: BaseException | None) -> None:
        handle, timings = entry.handle, entry.save.timings
        if row is None:
            handle.settle("failed", error=failure)
            _LOG.error("the save of step %d failed: %s", handle.step, failure)
            self._observe(SaveFailed(step=handle.step, error=str(failure)))
            return
        layout = self._session.journal.layout
        handle.settle("committed", checkpoint=Checkpoint(self._session.store, layout, row, on_lineage=True))
        _LOG.info(
            "step %d committed: %d bytes, staged in %.3f s, written in %.3f s, committed in %.3f s",
            row.step,
            row.n_bytes,
            timings.staging_s,
            timings.write_s,
            timings.commit_s,
        )
        self._observe(
            Committed(
                step=row.step,
                n_bytes=row.n_bytes,
                wait_s=timings.wait_s,
                staging_s=timings.staging_s,
                write_s=timings.write_s,
                commit_s=timings.commit_s,
            )
        )

    def _tell_superseded(self, entry: _Entry) -> None:
        """Tell that a save gave way; outside the lock, since a handle's callbacks are not our code."""
        if entry.handle.settle("superseded"):
            reason = "a newer save took its place before it was written"
            _LOG.info("the save of step %d is superseded: %s", entry.handle.step, reason)
            self._observe(SaveSkipped(step=entry.handle.step, reason=reason))

    def _leave(self, entry: _Entry) -> None:
        with self._lock:
            if entry in self._line:
                self._line.remove(entry)
            self._changed.notify_all()
