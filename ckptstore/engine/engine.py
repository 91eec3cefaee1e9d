"""How do saves go on while training does, in order, in bounded memory, and without losing a failure?

The training thread waits for a free image, copies the state into it, and goes on. One publisher thread takes the saves
in the order they were made and brings each to its commit; parts are written by a few more. What fails in the background
is kept until a call on the training thread raises it.
"""

from __future__ import annotations

import collections
import logging
import threading
from typing import TYPE_CHECKING, Literal

from ckptstore.checkpoint import Checkpoint
from ckptstore.engine.saver import Save, SaveRequest
from ckptstore.engine.overlap import Later
from ckptstore.engine.staging import COPY_THREADS, Image, SavePlan, signature_of
from ckptstore.engine.workers import Workers
from ckptstore.errors import UnavailableError
from ckptstore.events import Committed, SaveFailed, StagingDone

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptstore.engine.capture import Captured
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
    """A save in flight, and who waits for it."""

    def __init__(self, save: Save, handle: SaveHandle) -> None:
        self.save = save
        self.handle = handle
        self.staged = False
        self.started = False


class Engine:
    """Saves states of one run in the background. One training thread calls it; handles may be used from any.

    Args:
        session: Owns the run.
        clock: For timings.
        on_busy: What a save does while *max_pending* saves are in flight: "wait"; "skip"; or "replace": supersede the
            newest one that has not begun to be written.
        max_pending: How many saves may be in flight, staged or being written.
        memory_bytes: Bound of all staging memory; None: as much as *max_pending* states take.
        observe: Told of each event, on the thread where it happens; must not raise.

    Attributes:
        committed_s: When the last commit was, on *clock*'s steady time; None before the first.
    """

    def __init__(
        self,
        session: Session,
        *,
        clock: Clock,
        on_busy: OnBusy = "wait",
        max_pending: int = 1,
        memory_bytes: int | None = None,
        observe: Callable[[Event], None],
    ) -> None:
        self._observe = observe
        self.committed_s: float | None = None
        self._session = session
        self._clock = clock
        self._on_busy = on_busy
        self._max_pending = max_pending
        self._memory_bytes = memory_bytes
        self._plan: SavePlan | None = None
        self._free: list[Image] = []
        self._n_images = 0
        self._queue: collections.deque[_Entry] = collections.deque()
        self._changed = threading.Condition()
        self._failures: list[tuple[int, BaseException]] = []
        self._workers = Workers(WRITE_THREADS, "ckptstore-write")
        self._publisher: threading.Thread | None = None
        self._stopping = False
        self._warned = False
        self._later: Later | None = None

    # ── from the training thread ─────────────────────────────────────────────────────────────────────────────────

    @property
    def pending(self) -> list[SaveHandle]:
        """The saves in flight, oldest first."""
        with self._changed:
            return [entry.handle for entry in self._queue]

    @property
    def bytes_in_flight(self) -> int:
        """Bytes that are staged, or being staged, and not durable."""
        with self._changed:
            return sum(entry.save.image.plan.n_bytes for entry in self._queue)

    def admit(self, handle: SaveHandle) -> float | None:
        """Wait or make room for one more save; return the seconds waited, or None if it is to be skipped."""
        started = self._clock.monotonic()
        with self._changed:
            if len(self._queue) >= self._max_pending:
                if self._on_busy == "skip":
                    return None
                if self._on_busy == "replace":
                    self._supersede()
            while len(self._queue) >= self._max_pending:
                self._changed.wait(BUSY_WARNING_S)
                waited = self._clock.monotonic() - started
                if waited >= BUSY_WARNING_S and not self._warned:
                    self._warned = True
                    _LOG.warning(
                        "step %d waits for the save of step %d to be written; save less often, or choose "
                        'on_busy="skip" or on_busy="replace" with max_pending=2',
                        handle.step,
                        self._queue[0].handle.step if self._queue else handle.step,
                    )
        return self._clock.monotonic() - started

    def submit(self, captured: Captured, request: SaveRequest, handle: SaveHandle, *, waited_s: float) -> None:
        """Stage *captured* and return; it is written and committed in the background, after those before it."""
        started = self._clock.monotonic()
        self.wait_staged()
        image = self._image(captured)
        image.begin()
        save = Save(self._session, captured, request, image, self._workers.submit, self._clock)
        save.timings.wait_s = waited_s
        entry = _Entry(save, handle)
        with self._changed:
            self._queue.append(entry)
            self._changed.notify_all()
        self._start()
        eager = captured.tensors
        if captured.guarded and image.holds_all:
            eager = {name: tensor for name, tensor in eager.items() if name not in captured.guarded}
        later = Later(captured) if len(eager) < len(captured.tensors) else None

        def stage() -> None:
            """Stage what is left; on the training thread, or beside it."""
            try:
                if later is None:
                    image.stage(captured.tensors, save.part_staged, threads=COPY_THREADS)
                else:
                    image.stage(later.tensors, save.part_staged, threads=1)
                    later.check(request.step)
                save.staged()
            except BaseException as error:
                save.fail(error)
                if later is None:
                    raise
            finally:
                save.timings.staging_s = self._clock.monotonic() - started
                with self._changed:
                    entry.staged = True
                    self._changed.notify_all()
                handle.staged()
            n_bytes, staging_s = image.plan.n_bytes, save.timings.staging_s
            self._observe(StagingDone(step=request.step, n_bytes=n_bytes, wait_s=waited_s, staging_s=staging_s))

        if later is None:
            stage()
            return
        try:
            image.copy_now(eager)
        except BaseException as error:
            save.fail(error)
            with self._changed:
                entry.staged = True
                self._changed.notify_all()
            raise
        later.begin(stage, handle, self._clock)
        self._later = later

    def wait_staged(self, timeout_s: float | None = None) -> None:
        """Return when every save has its own copy of the state; UnavailableError if not within *timeout_s* seconds."""
        if self._later is not None:
            self._later.wait(timeout_s)

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when no save is in flight; UnavailableError names those that are after *timeout_s* seconds."""
        self.wait_staged(timeout_s)
        with self._changed:
            done = self._changed.wait_for(lambda: not self._queue, timeout_s)
            steps = [entry.handle.step for entry in self._queue]
        if not done:
            message = (
                f"step {', '.join(map(str, steps))} is not durable after {timeout_s} s: the storage has not answered"
            )
            raise UnavailableError(message, operation="wait")

    def raise_failure(self) -> None:
        """Raise the oldest failure of a background save that no call has raised yet."""
        with self._changed:
            if not self._failures:
                return
            step, error = self._failures.pop(0)
        error.add_note(f"this is the failure of the save of step {step}, in the background")
        raise error

    def drop_failure(self, handle: SaveHandle) -> None:
        """Forget the failure of a save whose caller has seen it."""
        with self._changed:
            self._failures = [item for item in self._failures if item[0] != handle.step]

    @property
    def failures(self) -> int:
        """How many failures no call has raised yet."""
        with self._changed:
            return len(self._failures)

    def close(self, timeout_s: float) -> None:
        """Drain for at most *timeout_s* seconds, then stop; UnavailableError names what is not durable."""
        try:
            self.wait(timeout_s)
        finally:
            with self._changed:
                self._stopping = True
                self._changed.notify_all()
            if not self._queue:
                self._workers.stop(timeout_s)
                self._free.clear()

    # ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _image(self, captured: Captured) -> Image:
        """Return a free image for this state. The plan, and with it the images, are kept while the state's form is."""
        signature = signature_of(captured.tensors)
        if self._plan is None or self._plan.signature != signature:
            self._plan = SavePlan(captured.tensors)
        with self._changed:
            while True:
                while self._free:
                    image = self._free.pop()
                    if image.plan is self._plan:
                        return image
                    self._n_images -= 1
                if self._n_images < self._images_allowed(self._plan):
                    self._n_images += 1
                    break
                self._changed.wait()
        if self._memory_bytes is None:
            return Image(self._plan, None)
        return Image(self._plan, self._memory_bytes // self._images_allowed(self._plan))

    def _images_allowed(self, plan: SavePlan) -> int:
        """Return how many images fit the bound; a state larger than it streams through one."""
        if self._memory_bytes is None:
            return self._max_pending
        return max(1, min(self._max_pending, self._memory_bytes // max(plan.staging_bytes, 1)))

    # ── the publisher ────────────────────────────────────────────────────────────────────────────────────────────

    def _start(self) -> None:
        if self._publisher is None:
            self._publisher = threading.Thread(target=self._publish, name="ckptstore-publish", daemon=True)
            self._publisher.start()

    def _publish(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._stopping:
                    self._changed.wait()
                if not self._queue:
                    return
                entry = self._queue[0]
                entry.started = True
            self._one(entry)
            del entry  # its memory must not be held until the next save

    def _one(self, entry: _Entry) -> None:
        save, handle = entry.save, entry.handle
        failure: BaseException | None = None
        row = None
        try:
            row = save.run()
        except BaseException as error:  # noqa: BLE001 - kept for the training thread
            failure = error
        with self._changed:
            while not entry.staged:  # the image is staged into until the training thread has noticed
                self._changed.wait()
            if failure is not None:
                self._failures.append((handle.step, failure))
        if row is None:
            _LOG.error("the save of step %d failed: %s", handle.step, failure)
            handle.settle("failed", error=failure)
            self._observe(SaveFailed(step=handle.step, error=str(failure)))
        else:
            layout = self._session.journal.layout
            checkpoint = Checkpoint(self._session.store, layout, row, on_lineage=True)
            handle.settle("committed", checkpoint=checkpoint)
            self._observe(_committed(row, save))
        with self._changed:  # last: who waits for the line to be empty finds every handle settled
            self._queue.popleft()
            self._free.append(save.image)
            if row is not None:
                self.committed_s = self._clock.monotonic()
            self._changed.notify_all()

    def _supersede(self) -> None:
        """Take the newest save that has not begun to be written out of the line. Called with the lock held."""
        for entry in reversed(self._queue):
            if entry.staged and not entry.started:
                self._queue.remove(entry)
                self._free.append(entry.save.image)
                _LOG.info("the save of step %d is superseded by a newer one", entry.handle.step)
                entry.handle.settle("superseded")
                return


def _committed(row: Row, save: Save) -> Committed:
    timings = save.timings
    _LOG.info(
        "step %d committed: %d bytes, staged in %.3f s, written in %.3f s, committed in %.3f s",
        row.step,
        row.n_bytes,
        timings.staging_s,
        timings.write_s,
        timings.commit_s,
    )
    return Committed(
        step=row.step,
        n_bytes=row.n_bytes,
        wait_s=timings.wait_s,
        staging_s=timings.staging_s,
        write_s=timings.write_s,
        commit_s=timings.commit_s,
    )
