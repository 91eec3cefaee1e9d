"""Whenever the power is cut or a call fails, the local store keeps its word; and the simulator can tell."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ckptstore.errors import CkptStoreError, NotFoundError, OutcomeUnknownError, StorageFullError, UnavailableError
from ckptstore.store import Conflict, Published
from ckptstore.testing.crashfs import CrashFiles
from ckptstore.testing.subject import record_of
from ckptstore_posix import PosixConfig, PosixStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptstore.store import CheckpointStore, Outcome

PAYLOAD, MANIFEST, RECORD = (
    "data/0123abcd/1-e0-x/rank0",
    "data/0123abcd/1-e0-x/MANIFEST.json",
    "journal/0123abcd/1.json",
)
BODY = bytes(range(256)) * 48  # three blocks
PART_BYTES = 4096
BODIES = {PAYLOAD: BODY, MANIFEST: b"{manifest}" * 500, RECORD: record_of("mine", n_bytes=5000)}


def open_on(files: CrashFiles, kind: type[PosixStore] = PosixStore) -> PosixStore:
    return kind(PosixConfig(root=Path("/disk/run")), files=files)


def write_payload(store: CheckpointStore, key: str = PAYLOAD) -> None:
    writer = store.create(key, len(BODY), PART_BYTES)
    try:
        for offset in range(0, len(BODY), PART_BYTES):
            writer.write(offset, BODY[offset : offset + PART_BYTES])
        writer.finish()
    finally:
        writer.abort()  # does nothing to a finished one


def commit(store: CheckpointStore) -> None:
    """Follow the order that makes a record's word good: payload, manifest, record."""
    write_payload(store)
    store.put(MANIFEST, BODIES[MANIFEST])
    assert store.publish(RECORD, BODIES[RECORD], write_id="mine") == Published()


def found_on(files: CrashFiles, *keys: str) -> dict[str, bytes]:
    """Return what a fresh store reads under *keys*, absent ones left out."""
    store, found = open_on(files), {}
    for key in keys:
        try:
            found[key] = store.get(key, max_bytes=1 << 20)
        except NotFoundError:
            continue
    return found


def broken_promises(files: CrashFiles, told: int) -> set[str]:
    """Return which promises of a commit some power cut breaks, if it was reported after *told* changes."""
    broken = set()
    for cut in files.cuts():
        found = found_on(cut.files, *BODIES)
        if RECORD not in found:
            broken |= {"lost"} if cut.after >= told else set()
        elif found[RECORD] != BODIES[RECORD]:
            broken.add("torn record")
        elif found != BODIES:
            broken.add("record without its data")
    return broken


@pytest.mark.parametrize(
    "options",
    [{}, {"exclusive": False}, {"direct": False}, {"write_bytes": 1000}],
    ids=["all", "by link", "cached", "short writes"],
)
def test_no_power_cut_breaks_a_commit(options: dict[str, bool]) -> None:
    files = CrashFiles(**options)
    commit(open_on(files))
    assert files.tree() == {f"/disk/run/{key}": body for key, body in BODIES.items()}
    assert files.open_paths == []
    assert broken_promises(files, told=len(files.changes)) == set()


class FoldersUnsynced(CrashFiles):
    def fsync(self, fd: int) -> None:
        if self._node(fd) not in self._disk.folders:
            super().fsync(fd)


class ParentsUnsynced(CrashFiles):
    """Syncs the folder of each file, as careful programs do, but not the folders above it."""

    def fsync(self, fd: int) -> None:
        if self._path(fd) not in ("/", "/disk", "/disk/run", "data", "journal"):
            super().fsync(fd)


class FilesUnsynced(CrashFiles):
    def fsync(self, fd: int) -> None:
        if self._node(fd) in self._disk.folders:
            super().fsync(fd)


class RetriesFsync(CrashFiles):
    def fsync(self, fd: int) -> None:
        try:
            super().fsync(fd)
        except OSError:
            super().fsync(fd)


