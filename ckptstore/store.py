"""What must a storage give so that checkpoints on it are safe?

About ten verbs over keys and bytes. Only one of them, ``publish``, decides anything: it creates a small record under
a name that did not exist, once, for all observers. Everything else (the journal, fencing, retention) is built on that,
so a backend has one promise to prove. A verb that safety leans on has no default here: look-then-write is not
create-if-absent. Conveniences are functions beside the class; retry, tracing and faults are wrappers and themselves
stores.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from ckptstore.errors import ConfigError, CorruptionError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import TracebackType
    from typing import Self

__all__ = [
    "Capabilities",
    "CheckpointStore",
    "Conflict",
    "DeleteResult",
    "ObjectInfo",
    "Outcome",
    "PartWriter",
    "Published",
    "Upload",
    "WritableBuffer",
    "check_key",
    "settle",
    "write_id_of",
]

MAX_KEY_BYTES = 1024
MAX_SEGMENT_BYTES = 200
MAX_RECORD_BYTES = 64 * 1024

WritableBuffer: TypeAlias = bytearray | memoryview
"""Where ``read_into`` puts bytes: one-dimensional, contiguous, writable, item size 1."""

_SEGMENT = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class Published:
    """The record under this key is ours, durable to the degree the store promises."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """Another record was there first.

    Attributes:
        record: The bytes found under the key, at most ``MAX_RECORD_BYTES`` of them.
    """

    record: bytes


Outcome: TypeAlias = Published | Conflict
"""What a publish that got an answer can say. No answer and no proof is OutcomeUnknownError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What this store promises; a store that promises less works in a smaller mode, said loudly.

    Attributes:
        exclusive: "atomic": ``publish`` has one winner among all processes and hosts. "weak" or "none": only one
            writer may use the store (single-writer mode), never advertised as fenced.
        durable: What a returned write survives: "fsync" a power cut of this machine, "ack" the server's promise.
        listing: "strong": a listing that starts after a write returned shows it, keys in order. "stale": within
            ``stale_bound_s``. "unordered": strong, any order.
        stale_bound_s: For "stale": seconds after which a listing is true; else 0.
        store_clock: Whether ``ObjectInfo.modified`` is the store's own clock.
        grace_s: Seconds between a published retirement and the deletion of its data; 0 where open files stay readable.
        part_bytes_min: Smallest part but for the last, bytes.
        object_bytes_max: Largest object, bytes.
        local: Whether reads are cheap enough to digest first and read again (page cache).
    """

    exclusive: Literal["atomic", "weak", "none"]
    durable: Literal["fsync", "ack", "unknown"]
    listing: Literal["strong", "stale", "unordered"]
    stale_bound_s: float = 0.0
    store_clock: bool = True
    grace_s: float = 0.0
    part_bytes_min: int = 1
    object_bytes_max: int = 1 << 62
    local: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One object: its key, its size in bytes, and when the store says it was last written (seconds, Unix time)."""

    key: str
    n_bytes: int
    modified: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteResult:
    """The fate of one key of a delete. Absent keys count as deleted."""

    key: str
    error: Exception | None = field(default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """An unfinished write that a dead process left: a multipart upload, or a stray temporary."""

    key: str
    upload_id: str
    started: float | None = None


class PartWriter(Protocol):
    """An object being written. Invisible to no one, promised to no one, until ``finish`` returns."""

    def write(self, offset: int, buffer: bytes | bytearray | memoryview) -> None:
        """Put *buffer* at *offset*; any thread, any order, each byte once.

        Args:
            offset: A multiple of the ``part_bytes`` given to ``create``.
            buffer: One part: ``part_bytes`` long, shorter only at the end of the object. Not changed by the caller
                until the call returns.
        """
        ...

    def finish(self) -> None:
        """Make the whole object durable. An error means it must be written again under another key."""
        ...

    def abort(self) -> None:
        """Remove what was written, as far as possible. Never raises; may be called after a failed ``finish``."""
        ...


class CheckpointStore(ABC):
    """Keys and bytes in one root. Thread-safe; payload keys are written once.

    Keys are relative, "/"-separated; see ``check_key``. Errors are those of ``ckptstore.errors``; each verb raises
    UnavailableError when the store does not answer and PermissionDeniedError when it refuses.
    """

    @property
    @abstractmethod
    def url(self) -> str:
        """The address of the root, without secrets: equal for two stores of one process iff they share their data."""

    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What this store promises, probed once where it can't be known. Cheap after the first call."""

    @abstractmethod
    def publish(self, key: str, record: bytes, *, write_id: str) -> Outcome:
        """Create *record* under *key* if no one has: all of it or none, one body ever, durable on return.

        Any thread may call this, and with the same *write_id* call it again: the answer is then Published if the first
        call took effect. Create-if-absent is "If-None-Match: *" in the sense of RFC 9110, section 13.

        Args:
            key: See ``check_key``.
            record: At most 64 KiB; its first line is a JSON object whose ``write_id`` is the argument.
            write_id: Proves that a record read back after a lost answer is ours.

        Returns:
            Published; or Conflict, with the record that was there first.

        Raises:
            OutcomeUnknownError: no answer and no proof; the record may be there.
            UnavailableError: certainly not written.
            UnsupportedError: this store can't create-if-absent.
        """

    @abstractmethod
    def put(self, key: str, body: bytes) -> None:
        """Create or replace a small object (manifest, receipt, pin, hint): durable, and never seen in part."""

    @abstractmethod
    def get(self, key: str, *, max_bytes: int) -> bytes:
        """Return the whole object.

        Raises:
            NotFoundError: proven absent.
            CorruptionError: it holds more than *max_bytes*.
        """

    @abstractmethod
    def create(self, key: str, n_bytes: int, part_bytes: int) -> PartWriter:
        """Begin an object of exactly *n_bytes* under a key never used before, written in parts of *part_bytes*.

        Raises:
            AlreadyExistsError: the key is taken (where the store can tell).
            StorageFullError: it is known now that it will not fit.
        """

    @abstractmethod
    def read_into(self, key: str, offset: int, buffer: WritableBuffer) -> None:
        """Fill *buffer* with the bytes from *offset* on. Any thread, many at once.

        Raises:
            NotFoundError: proven absent.
            CorruptionError: the object ends before the buffer is full.
        """

    def map(self, key: str) -> memoryview:
        """Return the object's bytes as memory that is read when it is touched.

        Writing to it changes no stored byte. It stays readable when the object is deleted meanwhile.

        Raises:
            UnsupportedError: the store's objects are not files of this machine.
            NotFoundError: proven absent.
        """
        message = (
            f"{self.url} can't be mapped into memory, only checkpoints on a local file system can: load without "
            "mmap=True, or copy it to a local disk first"
        )
        raise UnsupportedError(message, operation="map", key=key)

    @abstractmethod
    def stat(self, key: str) -> ObjectInfo:
        """Return size and time of one object; NotFoundError if proven absent."""

    @abstractmethod
    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        """Yield every object whose key starts with *prefix*, at any depth, in key order (but see ``listing``).

        Temporaries of unfinished writes are not shown. A prefix that does not exist yields nothing.

        Args:
            prefix: Empty, or a key, or a key with a trailing "/".
            after: Only keys greater than this.
        """

    @abstractmethod
    def delete(self, keys: Iterable[str]) -> Sequence[DeleteResult]:
        """Remove objects; an absent one counts as removed. One result per key, in order; does not stop at an error."""

    @abstractmethod
    def uploads(self, prefix: str) -> Iterator[Upload]:
        """Yield unfinished writes below *prefix*, of this process too: multiparts, stray temporaries."""

    @abstractmethod
    def abort_upload(self, upload: Upload) -> None:
        """Remove one unfinished write; absent counts as removed."""

    @abstractmethod
    def close(self) -> None:
        """Release connections and threads. Other verbs must not be called afterwards. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_key(key: str) -> str:
    """Return *key* if it is legal everywhere, before anything is written.

    Legal: 1 to 1024 bytes; segments of ``[A-Za-z0-9._-]``, 1 to 200 bytes each, none starting with a dot. So a key can
    neither leave the run nor name a backend's temporary.
    """
    if not isinstance(key, str) or not 0 < len(key) <= MAX_KEY_BYTES:
        message = f"key {key!r:.120} is not 1 to {MAX_KEY_BYTES} characters long"
        raise ConfigError(message, key=str(key)[:120])
    for segment in key.split("/"):
        if len(segment) > MAX_SEGMENT_BYTES or not _SEGMENT.match(segment):
            message = (
                f"key {key!r:.300}: segment {segment!r:.210} must be 1 to {MAX_SEGMENT_BYTES} characters of "
                "[A-Za-z0-9._-] and not start with a dot"
            )
            raise ConfigError(message, key=key)
    return key


def check_prefix(prefix: str) -> str:
    """Return *prefix* if it is empty, a legal key, or a legal key and "/"."""
    if prefix:
        check_key(prefix.removesuffix("/"))
    return prefix


def write_id_of(record: bytes) -> str | None:
    """Return the write id in the first line of a record, or None if there is none to read (a torn or foreign file)."""
    try:
        found = json.loads(record.split(b"\n", 1)[0])
    except (ValueError, RecursionError):
        return None
    write_id = found.get("write_id") if isinstance(found, dict) else None
    return write_id if isinstance(write_id, str) else None


def settle(found: bytes, write_id: str) -> Outcome:
    """Decide a publish by the record found under its key: ours if it carries our write id, whatever a status said."""
    return Published() if write_id_of(found) == write_id else Conflict(found)


def short_read(key: str, offset: int, wanted: int, got: int) -> CorruptionError:
    """Return the error for an object that ended too early."""
    message = f"{key}: wanted {wanted} bytes at offset {offset}, the object ends after {got} of them: it is truncated"
    return CorruptionError(message, operation="read_into", key=key)
