"""In which order does a staged state become a checkpoint?

Payload first, then the manifest, each durable before the next begins; last one small record, published under the next
number of the journal. Until that publish nothing exists for a reader, so whatever fails before it leaves earlier
checkpoints as they were, and what was written is removed. Once the publish was sent, nothing is removed unless it is
known that the record is not there.
"""

from __future__ import annotations

import logging
import platform
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ckptstore import __version__
from ckptstore.errors import CkptStoreError, OutcomeUnknownError
from ckptstore.run.manifest import FileEntry, Manifest, Piece, TensorEntry, encode_manifest, manifest_ref
from ckptstore.state.digest import PART_BYTES, file_digest, part_digest

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptstore.engine.capture import Captured
    from ckptstore.engine.staging import Image
    from ckptstore.run.records import Row
    from ckptstore.run.session import Attempt, Session
    from ckptstore.seams import Clock
    from ckptstore.state.container import ContainerPlan
    from ckptstore.store import PartWriter

__all__ = ["Save", "SaveRequest", "Timings"]

ALGORITHM = "xxh3-128"
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """What a caller wants saved beside the state itself."""

    step: int
    metrics: dict[str, float | int | str]
    tags: tuple[str, ...]
    permanent: bool
    metadata: dict[str, Any] | None


@dataclass(slots=True)
class Timings:
    """Seconds that the phases of one save took; staging and writing overlap."""

    wait_s: float = 0.0
    staging_s: float = 0.0
    write_s: float = 0.0
    commit_s: float = 0.0


@dataclass(slots=True)
class _Container:
    """One container being written."""

    path: str
    plan: ContainerPlan
    writer: PartWriter
    parts: dict[int, bytes] = field(default_factory=dict)

    def entry(self) -> FileEntry:
        digests = [self.parts[index] for index in sorted(self.parts)]
        return _entry(self.path, self.plan.n_bytes, digests)


