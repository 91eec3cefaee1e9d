"""Which system calls does the store make?

These, and no others. A test puts a simulated disk in their place, one that forgets at a power cut what was not synced.
Names below the root are opened relative to the descriptor of their folder, so that nothing can be moved or linked
into a path while it is walked.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["O_DIRECT", "O_PATH", "REAL_FILES", "Files", "RealFiles"]

# Linux has both. Elsewhere 0: there is no second descriptor, and a folder is passed through by opening it for reading.
O_DIRECT: int = getattr(os, "O_DIRECT", 0)
O_PATH: int = getattr(os, "O_PATH", 0)

_RENAME_NOREPLACE = 1
_SYNC_FILE_RANGE_WRITE = 2


class Files(Protocol):
    """System calls on files. Thread-safe; each raises OSError with its errno. *folder* is an open folder's descriptor.

    Modes are 0666 for files and 0777 for folders, less the umask.
    """

    def token(self) -> str:
        """Return characters ``[0-9a-z]`` that name nothing else: the one place where randomness comes in."""
        ...

    def open(self, path: str, flags: int, *, folder: int | None = None) -> int:
        """Return a new descriptor, as openat(2) does; never inherited over exec."""
        ...

    def close(self, fd: int) -> None:
        """Give up a descriptor; it is gone even when this raises."""
        ...

    def fstat(self, fd: int) -> os.stat_result:
        """Look at an open file or folder."""
        ...

    def lstat(self, path: str, *, folder: int | None = None) -> os.stat_result:
        """Look at a name, and at a link itself."""
        ...

    def preadv(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Read into *buffer*; return how many bytes, 0 at the end, possibly fewer than asked for."""
        ...

    def map(self, fd: int, n_bytes: int) -> memoryview:
        """Return *n_bytes* of an open file, more than none, as memory; what is written to it stays private."""
        ...

    def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Write; return how many bytes, possibly fewer than asked for."""
        ...

    def allocate(self, fd: int, n_bytes: int) -> None:
        """Make the file *n_bytes* long and reserve their blocks; EOPNOTSUPP where that would mean writing zeros."""
        ...

    def ftruncate(self, fd: int, n_bytes: int) -> None:
        """Set the size."""
        ...

    def start_writeback(self, fd: int, offset: int, n_bytes: int) -> None:
        """Let the kernel begin to write cached pages, and do not wait. Promises nothing and reports nothing."""
        ...

    def fsync(self, fd: int) -> None:
        """Make the content of a file, or the names in a folder, survive a power cut."""
        ...

    def mkdir(self, path: str, *, folder: int | None = None) -> None:
        """Make a folder; EEXIST if the name is taken."""
        ...

    def rmdir(self, name: str, *, folder: int) -> None:
        """Remove an empty folder."""
        ...

    def unlink(self, name: str, *, folder: int) -> None:
        """Remove a name that is not a folder's."""
        ...

    def link(self, name: str, new_name: str, *, folder: int) -> None:
        """Give a file a second name; EEXIST if that is taken."""
        ...

    def rename_noreplace(self, name: str, new_name: str, *, folder: int) -> None:
        """Rename unless *new_name* is taken: EEXIST. EINVAL or ENOSYS where renameat2(2) is unknown or can't do it."""
        ...

    def replace(self, name: str, new_name: str, *, folder: int) -> None:
        """Rename, over whatever file has *new_name*."""
        ...

    def scandir(self, folder: int) -> list[tuple[str, bool]]:
        """Return each name in a folder opened for reading, and whether it is a folder itself (a link is not)."""
        ...


class RealFiles:
    """The operating system's. Without state, so it may be pickled and used on either side of a fork."""

    def token(self) -> str:
        return os.urandom(12).hex()  # noqa: TID251 - this class is the seam through which a backend gets randomness

    def open(self, path: str, flags: int, *, folder: int | None = None) -> int:
        return os.open(path, flags, 0o666, dir_fd=folder)

    def close(self, fd: int) -> None:
        os.close(fd)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def lstat(self, path: str, *, folder: int | None = None) -> os.stat_result:
        return os.stat(path, dir_fd=folder, follow_symlinks=False)

    def preadv(self, fd: int, buffer: memoryview, offset: int) -> int:
        return os.preadv(fd, [buffer], offset)

    def map(self, fd: int, n_bytes: int) -> memoryview:
        return memoryview(mmap.mmap(fd, n_bytes, access=mmap.ACCESS_COPY))

    def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
        return os.pwrite(fd, buffer, offset)

    def allocate(self, fd: int, n_bytes: int) -> None:
        # Not posix_fallocate: where the file system can't, that writes a byte into each block instead.
        while (failed := _call(_fallocate, fd, 0, 0, n_bytes)) == errno.EINTR:
            pass
        if failed:
            raise OSError(failed, os.strerror(failed))

    def ftruncate(self, fd: int, n_bytes: int) -> None:
        os.ftruncate(fd, n_bytes)

    def start_writeback(self, fd: int, offset: int, n_bytes: int) -> None:
        _call(_sync_file_range, fd, offset, n_bytes, _SYNC_FILE_RANGE_WRITE)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def mkdir(self, path: str, *, folder: int | None = None) -> None:
        os.mkdir(path, 0o777, dir_fd=folder)

    def rmdir(self, name: str, *, folder: int) -> None:
        os.rmdir(name, dir_fd=folder)

    def unlink(self, name: str, *, folder: int) -> None:
        os.unlink(name, dir_fd=folder)

    def link(self, name: str, new_name: str, *, folder: int) -> None:
        os.link(name, new_name, src_dir_fd=folder, dst_dir_fd=folder)

    def rename_noreplace(self, name: str, new_name: str, *, folder: int) -> None:
        old, new = os.fsencode(name), os.fsencode(new_name)
        if failed := _call(_renameat2, folder, old, folder, new, _RENAME_NOREPLACE):
            raise OSError(failed, os.strerror(failed), name, None, new_name)

    def replace(self, name: str, new_name: str, *, folder: int) -> None:
        os.replace(name, new_name, src_dir_fd=folder, dst_dir_fd=folder)

    def scandir(self, folder: int) -> list[tuple[str, bool]]:
        with os.scandir(folder) as entries:
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]


def _from_libc(name: str, *arguments: type) -> Callable[..., int] | None:
    """Return a function of the C library that answers -1 and sets errno, or None where it has none of that name."""
    # CDLL lets other threads run during the call; with use_errno each thread finds its own errno afterwards.
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is not None:
        function.argtypes = arguments
        function.restype = ctypes.c_int
    return function


def _call(function: Callable[..., int] | None, *arguments: object) -> int:
    """Call and return the errno, 0 for success."""
    if function is None:
        return errno.ENOSYS
    return ctypes.get_errno() if function(*arguments) else 0


_int, _char_p, _offset = ctypes.c_int, ctypes.c_char_p, ctypes.c_int64
_renameat2 = _from_libc("renameat2", _int, _char_p, _int, _char_p, ctypes.c_uint)
_fallocate = _from_libc("fallocate64", _int, _int, _offset, _offset) or _from_libc(
    "fallocate", _int, _int, _offset, _offset
)
_sync_file_range = _from_libc("sync_file_range", _int, _offset, _offset, ctypes.c_uint)

REAL_FILES: Files = RealFiles()
