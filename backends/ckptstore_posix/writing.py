"""How do large bytes reach the disk, fast and completely?

Past the page cache where that works: copying into the cache costs more than the disk. It needs memory, offset and
length aligned to a page; the tail of a file is written as a whole page and cut off before the sync. Where the kernel or
the buffer does not allow it, through the cache, which is told to begin writing at once, so that the sync at the end
finds little to do. Which of the two is decided by trying.

After any error the file is given up: a kernel may drop what it could not write and report that once only, so a second
fsync that succeeds proves nothing.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from ckptstore.errors import CkptStoreError, ConfigError
from ckptstore_posix.mapping import mapping

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptstore_posix.files import Files

__all__ = ["PAGE", "PosixPartWriter", "write_all"]

_FINISHED = "is finished"
_ABORTED = "was aborted"

PAGE = 4096
"""What memory, offset and length are multiples of when a write goes past the page cache, bytes."""


def write_all(files: Files, fd: int, view: memoryview, offset: int) -> None:
    """Write the whole of *view* at *offset*, however little the kernel takes at a time."""
    while view:
        view, offset = _advance(view, offset, files.pwrite(fd, view, offset))


def _advance(view: memoryview, offset: int, written: int) -> tuple[memoryview, int]:
    if written <= 0:
        raise OSError(errno.EIO, "a write wrote nothing")
    return view[written:], offset + written


class PosixPartWriter:
    """A new file, written at any offset from any thread. Owns its descriptors and closes them when it ends.

    Args:
        files: The system calls.
        key: The key, for errors.
        path: The full path, for messages.
        folder: Descriptor of the folder, to sync.
        fd: Descriptor of the new file.
        direct: A second one, that goes past the page cache; or None.
        n_bytes: Size of the file.
        part_bytes: The grid.
        discard: Removes the file; called by ``abort``.
    """

    def __init__(
        self,
        *,
        files: Files,
        key: str,
        path: str,
        folder: int,
        fd: int,
        direct: int | None,
        n_bytes: int,
        part_bytes: int,
        discard: Callable[[], None],
    ) -> None:
        self._files = files
        self._key = key
        self._path = path
        self._folder = folder
        self._fd = fd
        self._direct = direct
        self._n_bytes = n_bytes
        self._part_bytes = part_bytes
        self._discard = discard
        self._lock = threading.Lock()
        self._open = [fd, folder] if direct is None else [direct, fd, folder]
        self._active = 0
        self._written: set[int] = set()
        self._ended = ""

    def write(self, offset: int, buffer: bytes | bytearray | memoryview) -> None:
        view = memoryview(buffer).cast("B")
        expected = min(self._part_bytes, self._n_bytes - offset)
        if offset < 0 or offset % self._part_bytes or len(view) != expected:
            message = f"{self._key}: a part of {len(view)} bytes at {offset} is not on the grid of {self._part_bytes}"
            raise ConfigError(message, operation="write", key=self._key)
        with self._lock:
            self._refuse_ended("write")
            self._active += 1
        try:
            with mapping("write", self._key, self._path):
                self._write_part(view, offset)
        except BaseException:
            with self._lock:
                self._ended = self._ended or "failed"
                self._leave()
            raise
        with self._lock:
            self._written.add(offset)
            self._leave()

    def finish(self) -> None:
        with self._lock:
            self._refuse_ended("finish")
            n_parts = -(-self._n_bytes // self._part_bytes)
            if self._active or len(self._written) < n_parts:
                message = f"{self._key}: only {len(self._written)} of {n_parts} parts were written"
                raise CkptStoreError(message, operation="finish", key=self._key)
            self._ended = "failed"  # until proven otherwise; from here on no write may begin
            self._active += 1
        try:
            with mapping("finish", self._key, self._path):
                self._make_durable()
            with self._lock:
                if self._ended == _ABORTED:
                    self._refuse_ended("finish")
                self._ended = _FINISHED
        finally:
            with self._lock:
                self._leave()

    def abort(self) -> None:
        with self._lock:
            if self._ended in (_ABORTED, _FINISHED):
                return
            self._ended = _ABORTED
            if not self._active:
                self._close_all()
        with suppress(Exception):
            self._discard()

    def _write_part(self, view: memoryview, offset: int) -> None:
        # The address of read-only memory can't be asked for; none that comes from Python is aligned.
        address = ctypes.addressof(ctypes.c_char.from_buffer(view)) if view and not view.readonly else 1
        while view:  # empty, too, when a padded page went beyond its end
            written = self._write_some(view, offset, address)
            view, offset = _advance(view, offset, written)
            address += written

    def _write_some(self, view: memoryview, offset: int, address: int) -> int:
        if self._direct is not None and not offset % PAGE and not address % PAGE:
            whole = view[: len(view) - len(view) % PAGE] or _page_of(view)
            try:
                return self._files.pwrite(self._direct, whole, offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._direct = None  # it can be opened so, but not written; closed with the others
        written = self._files.pwrite(self._fd, view, offset)
        self._files.start_writeback(self._fd, offset, written)
        return written

    def _make_durable(self) -> None:
        self._files.ftruncate(self._fd, self._n_bytes)  # a padded tail
        self._files.fsync(self._fd)
        if not self._files.fstat(self._fd).st_nlink:
            message = f"{self._path} was removed while it was written"
            raise CkptStoreError(message, operation="finish", key=self._key)
        # Closing may report what the sync did not. Only then is the name made durable.
        while self._open[0] != self._folder:
            self._files.close(self._open.pop(0))
        self._files.fsync(self._folder)

    def _refuse_ended(self, operation: str) -> None:
        if self._ended:
            message = f"{self._key}: this write {self._ended}; write the object again under another key"
            raise CkptStoreError(message, operation=operation, key=self._key)

    def _leave(self) -> None:
        """Count one user less. The last one of an ended write closes: a number closed earlier may be another file's."""
        self._active -= 1
        if self._ended and not self._active:
            self._close_all()

    def _close_all(self) -> None:
        while self._open:
            with suppress(OSError):
                self._files.close(self._open.pop(0))


def _page_of(view: memoryview) -> memoryview:
    """Return a copy of the last bytes of a file in an aligned page of their own, padded with zeros."""
    page = memoryview(mmap.mmap(-1, PAGE))
    page[: len(view)] = view
    return page
