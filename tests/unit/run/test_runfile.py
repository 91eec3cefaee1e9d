"""Which run lives here: RUN.json says so, the journal stands in for it, and absence needs proof."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from ckptstore.errors import ConfigError, CorruptionError, UnavailableError, UnsupportedError
from ckptstore.run.journal import Damaged
from ckptstore.run.layout import Layout, attempt_epoch, attempt_name, journal_of
from ckptstore.run.runfile import RunInfo, create_run, find_run
from ckptstore.testing.faulty import FailBefore, FaultPlan, FaultyStore
from tests.unit.run.world import (
    CountedIds,
    FakeClock,
    abandon,
    assert_sound,
    forge,
    new_journal,
    new_session,
    new_store,
    save,
    take,
)

if TYPE_CHECKING:
    from ckptstore.memory import MemoryStore


@pytest.fixture
def used() -> MemoryStore:
    """A store with a claim and one checkpoint."""
    store = new_store()
    session = new_session(store)
    take(session)
    save(session, 1)
    abandon(session)
    return store


def uid_of(store: MemoryStore) -> str:
    found = find_run(store)
    assert found is not None
    return found.run_uid


def test_an_empty_store_holds_no_run() -> None:
    assert find_run(new_store()) is None


def test_foreign_files_are_no_run() -> None:
    store = new_store()
    store.put("journal/README", b"hello")
    store.put("journal/zzzz/0000000000.json", b"{}")
    assert find_run(store) is None


def test_a_store_that_does_not_answer_is_not_taken_for_an_empty_one() -> None:
    for verb in ("get", "list"):
        with pytest.raises(UnavailableError):
            find_run(FaultyStore(new_store(), FaultPlan({(verb, 0): FailBefore()})))


def test_of_several_that_create_a_run_at_once_all_get_the_same_one() -> None:
    store = new_store()
    found: list[str] = []
    start = threading.Barrier(8)

    def create() -> None:
        start.wait()
        found.append(create_run(store, clock=FakeClock(), ids=CountedIds()).run_uid)

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert set(found) == {uid_of(store)}


@pytest.mark.parametrize("harm", ["lost", "torn", "garbage", "flipped"])
def test_a_lost_or_damaged_run_file_is_read_from_the_first_claim_and_written_again_only_by_a_claim(
    used: MemoryStore, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = used.get("RUN.json", max_bytes=1 << 16)
    uid = uid_of(used)
    used.put("RUN.json", {"torn": before[:50], "garbage": b"\0\xff", "flipped": b"}" + before[1:]}.get(harm, b""))
    if harm == "lost":
        used.delete(["RUN.json"])
    found = find_run(used)
    assert found == RunInfo(run_uid=uid, file=found.file if found else {}, lost=True)
    assert "RUN.json is " in caplog.text
    session = new_session(used)
    assert session.refresh().state.live[0].step == 1
    assert (harm == "lost") != any(info.key == "RUN.json" for info in used.list(""))
    take(session)
    assert used.get("RUN.json", max_bytes=1 << 16) == before
    abandon(session)
    assert_sound(used)


def test_a_claim_holds_even_if_the_lost_run_file_can_t_be_written_again(
    used: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    used.delete(["RUN.json"])
    session = new_session(FaultyStore(used, FaultPlan({("put", 2): FailBefore()})))  # alive, LATEST, RUN.json
    take(session)
    assert session.owns
    assert "could not be written again" in caplog.text
    assert find_run(used) is not None
    take(session)
    abandon(session)
    assert assert_sound(used).seq == 3


def test_a_lost_run_file_with_two_journals_asks_which(used: MemoryStore) -> None:
    used.put("journal/ffffffff/0000000000.json", b"x")
    assert uid_of(used)
    used.delete(["RUN.json"])
    with pytest.raises(ConfigError, match=r"several runs .*ffffffff"):
        find_run(used)


def test_a_damaged_run_file_without_a_journal_is_not_an_empty_store() -> None:
    store = new_store()
    store.put("RUN.json", b"{")
    with pytest.raises(CorruptionError, match="no journal"):
        find_run(store)


def test_a_run_file_and_first_claim_that_are_both_lost_are_told_apart_from_an_empty_store(used: MemoryStore) -> None:
    layout = Layout(uid_of(used))
    body = used.get(layout.record(0), max_bytes=1 << 16)
    used.delete(["RUN.json", layout.record(0)])
    with pytest.raises(CorruptionError, match=r"RUN.json is lost and so is journal"):
        find_run(used)
    used.put(layout.record(0), body[:-9])
    with pytest.raises(CorruptionError, match="torn or damaged"):
        find_run(used)


def test_a_first_claim_that_repeats_another_run_does_not_stand_in(used: MemoryStore) -> None:
    key = Layout(uid_of(used)).record(0)
    used.delete(["RUN.json"])
    forge(used, key, lambda fields: fields.pop("run"))
    with pytest.raises(CorruptionError, match="does not repeat it"):
        find_run(used)
    forge(used, key, lambda fields: fields.update(run_uid="f" * 32, run={}))
    with pytest.raises(CorruptionError, match="does not repeat it"):
        find_run(used)


def test_a_run_of_a_newer_version_is_refused_although_the_journal_could_stand_in(used: MemoryStore) -> None:
    forge(used, "RUN.json", lambda fields: fields.update(version=2))
    with pytest.raises(UnsupportedError, match="upgrade"):
        find_run(used)
    forge(used, "RUN.json", lambda fields: fields.update(version=1, requires=["x"]))
    with pytest.raises(UnsupportedError, match="upgrade"):
        find_run(used)


@pytest.mark.parametrize("uid", ["../../../../../../../../../etc/xx", "ABCDEF0123456789" * 2, "", 5])
def test_a_run_file_with_an_impossible_uid_is_damaged(uid: object) -> None:
    store = new_store()
    create_run(store, clock=FakeClock(), ids=CountedIds())
    forge(store, "RUN.json", lambda fields: fields.update(run_uid=uid))
    with pytest.raises(CorruptionError, match="32 hexadecimal"):
        find_run(store)


def test_a_run_that_was_deleted_and_made_again_shares_nothing_with_the_writers_of_the_old_one(
    used: MemoryStore,
) -> None:
    zombie = new_session(used)
    take(zombie)
    old = zombie.journal.layout
    used.delete([info.key for info in used.list("")])
    heir = new_session(used)
    take(heir)
    save(heir, 5)
    save(zombie, 2)
    head = heir.refresh()
    assert [row.step for row in head.state.live] == [5]
    assert heir.journal.layout.uid8 != old.uid8
    abandon(zombie, heir)


def test_a_run_deleted_under_a_living_writer_is_never_taken_for_a_new_one(used: MemoryStore) -> None:
    session = new_session(used)
    take(session)
    used.delete([info.key for info in used.list("")])
    save(session, 2)
    abandon(session)
    with pytest.raises(CorruptionError, match=r"RUN.json is lost"):
        new_session(used).refresh()


def test_names_of_attempts_say_their_epoch_and_nothing_else_does() -> None:
    assert attempt_epoch(attempt_name(5, 17, "a" * 20)) == 17
    assert attempt_name(5, 17, "a" * 20) < attempt_name(12, 3, "a" * 20)
    assert attempt_epoch("000000000005-m-aaaaaaaaaaaa") == -1
    for name in ("x", "5-e1-short", "5-e-aaaaaaaaaaaa", "5-e1-AAAAAAAAAAAA", "-e1-aaaaaaaaaaaa", "5-e1-aaaaaaaaaaaa\n"):
        assert attempt_epoch(name) is None


def test_the_folder_of_a_record_is_found_in_its_key_and_in_no_other() -> None:
    layout = Layout("0123456789abcdef" * 2)
    assert journal_of(layout.record(0)) == journal_of(layout.record(10**12)) == "01234567"
    for key in (
        "journal/01234567/x.json",
        "journal/01234567",
        "index/01234567/0000000000.json",
        "journal/0000000000.json",
    ):
        assert journal_of(key) is None


def test_an_absent_number_is_absent_and_an_unreadable_one_is_damaged(used: MemoryStore) -> None:
    journal = new_journal(used)
    used.put(journal.layout.record(2), b"x" * (1 << 17))
    found = journal.read(2)
    assert isinstance(found, Damaged)
    assert "more than" in found.reason