class WritesInPlace(PosixStore):
    """Publishes without a temporary: exclusive, durable on return, and not atomic."""

    def publish(self, key: str, record: bytes, *, write_id: str) -> Outcome:
        write_in_place(self, key, record)
        return Published()


def write_in_place(store: PosixStore, key: str, body: bytes) -> None:
    writer = store.create(key, len(body), len(body))
    writer.write(0, body)
    writer.finish()


@pytest.mark.parametrize(
    "files, kind, expected",
    [
        (FoldersUnsynced(), PosixStore, "lost"),
        (ParentsUnsynced(), PosixStore, "lost"),
        (FilesUnsynced(), PosixStore, "torn record"),
        (CrashFiles(), WritesInPlace, "torn record"),
    ],
    ids=["folders unsynced", "parents unsynced", "files unsynced", "written in place"],
)
def test_the_simulator_catches_a_careless_store(files: CrashFiles, kind: type[PosixStore], expected: str) -> None:
    commit(open_on(files, kind))
    assert expected in broken_promises(files, told=len(files.changes))


def test_the_simulator_catches_a_record_that_is_published_before_its_data() -> None:
    files = CrashFiles()
    store = open_on(files)
    store.publish(RECORD, BODIES[RECORD], write_id="mine")
    write_payload(store)
    store.put(MANIFEST, BODIES[MANIFEST])
    assert "record without its data" in broken_promises(files, told=len(files.changes))


def test_a_failed_fsync_is_not_tried_again_on_that_file() -> None:
    files, careless = CrashFiles(), RetriesFsync()
    for disk in (files, careless):
        open_on(disk).put("LATEST", b"")  # so that the root exists
        disk.fail("fsync", errno.EIO, about="rank0")
    with pytest.raises(UnavailableError):
        write_payload(open_on(files))
    assert [(call.call, call.about) for call in files.calls].count(("fsync", "rank0")) == 1
    commit(open_on(careless))
    assert "record without its data" in broken_promises(careless, told=len(careless.changes))


def test_after_any_power_cut_the_next_commit_works_and_is_durable() -> None:
    files = CrashFiles()
    commit(open_on(files))
    other = record_of("next")
    for cut in files.cuts(limit=6):
        store = open_on(cut.files)
        for upload in list(store.uploads("")):
            store.abort_upload(upload)
        assert set(store.list("")) == {store.stat(key) for key in found_on(cut.files, *BODIES)}
        outcome = store.publish(RECORD, BODIES[RECORD], write_id="mine")
        assert outcome == Published()
        assert store.publish(RECORD, other, write_id="next") == Conflict(BODIES[RECORD])
        write_payload(store, "data/0123abcd/2-e0-y/rank0")
        assert store.publish("journal/0123abcd/2.json", other, write_id="next") == Published()
        told = len(cut.files.changes)
        for second in cut.files.cuts(limit=2):
            if second.after >= told:
                found = found_on(second.files, "data/0123abcd/2-e0-y/rank0", "journal/0123abcd/2.json", RECORD)
                assert list(found.values()) == [BODY, other, BODIES[RECORD]]


def test_put_leaves_the_old_object_or_the_new_one() -> None:
    files = CrashFiles()
    store = open_on(files)
    store.put("LATEST", b"old")
    first = len(files.changes)
    store.put("LATEST", b"the new one")
    for cut in files.cuts():
        found = found_on(cut.files, "LATEST").get("LATEST")
        expected: set[bytes | None] = {b"the new one"} if cut.after >= len(files.changes) else {b"old", b"the new one"}
        assert found in (expected if cut.after >= first else expected | {None})


