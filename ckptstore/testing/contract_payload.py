"""Do large objects come out as they went in, and do unfinished ones leave nothing that is believed or lost?"""

from __future__ import annotations

import functools
import mmap
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from ckptstore.errors import AlreadyExistsError, CkptStoreError, CorruptionError
from ckptstore.store import check_key
from ckptstore.testing.subject import Subject, assert_listed, must, should, write_parts

if TYPE_CHECKING:
    from ckptstore.store import CheckpointStore, PartWriter

__all__ = ["PayloadContract"]

KEY = "data/0123abcd/0000000100-e3-attempt/rank00000-of-00001.000.safetensors"
THREADS = 4


class PayloadContract:
    """The tests of ``create``, its PartWriter, ``read_into``, ``uploads`` and ``abort_upload``."""

    @must("an object is exactly its parts, written from any thread in any order, whatever its size")
    def test_parts_make_up_the_object_in_any_order(self, subject: Subject) -> None:
        for part_bytes in _part_sizes(subject.store):
            for n_bytes in (0, 1, part_bytes - 1, part_bytes, part_bytes + 1, 5 * part_bytes, 5 * part_bytes + 7):
                key = f"data/{part_bytes}/{n_bytes}"
                body = _pattern(n_bytes)
                writer = subject.store.create(key, n_bytes, part_bytes)
                offsets = list(range(0, n_bytes, part_bytes))
                write = functools.partial(_write_part, writer, body, part_bytes)
                with ThreadPoolExecutor(THREADS) as pool:
                    list(pool.map(write, offsets[1::2] + offsets[::2]))
                writer.finish()
                assert subject.raw.read(key) == body
                assert subject.store.stat(key).n_bytes == n_bytes

    @must("parts written from last to first make up the same object")
    def test_parts_may_come_from_last_to_first(self, subject: Subject) -> None:
        part_bytes = _part_sizes(subject.store)[0]
        body = _pattern(4 * part_bytes + 3)
        writer = subject.store.create(KEY, len(body), part_bytes)
        write_parts(writer, body, part_bytes, reversed(range(0, len(body), part_bytes)))
        writer.finish()
        assert subject.raw.read(KEY) == body

    @must("the caller's buffer is its own again when write returns")
    def test_a_buffer_may_be_used_again_after_write(self, subject: Subject) -> None:
        part_bytes = _part_sizes(subject.store)[0]
        body = _pattern(3 * part_bytes)
        writer = subject.store.create(KEY, len(body), part_bytes)
        staging = bytearray(part_bytes)
        for offset in range(0, len(body), part_bytes):
            staging[:] = body[offset : offset + part_bytes]
            writer.write(offset, memoryview(staging))
            staging[:] = b"\xee" * part_bytes
        writer.finish()
        assert subject.raw.read(KEY) == body

    @must("parts from page-aligned memory, which a store may write past the page cache, make up the same object")
    def test_aligned_memory_is_stored_like_any_other(self, subject: Subject) -> None:
        part_bytes = _part_sizes(subject.store)[0]
        for tail in (0, 1, 4095, 4096, 4097, part_bytes - 1):
            body = _pattern(2 * part_bytes + tail)
            key = f"data/{tail}"
            with mmap.mmap(-1, len(body)) as staging, memoryview(staging) as image:
                image[:] = body
                writer = subject.store.create(key, len(body), part_bytes)
                for offset in range(0, len(body), part_bytes):
                    with image[offset : offset + part_bytes] as part:
                        writer.write(offset, part)
                writer.finish()
                assert subject.raw.read(key) == body
                image[:] = bytes(len(body))
                subject.store.read_into(key, 0, image)
                assert image == body

    @must("a finished object is listed and read by another store object at once")
    def test_a_finished_object_is_seen_at_once(self, subject: Subject) -> None:
        before = subject.raw.keys()
        other = subject.reopen()
        assert_listed(other, "data/", [])
        body = _pattern(1000)
        _store_object(subject.store, KEY, body)
        assert_listed(other, "data/", [KEY])
        assert other.get(KEY, max_bytes=len(body)) == body
        assert list(other.uploads("")) == []
        assert subject.raw.keys() == before | {KEY}

    @must("while an object is being written no temporary is listed as an object")
    def test_an_unfinished_object_shows_no_temporary(self, subject: Subject) -> None:
        subject.store.put("data/other", b"x")
        part_bytes = _part_sizes(subject.store)[0]
        writer = subject.store.create(KEY, 2 * part_bytes, part_bytes)
        writer.write(0, _pattern(part_bytes))
        # The object itself may be seen, since no one is promised it; a name that no one asked for may not.
        listed = {check_key(info.key) for info in subject.store.list("")}
        assert {"data/other"} <= listed <= {"data/other", KEY}
        writer.abort()

    @must("an unfinished write can be found and removed, by another store object too")
    def test_an_unfinished_write_can_be_swept(self, subject: Subject) -> None:
        before = subject.raw.keys()
        part_bytes = _part_sizes(subject.store)[0]
        writer = subject.store.create(KEY, 2 * part_bytes, part_bytes)
        writer.write(part_bytes, _pattern(part_bytes))
        sweeper = subject.reopen()
        assert list(sweeper.uploads("elsewhere/")) == []
        uploads = list(sweeper.uploads("data/"))
        listed = [info.key for info in sweeper.list("data/")]
        # Written in place it is an object, else an upload: under its key, or that of a stray temporary beside it.
        assert listed == [KEY] or (listed == [] and [upload.key.split("/")[0] for upload in uploads] == ["data"])
        for upload in uploads:
            sweeper.abort_upload(upload)
            sweeper.abort_upload(upload)  # absent counts as removed
        sweeper.delete(listed)
        assert list(sweeper.uploads("")) == []
        assert_listed(sweeper, "", [])
        assert subject.raw.keys() == before
        writer.abort()

    @must("abort leaves nothing, never raises, and may be called twice")
    def test_abort_leaves_nothing(self, subject: Subject) -> None:
        before = subject.raw.keys()
        part_bytes = _part_sizes(subject.store)[0]
        for written in ([], [0], [0, part_bytes]):
            key = f"data/{len(written)}"
            writer = subject.store.create(key, 2 * part_bytes, part_bytes)
            write_parts(writer, _pattern(2 * part_bytes), part_bytes, written)
            writer.abort()
            writer.abort()
            assert subject.raw.keys() == before
            assert_listed(subject.store, "", [])
            assert list(subject.store.uploads("")) == []

    @must("an object of which a part is missing can't be finished")
    def test_a_missing_part_is_refused(self, subject: Subject) -> None:
        before = subject.raw.keys()
        part_bytes = _part_sizes(subject.store)[0]
        body = _pattern(2 * part_bytes + 5)
        for missing in (0, part_bytes, 2 * part_bytes):
            writer = subject.store.create(f"data/{missing}", len(body), part_bytes)
            write_parts(writer, body, part_bytes, {0, part_bytes, 2 * part_bytes} - {missing})
            with pytest.raises(CkptStoreError) as refused:
                writer.finish()
            assert (refused.value.operation, refused.value.key) == ("finish", f"data/{missing}")
            writer.abort()
        assert subject.raw.keys() == before

    @should("a part off the grid, of the wrong length or beyond the end is refused")
    def test_a_part_off_the_grid_is_refused(self, subject: Subject) -> None:
        part_bytes = _part_sizes(subject.store)[0]
        part = _pattern(part_bytes)
        writer = subject.store.create(KEY, 2 * part_bytes, part_bytes)
        for offset, buffer in (
            (1, part),
            (0, part[:-1]),
            (0, part + b"x"),
            (2 * part_bytes, part),
            (-part_bytes, part),
        ):
            with pytest.raises(CkptStoreError):
                writer.write(offset, buffer)
        writer.abort()

    @must("create on a key that is taken does not harm its bytes; where the store can tell it is AlreadyExistsError")
    def test_a_payload_key_is_written_once(self, subject: Subject) -> None:
        body = _pattern(1000)
        _store_object(subject.store, KEY, body)
        for store in (subject.store, subject.reopen()):
            try:
                writer = store.create(KEY, len(body), _part_sizes(store)[0])
            except AlreadyExistsError as error:
                assert (error.operation, error.key) == ("create", KEY)  # noqa: PT017  not every store can tell
            else:
                writer.abort()
            assert subject.raw.read(KEY) == body

    @must("read_into fills exactly the buffer from the offset on, for many threads at once")
    def test_read_into_fills_the_buffer_from_the_offset_on(self, subject: Subject) -> None:
        body = _pattern(300_007)
        subject.raw.write(KEY, body)
        for offset, n_bytes in ((0, 1), (0, len(body)), (1, 4096), (4095, 70_001), (len(body) - 1, 1), (7, 0)):
            buffer = bytearray(b"\xee" * (n_bytes + 2))
            subject.store.read_into(KEY, offset, memoryview(buffer)[1 : 1 + n_bytes])
            assert buffer == b"\xee" + body[offset : offset + n_bytes] + b"\xee"
        whole = bytearray(len(body))
        pieces = [(start, min(start + 10_000, len(body))) for start in range(0, len(body), 10_000)]
        with ThreadPoolExecutor(THREADS) as pool:
            list(
                pool.map(
                    lambda piece: subject.store.read_into(KEY, piece[0], memoryview(whole)[piece[0] : piece[1]]), pieces
                )
            )
        assert whole == body

    @must("a read beyond the end of the object is CorruptionError, never a short read")
    def test_a_short_object_is_corruption(self, subject: Subject) -> None:
        body = _pattern(1000)
        subject.raw.write(KEY, body)
        for offset, n_bytes in ((0, 1001), (999, 2), (1000, 1), (5000, 10)):
            with pytest.raises(CorruptionError) as short:
                subject.store.read_into(KEY, offset, bytearray(n_bytes))
            assert (short.value.operation, short.value.key) == ("read_into", KEY)
        subject.raw.write(KEY, body[:400])
        with pytest.raises(CorruptionError):
            subject.store.read_into(KEY, 0, bytearray(1000))


def _part_sizes(store: CheckpointStore) -> tuple[int, ...]:
    """Return part sizes that the store takes: round ones first, odd ones where it is not picky."""
    smallest = store.capabilities().part_bytes_min
    return (max(smallest, 16 * 1024), max(smallest, 1009))


def _write_part(writer: PartWriter, body: bytes, part_bytes: int, offset: int) -> None:
    writer.write(offset, body[offset : offset + part_bytes])


def _pattern(n_bytes: int) -> bytes:
    """Return bytes that no shift by a part repeats."""
    block = b"".join(number.to_bytes(4, "big") for number in range(n_bytes // 4 + 1))
    return block[:n_bytes]


def _store_object(store: CheckpointStore, key: str, body: bytes) -> None:
    part_bytes = _part_sizes(store)[0]
    writer = store.create(key, len(body), part_bytes)
    write_parts(writer, body, part_bytes)
    writer.finish()
