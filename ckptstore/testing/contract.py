"""Does a store keep every promise of ``CheckpointStore``?

One class per backend: derive from StoreConformance, give it a ``subject``, and pytest runs the contract. What the
store wrote is read past it, and what it reads was planted past it, so that a store can't agree with itself about
something that is not there. Tests are grouped by verb in modules of their own; here stands what concerns all verbs. A
test takes nothing but the subject, so that it can be run without pytest's fixtures too.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from ckptstore.errors import ConfigError
from ckptstore.store import MAX_KEY_BYTES, MAX_SEGMENT_BYTES
from ckptstore.testing.contract_objects import ObjectContract
from ckptstore.testing.contract_payload import PayloadContract
from ckptstore.testing.contract_publish import PublishContract, publishes
from ckptstore.testing.stateful import drive_against_memory
from ckptstore.testing.subject import Subject, assert_listed, must, record_of, write_parts

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptstore.store import CheckpointStore

__all__ = ["StoreConformance", "Subject"]

BAD_KEYS = (
    "",
    "/",
    "/a",
    "a//b",
    ".",
    "..",
    "../a",
    "a/../b",
    "a/./b",
    "./a",
    ".hidden",
    "a/.tmp-b",
    "a b",
    "a\n",
    "a\nb",
    "a\x00b",
    "a\\b",
    "a:b",
    "a*",
    "%2e%2e/a",
    "é",
    "٣",
    "~/a",
    "x" * (MAX_SEGMENT_BYTES + 1),
    "/".join(["x" * 100] * 11),
)
LONGEST_SEGMENT = "data/" + "s" * MAX_SEGMENT_BYTES
LONGEST_KEY = "/".join(["k" * MAX_SEGMENT_BYTES] * 5 + ["k" * (MAX_KEY_BYTES - 5 * (MAX_SEGMENT_BYTES + 1))])


def _publish(store: CheckpointStore, key: str) -> None:
    store.publish(key, record_of("a"), write_id="a")


VERBS: tuple[Callable[[CheckpointStore, str], object], ...] = (
    lambda store, key: store.put(key, b"x"),
    lambda store, key: store.get(key, max_bytes=10),
    lambda store, key: store.create(key, 1, store.capabilities().part_bytes_min),
    lambda store, key: store.read_into(key, 0, bytearray(1)),
    lambda store, key: store.stat(key),
)
"""One call of every verb that takes a key, but for publish, which a store may refuse, and delete."""


class StoreConformance(PublishContract, ObjectContract, PayloadContract):
    """The whole contract. Override ``subject``; each test gets one of its own, on empty data."""

    @pytest.fixture
    def subject(self) -> Subject:
        """The backend under test."""
        message = f"{type(self).__name__} has to define the fixture `subject`"
        raise NotImplementedError(message)

    @must("an illegal key is refused by every verb before anything is written")
    def test_an_illegal_key_is_refused(self, subject: Subject) -> None:
        calls = [*VERBS, _publish] if publishes(subject) else VERBS
        before = subject.raw.keys()
        for key in (*BAD_KEYS, "a/"):
            for call in calls:
                with pytest.raises(ConfigError) as refused:
                    call(subject.store, key)
                assert refused.value.key or not key
        for prefix in (prefix for prefix in BAD_KEYS if prefix):
            for listing in (subject.store.list, subject.store.uploads):
                with pytest.raises(ConfigError):
                    list(listing(prefix))
        assert subject.raw.keys() == before

    @must("delete refuses an illegal key, by an exception or in its result, and touches nothing under that name")
    def test_delete_refuses_an_illegal_key(self, subject: Subject) -> None:
        subject.raw.write("data/a", b"x")
        for key in (*BAD_KEYS, "data/", "data/../data/a", "./data/a"):
            try:
                results = subject.store.delete([key])
            except ConfigError:
                continue
            assert [type(result.error) for result in results] == [ConfigError]
        assert subject.raw.read("data/a") == b"x"

    @must("the longest legal keys and segments work for every verb")
    def test_the_longest_keys_work(self, subject: Subject) -> None:
        part_bytes = subject.store.capabilities().part_bytes_min
        for key in (LONGEST_SEGMENT, LONGEST_KEY):
            subject.store.put(key, b"put")
            assert subject.store.get(key, max_bytes=10) == b"put"
            assert_listed(subject.store, key, [key])
            subject.store.delete([key])
            writer = subject.store.create(f"{key[:-1]}C", 3, part_bytes)
            write_parts(writer, b"abc", part_bytes)
            writer.finish()
            assert subject.raw.read(f"{key[:-1]}C") == b"abc"
            if publishes(subject):
                record = record_of("a")
                subject.store.publish(f"{key[:-1]}P", record, write_id="a")
                assert subject.raw.read(f"{key[:-1]}P") == record

    @must("an empty root is an empty store")
    def test_an_empty_root_is_an_empty_store(self, subject: Subject) -> None:
        assert_listed(subject.store, "", [])
        assert_listed(subject.store, "journal/", [])
        assert list(subject.store.uploads("")) == []

    @must("two store objects on the same data have the same url, and see each other's writes")
    def test_equal_urls_share_their_data(self, subject: Subject) -> None:
        other = subject.reopen()
        assert other is not subject.store
        assert other.url == subject.store.url
        assert "://" in subject.store.url
        subject.store.put("data/a", b"x")
        assert other.get("data/a", max_bytes=1) == b"x"

    @must("capabilities are the same at every call and for every store object on the same data")
    def test_capabilities_do_not_change(self, subject: Subject) -> None:
        promised = subject.store.capabilities()
        assert subject.store.capabilities() == promised
        assert subject.reopen().capabilities() == promised

    @must("asking for capabilities leaves nothing that a listing of the run's own prefixes shows")
    def test_a_probe_leaves_the_run_alone(self, subject: Subject) -> None:
        subject.store.capabilities()
        assert all(info.key.startswith("probe/") for info in subject.store.list(""))

    @must("close is idempotent, and the data outlive it")
    def test_close_is_idempotent(self, subject: Subject) -> None:
        other = subject.reopen()
        with other:
            other.put("data/a", b"x")
        other.close()
        assert subject.store.get("data/a", max_bytes=1) == b"x"

    @must("one store object serves many threads at once")
    def test_threads_do_not_disturb_each_other(self, subject: Subject) -> None:
        part_bytes = subject.store.capabilities().part_bytes_min
        mine = publishes(subject)

        def work(worker: int) -> None:
            prefix = f"data/{worker}"
            for number in range(5):
                body = f"{worker} {number} ".encode() * (100 + worker)
                subject.store.put(f"{prefix}/put", body)
                assert subject.store.get(f"{prefix}/put", max_bytes=len(body)) == body
                size = max(part_bytes, 256)
                writer = subject.store.create(f"{prefix}/object-{number}", len(body), size)
                write_parts(writer, body, size)
                writer.finish()
                buffer = bytearray(len(body) - 1)
                subject.store.read_into(f"{prefix}/object-{number}", 1, buffer)
                assert buffer == body[1:]
                if mine:
                    write_id = f"{worker}-{number}"
                    subject.store.publish(f"{prefix}/{number}", record_of(write_id), write_id=write_id)
            assert_listed(
                subject.store,
                prefix,
                [f"{prefix}/put"]
                + [f"{prefix}/object-{number}" for number in range(5)]
                + [f"{prefix}/{number}" for number in range(5) if mine],
            )
            subject.store.delete([info.key for info in subject.store.list(f"{prefix}/")])

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        assert_listed(subject.store, "", [])

    @must("any sequence of verbs has the results that the reference has")
    def test_behaves_like_the_reference(self, subject: Subject) -> None:
        drive_against_memory(subject)
