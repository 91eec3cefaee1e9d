"""Are these the bytes that were written?

A file has one digest per part, on a grid of ``PART_BYTES`` from offset 0, so that a partial read verifies exactly the
parts it touches; the digest of the file is the sha256 over its raw part digests, in order. xxh3-128 finds damage and
runs at memory speed; it does not find tampering. sha256 finds both. Both let other threads run while they work.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Protocol

import xxhash

from ckptstore.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["ALGORITHMS", "PART_BYTES", "Hasher", "file_digest", "new_digest", "part_digest"]

PART_BYTES = 16 * 2**20


class Hasher(Protocol):
    """A digest being computed, piece by piece."""

    def update(self, buffer: bytes | bytearray | memoryview, /) -> None: ...
    def digest(self) -> bytes: ...


# xxh3-128 has seed 0 and its digest is big-endian: the canonical form, equal to the usual hex digits.
ALGORITHMS: dict[str, Callable[[], Hasher]] = {"xxh3-128": xxhash.xxh3_128, "sha256": hashlib.sha256}
"""The digests of parts, by the name that the manifest records."""


def new_digest(algorithm: str) -> Hasher:
    """Begin the digest of one part.

    Raises:
        UnsupportedError: the algorithm is unknown here, as in a checkpoint by a newer version.
    """
    try:
        return ALGORITHMS[algorithm]()
    except KeyError:
        message = f"digest algorithm {algorithm!r} is unknown here; known are {', '.join(sorted(ALGORITHMS))}"
        raise UnsupportedError(message, operation="digest") from None


def part_digest(buffer: bytes | bytearray | memoryview, algorithm: str = "xxh3-128") -> bytes:
    """The raw digest of one part: 16 bytes for "xxh3-128", 32 for "sha256". Any thread, many at once."""
    digest = new_digest(algorithm)
    digest.update(buffer)
    return digest.digest()


def file_digest(part_digests: Iterable[bytes]) -> str:
    """The digest of a file from the raw digests of its parts in order: "sha256:" and 64 hex digits."""
    whole = hashlib.sha256()
    for digest in part_digests:
        whole.update(digest)
    return f"sha256:{whole.hexdigest()}"
