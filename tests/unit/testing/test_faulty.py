"""Injected faults are the ones that were asked for, at the call that was asked for, and no others."""

from __future__ import annotations

import itertools
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from ckptstore.errors import (
    CkptStoreError,
    ConfigError,
    NotFoundError,
    OutcomeUnknownError,
    StorageFullError,
    UnavailableError,
)
from ckptstore.memory import MemoryStore
from ckptstore.store import Conflict, Published
from ckptstore.testing.contract import StoreConformance, Subject
from ckptstore.testing.faulty import (
    AnswerLost,
    Die,
    Duplicated,
    FailBefore,
    FaultPlan,
    FaultyStore,
    Killed,
    Late,
    Torn,
    possible_faults,
    single_faults,
)
from ckptstore.testing.raw import RawMemory
from ckptstore.testing.subject import record_of

if TYPE_CHECKING:
    from ckptstore.store import CheckpointStore
    from ckptstore.testing.faulty import Fault

names = itertools.count()


@pytest.fixture
def inner() -> MemoryStore:
    return MemoryStore(f"faulty-{next(names)}")


def faulty(inner: CheckpointStore, verb: str, fault: Fault, call: int = 0) -> FaultyStore:
    return FaultyStore(inner, FaultPlan({(verb, call): fault}))


class TestWithoutFaults(StoreConformance):
    """A plan without faults changes nothing."""

    @pytest.fixture
    def subject(self, request: pytest.FixtureRequest) -> Subject:
        name = request.node.nodeid
        store = FaultyStore(MemoryStore(name))
        return Subject(store=store, raw=RawMemory(name), reopen=lambda: FaultyStore(MemoryStore(name)))


def test_a_fault_before_the_verb_leaves_nothing_and_meets_one_call_only(inner: MemoryStore) -> None:
    store = faulty(inner, "put", FailBefore(StorageFullError), call=1)
    store.put("a", b"1")
    with pytest.raises(StorageFullError) as error:
        store.put("b", b"2")
    assert (error.value.operation, error.value.key) == ("put", "b")
    store.put("c", b"3")
    assert [info.key for info in inner.list("")] == ["a", "c"]
    assert store.met == [("put", 1, FailBefore(StorageFullError))]


def test_a_lost_answer_of_publish_is_unknown_and_the_record_is_there(inner: MemoryStore) -> None:
    store = faulty(inner, "publish", AnswerLost())
    with pytest.raises(OutcomeUnknownError):
        store.publish("journal/0", record_of("a"), write_id="a")
    assert inner.get("journal/0", max_bytes=100) == record_of("a")
    assert store.publish("journal/0", record_of("a"), write_id="a") == Published()


def test_a_lost_conflict_is_unknown_too(inner: MemoryStore) -> None:
    inner.publish("journal/0", record_of("b"), write_id="b")
    store = faulty(inner, "publish", AnswerLost())
    with pytest.raises(OutcomeUnknownError):
        store.publish("journal/0", record_of("a"), write_id="a")
    assert store.publish("journal/0", record_of("a"), write_id="a") == Conflict(record_of("b"))


def test_unknown_may_also_mean_that_nothing_happened(inner: MemoryStore) -> None:
    store = faulty(inner, "publish", FailBefore(OutcomeUnknownError))
    with pytest.raises(OutcomeUnknownError):
        store.publish("journal/0", record_of("a"), write_id="a")
    assert list(inner.list("")) == []


def test_a_lost_answer_of_another_verb_is_unavailable_and_it_happened(inner: MemoryStore) -> None:
    inner.put("b", b"x")
    store = FaultyStore(inner, FaultPlan({("put", 0): AnswerLost(), ("delete", 0): AnswerLost()}))
    with pytest.raises(UnavailableError):
        store.put("a", b"x")
    with pytest.raises(UnavailableError):
        store.delete(["b"])
    assert [info.key for info in inner.list("")] == ["a"]


def test_a_late_publish_arrives_when_the_caller_has_moved_on(inner: MemoryStore) -> None:
    store = faulty(inner, "publish", Late(calls=2))
    with pytest.raises(OutcomeUnknownError):
        store.publish("journal/0", record_of("a"), write_id="a")
    with pytest.raises(NotFoundError):
        store.stat("journal/0")
    # Before the second call from then on: it is there when that one looks.
    assert store.stat("journal/0").n_bytes == len(record_of("a"))


