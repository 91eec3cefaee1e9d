"""Digests of parts and files."""

from __future__ import annotations

import _thread
import hashlib
import sys
import threading
from typing import TYPE_CHECKING

import pytest
import xxhash

from ckptstore.errors import UnsupportedError
from ckptstore.state import digest
from ckptstore.state.digest import PART_BYTES, file_digest, part_digest

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_part_digests_are_the_published_ones() -> None:
    assert part_digest(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert part_digest(b"a").hex() == "a96faf705af16834e6c632b61e964e1f" == xxhash.xxh3_128(b"a").hexdigest()
    assert part_digest(b"abc", "sha256") == hashlib.sha256(b"abc").digest()
    assert PART_BYTES == 16 * 2**20


def test_any_buffer_will_do() -> None:
    data = bytes(range(256))
    for algorithm in digest.ALGORITHMS:
        found = {part_digest(buffer, algorithm) for buffer in (data, bytearray(data), memoryview(data))}
        assert len(found) == 1


def test_every_bit_counts() -> None:
    data = bytearray(4096)
    for algorithm in digest.ALGORITHMS:
        before = part_digest(data, algorithm)
        for bit in range(0, len(data) * 8, 997):
            data[bit // 8] ^= 1 << bit % 8
            assert part_digest(data, algorithm) != before
            data[bit // 8] ^= 1 << bit % 8


def test_the_digest_of_a_file_is_the_sha256_over_its_parts_digests_in_order() -> None:
    parts = [part_digest(b"a"), part_digest(b"b")]
    assert file_digest(parts) == "sha256:" + hashlib.sha256(parts[0] + parts[1]).hexdigest()
    assert file_digest(iter(parts)) == file_digest(parts) != file_digest(parts[::-1])
    assert file_digest([]) == "sha256:" + hashlib.sha256().hexdigest()


def test_an_unknown_algorithm_is_named() -> None:
    with pytest.raises(UnsupportedError, match="'md5' is unknown here; known are sha256, xxh3-128"):
        part_digest(b"", "md5")


@pytest.fixture
def _no_forced_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(3600)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_no_forced_switches")
@pytest.mark.parametrize("algorithm", sorted(digest.ALGORITHMS))
def test_other_threads_run_while_a_large_part_is_digested(algorithm: str) -> None:
    data, turn, n_digests = bytearray(PART_BYTES), threading.Event(), 0
    _thread.start_new_thread(turn.set, ())  # Thread.start() would wait for it, which gives it its turn
    while not turn.is_set() and n_digests < 500:  # the lock is let go inside the digest or not at all
        part_digest(data, algorithm)
        n_digests += 1
    assert turn.is_set()
