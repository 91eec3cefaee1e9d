"""In which order did the caller use the store?

A store around a store that notes when each verb begins and ends. Most orders that matter are "this had returned before
that was asked": with both ends noted, a test can tell them from calls that merely began in order.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ckptstore.store import CheckpointStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ckptstore.store import (
        Capabilities,
        DeleteResult,
        ObjectInfo,
        Outcome,
        PartWriter,
        Upload,
        WritableBuffer,
    )

__all__ = ["Event", "RecordingStore"]


@dataclass(frozen=True, slots=True)
class Event:
    """One end of one call. The key of ``delete`` is its keys joined by spaces; a PartWriter's is that of its object."""

    verb: str
    key: str
    phase: Literal["began", "returned", "failed"]


class RecordingStore(CheckpointStore):
    """Passes everything to *store* and notes it. Thread-safe; the order of the notes is the order in time."""

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._events: list[Event] = []

    @property
    def events(self) -> list[Event]:
        """Both ends of every call so far, a copy."""
        with self._lock:
            return list(self._events)

    @property
    def calls(self) -> list[tuple[str, str]]:
        """Verb and key of every call so far, as they began."""
        return [(event.verb, event.key) for event in self.events if event.phase == "began"]

    def clear(self) -> None:
        """Forget what was noted."""
        with self._lock:
            self._events.clear()

    @property
    def url(self) -> str:
        return self._store.url

    def capabilities(self) -> Capabilities:
        return self._store.capabilities()

    def publish(self, key: str, record: bytes, *, write_id: str) -> Outcome:
        with self.noting("publish", key):
            return self._store.publish(key, record, write_id=write_id)

    def put(self, key: str, body: bytes) -> None:
        with self.noting("put", key):
            self._store.put(key, body)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        with self.noting("get", key):
            return self._store.get(key, max_bytes=max_bytes)

    def create(self, key: str, n_bytes: int, part_bytes: int) -> PartWriter:
        with self.noting("create", key):
            return _RecordingPartWriter(self, key, self._store.create(key, n_bytes, part_bytes))

    def read_into(self, key: str, offset: int, buffer: WritableBuffer) -> None:
        with self.noting("read_into", key):
            self._store.read_into(key, offset, buffer)

    def stat(self, key: str) -> ObjectInfo:
        with self.noting("stat", key):
            return self._store.stat(key)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        with self.noting("list", prefix):
            yield from self._store.list(prefix, after=after)

    def delete(self, keys: Iterable[str]) -> Sequence[DeleteResult]:
        asked = tuple(keys)
        with self.noting("delete", " ".join(asked)):
            return self._store.delete(asked)

    def uploads(self, prefix: str) -> Iterator[Upload]:
        with self.noting("uploads", prefix):
            yield from self._store.uploads(prefix)

    def abort_upload(self, upload: Upload) -> None:
        with self.noting("abort_upload", upload.key):
            self._store.abort_upload(upload)

    def close(self) -> None:
        self._store.close()

    @contextmanager
    def noting(self, verb: str, key: str) -> Iterator[None]:
        """Note that *verb* begins, and how it ends."""
        self._note(Event(verb, key, "began"))
        try:
            yield
        except GeneratorExit:
            # The caller of a listing had seen enough.
            self._note(Event(verb, key, "returned"))
            raise
        except BaseException:
            self._note(Event(verb, key, "failed"))
            raise
        self._note(Event(verb, key, "returned"))

    def _note(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)


class _RecordingPartWriter:
    def __init__(self, owner: RecordingStore, key: str, writer: PartWriter) -> None:
        self._owner = owner
        self._key = key
        self._writer = writer

    def write(self, offset: int, buffer: bytes | bytearray | memoryview) -> None:
        with self._owner.noting("write", self._key):
            self._writer.write(offset, buffer)

    def finish(self) -> None:
        with self._owner.noting("finish", self._key):
            self._writer.finish()

    def abort(self) -> None:
        with self._owner.noting("abort", self._key):
            self._writer.abort()
