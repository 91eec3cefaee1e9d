"""The power-cut simulator allows what POSIX allows: no less, or it proves nothing; no more, or nothing passes."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from ckptstore.testing.crashfs import BLOCK, Change, CrashFiles

if TYPE_CHECKING:
    from ckptstore_posix.files import Files

NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
FOLDER = os.O_RDONLY | os.O_DIRECTORY


def write(files: CrashFiles, path: str, body: bytes, *, sync: bool = False) -> None:
    fd = files.open(path, NEW)
    files.pwrite(fd, memoryview(body), 0)
    if sync:
        files.fsync(fd)
    files.close(fd)


def sync_folder(files: CrashFiles, path: str = "/") -> None:
    fd = files.open(path, FOLDER)
    files.fsync(fd)
    files.close(fd)


def after_the_last_change(files: CrashFiles, limit: int = 1000) -> list[dict[str, bytes]]:
    return [cut.files.tree() for cut in files.cuts(limit) if cut.after == len(files.changes)]


def test_it_offers_the_system_calls_that_the_store_makes() -> None:
    files: Files = CrashFiles()
    assert files.token() != files.token()


def test_a_name_and_its_bytes_survive_each_only_after_its_own_sync() -> None:
    files = CrashFiles()
    write(files, "/a", b"x", sync=True)
    assert {tuple(tree.items()) for tree in after_the_last_change(files)} == {(), (("/a", b"x"),)}
    files = CrashFiles()
    write(files, "/a", b"x")
    sync_folder(files)
    assert {tree["/a"] for tree in after_the_last_change(files)} == {b"", b"\0", b"x"}
    files = CrashFiles()
    write(files, "/a", b"x", sync=True)
    sync_folder(files)
    assert after_the_last_change(files) == [{"/a": b"x"}]


def test_any_subset_of_unsynced_blocks_may_survive_and_any_size_between() -> None:
    files = CrashFiles()
    write(files, "/a", b"1" * BLOCK + b"2" * BLOCK)
    sync_folder(files)
    zeros = b"\0" * BLOCK
    expected = {b""}
    expected |= {first + second for first in (zeros, b"1" * BLOCK) for second in (b"", zeros, b"2" * BLOCK)}
    assert {tree["/a"] for tree in after_the_last_change(files)} == expected


def test_an_overwritten_block_is_the_old_one_or_the_new_one() -> None:
    files = CrashFiles()
    write(files, "/a", b"old" * BLOCK, sync=True)
    sync_folder(files)
    fd = files.open("/a", os.O_WRONLY)
    files.pwrite(fd, memoryview(b"new"), 0)
    starts = {tree["/a"][:3] for tree in after_the_last_change(files)}
    assert starts == {b"old", b"new"}
    assert {len(tree["/a"]) for tree in after_the_last_change(files)} == {3 * BLOCK}


def test_a_rename_is_one_change_the_old_name_or_the_new_one() -> None:
    files = CrashFiles()
    write(files, "/tmp", b"new", sync=True)
    write(files, "/name", b"old", sync=True)
    sync_folder(files)
    root = files.open("/", FOLDER)
    files.replace("tmp", "name", folder=root)
    found = after_the_last_change(files)
    assert sorted(found, key=len) == [{"/name": b"new"}, {"/name": b"old", "/tmp": b"new"}]


def test_changes_of_names_survive_each_by_itself() -> None:
    files = CrashFiles()
    write(files, "/kept", b"", sync=True)
    sync_folder(files)
    write(files, "/a", b"", sync=True)
    write(files, "/b", b"", sync=True)
    root = files.open("/", FOLDER)
    files.unlink("kept", folder=root)
    found = {frozenset(tree) for tree in after_the_last_change(files)}
    assert found == {
        frozenset(some) | kept
        for some in ((), ("/a",), ("/b",), ("/a", "/b"))
        for kept in (frozenset(), frozenset({"/kept"}))
    }


def test_a_durable_file_in_a_folder_that_is_not_is_lost_with_it() -> None:
    files = CrashFiles()
    files.mkdir("/folder")
    write(files, "/folder/a", b"x", sync=True)
    sync_folder(files, "/folder")
    assert {} in after_the_last_change(files)
    sync_folder(files)
    assert after_the_last_change(files) == [{"/folder/a": b"x"}]


def test_what_an_fsync_failed_to_save_no_later_one_saves() -> None:
    files = CrashFiles()
    write(files, "/a", b"before", sync=True)
    sync_folder(files)
    fd = files.open("/a", os.O_WRONLY)
    files.pwrite(fd, memoryview(b"after!"), 0)
    files.fail("fsync", errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        files.fsync(fd)
    files.fsync(fd)
    assert {tree["/a"] for tree in after_the_last_change(files)} == {b"before", b"after!"}


def test_there_is_a_cut_before_the_first_change_and_after_each() -> None:
    files = CrashFiles()
    write(files, "/a", b"x", sync=True)
    assert [change.call for change in files.changes] == ["create", "pwrite", "fsync"]
    cuts = list(files.cuts())
    assert {cut.after for cut in cuts} == {0, 1, 2, 3}
    assert (cuts[0].last, cuts[-1].last) == (None, Change("fsync", "/a"))


def test_many_states_are_sampled_extremes_first_and_the_same_for_one_seed() -> None:
    def many(seed: int) -> list[dict[str, bytes]]:
        files = CrashFiles(seed=seed)
        for number in range(30):
            write(files, f"/{number}", b"x" * 5 * BLOCK)
        return after_the_last_change(files, limit=40)

    found = many(1)
    assert len(found) == 40
    assert found[0] == {}
    assert found[1] == {f"/{number}": b"x" * 5 * BLOCK for number in range(30)}
    assert many(1) == found
    assert many(2) != found


def test_a_disk_that_was_found_is_a_disk_like_any_other() -> None:
    files = CrashFiles()
    write(files, "/a", b"x", sync=True)
    sync_folder(files)
    (found,) = [cut.files for cut in files.cuts() if cut.after == len(files.changes)]
    write(found, "/b", b"y")
    assert {} not in after_the_last_change(found)
    assert {frozenset(tree) for tree in after_the_last_change(found)} == {frozenset({"/a"}), frozenset({"/a", "/b"})}
    assert files.tree() == {"/a": b"x"}


def test_the_nth_call_fails_before_or_after_its_effect_once_or_from_then_on() -> None:
    files = CrashFiles()
    files.fail("mkdir", errno.ENOSPC, nth=2)
    files.mkdir("/1")
    with pytest.raises(OSError, match="No space left"):
        files.mkdir("/2")
    files.mkdir("/2")
    files.fail("mkdir", errno.EIO, after=True)
    with pytest.raises(OSError, match="Input/output"):
        files.mkdir("/3")
    with pytest.raises(FileExistsError):
        files.mkdir("/3")
    files.fail(None, errno.EIO, lasting=True)
    for _ in range(3):
        with pytest.raises(OSError, match="Input/output"):
            files.lstat("/1")
    files.heal()
    files.lstat("/1")


def test_errors_are_those_of_the_operating_system() -> None:
    files = CrashFiles(links=False)
    files.mkdir("/folder")
    write(files, "/file", b"x")
    root = files.open("/", FOLDER)
    folder = files.open("/folder", FOLDER)
    file = files.open("/file", os.O_WRONLY)
    for expected, call in (
        (errno.ENOENT, lambda: files.open("/none", os.O_RDONLY)),
        (errno.ENOENT, lambda: files.lstat("/none/a")),
        (errno.ENOTDIR, lambda: files.open("/file/a", os.O_RDONLY)),
        (errno.ENOTDIR, lambda: files.open("/file", FOLDER)),
        (errno.EISDIR, lambda: files.open("/folder", os.O_WRONLY)),
        (errno.EEXIST, lambda: files.open("/file", NEW)),
        (errno.EEXIST, lambda: files.mkdir("/folder")),
        (errno.EEXIST, lambda: files.rename_noreplace("file", "folder", folder=root)),
        (errno.EPERM, lambda: files.link("file", "second", folder=root)),
        (errno.EISDIR, lambda: files.replace("file", "folder", folder=root)),
        (errno.EISDIR, lambda: files.unlink("folder", folder=root)),
        (errno.ENOTDIR, lambda: files.rmdir("file", folder=root)),
        (errno.EISDIR, lambda: files.pwrite(root, memoryview(b"x"), 0)),
        (errno.EBADF, lambda: files.fsync(12345)),
        (errno.EBADF, lambda: files.close(12345)),
    ):
        with pytest.raises(OSError) as refused:
            call()
        assert refused.value.errno == expected
    files.rmdir("folder", folder=root)
    with pytest.raises(FileNotFoundError):
        files.open("late", NEW, folder=folder)
    assert files.pwrite(file, memoryview(b"y"), 1) == 1


def test_threads_may_use_it_at_once() -> None:
    files = CrashFiles()
    start = threading.Barrier(4)

    def run(number: int) -> None:
        start.wait()
        for turn in range(50):
            write(files, f"/{number}-{turn}", b"x", sync=True)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))
    assert len(files.tree()) == 200
    assert files.open_paths == []
