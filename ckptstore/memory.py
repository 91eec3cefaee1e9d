"""How does a store behave when nothing fails? The reference that every backend is compared with.

Objects live in a process-wide table, one per name, so that ``memory://name`` opened twice is one store, as a bucket is.
One lock around each verb makes every verb atomic, which is all the protocol asks.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ckptstore.errors import AlreadyExistsError, CkptStoreError, ConfigError, CorruptionError, NotFoundError
from ckptstore.store import (
    MAX_RECORD_BYTES,
    Capabilities,
    CheckpointStore,
    DeleteResult,
    ObjectInfo,
    Published,
    Upload,
    check_key,
    check_prefix,
    settle,
    short_read,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Self

    from ckptstore.store import Outcome, PartWriter, WritableBuffer

__all__ = ["MemoryStore"]


class _Space:
    """The objects of one name, shared by all stores opened on it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.objects: dict[str, bytes] = {}
        self.open: dict[str, _MemoryPartWriter] = {}


_spaces: dict[str, _Space] = {}
_spaces_lock = threading.Lock()


class MemoryStore(CheckpointStore):
    """A store in this process's memory, for tests and as the reference. Gone with the process."""

    def __init__(self, name: str) -> None:
        self._name = name
        with _spaces_lock:
            self._space = _spaces.setdefault(name, _Space())

    @classmethod
    def from_url(cls, url: str, **options: object) -> Self:
        """Open ``memory://name``; there are no options."""
        if options:
            message = f"{url}: unknown option {', '.join(sorted(options))}; memory:// has no options"
            raise ConfigError(message, key=url)
        name = url.removeprefix("memory://").strip("/")
        if not name:
            message = "memory:// needs a name: memory://my-run"
            raise ConfigError(message, key=url)
        return cls(name)

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    def capabilities(self) -> Capabilities:
        return Capabilities(exclusive="atomic", durable="unknown", listing="strong", store_clock=False, local=True)

    def publish(self, key: str, record: bytes, *, write_id: str) -> Outcome:
        check_key(key)
        if len(record) > MAX_RECORD_BYTES:
            message = f"{key}: a record of {len(record)} bytes is over the limit of {MAX_RECORD_BYTES}"
            raise ConfigError(message, operation="publish", key=key)
        with self._space.lock:
            held = self._space.objects.get(key)
            if held is not None:
                return settle(held[:MAX_RECORD_BYTES], write_id)
            self._space.objects[key] = bytes(record)
            return Published()

    def put(self, key: str, body: bytes) -> None:
        check_key(key)
        with self._space.lock:
            self._space.objects[key] = bytes(body)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        body = self._held(key, "get")
        if len(body) > max_bytes:
            message = f"{key} holds {len(body)} bytes, more than the {max_bytes} it may"
            raise CorruptionError(message, operation="get", key=key)
        return body

    def create(self, key: str, n_bytes: int, part_bytes: int) -> PartWriter:
        check_key(key)
        with self._space.lock:
            if key in self._space.objects or key in self._space.open:
                message = f"{key} exists; payload keys are written once"
                raise AlreadyExistsError(message, operation="create", key=key)
            writer = _MemoryPartWriter(self._space, key, n_bytes, part_bytes)
            self._space.open[key] = writer
            return writer

    def read_into(self, key: str, offset: int, buffer: WritableBuffer) -> None:
        body = self._held(key, "read_into")
        view = memoryview(buffer)
        found = body[offset : offset + len(view)]
        if len(found) != len(view):
            raise short_read(key, offset, len(view), len(found))
        view[:] = found

    def stat(self, key: str) -> ObjectInfo:
        return ObjectInfo(key=key, n_bytes=len(self._held(key, "stat")))

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        with self._space.lock:
            found = sorted(
                (key, len(body))
                for key, body in self._space.objects.items()
                if key.startswith(prefix) and (after is None or key > after)
            )
        for key, n_bytes in found:
            yield ObjectInfo(key=key, n_bytes=n_bytes)

    def delete(self, keys: Iterable[str]) -> Sequence[DeleteResult]:
        results = []
        for key in keys:
            check_key(key)
            with self._space.lock:
                self._space.objects.pop(key, None)
            results.append(DeleteResult(key=key))
        return results

    def uploads(self, prefix: str) -> Iterator[Upload]:
        check_prefix(prefix)
        with self._space.lock:
            found = sorted(key for key in self._space.open if key.startswith(prefix))
        for key in found:
            yield Upload(key=key, upload_id=key)

    def abort_upload(self, upload: Upload) -> None:
        with self._space.lock:
            writer = self._space.open.get(upload.key)
        if writer is not None:
            writer.abort()

    def close(self) -> None:
        """Nothing to release: the objects belong to the name, not to this store."""

    def _held(self, key: str, operation: str) -> bytes:
        check_key(key)
        with self._space.lock:
            held = self._space.objects.get(key)
        if held is None:
            message = f"{key} does not exist in {self.url}"
            raise NotFoundError(message, operation=operation, key=key)
        return held


class _MemoryPartWriter:
    def __init__(self, space: _Space, key: str, n_bytes: int, part_bytes: int) -> None:
        self._space = space
        self._key = key
        self._n_bytes = n_bytes
        self._part_bytes = part_bytes
        self._parts: dict[int, bytes] = {}

    def write(self, offset: int, buffer: bytes | bytearray | memoryview) -> None:
        expected = min(self._part_bytes, self._n_bytes - offset)
        if offset < 0 or offset % self._part_bytes or len(buffer) != expected:
            message = f"{self._key}: a part of {len(buffer)} bytes at {offset} is not on the grid of {self._part_bytes}"
            raise ConfigError(message, operation="write", key=self._key)
        self._parts[offset] = bytes(buffer)

    def finish(self) -> None:
        body = b"".join(self._parts[offset] for offset in sorted(self._parts))
        if len(body) != self._n_bytes:
            message = f"{self._key}: {len(body)} of {self._n_bytes} bytes were written"
            raise CkptStoreError(message, operation="finish", key=self._key)
        with self._space.lock:
            if self._space.open.pop(self._key, None) is not self:
                message = f"{self._key}: this write was aborted"
                raise CkptStoreError(message, operation="finish", key=self._key)
            self._space.objects[self._key] = body

    def abort(self) -> None:
        with self._space.lock:
            if self._space.open.get(self._key) is self:
                del self._space.open[self._key]
