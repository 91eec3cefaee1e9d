"""How does a directory of a local disk keep the promises of a CheckpointStore?

A key is a path below the root. Large objects are written in their final place, under names never used before, and are
durable when their bytes, their name and every folder above are synced. Small ones that may be replaced are written to a
temporary beside them, synced, renamed over the name, and the folder synced: the rename makes the change atomic, the two
syncs make it durable, and only in this order.

``publish`` is the same but for its rename, which refuses a name that is taken; the kernel decides between any number of
writers. Until that rename the record does not exist for anyone, so an error before it is a definite failure. After it
the record exists, and an error of the last sync leaves open whether it survives a power cut: outcome unknown.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager, suppress
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from ckptstore.errors import (
    CkptStoreError,
    ConfigError,
    CorruptionError,
    NotFoundError,
    OutcomeUnknownError,
    UnavailableError,
    UnsupportedError,
)
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
from ckptstore_posix.config import PosixConfig
from ckptstore_posix.files import O_DIRECT, REAL_FILES
from ckptstore_posix.folders import FOLDER, Folders, folder_of, name_of, opened
from ckptstore_posix.mapping import mapped, mapping
from ckptstore_posix.placing import NEW, TEMPORARY, place, probe, temporary
from ckptstore_posix.walking import Walk, refusal
from ckptstore_posix.writing import PAGE, PosixPartWriter

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Self

    from ckptstore.store import Outcome, PartWriter, WritableBuffer
    from ckptstore_posix.files import Files

__all__ = ["PosixStore"]

# Opening a pipe would wait for its writer without O_NONBLOCK, which means nothing for a file.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK


class PosixStore(CheckpointStore):
    """Checkpoints below one directory. Creates nothing before the first write.

    Holds no descriptor between calls (but for objects being written), so any number of threads may use it, and so may a
    forked child. Pickling keeps the configuration.

    Args:
        config: Where.
        files: The system calls; a test's own.
    """

    def __init__(self, config: PosixConfig, files: Files = REAL_FILES) -> None:
        self._config = config
        self._root = os.fspath(config.root)
        self._files = files
        self._folders = Folders(self._root, files)
        self._exclusive: Literal["atomic", "none"] | None = None

    @classmethod
    def from_url(cls, url: str, **options: object) -> Self:
        """Open ``file:///path`` or a bare path; there are no options. Touches nothing."""
        return cls(PosixConfig.from_url(url, **options))

    def __reduce__(self) -> tuple[type[Self], tuple[PosixConfig, Files]]:
        return type(self), (self._config, self._files)

    @property
    def url(self) -> str:
        return self._config.url

    def capabilities(self) -> Capabilities:
        if self._exclusive is None:
            self._exclusive = probe(self._files, self._root)
        return Capabilities(exclusive=self._exclusive or "atomic", durable="fsync", listing="strong", local=True)

    def publish(self, key: str, record: bytes, *, write_id: str) -> Outcome:
        check_key(key)
        if len(record) > MAX_RECORD_BYTES:
            message = f"{key}: a record of {len(record)} bytes is over the limit of {MAX_RECORD_BYTES}"
            raise ConfigError(message, operation="publish", key=key)

        def act(folder: int, name: str) -> Outcome:
            with temporary(self._files, folder, record) as unnamed:
                return self._publish(key, folder, unnamed, name, write_id)

        with self._mapping("publish", key):
            # An earlier call may have put our record there and not known it. So look first: then a failure to write it
            # is never mistaken for its absence.
            with (
                suppress(FileNotFoundError, NotADirectoryError),
                self._folders.reading(folder_of(key), FOLDER) as above,
            ):
                return self._settle(key, above, name_of(key), write_id)
            return self._folders.write_in(key, act)

    def put(self, key: str, body: bytes) -> None:
        check_key(key)

        def act(folder: int, name: str) -> None:
            with temporary(self._files, folder, body) as unnamed:
                self._files.replace(unnamed, name, folder=folder)
            self._files.fsync(folder)

        with self._mapping("put", key):
            self._folders.write_in(key, act)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        with self._object("get", key) as fd:
            n_bytes = self._files.fstat(fd).st_size
            if n_bytes > max_bytes:
                message = f"{key} holds {n_bytes} bytes, more than the {max_bytes} it may"
                raise CorruptionError(message, operation="get", key=key)
            return _read(self._files, fd, n_bytes)

    def create(self, key: str, n_bytes: int, part_bytes: int) -> PartWriter:
        check_key(key)
        if n_bytes < 0 or part_bytes < 1:
            message = f"{key}: an object of {n_bytes} bytes in parts of {part_bytes} can't be written"
            raise ConfigError(message, operation="create", key=key)

        def act(folder: int, name: str) -> PartWriter:
            return self._create(key, folder, name, n_bytes, part_bytes)

        with self._mapping("create", key):
            return self._folders.write_in(key, act)

    def read_into(self, key: str, offset: int, buffer: WritableBuffer) -> None:
        with self._object("read_into", key) as fd:
            view = memoryview(buffer)
            done = 0
            while done < len(view):
                read = self._files.preadv(fd, view[done:], offset + done)
                if not read:
                    raise short_read(key, offset, len(view), done)
                done += read

    def map(self, key: str) -> memoryview:
        with self._object("map", key) as fd:
            n_bytes = self._files.fstat(fd).st_size
            return self._files.map(fd, n_bytes) if n_bytes else memoryview(bytearray())

    def stat(self, key: str) -> ObjectInfo:
        with self._object("stat", key) as fd:
            found = self._files.fstat(fd)
            return ObjectInfo(key=key, n_bytes=found.st_size, modified=found.st_mtime)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        return self._walk(prefix, after or "", temporaries=False)

    def delete(self, keys: Iterable[str]) -> Sequence[DeleteResult]:
        results: list[DeleteResult] = []
        emptied: dict[str, None] = {}
        # Neighbours share one walk to their folder.
        for folder, asked in groupby(keys, _legal_folder_of):
            if folder is None:
                results += [DeleteResult(key=key, error=refusal(key)) for key in asked]
            else:
                results += self._delete_in(folder, [*asked])
                emptied[folder] = None
        for folder in emptied:
            self._folders.prune(folder)
        return results

    def uploads(self, prefix: str) -> Iterator[Upload]:
        check_prefix(prefix)
        return (
            Upload(key=info.key, upload_id=info.key, started=info.modified)
            for info in self._walk(prefix, "", temporaries=True)
        )

    def abort_upload(self, upload: Upload) -> None:
        folder, name = folder_of(upload.key), name_of(upload.key)
        if not name.startswith(TEMPORARY):
            message = f"{upload.key!r:.300} is no unfinished write of this store"
            raise ConfigError(message, operation="abort_upload", key=upload.key)
        for segments in (folder, name.removeprefix(".")):
            check_prefix(segments)
        with self._mapping("abort_upload", upload.key):
            self._discard(upload.key)

    def close(self) -> None:
        """Nothing to release: no descriptor outlives a call, but for those of objects being written."""

    @contextmanager
    def _mapping(self, operation: str, key: str, *, reading: bool = False) -> Iterator[None]:
        with mapping(operation, key, f"{self._root}/{key}", reading=reading):
            yield

    def _publish(self, key: str, folder: int, unnamed: str, name: str, write_id: str) -> Outcome:
        try:
            placed = place(self._files, folder, unnamed, name)
        except OSError as error:
            if isinstance(mapped(error, "publish", key, self._root), UnavailableError):
                raise self._unknown(key, "the answer to its rename is no answer") from error
            raise  # refused: certainly not there
        if placed == "neither":
            message = (
                f"the file system at {self._root} can neither rename without replacing nor link; publish needs one of "
                "them, so this store can be used by a single writer only"
            )
            raise UnsupportedError(message, operation="publish", key=key)
        if placed == "taken":
            return self._settle(key, folder, name, write_id)
        try:
            self._files.fsync(folder)
        except OSError as error:
            raise self._unknown(key, "it is in its place, but its folder can't be synced") from error
        return Published()

    def _settle(self, key: str, folder: int, name: str, write_id: str) -> Outcome:
        """Decide by the record that is there. If it is ours, whoever put it there may not have lived to sync it.

        Raises:
            FileNotFoundError: there is none.
        """
        try:
            with self._plain(folder, name) as fd:
                outcome = settle(_read(self._files, fd, MAX_RECORD_BYTES), write_id)
                if isinstance(outcome, Published):
                    self._files.fsync(fd)
                    self._files.fsync(folder)
                return outcome
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EISDIR, errno.ELOOP):
                raise  # proven: no record
            raise self._unknown(key, "something is there, and can't be read and synced") from error

    def _unknown(self, key: str, what: str) -> OutcomeUnknownError:
        message = f"publish of {self._root}/{key}: {what}; read back before you decide, and until then delete nothing"
        return OutcomeUnknownError(message, operation="publish", key=key)

    @contextmanager
    def _object(self, operation: str, key: str) -> Iterator[int]:
        """Open an object for reading, without following a link on the way."""
        check_key(key)
        with (
            self._mapping(operation, key, reading=True),
            self._folders.reading(folder_of(key)) as above,
            self._plain(above, name_of(key)) as fd,
        ):
            yield fd

    @contextmanager
    def _plain(self, folder: int, name: str) -> Iterator[int]:
        """Open a plain file for reading. EISDIR if it is a folder, ELOOP if it is a link or anything else."""
        with opened(self._files, name, _READ, folder=folder) as fd:
            mode = self._files.fstat(fd).st_mode
            if not stat.S_ISREG(mode):
                raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.ELOOP, "not a plain file", name)
            yield fd

    def _create(self, key: str, folder: int, name: str, n_bytes: int, part_bytes: int) -> PartWriter:
        opened_here = [self._files.open(name, NEW, folder=folder)]
        try:
            if n_bytes:
                self._allocate(opened_here[0], n_bytes)
            direct = None
            if O_DIRECT and n_bytes >= PAGE and part_bytes % PAGE == 0:
                direct = self._open_direct(folder, name)
                opened_here += [] if direct is None else [direct]
            opened_here.append(self._files.open(".", FOLDER, folder=folder))
        except BaseException:
            for fd in opened_here:
                with suppress(OSError):
                    self._files.close(fd)
            with suppress(OSError):
                self._files.unlink(name, folder=folder)
            self._folders.prune(folder_of(key))
            raise
        return PosixPartWriter(
            files=self._files,
            key=key,
            path=f"{self._root}/{key}",
            folder=opened_here[-1],
            fd=opened_here[0],
            direct=direct,
            n_bytes=n_bytes,
            part_bytes=part_bytes,
            discard=lambda: self._discard(key),
        )

    def _allocate(self, fd: int, n_bytes: int) -> None:
        """Reserve the space now, so that a full disk is known before any byte is staged; where that can't be, go on."""
        try:
            self._files.allocate(fd, n_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                raise

    def _open_direct(self, folder: int, name: str) -> int | None:
        try:
            return self._files.open(name, os.O_WRONLY | os.O_NOFOLLOW | O_DIRECT, folder=folder)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            return None

    def _walk(self, prefix: str, after: str, *, temporaries: bool) -> Iterator[ObjectInfo]:
        with self._mapping("list", prefix):
            yield from Walk(
                files=self._files, folders=self._folders, prefix=prefix, after=after, temporaries=temporaries
            )

    def _delete_in(self, folder: str, keys: Sequence[str]) -> Sequence[DeleteResult]:
        """Unlink and sync once, so that a manifest that is deleted stays deleted before its payload goes."""
        errors: list[CkptStoreError | None] = []
        try:
            with self._mapping("delete", folder), self._folders.reading(folder, FOLDER) as fd:
                errors = [self._unlink(fd, key) for key in keys]
                self._files.fsync(fd)
        except NotFoundError:
            errors = [None] * len(keys)
        except CkptStoreError as error:
            errors = [own or error for own in errors] or [error] * len(keys)
        return [DeleteResult(key=key, error=error) for key, error in zip(keys, errors, strict=True)]

    def _unlink(self, folder: int, key: str) -> CkptStoreError | None:
        try:
            with self._mapping("delete", key), suppress(FileNotFoundError, IsADirectoryError):
                self._files.unlink(name_of(key), folder=folder)
        except CkptStoreError as error:
            return error
        return None

    def _discard(self, key: str) -> None:
        """Remove one file, and the folders that it leaves empty."""
        with suppress(FileNotFoundError, NotADirectoryError), self._folders.reading(folder_of(key)) as fd:
            self._files.unlink(name_of(key), folder=fd)
        self._folders.prune(folder_of(key))


def _legal_folder_of(key: str) -> str | None:
    return None if refusal(key) else folder_of(key)


def _read(files: Files, fd: int, n_bytes: int) -> bytes:
    """Return up to *n_bytes* from the start of a file."""
    body = bytearray(n_bytes)
    done = 0
    while done < n_bytes and (read := files.preadv(fd, memoryview(body)[done:], done)):
        done += read
    return bytes(body[:done])