def test_a_late_publish_loses_to_what_was_published_meanwhile(inner: MemoryStore) -> None:
    store = faulty(inner, "publish", Late())
    with pytest.raises(OutcomeUnknownError):
        store.publish("journal/0", record_of("a"), write_id="a")
    assert store.publish("journal/0", record_of("b"), write_id="b") == Published()
    assert store.release() == 1
    assert store.release() == 0
    assert inner.get("journal/0", max_bytes=100) == record_of("b")


def test_a_late_write_arrives_after_its_caller_was_killed_with_the_bytes_of_then(inner: MemoryStore) -> None:
    store = FaultyStore(inner, FaultPlan({("write", 0): Late(), ("finish", 0): Late(), ("abort", 0): Die()}))
    buffer = bytearray(b"then")
    writer = store.create("a", 4, 4)
    with pytest.raises(UnavailableError):
        writer.write(0, buffer)
    buffer[:] = b"now!"
    with pytest.raises(UnavailableError):
        writer.finish()
    with pytest.raises(Killed):
        writer.abort()
    assert store.release() == 2
    assert inner.get("a", max_bytes=10) == b"then"


def test_a_duplicated_verb_gives_the_second_answer(inner: MemoryStore) -> None:
    store = FaultyStore(inner, FaultPlan({("publish", 0): Duplicated(), ("create", 0): Duplicated()}))
    assert store.publish("journal/0", record_of("a"), write_id="a") == Published()
    with pytest.raises(CkptStoreError, match="exists"):
        store.create("data/a", 1, 1)
    assert [upload.key for upload in inner.uploads("")] == ["data/a"]


def test_a_torn_write_keeps_a_prefix_and_spoils_the_rest(inner: MemoryStore) -> None:
    store = faulty(inner, "write", Torn(3))
    writer = store.create("a", 8, 8)
    with pytest.raises(UnavailableError):
        writer.write(0, b"abcdefgh")
    # What a caller would get that ignored the error.
    writer.finish()
    held = inner.get("a", max_bytes=10)
    assert held[:3] == b"abc"
    assert held != b"abcdefgh"


def test_a_torn_read_fills_a_part_of_the_buffer(inner: MemoryStore) -> None:
    inner.put("a", b"abcdef")
    buffer = bytearray(6)
    with pytest.raises(UnavailableError):
        faulty(inner, "read_into", Torn(2)).read_into("a", 0, buffer)
    assert buffer == b"ab\0\0\0\0"


def test_a_torn_listing_breaks_off(inner: MemoryStore) -> None:
    for key in "abc":
        inner.put(key, b"x")
    seen: list[str] = []
    with pytest.raises(UnavailableError):
        seen.extend(info.key for info in faulty(inner, "list", Torn(2)).list(""))
    listing = faulty(inner, "list", Torn(2)).list("")
    assert [next(listing).key, next(listing).key] == ["a", "b"]
    with pytest.raises(UnavailableError):
        next(listing)


def test_a_torn_listing_of_uploads_breaks_off(inner: MemoryStore) -> None:
    for key in "abc":
        inner.create(key, 1, 1)
    uploads = faulty(inner, "uploads", Torn(1)).uploads("")
    assert next(uploads).key == "a"
    with pytest.raises(UnavailableError):
        next(uploads)


def test_a_torn_delete_removes_some_and_says_which(inner: MemoryStore) -> None:
    for key in "abc":
        inner.put(key, b"x")
    results = faulty(inner, "delete", Torn(2)).delete("abc")
    assert [(result.key, type(result.error)) for result in results] == [
        ("a", type(None)),
        ("b", type(None)),
        ("c", UnavailableError),
    ]
    assert [info.key for info in inner.list("")] == ["c"]


@pytest.mark.parametrize("fault, stored", [(Die(), []), (Die(after=True), ["a"])], ids=["before", "after"])
def test_a_killed_caller_reaches_the_store_no_more(inner: MemoryStore, fault: Fault, stored: list[str]) -> None:
    store = faulty(inner, "finish", fault)
    writer = store.create("a", 1, 1)
    writer.write(0, b"x")
    with pytest.raises(Killed):
        writer.finish()
    assert store.killed
    for call in (
        lambda: store.put("b", b"x"),
        lambda: store.publish("c", record_of("a"), write_id="a"),
        lambda: list(store.list("")),
        lambda: writer.write(0, b"x"),
        writer.abort,
        store.capabilities,
        store.close,
    ):
        with pytest.raises(Killed):
            call()
    assert [info.key for info in inner.list("")] == stored


