"""Large objects reach the disk completely, past the page cache where that works, and an error gives the file up."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ckptstore.errors import CkptStoreError, ConfigError, CorruptionError, UnavailableError
from ckptstore.testing.crashfs import CrashFiles
from ckptstore_posix import PosixConfig, PosixStore
from ckptstore_posix.files import O_DIRECT, RealFiles

if TYPE_CHECKING:
    from ckptstore.store import PartWriter

KEY = "data/attempt/rank0"
MiB = 1 << 20


def aligned(body: bytes) -> memoryview:
    """Return *body* in memory that starts at a page, as the staging buffers do."""
    memory = memoryview(mmap.mmap(-1, max(len(body), 1)))[: len(body)]
    memory[:] = body
    return memory


def pattern(n_bytes: int) -> bytes:
    return b"".join(number.to_bytes(4, "big") for number in range(n_bytes // 4 + 1))[:n_bytes]


class Routes(CrashFiles):
    """Notes which writes went past the cache."""

    def __init__(self, *, direct: bool = True, write_bytes: int | None = None) -> None:
        super().__init__(direct=direct, write_bytes=write_bytes)
        self.direct_writes: list[tuple[int, int]] = []
        self.cached_writes: list[tuple[int, int]] = []

    def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
        written = super().pwrite(fd, buffer, offset)
        is_direct = self._opened[fd].flags & O_DIRECT
        (self.direct_writes if is_direct else self.cached_writes).append((offset, len(buffer)))
        return written


def on(files: CrashFiles | RealFiles, root: Path = Path("/disk/run")) -> PosixStore:
    return PosixStore(PosixConfig(root=root), files=files)


def store_object(store: PosixStore, body: memoryview, part_bytes: int) -> None:
    write_and_finish(store.create(KEY, len(body), part_bytes), body, part_bytes)


def write_and_finish(writer: PartWriter, body: bytes | memoryview, part_bytes: int) -> None:
    for offset in range(0, len(body), part_bytes):
        writer.write(offset, body[offset : offset + part_bytes])
    writer.finish()


def assert_ended(writer: PartWriter, how: str) -> None:
    with pytest.raises(CkptStoreError, match=f"{KEY}: this write {how}"):
        writer.write(0, b"y" * (4096 if how == "failed" else 1))
    with pytest.raises(CkptStoreError, match=f"{KEY}: this write {how}"):
        writer.finish()


@pytest.mark.parametrize("n_bytes", [0, 1, 4095, 4096, 4097, 8191, 3 * 8192, 3 * 8192 + 5000])
def test_aligned_memory_goes_past_the_cache_tail_included(n_bytes: int) -> None:
    files = Routes()
    store_object(on(files), aligned(pattern(n_bytes)), 8192)
    assert files.tree() == {f"/disk/run/{KEY}": pattern(n_bytes)}
    if n_bytes >= 4096:
        assert files.cached_writes == []
        assert sum(length for _, length in files.direct_writes) == -(-n_bytes // 4096) * 4096


@pytest.mark.parametrize("n_bytes", [0, 1, 4095, 4096, 4097, 16 * MiB + 1])
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "unaligned"])
def test_objects_of_any_size_come_out_as_they_went_in_on_this_disk(n_bytes: int, shift: int, tmp_path: Path) -> None:
    body = pattern(n_bytes)
    store = PosixStore(PosixConfig(root=tmp_path))
    store_object(store, aligned(bytes(shift) + body)[shift:], 4 * MiB)
    assert (tmp_path / KEY).read_bytes() == body
    buffer = bytearray(n_bytes)
    store.read_into(KEY, 0, buffer)
    assert buffer == body


@pytest.mark.parametrize(
    "files, part_bytes, body",
    [
        (Routes(direct=False), 8192, aligned(pattern(20_000))),
        (Routes(), 8192, aligned(b"x" + pattern(20_000))[1:]),
        (Routes(), 8192, memoryview(pattern(20_000))),
        (Routes(), 5000, aligned(pattern(20_000))),
    ],
    ids=["refused at open", "unaligned", "read-only memory", "odd parts"],
)
def test_where_going_past_the_cache_is_impossible_the_cache_is_used(
    files: Routes, part_bytes: int, body: memoryview
) -> None:
    store_object(on(files), body, part_bytes)
    assert files.tree() == {f"/disk/run/{KEY}": bytes(body)}
    assert files.direct_writes == []
    assert sum(length for _, length in files.cached_writes) == len(body)


def test_where_it_can_be_opened_but_not_written_the_cache_is_used_from_then_on() -> None:
    files = Routes()
    files.fail("pwrite", errno.EINVAL, nth=2)
    store_object(on(files), aligned(pattern(40_000)), 8192)
    assert files.tree() == {f"/disk/run/{KEY}": pattern(40_000)}
    assert files.direct_writes == [(0, 8192)]
    assert [offset for offset, _ in files.cached_writes] == [8192, 16384, 24576, 32768]
    assert files.open_paths == []


@pytest.mark.parametrize("write_bytes", [1, 1000, 4096, 6000])
def test_short_writes_are_continued(write_bytes: int) -> None:
    files = Routes(write_bytes=write_bytes)
    body = pattern(20_001 if write_bytes > 1 else 300)
    store = on(files)
    store_object(store, aligned(body), 8192)
    store.put("LATEST", body)
    assert files.tree() == {"/disk/run/LATEST": body, f"/disk/run/{KEY}": body}


def test_a_write_that_writes_nothing_is_an_error_not_a_loop() -> None:
    with pytest.raises(UnavailableError, match="wrote nothing"):
        on(CrashFiles(write_bytes=0)).put("LATEST", b"x")


def test_offsets_beyond_four_gib_are_exact(tmp_path: Path) -> None:
    class Sparse(RealFiles):
        def allocate(self, fd: int, n_bytes: int) -> None:
            os.ftruncate(fd, n_bytes)

    far, part = 1 << 32, aligned(pattern(8192))
    store = on(Sparse(), tmp_path)
    writer = store.create(KEY, far + 2 * 8192, 8192)
    writer.write(far, part)
    writer.write(far + 8192, bytes(part[::-1]))
    assert (tmp_path / KEY).stat().st_blocks * 512 < 8 * MiB
    buffer = bytearray(3 * 8192)
    store.read_into(KEY, far - 8192, buffer)
    assert buffer == bytes(8192) + bytes(part) + bytes(part[::-1])
    with pytest.raises(CorruptionError, match="truncated"):
        store.read_into(KEY, far + 8192, bytearray(8193))
    with pytest.raises(CkptStoreError, match="only 2 of 524290 parts"):
        writer.finish()
    writer.abort()
    assert not (tmp_path / "data").exists()


def test_after_an_error_the_file_is_given_up() -> None:
    for call in ("pwrite", "ftruncate", "fsync", "close", "fstat"):
        files = CrashFiles()
        store = on(files)
        store.put("LATEST", b"x")
        writer = store.create(KEY, 8192, 4096)
        files.fail(call, errno.EIO, about="rank0" if call != "close" else None)
        with pytest.raises(UnavailableError, match=f"/disk/run/{KEY}"):
            write_and_finish(writer, bytes(8192), 4096)
        assert_ended(writer, "failed")
        assert files.open_paths == []
        writer.abort()
        assert list(files.tree()) == ["/disk/run/LATEST"]


def test_a_finished_object_survives_abort_and_takes_no_more_writes() -> None:
    files = CrashFiles()
    writer = on(files).create(KEY, 1, 1)
    writer.write(0, b"x")
    writer.finish()
    writer.abort()
    assert files.tree() == {f"/disk/run/{KEY}": b"x"}
    assert_ended(writer, "is finished")


def test_an_aborted_object_takes_no_more_writes_and_leaves_no_folder() -> None:
    files = CrashFiles()
    store = on(files)
    store.put("data/kept/a", b"x")
    writer = store.create(KEY, 1, 1)
    files.fail("unlink", errno.EIO)
    writer.abort()  # never raises
    assert_ended(writer, "was aborted")
    writer = store.create("data/second/rank0", 1, 1)
    writer.abort()
    with pytest.raises(FileNotFoundError):
        files.lstat("/disk/run/data/second")
    assert files.open_paths == []


def test_an_object_that_was_removed_while_it_was_written_is_not_finished(tmp_path: Path) -> None:
    writer = on(RealFiles(), tmp_path).create(KEY, 1, 1)
    writer.write(0, b"x")
    (tmp_path / KEY).unlink()
    with pytest.raises(CkptStoreError, match="was removed while it was written"):
        writer.finish()


def test_abort_closes_nothing_under_a_write_that_is_still_running() -> None:
    class Slow(CrashFiles):
        def __init__(self) -> None:
            super().__init__()
            self.reached, self.go = threading.Event(), threading.Event()

        def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
            self.reached.set()
            assert self.go.wait(20)
            return super().pwrite(fd, buffer, offset)

    files = Slow()
    writer = on(files).create(KEY, 1, 1)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(writer.write, 0, b"x")
        assert files.reached.wait(20)
        with pytest.raises(CkptStoreError, match="only 0 of 1 parts"):
            writer.finish()
        writer.abort()
        # Had its number been given away, the write would go into another file.
        assert files.open_paths
        files.go.set()
        running.result()
    assert files.open_paths == []
    assert files.tree() == {}


def test_parts_may_be_written_by_many_threads(tmp_path: Path) -> None:
    body = aligned(pattern(64 * 8192 + 77))
    writer = on(RealFiles(), tmp_path).create(KEY, len(body), 8192)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda offset: writer.write(offset, body[offset : offset + 8192]), range(0, len(body), 8192)))
    writer.finish()
    assert (tmp_path / KEY).read_bytes() == body


@pytest.mark.parametrize("n_bytes, part_bytes", [(-1, 1), (1, 0), (1, -1)])
def test_a_size_that_makes_no_sense_is_refused(n_bytes: int, part_bytes: int) -> None:
    files = CrashFiles()
    with pytest.raises(ConfigError):
        on(files).create(KEY, n_bytes, part_bytes)
    assert files.changes == []


def test_space_is_reserved_where_that_is_possible() -> None:
    files = CrashFiles()
    on(files).create(KEY, 10_000, 4096)
    assert len(files.tree()[f"/disk/run/{KEY}"]) == 10_000
    unable = CrashFiles()
    unable.fail("allocate", errno.EOPNOTSUPP)
    store_object(on(unable), aligned(pattern(10_000)), 4096)
    assert unable.tree() == {f"/disk/run/{KEY}": pattern(10_000)}
