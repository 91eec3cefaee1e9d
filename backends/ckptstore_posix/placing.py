"""How does a small file get its name, all of it or none, and for publish only if no one has that name?

Its bytes are written to a temporary in the same folder and synced before they get the name. To refuse a name that is
taken the kernel has two ways: a rename that does not replace, and a second link. Which one works is seen by using it.
"""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from ckptstore_posix.folders import FOLDER, opened
from ckptstore_posix.writing import write_all

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptstore_posix.files import Files

__all__ = ["NEW", "TEMPORARY", "Placed", "place", "probe", "temporary"]

TEMPORARY = ".tmp-"
"""What the name of a temporary starts with; a key can't."""

NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
"""How to open a file that must not exist yet."""

Placed: TypeAlias = Literal["placed", "taken", "neither"]
"""The answer of ``place``: done, refused since another file has the name, or not possible on this file system."""

_NO_RENAME = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV)
_NO_LINK = (errno.EPERM, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV, errno.EMLINK)


@contextmanager
def temporary(files: Files, folder: int, body: bytes) -> Iterator[str]:
    """Yield the name of a new file whose *body* is synced, to be given its real name; what has none is removed."""
    name = TEMPORARY + files.token()
    try:
        with opened(files, name, NEW, folder=folder) as fd:
            write_all(files, fd, memoryview(body), 0)
            files.fsync(fd)
        yield name
    finally:
        with suppress(OSError):
            files.unlink(name, folder=folder)


def place(files: Files, folder: int, name: str, new_name: str) -> Placed:
    """Give the file *name* the name *new_name* if no file has it. It may keep the old one too: remove that yourself."""
    try:
        files.rename_noreplace(name, new_name, folder=folder)
        return "placed"
    except FileExistsError:
        return "taken"
    except OSError as error:
        if error.errno not in _NO_RENAME:
            raise
    try:
        files.link(name, new_name, folder=folder)
    except FileExistsError:
        return "taken"
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        return "neither"
    return "placed"


def probe(files: Files, root: str) -> Literal["atomic", "none"] | None:
    """Say whether a taken name is refused and a free one given, in *root* or, if it is missing, where it will be.

    Leaves nothing. Returns None if nothing can be made there: then nothing can be published there either.
    """
    path = root
    while True:
        try:
            with opened(files, path, FOLDER) as folder:
                return _probe_in(files, folder)
        except FileNotFoundError:
            if path == "/":
                return None
            path = str(Path(path).parent)
        except OSError:
            return None


def _probe_in(files: Files, folder: int) -> Literal["atomic", "none"]:
    source, taken, free = [TEMPORARY + files.token() for _ in range(3)]
    try:
        for name in (source, taken):
            with opened(files, name, NEW, folder=folder):
                pass
        answers = [place(files, folder, source, name) for name in (taken, free)]
        return "atomic" if answers == ["taken", "placed"] else "none"
    finally:
        for name in (source, taken, free):
            with suppress(OSError):
                files.unlink(name, folder=folder)
