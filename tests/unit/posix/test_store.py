"""What a local directory can throw at the store: links, strange files, modes, folders that come and go."""

from __future__ import annotations

import errno
import functools
import os
import shutil
import signal
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ckptstore.errors import (
    AlreadyExistsError,
    CkptStoreError,
    ConfigError,
    CorruptionError,
    NotFoundError,
    PermissionDeniedError,
    StorageFullError,
    UnavailableError,
    UnsupportedError,
)
from ckptstore.store import Conflict, Published, Upload
from ckptstore.testing.crashfs import CrashFiles
from ckptstore.testing.publish import assert_sequence, race_for_key, race_processes
from ckptstore.testing.raw import RawDirectory
from ckptstore.testing.subject import record_of
from ckptstore_posix import PosixConfig, PosixStore
from ckptstore_posix.files import RealFiles

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def store(root: Path) -> PosixStore:
    return PosixStore(PosixConfig(root=root))


def on(files: CrashFiles) -> PosixStore:
    return PosixStore(PosixConfig(root=Path("/disk/run")), files=files)


def n_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# Links and strange files.


def test_a_link_in_the_place_of_an_object_is_never_followed(store: PosixStore, root: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(record_of("a"))
    store.put("data/real", b"x")
    (root / "data" / "link").symlink_to(tmp_path / "secret")
    for read in (
        lambda: store.get("data/link", max_bytes=100),
        lambda: store.read_into("data/link", 0, bytearray(1)),
        lambda: store.stat("data/link"),
        lambda: store.publish("data/link", record_of("a"), write_id="a"),
    ):
        with pytest.raises(CorruptionError, match="data/link"):
            read()
    assert [info.key for info in store.list("")] == ["data/real"]
    # Neither replacing nor deleting reaches through it.
    store.put("data/link", b"new")
    (root / "data" / "other").symlink_to(tmp_path / "secret")
    assert store.delete(["data/other"])[0].error is None
    assert (tmp_path / "secret").read_bytes() == record_of("a")
    assert store.get("data/link", max_bytes=3) == b"new"


def test_a_link_in_the_place_of_a_folder_leads_nowhere(store: PosixStore, root: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "a").write_bytes(b"x")
    store.put("LATEST", b"x")
    (root / "data").symlink_to(tmp_path / "outside")
    for verb in (
        lambda: store.get("data/a", max_bytes=1),
        lambda: store.put("data/a", b"y"),
        lambda: store.create("data/b", 1, 1),
        lambda: store.publish("data/c", b"{}", write_id="a"),
        lambda: list(store.list("data/")),
    ):
        with pytest.raises(CorruptionError, match="link"):
            verb()
    assert isinstance(store.delete(["data/a"])[0].error, CorruptionError)
    assert [info.key for info in store.list("")] == ["LATEST"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "outside").iterdir()} == {"a": b"x"}


def test_the_root_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    store = PosixStore(PosixConfig(root=tmp_path / "run"))
    store.put("data/a", b"x")
    assert (tmp_path / "disk" / "data" / "a").read_bytes() == b"x"