def test_a_kill_in_one_thread_keeps_the_others_from_learning_more() -> None:
    inside, resume = threading.Event(), threading.Event()

    class SlowGet(MemoryStore):
        def get(self, key: str, *, max_bytes: int) -> bytes:
            inside.set()
            resume.wait()
            return super().get(key, max_bytes=max_bytes)

    inner = SlowGet("slow-get")
    inner.put("a", b"x")
    store = faulty(inner, "put", Die())
    caught: list[BaseException] = []

    def read() -> None:
        try:
            store.get("a", max_bytes=1)
        except Killed as killed:
            caught.append(killed)

    reader = threading.Thread(target=read)
    reader.start()
    inside.wait()
    with pytest.raises(Killed):
        store.put("b", b"x")
    resume.set()
    reader.join()
    assert len(caught) == 1


def test_a_caller_can_be_killed_in_the_middle_of_a_verb(inner: MemoryStore) -> None:
    for key in ("a", "b"):
        inner.put(key, b"x")
    store = faulty(inner, "delete", Torn(1, kill=True))
    with pytest.raises(Killed):
        store.delete(["a", "b"])
    assert store.killed
    assert [info.key for info in inner.list("")] == ["b"]


def test_killed_is_no_error_that_a_living_caller_would_handle() -> None:
    assert not issubclass(Killed, Exception)


def test_abort_never_raises_whatever_the_fault(inner: MemoryStore) -> None:
    store = faulty(inner, "abort", FailBefore())
    writer = store.create("a", 1, 1)
    writer.abort()
    assert [upload.key for upload in inner.uploads("")] == ["a"]


def scenario(store: CheckpointStore) -> None:
    """Use every verb once or more."""
    writer = store.create("data/a", 300, 200)
    writer.write(0, b"x" * 200)
    writer.write(200, b"y" * 100)
    writer.finish()
    store.create("data/b", 1, 1).abort()
    store.put("LATEST", b"0")
    store.publish("journal/0", record_of("a"), write_id="a")
    store.get("LATEST", max_bytes=10)
    store.stat("data/a")
    store.read_into("data/a", 0, bytearray(300))
    list(store.list(""))
    for upload in list(store.uploads("")):
        store.abort_upload(upload)
    store.delete(["data/a", "LATEST"])


def test_every_single_fault_is_met_by_the_call_it_was_planned_for(inner: MemoryStore) -> None:
    counting = FaultyStore(inner)
    scenario(counting)
    assert counting.calls["write"] == 2
    plans = list(single_faults(counting.calls))
    assert len(plans) == sum(len(possible_faults(verb)) * n_calls for verb, n_calls in counting.calls.items())
    for plan in plans:
        ((verb, call),) = plan.faults
        store = FaultyStore(MemoryStore(f"faulty-{next(names)}"), plan)
        with suppress(CkptStoreError, Killed):
            scenario(store)
        assert store.met == [(verb, call, plan.faults[verb, call])]


def test_the_same_seed_draws_the_same_faults() -> None:
    calls = {"publish": 3, "put": 2, "write": 5}
    plans = [FaultPlan.sampled(seed, calls) for seed in range(50)]
    assert plans == [FaultPlan.sampled(seed, dict(reversed(calls.items()))) for seed in range(50)]
    assert all(len(plan.faults) == 2 for plan in plans)
    assert len({str(plan) for plan in plans}) > 25
    assert all(call < calls[verb] for plan in plans for verb, call in plan.faults)
    assert len(FaultPlan.sampled(0, {"put": 1}, n_faults=5).faults) == 1


@pytest.mark.parametrize(
    "verb, fault",
    [
        ("publish", Torn(5)),
        ("put", Torn(5)),
        ("get", AnswerLost()),
        ("stat", Late()),
        ("abort", Torn(1)),
        ("nap", Die()),
    ],
    ids=str,
)
def test_a_fault_that_the_contract_rules_out_is_refused(verb: str, fault: Fault) -> None:
    with pytest.raises(ConfigError, match=verb):
        FaultPlan({(verb, 0): fault})
