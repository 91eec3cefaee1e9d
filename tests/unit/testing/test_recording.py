"""A recording says what began and what had returned, in the order of time."""

from __future__ import annotations

import pytest

from ckptstore.errors import NotFoundError
from ckptstore.memory import MemoryStore
from ckptstore.testing.contract import StoreConformance, Subject
from ckptstore.testing.raw import RawMemory
from ckptstore.testing.recording import Event, RecordingStore
from ckptstore.testing.subject import record_of


class TestRecording(StoreConformance):
    """Being watched changes nothing."""

    @pytest.fixture
    def subject(self, request: pytest.FixtureRequest) -> Subject:
        name = request.node.nodeid
        store = RecordingStore(MemoryStore(name))
        return Subject(store=store, raw=RawMemory(name), reopen=lambda: RecordingStore(MemoryStore(name)))


def test_the_calls_are_noted_in_order_with_their_keys() -> None:
    store = RecordingStore(MemoryStore("recorded"))
    writer = store.create("data/a", 2, 1)
    writer.write(1, b"b")
    writer.write(0, b"a")
    writer.finish()
    store.publish("journal/0", record_of("a"), write_id="a")
    store.delete(["data/a", "data/b"])
    list(store.list("journal/"))
    assert store.calls == [
        ("create", "data/a"),
        ("write", "data/a"),
        ("write", "data/a"),
        ("finish", "data/a"),
        ("publish", "journal/0"),
        ("delete", "data/a data/b"),
        ("list", "journal/"),
    ]
    store.clear()
    assert store.calls == []


def test_both_ends_of_a_call_are_noted_and_a_failure_is_told_from_a_return() -> None:
    store = RecordingStore(MemoryStore("both-ends"))
    store.put("a", b"x")
    with pytest.raises(NotFoundError):
        store.get("b", max_bytes=1)
    store.put("b", b"x")
    listing = store.list("")
    next(listing)
    listing.close()  # type: ignore[attr-defined]  # seen enough of a listing is a return
    assert store.events == [
        Event("put", "a", "began"),
        Event("put", "a", "returned"),
        Event("get", "b", "began"),
        Event("get", "b", "failed"),
        Event("put", "b", "began"),
        Event("put", "b", "returned"),
        Event("list", "", "began"),
        Event("list", "", "returned"),
    ]
