"""Are these the bytes that were written?

A file has one digest per part, on a grid of ``PART_BYTES`` from offset 0, so that a partial read verifies exactly the
parts it touches; the digest of the file is the sha256 over its raw part digests, in order. xxh3-128 finds damage and
runs at memory speed; it does not find tampering. sha256 finds both. Both let other threads run while they work.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import xxhash

from ckptstore.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["ALGORITHMS", "PART_BYTES", "file_digest", "part_digest"]

PART_BYTES = 16 * 2**20


def _sha256(buffer: bytes | bytearray | memoryview) -> bytes:
    return hashlib.sha256(buffer).digest()


def _xxh3_128(buffer: bytes | bytearray | memoryview) -> bytes:
    return xxhash.xxh3_128_digest(buffer)  # seed 0, big-endian: the canonical form, equal to the usual hex digits


ALGORITHMS: dict[str, Callable[[bytes | bytearray | memoryview], bytes]] = {"xxh3-128": _xxh3_128, "sha256": _sha256}
"""The digests of parts, by the name that the manifest records."""


def part_digest(buffer: bytes | bytearray | memoryview, algorithm: str = "xxh3-128") -> bytes:
    """The raw digest of one part: 16 bytes for "xxh3-128", 32 for "sha256". Any thread, many at once.

    Raises:
        UnsupportedError: the algorithm is unknown here, as in a checkpoint by a newer version.
    """
    try:
        digest = ALGORITHMS[algorithm]
    except KeyError:
        message = f"digest algorithm {algorithm!r} is unknown here; known are {', '.join(sorted(ALGORITHMS))}"
        raise UnsupportedError(message, operation="digest") from None
    return digest(buffer)


def file_digest(part_digests: Iterable[bytes]) -> str:
    """The digest of a file from the raw digests of its parts in order: "sha256:" and 64 hex digits."""
    whole = hashlib.sha256()
    for digest in part_digests:
        whole.update(digest)
    return f"sha256:{whole.hexdigest()}"
