"""Does ``publish`` create a record under a name that did not exist, once, for all observers?

Every other promise of the protocol stands on this one. A store that declares that it can't (``exclusive`` is not
"atomic") must refuse each call, and is then used by a single writer only; so each test here ends in one of the two
proofs, never in a skip.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptstore.errors import ConfigError, UnsupportedError
from ckptstore.store import MAX_RECORD_BYTES, Conflict, Published
from ckptstore.testing.publish import assert_sequence, race_for_key, race_processes, race_threads
from ckptstore.testing.subject import Subject, assert_listed, must, record_of, should

__all__ = ["PublishContract"]

KEY = "journal/0123abcd/0000000000.json"
RACERS = 8
ROUNDS = 10
PROCESSES = 3


def publishes(subject: Subject) -> bool:
    """Say whether the store declares an exclusive publish; if not, assert that it refuses and writes nothing."""
    if subject.store.capabilities().exclusive == "atomic":
        return True
    before = subject.raw.keys()
    with pytest.raises(UnsupportedError):
        subject.store.publish("refused/0", record_of("never"), write_id="never")
    assert subject.raw.keys() == before
    return False


class PublishContract:
    """The tests of ``publish``."""

    @must("publish creates the whole record, in a new prefix too")
    def test_publish_creates_the_whole_record(self, subject: Subject) -> None:
        if not publishes(subject):
            return
        record = record_of("a", n_bytes=5000)
        assert subject.store.publish(KEY, record, write_id="a") == Published()
        assert subject.raw.read(KEY) == record
        assert subject.store.get(KEY, max_bytes=MAX_RECORD_BYTES) == record
        assert_listed(subject.store, "journal/", [KEY])

    @must("publish never replaces: the second one gets a Conflict that holds the first one's record")
    def test_a_second_publish_gets_the_record_that_was_there_first(self, subject: Subject) -> None:
        if not publishes(subject):
            return
        first = record_of("a", n_bytes=100)
        subject.store.publish(KEY, first, write_id="a")
        for store in (subject.store, subject.reopen()):
            assert store.publish(KEY, record_of("b", n_bytes=200), write_id="b") == Conflict(first)
            assert subject.raw.read(KEY) == first

    @must("publish with the same write id again is Published, by whatever store object")
    def test_publishing_again_with_the_same_write_id_is_published(self, subject: Subject) -> None:
        if not publishes(subject):
            return
        record = record_of("a")
        for store in (subject.store, subject.store, subject.reopen()):
            assert store.publish(KEY, record, write_id="a") == Published()
        assert subject.store.publish(KEY, record_of("b"), write_id="b") == Conflict(record)
        assert subject.store.publish(KEY, record, write_id="a") == Published()
        assert subject.raw.read(KEY) == record

    @must("there is one body ever, even if the same write id comes again with another")
    def test_the_same_write_id_with_another_body_changes_nothing(self, subject: Subject) -> None:
        if not publishes(subject):
            return
        first = record_of("a", try_number=1)
        subject.store.publish(KEY, first, write_id="a")
        assert subject.store.publish(KEY, record_of("a", try_number=2), write_id="a") == Published()
        assert subject.raw.read(KEY) == first

    @must("authorship is proven by the write id, not by equal content")
    def test_equal_content_under_another_write_id_is_a_conflict(self, subject: Subject) -> None:
        if not publishes(subject):
            return
        first = record_of("id-1", step=7)
        subject.store.publish(KEY, first, write_id="id-1")
        assert subject.store.publish(KEY, record_of("id-2", step=7), write_id="id-2") == Conflict(first)

    @must("a record that is found decides by its write id, whoever put it there")
    def test_a_record_found_under_the_key_decides_by_its_write_id(self, subject: Subject) -> None:
        if not publishes(subject):
            return
        # Ours: the first answer was lost. Another's: a writer that this store object knows nothing of.
        subject.raw.write("journal/0", record_of("ours"))
        subject.raw.write("journal/1", record_of("theirs"))
        assert subject.store.publish("journal/0", record_of("ours"), write_id="ours") == Published()
        assert subject.store.publish("journal/1", record_of("ours"), write_id="ours") == Conflict(record_of("theirs"))
        assert subject.raw.read("journal/1") == record_of("theirs")

    @must("whatever holds the name holds it: an empty, torn or foreign file is a Conflict")
    def test_a_file_without_a_write_id_is_a_conflict(self, subject: Subject) -> None:
        if not publishes(subject):
            return
        for number, body in enumerate((b"", b'{"write_id": "a', b"\x00\xff\n", b"[]\n", b'{"write_id": 5}\n')):
            key = f"journal/{number}"
            subject.raw.write(key, body)
            assert subject.store.publish(key, record_of("a"), write_id="a") == Conflict(body)
            assert subject.raw.read(key) == body

    @must("a Conflict holds at most the record limit, however large the file that is in the way")
    def test_a_conflict_holds_at_most_the_record_limit(self, subject: Subject) -> None:
        if not publishes(subject):
            return
        huge = record_of("other", n_bytes=MAX_RECORD_BYTES + 5000)
        subject.raw.write(KEY, huge)
        assert subject.store.publish(KEY, record_of("a"), write_id="a") == Conflict(huge[:MAX_RECORD_BYTES])

    @must("a record of 64 KiB is taken, a larger one refused before anything is written")
    def test_a_record_over_64_kib_is_refused(self, subject: Subject) -> None:
        if not publishes(subject):
            return
        largest = record_of("a", n_bytes=MAX_RECORD_BYTES)
        assert subject.store.publish(KEY, largest, write_id="a") == Published()
        assert subject.raw.read(KEY) == largest
        before = subject.raw.keys()
        with pytest.raises(ConfigError) as refused:
            subject.store.publish("journal/9", largest + b".", write_id="a")
        assert (refused.value.operation, refused.value.key) == ("publish", "journal/9")
        assert subject.raw.keys() == before

    @must("a record is seen by another store object as soon as publish returned, even by one that had just looked")
    def test_a_record_is_seen_at_once_by_another_store_object(self, subject: Subject) -> None:
        if not publishes(subject):
            return
        other = subject.reopen()
        for number in range(3):
            assert_listed(other, "journal", [f"journal/{before}" for before in range(number)])
            subject.store.publish(f"journal/{number}", record_of("a"), write_id="a")
            assert other.get(f"journal/{number}", max_bytes=100) == record_of("a")
        assert_listed(other, "journal", ["journal/0", "journal/1", "journal/2"])

    @must("a reader sees the whole record or none of it, while it is published")
    def test_a_reader_never_sees_part_of_a_record(self, subject: Subject) -> None:
        if not publishes(subject):
            return
        record = record_of("a", n_bytes=MAX_RECORD_BYTES)
        keys = [f"journal/{number}" for number in range(20)]
        published = threading.Event()

        def watch() -> set[int]:
            lengths = set()
            for key in keys:
                held = None
                while held is None and not published.is_set():
                    held = subject.raw.read(key)
                lengths.add(len(held or record))
            return lengths

        with ThreadPoolExecutor(1) as pool:
            seen = pool.submit(watch)
            try:
                for key in keys:
                    subject.store.publish(key, record, write_id="a")
            finally:
                published.set()
            assert seen.result() == {len(record)}

    @should("neither a won nor a lost publish leaves a temporary behind")
    def test_publish_leaves_only_records(self, subject: Subject) -> None:
        if not publishes(subject):
            return
        before = subject.raw.keys()
        subject.store.publish(KEY, record_of("a"), write_id="a")
        subject.store.publish(KEY, record_of("b"), write_id="b")
        # Who loses in the middle of a race has come further than who finds the record at once.
        races = [f"race/{number}" for number in range(ROUNDS)]
        for key in races:
            race_for_key([subject.store] * RACERS, key, subject.raw)
        assert subject.raw.keys() == before | {KEY, *races}
        assert list(subject.store.uploads("")) == []

    @must("of many threads that publish under one key one wins, and all others are shown its record")
    def test_one_of_many_threads_wins(self, subject: Subject) -> None:
        if not publishes(subject):
            return
        # Half of the racers share one store object, half have one each: locks of either kind would hide a race.
        stores = [subject.store] * (RACERS // 2) + [subject.reopen() for _ in range(RACERS // 2)]
        for number in range(ROUNDS):
            race_for_key(stores, f"race/{number}", subject.raw)

    @must("threads and processes that climb one sequence fill it densely, and each number has one winner")
    def test_many_writers_fill_one_sequence(self, subject: Subject) -> None:
        if not publishes(subject):
            return
        stores = [subject.store, subject.store, subject.reopen(), subject.reopen()]
        told = race_threads(stores, "climb/threads", name="thread", wins=10, limit=40)
        assert_sequence(subject.raw, "climb/threads", told)
        if subject.open_elsewhere is not None:
            told = race_processes(subject.open_elsewhere, "climb/processes", processes=PROCESSES, threads=2, wins=10)
            assert_sequence(subject.raw, "climb/processes", told)
