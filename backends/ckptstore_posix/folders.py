"""How is a folder entered so that no link leads out of the run, and made so that no power cut takes it away?

A path is walked from the root down, each name relative to the descriptor of the folder before it, and a link in the way
is an error. The root's own path is the user's: links in it are followed.

A file is durable only if every folder on the way to it is. So the entry of each folder is synced in its parent before
anything is made inside, whoever made the folder: another process may have been killed between the two. That is done
once for each folder and store. A folder that a delete empties is removed, and forgotten first.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ckptstore.errors import ConfigError
from ckptstore_posix.files import O_PATH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckptstore_posix.files import Files

__all__ = ["FOLDER", "PASSING", "Folders", "folder_of", "name_of", "opened"]

FOLDER = os.O_RDONLY | os.O_DIRECTORY
"""How to open a folder to list or sync it."""
PASSING = O_PATH | os.O_DIRECTORY
"""How to open a folder to reach what is in it; needs no right to list it."""

_ATTEMPTS = 8
"""How often a folder is made again that others remove at the same time."""

_T = TypeVar("_T")


def folder_of(key: str) -> str:
    """Return the key of the folder that *key* lies in, "" for the root."""
    return key.rpartition("/")[0]


def name_of(key: str) -> str:
    """Return the last name of *key*."""
    return key.rpartition("/")[2]


@contextmanager
def opened(files: Files, path: str, flags: int, *, folder: int | None = None) -> Iterator[int]:
    """Open, and close at the end: an error of that close counts, unless the body failed already."""
    fd = files.open(path, flags, folder=folder)
    try:
        yield fd
    except BaseException:
        with suppress(OSError):
            files.close(fd)
        raise
    files.close(fd)


class _Durable:
    """The folders whose entry in their parent this process knows to be synced; "" is the root."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        # Held while a folder is made and synced, and while one is forgotten and removed, so that `known` never speaks
        # of an earlier folder of the same name.
        self.lock = threading.Lock()