def test_a_manifest_that_was_deleted_stays_deleted_before_its_payload_goes() -> None:
    files = CrashFiles()
    store = open_on(files)
    write_payload(store)
    store.put(MANIFEST, BODIES[MANIFEST])
    stored = len(files.changes)
    store.delete([MANIFEST])
    store.delete([PAYLOAD])
    assert files.tree() == {}
    for cut in files.cuts():
        if cut.after >= stored:
            assert set(found_on(cut.files, MANIFEST, PAYLOAD)) in ({MANIFEST, PAYLOAD}, {PAYLOAD}, set())


def test_a_folder_that_was_emptied_and_made_again_is_made_durable_again() -> None:
    files = CrashFiles()
    store = open_on(files)
    store.put("pins/a", b"x")
    store.delete(["pins/a"])
    store.put("pins/b", b"y")
    for cut in files.cuts():
        if cut.after >= len(files.changes):
            assert found_on(cut.files, "pins/b") == {"pins/b": b"y"}


def test_a_folder_that_was_emptied_is_not_trusted_when_another_process_made_it_again() -> None:
    files = CrashFiles()
    store = open_on(files)
    store.put("pins/a", b"x")
    store.delete(["pins/a"])
    files.fail("fsync", errno.EIO, about="/disk/run", lasting=True)  # the other process is killed before its sync
    with pytest.raises(UnavailableError):
        open_on(files).put("pins/other", b"x")
    files.heal()
    store.put("pins/b", b"y")
    for cut in files.cuts():
        if cut.after >= len(files.changes):
            assert found_on(cut.files, "pins/b") == {"pins/b": b"y"}


@pytest.mark.parametrize("nth", range(1, 6))
def test_a_folder_that_a_killed_process_made_is_synced_by_the_next_one(nth: int) -> None:
    files = CrashFiles()
    files.fail("fsync", errno.EIO, nth=nth, lasting=True)
    with pytest.raises(CkptStoreError):
        open_on(files).put("data/a/b", b"x")
    files.heal()
    open_on(files).put("data/a/b", b"x")
    for cut in files.cuts():
        if cut.after >= len(files.changes):
            assert found_on(cut.files, "data/a/b") == {"data/a/b": b"x"}


@pytest.mark.parametrize("exclusive", [True, False], ids=["rename", "link"])
def test_a_record_whose_folder_could_not_be_synced_is_unknown_until_a_second_publish_synced_it(
    *, exclusive: bool
) -> None:
    files = CrashFiles(exclusive=exclusive)
    store = open_on(files)
    store.publish("journal/0", record_of("first"), write_id="first")
    files.fail("fsync", errno.EIO, nth=2)  # of the temporary, then of the folder
    with pytest.raises(OutcomeUnknownError) as unknown:
        store.publish("journal/1", record_of("mine"), write_id="mine")
    assert (unknown.value.operation, unknown.value.key) == ("publish", "journal/1")
    assert isinstance(unknown.value.__cause__, OSError)
    for author in (open_on(files), store):
        assert author.publish("journal/1", record_of("mine"), write_id="mine") == Published()
        for cut in files.cuts():
            if cut.after >= len(files.changes):
                assert found_on(cut.files, "journal/1") == {"journal/1": record_of("mine")}
    assert list(store.uploads("")) == []


def test_a_second_publish_that_fails_does_not_deny_what_the_first_may_have_done() -> None:
    files = CrashFiles()
    store = open_on(files)
    store.publish("journal/0", record_of("first"), write_id="first")
    files.fail("fsync", errno.EIO, nth=2, lasting=True)
    for number in (errno.EIO, errno.ENOSPC, errno.EROFS):
        with pytest.raises(OutcomeUnknownError):
            store.publish("journal/1", record_of("mine"), write_id="mine")
        files.heal()
        for call in ("fsync", "pwrite", "mkdir", "preadv"):
            files.fail(call, number, lasting=True)
    files.heal()
    assert open_on(files).publish("journal/1", record_of("mine"), write_id="mine") == Published()


