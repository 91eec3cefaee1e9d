"""Do ``put``, ``get``, ``stat``, ``list`` and ``delete`` do what they say, and no more?"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptstore.errors import CorruptionError, NotFoundError
from ckptstore.store import DeleteResult
from ckptstore.testing.subject import Subject, assert_listed, must

__all__ = ["ObjectContract"]

MANY = 2500
"""More than two pages of any listing, more than two batches of any delete."""


class ObjectContract:
    """The tests of small objects, listings and deletion."""

    @must("put stores exactly the bytes, in a new prefix too, seen by others when it returns")
    def test_put_stores_exactly_the_bytes(self, subject: Subject) -> None:
        other = subject.reopen()
        for number, body in enumerate((b"", b"\x00", bytes(range(256)) * 41, b"\r\n\x1a" * 100_000)):
            key = f"data/deep/er/{number}"
            with pytest.raises(NotFoundError):
                other.get(key, max_bytes=1)
            subject.store.put(key, body)
            assert subject.raw.read(key) == body
            for store in (subject.store, other):
                assert store.get(key, max_bytes=len(body)) == body
                assert store.stat(key).n_bytes == len(body)

    @must("put replaces the whole object, a longer one by a shorter one too")
    def test_put_replaces_the_whole_object(self, subject: Subject) -> None:
        before = subject.raw.keys()
        other = subject.reopen()
        for body in (b"first", b"the second is longer", b"3rd", b""):
            subject.store.put("LATEST", body)
            assert subject.raw.read("LATEST") == body
            assert other.get("LATEST", max_bytes=100) == body
        assert subject.raw.keys() == before | {"LATEST"}

    @must("get returns what is stored now, whoever wrote it")
    def test_get_sees_what_another_program_wrote(self, subject: Subject) -> None:
        for body in (b"one", b"two and more", b""):
            subject.raw.write("pins/1", body)
            assert subject.store.get("pins/1", max_bytes=100) == body
        subject.raw.delete("pins/1")
        with pytest.raises(NotFoundError):
            subject.store.get("pins/1", max_bytes=100)

    @must("a reader of an object that is being replaced gets the old bytes or the new ones, whole")
    def test_a_reader_never_sees_part_of_a_put(self, subject: Subject) -> None:
        bodies = (b"a" * 60_000, b"b" * 90_000)
        subject.store.put("LATEST", bodies[0])
        other = subject.reopen()
        done = threading.Event()

        def watch() -> set[bytes]:
            seen = set()
            while not done.is_set():
                seen.add(other.get("LATEST", max_bytes=100_000))
                seen.add(subject.raw.read("LATEST") or b"absent")
            return seen

        with ThreadPoolExecutor(1) as pool:
            watching = pool.submit(watch)
            try:
                for number in range(40):
                    subject.store.put("LATEST", bodies[number % 2])
            finally:
                done.set()
            torn = [f"{len(body)} bytes, {body[:1]!r} to {body[-1:]!r}" for body in watching.result() - set(bodies)]
            assert torn == []

    @must("get refuses more than max_bytes")
    def test_get_refuses_more_than_max_bytes(self, subject: Subject) -> None:
        subject.raw.write("MANIFEST.json", b"x" * 1000)
        assert len(subject.store.get("MANIFEST.json", max_bytes=1000)) == len(b"x" * 1000)
        for max_bytes in (999, 0):
            with pytest.raises(CorruptionError) as refused:
                subject.store.get("MANIFEST.json", max_bytes=max_bytes)
            assert (refused.value.operation, refused.value.key) == ("get", "MANIFEST.json")

    @must("an absent object is NotFoundError, with verb and key, whether its prefix exists or not")
    def test_absent_is_not_found(self, subject: Subject) -> None:
        subject.store.put("data/here", b"x")
        for key in ("data/gone", "nowhere/at/all", "data/here/below"):
            buffer = bytearray(1)
            for verb, call in (
                ("get", lambda key=key: subject.store.get(key, max_bytes=10)),
                ("stat", lambda key=key: subject.store.stat(key)),
                ("read_into", lambda key=key, buffer=buffer: subject.store.read_into(key, 0, buffer)),
            ):
                with pytest.raises(NotFoundError) as absent:
                    call()
                assert (absent.value.operation, absent.value.key) == (verb, key)

    @must("a prefix of keys is not itself an object")
    def test_a_prefix_is_not_an_object(self, subject: Subject) -> None:
        subject.store.put("data/one/two", b"x")
        for key in ("data", "data/one"):
            with pytest.raises(NotFoundError):
                subject.store.get(key, max_bytes=10)
            with pytest.raises(NotFoundError):
                subject.store.stat(key)
            assert list(subject.store.delete([key])) == [DeleteResult(key=key)]
        assert subject.raw.read("data/one/two") == b"x"

    @must("keys that differ in case only are different objects")
    def test_case_matters(self, subject: Subject) -> None:
        subject.store.put("data/Key", b"upper")
        subject.store.put("data/key", b"lower")
        assert subject.store.get("data/Key", max_bytes=10) == b"upper"
        assert_listed(subject.store, "data/", ["data/Key", "data/key"])

    @must("stat and list give the key, the size, and the store's time where it has a clock")
    def test_stat_and_list_agree(self, subject: Subject) -> None:
        subject.raw.write("data/a", b"12345")
        found = subject.store.stat("data/a")
        assert (found.key, found.n_bytes) == ("data/a", 5)
        assert list(subject.store.list("data/a")) == [found]
        if subject.store.capabilities().store_clock:
            assert found.modified is not None
            assert found.modified > 0

    @must("list yields every key that starts with the prefix, at any depth, in key order")
    def test_list_compares_whole_keys(self, subject: Subject) -> None:
        # Between "a" and "a/" sort "a-" and "a.": a walk of directories yields another order.
        keys = ["a-b/x", "a.b", "a/b", "a/b-c", "a/bc/d", "a/bc/e/f", "a/c", "a0", "b/A", "b/a"]
        for key in reversed(keys):
            subject.raw.write(key, b"x")
        for prefix in ("", "a", "a/", "a/b", "a/bc", "a/bc/", "a/bc/e", "a/b/", "a/bc/d", "b/", "b/a", "c", "a/bc/d/"):
            assert_listed(subject.store, prefix, [key for key in keys if key.startswith(prefix)])

    @must("list with after yields only greater keys, whether that key exists or not")
    def test_list_goes_on_after_a_key(self, subject: Subject) -> None:
        keys = [f"journal/{number:010d}" for number in range(0, 20, 2)] + ["journal/x/1", "k"]
        for key in keys:
            subject.raw.write(key, b"x")
        for prefix in ("", "journal/"):
            for after in (
                "",
                "a",
                "journal/",
                "journal/0000000004",
                "journal/0000000005",
                "journal/x",
                "journal/x/1",
                "z",
            ):
                expected = [key for key in keys if key.startswith(prefix) and key > after]
                assert_listed(subject.store, prefix, expected, after=after)

    @must("a listing shows at once, also to a store object that has listed before, what was put and deleted")
    def test_list_is_never_a_memory_of_the_last_one(self, subject: Subject) -> None:
        other = subject.reopen()
        assert_listed(other, "data/", [])
        subject.store.put("data/a", b"x")
        assert_listed(other, "data/", ["data/a"])
        subject.raw.write("data/b", b"x")
        assert_listed(other, "data/", ["data/a", "data/b"])
        subject.store.delete(["data/a"])
        assert_listed(other, "data/", ["data/b"])
        assert_listed(subject.store, "data/", ["data/b"])

    @must("more keys than a page of listings or a batch of deletes holds are all listed and all deleted")
    def test_many_keys(self, subject: Subject) -> None:
        keys = [f"data/{number:05d}" for number in range(MANY)]
        for key in keys:
            subject.raw.write(key, b"x")
        subject.raw.write("data0", b"x")
        assert_listed(subject.store, "data/", keys)
        assert_listed(subject.store, "data/", keys[1001:], after=keys[1000])
        assert list(subject.store.delete(key for key in keys)) == [DeleteResult(key=key) for key in keys]
        assert_listed(subject.store, "data", ["data0"])
        assert subject.raw.keys() & set(keys) == set()

    @must("a listing survives that objects are deleted meanwhile")
    def test_a_listing_survives_deletion(self, subject: Subject) -> None:
        keys = [f"data/{name}/x" for name in "abcdef"]
        for key in keys:
            subject.raw.write(key, b"x")
        listing = subject.store.list("data/")
        seen = [next(listing).key]
        subject.store.delete(keys)
        seen += [info.key for info in listing]
        assert set(seen) <= set(keys)
        assert len(seen) == len(set(seen))

    @must("delete removes the named objects only, gives one result per key in order, and absent counts as removed")
    def test_delete_removes_the_named_objects_only(self, subject: Subject) -> None:
        for key in ("data/a", "data/ab", "data/a-b", "data/c/d", "e"):
            subject.raw.write(key, b"x")
        asked = ["data/c/d", "data/gone", "nowhere/gone", "data/a", "data/a"]
        assert list(subject.store.delete(iter(asked))) == [DeleteResult(key=key) for key in asked]
        assert_listed(subject.store, "", ["data/a-b", "data/ab", "e"])
        for key in asked:
            assert subject.raw.read(key) is None
        assert list(subject.store.delete([])) == []