@pytest.mark.parametrize("root", ["run", "run/below"])
def test_a_root_behind_a_link_to_nowhere_is_not_an_empty_store(root: str, tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(tmp_path / "not-mounted")
    store = PosixStore(PosixConfig(root=tmp_path / root))
    for verb in (lambda: list(store.list("")), lambda: store.get("a", max_bytes=1), lambda: store.put("a", b"x")):
        with pytest.raises(ConfigError, match="a link to nowhere"):
            verb()
    assert not (tmp_path / "not-mounted").exists()


def test_a_root_that_is_a_file_is_refused_by_every_verb(tmp_path: Path) -> None:
    (tmp_path / "run").write_bytes(b"x")
    store = PosixStore(PosixConfig(root=tmp_path / "run"))
    for verb in (lambda: list(store.list("")), lambda: store.get("a", max_bytes=1), lambda: store.put("a", b"x")):
        with pytest.raises(ConfigError, match=f"the root {tmp_path}/run is no folder"):
            verb()


def test_a_file_in_the_place_of_a_folder_is_named(store: PosixStore) -> None:
    store.put("data", b"x")
    for write in (
        lambda: store.put("data/a", b"y"),
        lambda: store.create("data/a", 1, 1),
        lambda: store.publish("data/a", b"{}", write_id="a"),
    ):
        with pytest.raises(ConfigError, match=r"run/data/a: .*a file stands where a folder belongs"):
            write()
    with pytest.raises(NotFoundError):
        store.get("data/a", max_bytes=1)


def test_a_folder_in_the_place_of_a_record_is_named(store: PosixStore, root: Path) -> None:
    (root / "journal" / "0").mkdir(parents=True)
    with pytest.raises(ConfigError, match="journal/0"):
        store.publish("journal/0", record_of("a"), write_id="a")
    with pytest.raises(ConfigError, match="journal/0"):
        store.put("journal/0", b"x")


def test_a_pipe_is_no_object_and_is_not_waited_for(store: PosixStore, root: Path) -> None:
    root.mkdir()
    os.mkfifo(root / "pipe")
    with pytest.raises(CorruptionError, match="no plain file"):
        store.get("pipe", max_bytes=1)
    assert list(store.list("")) == []


def test_names_that_no_key_can_have_are_not_listed(store: PosixStore, root: Path) -> None:
    store.put("data/a", b"x")
    for name in (".hidden", ".nfs0001", "with space", "line\nbreak", "é", os.fsdecode(b"\xff")):
        (root / "data" / name).write_bytes(b"x")
        (root / f"{name}-folder").mkdir()
        (root / f"{name}-folder" / "inside").write_bytes(b"x")
        (root / f"{name}-folder" / ".tmp-inside").write_bytes(b"x")
    assert [info.key for info in store.list("")] == ["data/a"]
    assert list(store.uploads("")) == []


# Modes and groups.


@pytest.mark.parametrize("umask, file_mode, folder_mode", [(0o022, 0o644, 0o755), (0o007, 0o660, 0o770)])
def test_modes_follow_the_umask(umask: int, file_mode: int, folder_mode: int, store: PosixStore, root: Path) -> None:
    before = os.umask(umask)
    try:
        store.put("data/put", b"x")
        store.publish("journal/0", record_of("a"), write_id="a")
        writer = store.create("data/payload", 1, 1)
        writer.write(0, b"x")
        writer.finish()
    finally:
        os.umask(before)
    for path in root.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (folder_mode if path.is_dir() else file_mode)


def test_the_group_of_a_setgid_folder_is_kept(store: PosixStore, root: Path) -> None:
    others = [group for group in os.getgroups() if group != os.getegid()]
    group = 12345 if os.geteuid() == 0 else next(iter(others), None)
    if group is None:
        pytest.skip("no right to a second group")
    root.mkdir()
    os.chown(root, -1, group)
    root.chmod(0o2775)
    store.put("data/deep/put", b"x")
    store.publish("data/deep/0", record_of("a"), write_id="a")
    assert {path.stat().st_gid for path in root.rglob("*")} == {group}
    assert all(path.stat().st_mode & stat.S_ISGID for path in root.rglob("*") if path.is_dir())


# Temporaries.


def test_a_stray_temporary_is_hidden_found_and_removed_with_its_empty_folders(store: PosixStore, root: Path) -> None:
    store.put("data/a", b"x")
    (root / "journal" / "uid").mkdir(parents=True)
    (root / "journal" / "uid" / ".tmp-0123").write_bytes(b"torn")
    (root / ".tmp-4567").write_bytes(b"")
    assert [info.key for info in store.list("")] == ["data/a"]
    found = list(store.uploads(""))
    assert [upload.key for upload in found] == [".tmp-4567", "journal/uid/.tmp-0123"]
    assert all(upload.started and upload.upload_id == upload.key for upload in found)
    assert [upload.key for upload in store.uploads("journal/")] == ["journal/uid/.tmp-0123"]
    for upload in found * 2:
        store.abort_upload(upload)
    assert {path.name for path in root.iterdir()} == {"data"}


@pytest.mark.parametrize("key", ["data/a", "../.tmp-a", "/etc/.tmp-a", ".tmp-a b", "data/../.tmp-a", ""])
def test_only_a_temporary_below_the_root_can_be_aborted(key: str, store: PosixStore) -> None:
    store.put("data/a", b"x")
    with pytest.raises(ConfigError):
        store.abort_upload(Upload(key=key, upload_id=key))
    assert store.get("data/a", max_bytes=1) == b"x"


# Folders that come and go.


def test_delete_removes_the_folders_that_it_empties_but_not_the_root(store: PosixStore, root: Path) -> None:
    for key in ("data/u/1/a", "data/u/1/b", "data/u/2/a"):
        store.put(key, b"x")
    store.delete(["data/u/1/a"])
    assert (root / "data/u/1").is_dir()
    store.delete(["data/u/1/b"])
    assert not (root / "data/u/1").exists()
    assert (root / "data/u/2").is_dir()
    store.delete(["data/u/2/a"])
    assert list(root.iterdir()) == []


def test_a_folder_removed_by_hand_is_made_again(store: PosixStore, root: Path) -> None:
    for _ in range(2):
        store.put("data/u/a", b"x")
        store.publish("journal/u/0", record_of("a"), write_id="a")
        shutil.rmtree(root / "data")
        store.put("data/u/b", b"x")
        shutil.rmtree(root)
    store.put("data/u/a", b"x")
    assert [info.key for info in store.list("")] == ["data/u/a"]


def test_writers_are_not_disturbed_by_others_that_empty_the_same_folder(store: PosixStore, root: Path) -> None:
    def work(worker: int) -> None:
        for turn in range(25):
            key = f"data/shared/{worker}"
            store.put(key, b"x" * turn)
            assert store.get(key, max_bytes=100) == b"x" * turn
            assert [result.error for result in store.delete([key])] == [None]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert list(root.iterdir()) == []


def test_a_listing_goes_on_when_a_folder_vanishes(store: PosixStore, root: Path) -> None:
    for name in "abc":
        for number in range(3):
            store.put(f"data/{name}/{number}", b"x")
    listing = store.list("data/")
    assert next(listing).key == "data/a/0"
    shutil.rmtree(root / "data" / "b")
    shutil.rmtree(root / "data" / "a")
    assert [info.key for info in listing] == ["data/c/0", "data/c/1", "data/c/2"]


def test_a_folder_that_vanishes_while_it_is_entered_holds_nothing() -> None:
    files = CrashFiles()
    store = on(files)
    for key in ("data/a/0", "data/b/0", "data/c/0"):
        store.put(key, b"x")
    files.fail("scandir", errno.ENOENT, about="b")
    assert [info.key for info in store.list("data/")] == ["data/a/0", "data/c/0"]


def test_thousands_of_objects_are_listed_in_order_with_few_descriptors(store: PosixStore, root: Path) -> None:
    keys = [f"data/{folder:03d}/{number:03d}" for folder in range(60) for number in range(60)]
    for key in reversed(keys):
        path = root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    before = n_descriptors()
    listing = store.list("")
    seen = [next(listing).key]
    assert n_descriptors() - before <= 4
    seen += [info.key for info in listing]
    assert seen == keys
    assert n_descriptors() == before


def test_a_listing_that_is_given_up_holds_nothing(store: PosixStore) -> None:
    store.put("data/a/b/c", b"x")
    before = n_descriptors()
    listing = store.list("")
    next(listing)
    del listing
    assert n_descriptors() == before


# Errors.


@pytest.mark.parametrize(
    "number, kind",
    [
        (errno.ENOSPC, StorageFullError),
        (errno.EDQUOT, StorageFullError),
        (errno.EFBIG, StorageFullError),
        (errno.EACCES, PermissionDeniedError),
        (errno.EPERM, PermissionDeniedError),
        (errno.EROFS, PermissionDeniedError),
        (errno.EIO, UnavailableError),
        (errno.ESTALE, UnavailableError),
        (errno.ETIMEDOUT, UnavailableError),
        (errno.ENAMETOOLONG, ConfigError),
        (errno.EMFILE, CkptStoreError),
        (errno.ENOTRECOVERABLE, CkptStoreError),
    ],
)
def test_each_errno_means_one_kind_of_error(number: int, kind: type[CkptStoreError]) -> None:
    files = CrashFiles()
    store = on(files)
    store.put("data/a", b"x")
    files.fail("open", number, about="a", lasting=True)
    for verb, call in (
        ("get", lambda: store.get("data/a", max_bytes=1)),
        ("stat", lambda: store.stat("data/a")),
        ("create", lambda: store.create("data/a", 1, 1)),
    ):
        with pytest.raises(CkptStoreError) as failed:
            call()
        assert type(failed.value) is kind
        assert (failed.value.operation, failed.value.key) == (verb, "data/a")
        assert "/disk/run/data/a" in str(failed.value)
        assert os.strerror(number) in str(failed.value)
        assert isinstance(failed.value.__cause__, OSError)


def test_an_error_of_one_key_of_a_delete_is_its_result_and_stops_nothing() -> None:
    files = CrashFiles()
    store = on(files)
    for key in ("data/a", "data/b", "data/c", "other/d"):
        store.put(key, b"x")
    files.fail("unlink", errno.EACCES, about="b")
    results = store.delete(["data/a", "data/b", "../escape", "data/c", "other/d"])
    kinds = [type(result.error) for result in results]
    assert kinds == [type(None), PermissionDeniedError, ConfigError, type(None), type(None)]
    assert list(files.tree()) == ["/disk/run/data/b"]
    files.fail("fsync", errno.EIO, about="data")
    assert isinstance(store.delete(["data/b"])[0].error, UnavailableError)


def test_an_existing_payload_is_left_alone(store: PosixStore) -> None:
    store.put("data/a", b"x")
    with pytest.raises(AlreadyExistsError, match="run/data/a"):
        store.create("data/a", 1, 1)
    assert store.get("data/a", max_bytes=1) == b"x"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(mount)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small file system")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)


def write_payload(store: PosixStore, key: str, body: bytes) -> None:
    writer = store.create(key, len(body), 1 << 20)
    try:
        for offset in range(0, len(body), 1 << 20):
            writer.write(offset, body[offset : offset + (1 << 20)])
        writer.finish()
    finally:
        writer.abort()


class NoAllocation(RealFiles):
    """As a file system that can't reserve blocks."""

    def allocate(self, fd: int, n_bytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def test_a_full_disk_is_one_clear_error_and_earlier_objects_stay(small_disk: Path) -> None:
    body = bytes(1 << 20)
    for files in (RealFiles(), NoAllocation()):
        store = PosixStore(PosixConfig(root=small_disk / "run"), files)
        store.publish("journal/0", record_of("a"), write_id="a")
        store.put("data/first", body)
        with pytest.raises(StorageFullError, match=r"no space left.*\(No space left on device\)"):
            write_payload(store, "data/x/second", body * 2)
        assert not (small_disk / "run/data/x").exists()
        with pytest.raises(StorageFullError, match=r"put of .*data/x/third"):
            store.put("data/x/third", body * 2)
        assert [info.key for info in store.list("")] == ["data/first", "journal/0"]
        assert list(store.uploads("")) == []
        store.delete(["data/first"])
        store.put("data/x/third", body)
        store.delete(["data/x/third", "journal/0"])


# Publishing.


class LinksOnly(RealFiles):
    """As a file system that can't rename without replacing."""

    def rename_noreplace(self, name: str, new_name: str, *, folder: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


@pytest.mark.parametrize("files", [RealFiles(), LinksOnly()], ids=["rename", "link"])
def test_of_eight_threads_one_wins(files: RealFiles, root: Path) -> None:
    config = PosixConfig(root=root)
    shared = PosixStore(config, files)
    stores = [shared] * 4 + [PosixStore(config, files) for _ in range(4)]
    for number in range(20):
        race_for_key(stores, f"journal/{number}", RawDirectory(root))
    assert list(shared.uploads("")) == []


def test_four_processes_fill_a_sequence_with_one_winner_for_each_number(root: Path) -> None:
    opener = functools.partial(PosixStore, PosixConfig(root=root))
    told = race_processes(opener, "journal", processes=4, threads=2, wins=5)
    assert_sequence(RawDirectory(root), "journal", told)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV])
def test_where_neither_rename_nor_link_is_exclusive_publish_is_refused(number: int) -> None:
    files = CrashFiles(links=False)
    files.fail("rename_noreplace", number, lasting=True)
    store = on(files)
    assert store.capabilities().exclusive == "none"
    assert files.tree() == {}
    with pytest.raises(UnsupportedError, match="a single writer only"):
        store.publish("journal/0", record_of("a"), write_id="a")
    assert files.tree() == {}
    store.put("journal/0", record_of("b"))
    assert store.publish("journal/0", record_of("a"), write_id="a") == Conflict(record_of("b"))


def test_capabilities_are_probed_where_the_root_will_be_and_leave_nothing() -> None:
    files = CrashFiles(exclusive=False)
    assert on(files).capabilities().exclusive == "atomic"
    assert "link" in [call.call for call in files.calls]
    assert files.tree() == {}
    with pytest.raises(FileNotFoundError):
        files.lstat("/disk")


def test_capabilities_of_a_read_only_disk_can_be_asked_and_are_asked_again() -> None:
    files = CrashFiles(exclusive=False, links=False)
    files.fail("open", errno.EROFS, nth=3)
    store = on(files)
    assert store.capabilities().exclusive == "atomic"
    assert store.capabilities().exclusive == "none"


# Processes.


def test_a_forked_child_works_even_if_a_thread_held_the_lock(store: PosixStore) -> None:
    store.put("data/a", b"x")
    with store._folders._durable().lock:
        child = os.fork()
        if not child:
            signal.alarm(20)
            failed = 1
            try:
                store.put("data/new/b", b"y")
                store.delete(["data/a"])
                failed = 0
            finally:
                os._exit(failed)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert [info.key for info in store.list("")] == ["data/new/b"]


def test_no_descriptor_outlives_a_verb(store: PosixStore) -> None:
    before = n_descriptors()
    store.put("data/a", b"x")
    assert store.publish("journal/0", record_of("a"), write_id="a") == Published()
    assert store.publish("journal/0", record_of("b"), write_id="b") == Conflict(record_of("a"))
    store.get("data/a", max_bytes=1)
    store.read_into("data/a", 0, bytearray(1))
    store.delete(["data/a"])
    for key in ("absent", "absent/deep"):
        with pytest.raises(NotFoundError):
            store.stat(key)
    assert n_descriptors() == before