def attempt(step: Callable[..., object], *arguments: object, **options: object) -> CkptStoreError | None:
    """Return the error of *step*; one that is not the library's own is a failure of the test."""
    try:
        step(*arguments, **options)
    except CkptStoreError as error:
        return error
    return None


FAULTS = [(errno.ENOSPC, False), (errno.EIO, False), (errno.EIO, True)]


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("number, after", FAULTS, ids=["full", "broken", "answer lost"])
def test_whatever_call_fails_a_verb_says_what_it_knows_and_harms_nothing(
    number: int, *, after: bool, lasting: bool
) -> None:
    earlier = record_of("earlier")
    counted = CrashFiles()
    open_on(counted).publish("journal/0123abcd/0.json", earlier, write_id="earlier")
    before = len(counted.calls)
    commit(open_on(counted))
    n_calls = len(counted.calls) - before
    assert n_calls > 60
    for nth in range(1, n_calls + 1):
        files = CrashFiles()
        open_on(files).publish("journal/0123abcd/0.json", earlier, write_id="earlier")
        files.fail(None, number, nth=nth, after=after, lasting=lasting)
        store = open_on(files)
        payload = attempt(write_payload, store)
        manifest = attempt(store.put, MANIFEST, BODIES[MANIFEST])
        record = attempt(store.publish, RECORD, BODIES[RECORD], write_id="mine")
        failed = files.calls[before + nth - 1 :][:1]
        files.heal()

        found = found_on(files, "journal/0123abcd/0.json", *BODIES)
        assert found.pop("journal/0123abcd/0.json") == earlier
        errors = [error for error in (payload, manifest, record) if error is not None]
        assert all(isinstance(error.__cause__, OSError) for error in errors), failed
        if number == errno.ENOSPC:
            kinds = (StorageFullError, OutcomeUnknownError)
            assert all(isinstance(error, kinds) for error in errors), failed
        for key, error in ((PAYLOAD, payload), (MANIFEST, manifest), (RECORD, record)):
            if error is None:
                assert found[key] == BODIES[key], failed
        if record is not None and not isinstance(record, OutcomeUnknownError):
            assert RECORD not in found, failed
        assert found.get(RECORD, BODIES[RECORD]) == BODIES[RECORD], failed
        assert found.get(MANIFEST, BODIES[MANIFEST]) == BODIES[MANIFEST], failed

        if not lasting and [change.call for change in failed] != ["unlink"]:
            assert list(store.uploads("")) == [], failed
            if payload is not None and not after:
                assert PAYLOAD not in found, failed
        if not after:
            assert files.open_paths == [], failed
        # Not wedged: the same store goes on, under other names where the protocol wants that.
        write_payload(store, "data/0123abcd/1-e0-second/rank0")
        store.put(MANIFEST, BODIES[MANIFEST])
        assert store.publish(RECORD, BODIES[RECORD], write_id="mine") == Published()


def test_a_full_disk_is_named_with_its_path_and_what_was_written_is_freed() -> None:
    for call in ("allocate", "pwrite", "fsync", "close"):
        files = CrashFiles()
        store = open_on(files)
        store.put("LATEST", b"x")
        earlier = files.tree()
        files.fail(call, errno.ENOSPC, about="rank0")
        with pytest.raises(StorageFullError, match=r"no space left.*") as full:
            write_payload(store, "data/attempt/rank0")
        assert "/disk/run/data/attempt/rank0" in str(full.value)
        assert files.tree() == earlier
        with pytest.raises(FileNotFoundError):
            files.lstat("/disk/run/data")


def test_a_store_that_can_only_link_still_has_one_winner() -> None:
    files = CrashFiles(exclusive=False)
    store = open_on(files)
    assert store.capabilities().exclusive == "atomic"
    assert store.publish("journal/0", record_of("a"), write_id="a") == Published()
    assert store.publish("journal/0", record_of("b"), write_id="b") == Conflict(record_of("a"))
    assert files.tree() == {"/disk/run/journal/0": record_of("a")}