class Folders:
    """The folders below *root*. Thread-safe, and safe in a forked child. Raises OSError."""

    def __init__(self, root: str, files: Files) -> None:
        self._root = root
        self._files = files
        # By process: after a fork the lock may be held by a thread that does not exist here.
        self._by_process: dict[int, _Durable] = {}

    @contextmanager
    def reading(self, folder: str, flags: int = PASSING) -> Iterator[int]:
        """Enter *folder*, which is a key or "" for the root, and yield its descriptor, opened with *flags*."""
        names = folder.split("/") if folder else []
        fd = self._open_root(PASSING if names else flags)
        try:
            for position, name in enumerate(names, 1):
                inner = self.enter(fd, name, PASSING if position < len(names) else flags)
                self._shut(fd)
                fd = inner
            yield fd
        finally:
            self._shut(fd)

    @contextmanager
    def writing(self, folder: str) -> Iterator[int]:
        """As ``reading``, but make what is missing, and make the way to the folder durable first."""
        fd = self._make_root()
        at = ""
        try:
            for name in folder.split("/") if folder else []:
                at = f"{at}/{name}" if at else name
                inner = self._make(fd, name, at)
                self._shut(fd)
                fd = inner
            yield fd
        finally:
            self._shut(fd)

    def write_in(self, key: str, act: Callable[[int, str], _T]) -> _T:
        """Return ``act(folder, name)`` for the folder and the last name of *key*.

        Another thread or process may remove a folder between the moment it is entered and the moment something is made
        in it. Then *act* meets ENOENT, having done nothing, and is called again with a new folder.
        """
        attempt = 1
        while True:
            try:
                with self.writing(folder_of(key)) as fd:
                    return act(fd, name_of(key))
            except FileNotFoundError as error:
                if attempt == _ATTEMPTS:
                    reason = "the folder disappears as often as it is made; does another program clean up?"
                    raise OSError(errno.ESTALE, reason, key) from error
            attempt += 1

    def prune(self, folder: str) -> None:
        """Remove *folder* and those above it as far as they are empty; never the root, never raises."""
        durable = self._durable()
        while folder:
            try:
                with self.reading(folder_of(folder)) as fd, durable.lock:
                    durable.known.discard(folder)
                    self._files.rmdir(name_of(folder), folder=fd)
            except FileNotFoundError:
                pass  # another was faster; those above may be empty now
            except (OSError, ConfigError):
                return  # in use, most often: what is left empty harms no one
            folder = folder_of(folder)

    def enter(self, folder: int, name: str, flags: int) -> int:
        """Open the folder *name* in *folder*. ELOOP if it is a link, ENOTDIR if it is something else."""
        try:
            return self._files.open(name, flags | os.O_NOFOLLOW, folder=folder)
        except NotADirectoryError:
            # The kernel answers ENOTDIR for a link, too.
            if stat.S_ISLNK(self._files.lstat(name, folder=folder).st_mode):
                raise OSError(errno.ELOOP, "symbolic link in the place of a folder", name) from None
            raise

    def _shut(self, fd: int) -> None:
        """Close a folder. Nothing was written through it, so an error says nothing, and must not hide one that does."""
        with suppress(OSError):
            self._files.close(fd)

    def _open_root(self, flags: int) -> int:
        try:
            return self._files.open(self._root, flags)
        except FileNotFoundError:
            self._refuse_dangling()
            raise
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
                raise
            message = f"the root {self._root} is no folder ({error.strerror}): a file or a link cycle is in its place"
            raise ConfigError(message, operation="open", key=self._root) from error

    def _refuse_dangling(self) -> None:
        """Raise if the root is missing because a link leads nowhere: that disk is not mounted, and not empty."""
        path = self._root
        while True:
            try:
                found = self._files.lstat(path)
            except FileNotFoundError:
                path = str(Path(path).parent)
                continue
            if stat.S_ISLNK(found.st_mode):
                message = f"the root {self._root} can't be reached: {path} is a link to nowhere; is a disk not mounted?"
                raise ConfigError(message, operation="open", key=self._root)
            return

    def _make_root(self) -> int:
        durable = self._durable()
        with suppress(FileNotFoundError):
            fd = self._open_root(FOLDER)
            if "" in durable.known:
                return fd
            self._shut(fd)
        with durable.lock:
            durable.known.discard("")
            self._make_path(self._root)
            fd = self._open_root(FOLDER)
            durable.known.add("")
            return fd

    def _make_path(self, path: str) -> None:
        """Make *path* and all above it that is missing, from the top down, each synced in its parent before the next.

        So if anything exists inside a folder that such a walk made, that folder is durable, and it is enough to sync
        upwards from the lowest one that exists.
        """
        above = str(Path(path).parent)
        if above == path:
            return
        existed = self._exists(path)
        if not existed:
            self._make_path(above)
            with suppress(FileExistsError):
                self._files.mkdir(path)
        try:
            with opened(self._files, above, FOLDER) as fd:
                self._files.fsync(fd)
        except OSError as error:
            # We did not make it and may not look above it, or there is nothing to sync there (a mount in /proc, say).
            if not (existed and error.errno in (errno.EACCES, errno.EPERM, errno.EINVAL)):
                raise

    def _exists(self, path: str) -> bool:
        try:
            self._files.lstat(path)
        except FileNotFoundError:
            return False
        return True

    def _make(self, parent: int, name: str, at: str) -> int:
        durable = self._durable()
        with suppress(FileNotFoundError):
            # Opened first, looked up second: the folder we hold is then the one that is known, or a removed one, in
            # which nothing can be made.
            fd = self.enter(parent, name, FOLDER)
            if at in durable.known:
                return fd
            self._shut(fd)
        with durable.lock:
            durable.known.discard(at)
            with suppress(FileExistsError):
                self._files.mkdir(name, folder=parent)
            fd = self.enter(parent, name, FOLDER)
            try:
                self._files.fsync(parent)
            except BaseException:
                self._shut(fd)
                raise
            durable.known.add(at)
            return fd

    def _durable(self) -> _Durable:
        return self._by_process.setdefault(os.getpid(), _Durable())
