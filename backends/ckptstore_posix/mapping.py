"""What does an errno mean to a caller?

One table for all verbs. What is not in it is a plain CkptStoreError: in doubt, not retryable.
"""

from __future__ import annotations

import errno
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckptstore.errors import (
    AlreadyExistsError,
    CkptStoreError,
    ConfigError,
    CorruptionError,
    NotFoundError,
    PermissionDeniedError,
    StorageFullError,
    UnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["mapped", "mapping"]

_TABLE: dict[int, tuple[type[CkptStoreError], str]] = {
    number: (kind, advice)
    for kind, advice, numbers in (
        (
            StorageFullError,
            "no space left: free some or raise the quota; earlier checkpoints are untouched",
            (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
        ),
        (PermissionDeniedError, "access is refused", (errno.EACCES, errno.EPERM, errno.EROFS)),
        (NotFoundError, "it does not exist", (errno.ENOENT,)),
        (AlreadyExistsError, "it exists, and is written once", (errno.EEXIST,)),
        (
            UnavailableError,
            "the file system does not answer as it should",
            (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EBUSY, errno.EAGAIN, errno.ENOTCONN, errno.ENODEV),
        ),
        (CorruptionError, "what stands there is no plain file or folder, and no link is followed", (errno.ELOOP,)),
        (
            ConfigError,
            "the path can't be used: a file stands where a folder belongs, or the reverse",
            (errno.ENOTDIR, errno.EISDIR),
        ),
        (ConfigError, "the path can't be used: it is too long", (errno.ENAMETOOLONG,)),
    )
    for number in numbers
}


def mapped(error: OSError, operation: str, key: str, path: str, *, reading: bool = False) -> CkptStoreError:
    """Return what *error* means; raise it ``from error``.

    To a reader a file in the place of a folder, or the reverse, says that the object can't be there.
    """
    kind, advice = _TABLE.get(error.errno or 0, (CkptStoreError, "the system call failed"))
    if reading and error.errno in (errno.ENOTDIR, errno.EISDIR):
        kind = NotFoundError
    message = f"{operation} of {path}: {advice} ({error.strerror or error})"
    return kind(message, operation=operation, key=key)


@contextmanager
def mapping(operation: str, key: str, path: str, *, reading: bool = False) -> Iterator[None]:
    """Turn an OSError of the body into what it means. *path* is what the message names."""
    try:
        yield
    except OSError as error:
        raise mapped(error, operation, key, path, reading=reading) from error