class Save:
    """One save on its way from staged parts to a commit.

    The training thread stages; ``part_staged`` may come from several threads. ``run`` belongs to the publisher thread.

    Args:
        session: Owns the run.
        captured: The state; its tensors are let go as soon as they are staged.
        request: What is saved beside it.
        image: Where the state is staged; this save's until ``let_go``.
        submit: Runs a job on the writing threads.
        clock: For timings.
    """

    def __init__(  # noqa: PLR0917 - one caller, and the order of the docstring
        self,
        session: Session,
        captured: Captured,
        request: SaveRequest,
        image: Image,
        submit: Callable[[Callable[[], None]], None],
        clock: Clock,
        *,
        eager: bool,
    ) -> None:
        self.request = request
        self.plan = image.plan
        self._image: Image | None = image
        self.timings = Timings()
        self._session = session
        self._store = session.store
        self._tree = captured.tree
        self._submit = submit
        self._clock = clock
        self._lock = threading.RLock()  # taken bare, as the engine's
        self._changed = threading.Condition(self._lock)
        self._created = False
        self._waiting: list[int] = []  # parts staged, not yet handed to the writing threads
        self._unstaged = n_parts = len(image.plan.parts)
        # Writing begins while the state is still being copied, but disturbs the copy: unless someone waits for the
        # commit, not before half of it is done. With memory for a few parts only, nothing can wait.
        self._hold = n_parts // 2 if image.holds_all and not eager else n_parts
        self._undigested: list[int] | None = [] if image.holds_all else None  # written before all was copied
        self._left = len(self.plan.parts) + 1  # the parts, and the word that they are one consistent snapshot
        self._failed: BaseException | None = None
        self._containers: list[_Container] = []
        self._keys: list[str] = []
        self._running = 0
        self._begun_s = clock.monotonic()
        self.uncleaned = 0  # objects of a failed save that could not be removed

    @property
    def failure(self) -> BaseException | None:
        """Why it fails; None while it does not."""
        return self._failed

    # ── from the staging threads ─────────────────────────────────────────────────────────────────────────────────

    def part_staged(self, number: int) -> None:
        """Take over a complete part; it is written as soon as its file exists and it is time."""
        with self._lock:
            self._waiting.append(number)
            self._unstaged -= 1
        self._hand_on()

    def staged(self) -> None:
        """Say that every part was staged and that the state did not change meanwhile."""
        self.timings.staging_s = self._clock.monotonic() - self._begun_s
        with self._lock:
            self._left -= 1
            self._changed.notify_all()
            undigested, self._undigested = self._undigested or [], None
        self._hand_on()
        for number in undigested:
            self._submit(partial(self._work, self._digest, number))

    def _hand_on(self) -> None:
        with self._lock:
            if not self._created or self._unstaged > self._hold:
                return
            ready, self._waiting = self._waiting, []
        for number in ready:
            self._submit(partial(self._work, self._write, number))

    def fail(self, error: BaseException) -> BaseException:
        """Let the save fail, from any thread, and return the reason that counts: the first."""
        with self._lock:
            reason = self._failed = error if self._failed is None else self._failed
            self._changed.notify_all()
            image = self._image
        if image is not None:
            image.stop(reason)
        return reason

    def let_go(self) -> None:
        """Use the image no more: ``run`` has returned, and nothing is staged any more."""
        self._image = None

    # ── on the publisher's thread ────────────────────────────────────────────────────────────────────────────────

    def run(self) -> Row:
        """Write, and commit. Returns when it is durable.

        Raises:
            CkptStoreError: it is not a checkpoint, and what was written has been removed.
            OutcomeUnknownError: it may be one; nothing was removed.
        """
        started = self._clock.monotonic()
        try:
            attempt = self._session.mint(self.request.step)
            files = self._payload(attempt)
            self.timings.write_s = self._clock.monotonic() - started
            body, n_bytes = self._manifest(attempt, files)
            key = self._session.journal.layout.manifest(attempt.name)
            self._keys.append(key)
            self._store.put(key, body)  # durable, and still nothing exists
        except BaseException as error:
            self.fail(error)
            self._clean()
            raise
        started = self._clock.monotonic()
        try:
            row = self._session.commit(
                attempt,
                manifest=manifest_ref(body),
                n_bytes=n_bytes,
                metrics=self.request.metrics,
                tags=self.request.tags,
                permanent=self.request.permanent,
            )
        except OutcomeUnknownError:
            raise
        except CkptStoreError:  # certainly not committed; after anything else (an interrupt) the data must stay
            self._clean()
            raise
        self.timings.commit_s = self._clock.monotonic() - started
        return row

    def _payload(self, attempt: Attempt) -> list[FileEntry]:
        """Create the files, write the parts as they are staged, and return when every file is durable."""
        for number, plan in enumerate(self.plan.containers):
            path = f"rank00000-of-00001.{number:03d}.safetensors"
            self._keys.append(attempt.prefix + path)
            writer = self._store.create(attempt.prefix + path, plan.n_bytes, PART_BYTES)
            self._containers.append(_Container(path, plan, writer))
        with self._lock:
            self._created = True
        self._hand_on()
        with self._lock:
            while self._left and self._failed is None:
                self._changed.wait()
            if self._failed is not None:
                raise self._failed
        for container in self._containers:
            container.writer.finish()
        return [container.entry() for container in self._containers]

    def _work(self, what: Callable[[int, Image], bool], number: int) -> None:
        """Do a piece of work for part *number* on a writing thread, unless the save has failed."""
        with self._lock:
            image = self._image
            if self._failed is not None or image is None:
                return
            self._running += 1
        done = False
        try:
            done = what(number, image)
        except BaseException as error:  # noqa: BLE001 - raised by run, on the publisher's thread
            self.fail(error)  # before this thread counts as gone: the image is another save's soon after
        with self._lock:
            self._running -= 1
            self._left -= done
            self._changed.notify_all()

    def _write(self, number: int, image: Image) -> bool:
        """Write a part, and digest it, but not while the rest is being copied: then the processors are the copy's.

        A direct write needs next to no processor, a digest does.
        """
        part = self.plan.parts[number]
        self._containers[part.container].writer.write(part.offset, image.memory(number))
        with self._lock:
            if self._undigested is not None:
                self._undigested.append(number)
                return False
        return self._digest(number, image)

    def _digest(self, number: int, image: Image) -> bool:
        part = self.plan.parts[number]
        self._containers[part.container].parts[part.index] = part_digest(image.memory(number), ALGORITHM)
        image.release(number)
        return True

    def _clean(self) -> None:
        """Free what a failed save wrote. Best effort: what can't be removed is garbage of a dead attempt."""
        with self._lock:
            while self._running:  # no thread may still write into a file that is removed
                self._changed.wait()
        for container in self._containers:
            container.writer.abort()
        try:
            errors = [result.error for result in self._store.delete(self._keys) if result.error is not None]
        except CkptStoreError as error:
            errors = [error] * len(self._keys)
        self.uncleaned = len(errors)
        if errors:
            _LOG.warning(
                "%d of %d objects of the failed save of step %d could not be removed: %s",
                len(errors),
                len(self._keys),
                self.request.step,
                errors[0],
            )

    def _manifest(self, attempt: Attempt, files: list[FileEntry]) -> tuple[bytes, int]:
        tensors = {
            entry.spec.name: TensorEntry(
                dtype=entry.spec.dtype,
                shape=entry.spec.shape,
                pieces=(Piece(file=number, start=entry.start, n_bytes=entry.n_bytes),),
            )
            for number, container in enumerate(self.plan.containers)
            for entry in container.entries
        }

        def put_side(name: str, body: bytes) -> FileEntry:
            self._keys.append(attempt.prefix + name)
            self._store.put(attempt.prefix + name, body)
            parts = range(0, len(body), PART_BYTES)
            return _entry(name, len(body), [part_digest(body[at : at + PART_BYTES], ALGORITHM) for at in parts])

        timings = self.timings
        manifest = Manifest(
            run_uid=self._session.journal.run_uid,
            attempt=attempt.name,
            step=attempt.step,
            epoch=attempt.epoch,
            world_size=1,
            ranks=(0,),
            files=tuple(files),
            n_bytes=0,
            root="",
            tensors=tensors,
            tree=self._tree,
            user=self.request.metadata,
            env={
                "ckptstore": __version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
            timings={
                "wait_s": round(timings.wait_s, 6),
                "staging_s": round(timings.staging_s, 6),
                "write_s": round(timings.write_s, 6),
            },
        )
        return encode_manifest(manifest, put_side)


def _entry(path: str, size: int, digests: list[bytes]) -> FileEntry:
    return FileEntry(
        path=path,
        size=size,
        rank=0,
        part_bytes=PART_BYTES,
        algorithm=ALGORITHM,
        parts=tuple(digest.hex() for digest in digests),
        digest=file_digest(digests),
    )
