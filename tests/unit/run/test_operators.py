"""Commands change a run beside its living trainer: nothing is lost on either side, no one is stopped or starved."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from ckptstore.errors import (
    CkptStoreError,
    ConfigError,
    ConflictError,
    CorruptionError,
    FencedError,
    NotFoundError,
    OutcomeUnknownError,
    UnavailableError,
    UnsupportedError,
)
from ckptstore.memory import MemoryStore
from ckptstore.run import changes
from ckptstore.run.journal import Journal
from ckptstore.run.operators import operate
from ckptstore.run.records import Record
from ckptstore.run.runfile import find_run
from ckptstore.testing.faulty import AnswerLost, FailBefore, FaultPlan, FaultyStore
from tests.unit.run.world import (
    CountedIds,
    FakeClock,
    abandon,
    assert_sound,
    claim_change,
    forge,
    new_journal,
    new_session,
    new_store,
    push,
    push_commit,
    records_of,
    save,
    steps,
    take,
)

if TYPE_CHECKING:
    from ckptstore.run.journal import Head
    from ckptstore.store import CheckpointStore


def journal_on(store: CheckpointStore, clock: FakeClock) -> Journal:
    run = find_run(store)
    assert run is not None
    return Journal(store, run, clock=clock, ids=CountedIds())


def filled(n_commits: int = 3) -> MemoryStore:
    store = new_store()
    journal = new_journal(store)
    head = push(journal, claim_change())
    for step in range(1, n_commits + 1):
        head = push_commit(journal, step, head)
    return store


def decided(change: dict[str, Any], _: Head) -> dict[str, Any]:
    """Judge any head alike."""
    return change


class Contended(MemoryStore):
    """A store on which someone else is always a moment faster, *times* times."""

    def __init__(self, store: MemoryStore, times: int) -> None:
        super().__init__(store.url.removeprefix("memory://"))
        self.times = times
        self.publishes: list[str] = []

    def publish(self, key: str, record: bytes, *, write_id: str) -> Any:
        self.publishes.append(key[-15:-5])
        if self.times:
            self.times -= 1
            push(new_journal(MemoryStore(self._name)), changes.note("faster"))
        return super().publish(key, record, write_id=write_id)


def test_a_command_publishes_under_the_owner_s_epoch_with_a_writer_of_its_own() -> None:
    store = filled()
    head = operate(new_journal(store), lambda head: changes.tag(2, add=["good"]))
    assert head is not None
    record = new_journal(store).read(4)
    assert isinstance(record, Record)
    assert (record.epoch, record.kind, head.state.live[1].tags) == (0, "tag", ("good",))
    assert record.writer["id"] != "someone"
    assert new_journal(store).head() == head


def test_a_command_without_anything_to_do_publishes_nothing() -> None:
    store = filled()
    assert operate(new_journal(store), lambda head: None) is None
    assert new_journal(store).head().seq == 3


def test_after_a_lost_race_the_command_waits_a_second_or_more_and_is_judged_again_on_the_new_head() -> None:
    store, clock = filled(), FakeClock()
    contended = Contended(store, 3)
    judged: list[int] = []

    def judge(head: Head) -> dict[str, Any]:
        judged.append(head.seq)
        return changes.tag(2, add=[f"on-{head.seq}"])

    head = operate(journal_on(contended, clock), judge)
    assert head is not None
    assert judged == [3, 4, 5, 6]
    assert head.state.live[1].tags == ("on-6",)
    assert len(clock.slept) == 3
    assert all(1 <= seconds <= 2 for seconds in clock.slept)
    assert len(set(clock.slept)) > 1  # with jitter
    assert contended.publishes == ["0000000004", "0000000005", "0000000006", "0000000007"]


def test_a_command_that_has_nothing_left_to_do_after_a_lost_race_is_dropped() -> None:
    store, clock = filled(), FakeClock()
    done = operate(journal_on(Contended(store, 1), clock), lambda head: changes.note("x") if head.seq == 3 else None)
    assert done is None
    assert new_journal(store).head().seq == 4


def test_a_command_gives_up_after_eight_lost_races() -> None:
    store, clock = filled(), FakeClock()
    contended = Contended(store, 100)
    with pytest.raises(ConflictError, match=r"8 races .* nothing was changed"):
        operate(journal_on(contended, clock), lambda head: changes.note("mine"))
    assert len(contended.publishes) == 8
    assert len(clock.slept) == 7
    texts = [record.change.get("text") for record in records_of(store) if isinstance(record, Record)]
    assert "mine" not in texts


def test_the_epoch_is_that_of_the_head_even_if_a_claim_was_faster() -> None:
    store, clock = filled(), FakeClock()

    class Claimed(Contended):
        def publish(self, key: str, record: bytes, *, write_id: str) -> Any:
            if self.times:
                self.times = 0
                push(new_journal(store), claim_change())
            return super().publish(key, record, write_id=write_id)

    head = operate(journal_on(Claimed(store, 1), clock), lambda head: changes.tag(1, add=["x"]))
    assert head is not None
    assert (head.seq, head.state.epoch) == (5, 4)


@pytest.mark.parametrize("kind", ["claim", "commit", "explode", None])
def test_a_command_never_claims_or_commits(kind: str | None) -> None:
    store = filled()
    with pytest.raises(ConfigError, match="only the run's owner"):
        operate(new_journal(store), lambda head: {"kind": kind})
    assert new_journal(store).head().seq == 3


def test_an_empty_journal_has_nothing_to_change() -> None:
    with pytest.raises(NotFoundError, match="never claimed"):
        operate(new_journal(new_store()), lambda head: changes.note("x"))


@pytest.mark.parametrize("exclusive", ["weak", "none"])
def test_a_store_without_exclusive_creation_takes_no_commands(exclusive: Any) -> None:
    class Weak(MemoryStore):
        def capabilities(self) -> Any:
            return dataclasses.replace(super().capabilities(), exclusive=exclusive)

    store = filled()
    with pytest.raises(UnsupportedError, match="single-writer mode"):
        operate(new_journal(Weak(store.url.removeprefix("memory://"))), lambda head: changes.note("x"))
    assert new_journal(store).head().seq == 3


def test_over_a_damaged_record_that_may_be_a_claim_no_command_publishes() -> None:
    for seqs in ([3], [0, 1, 2, 3]):
        store = filled()
        for seq in seqs:
            store.put(new_journal(store).layout.record(seq), b"torn")
        with pytest.raises(CorruptionError, match="may be a claim"):
            operate(new_journal(store), lambda head: changes.note("x"))
        assert new_journal(store).head().seq == 3


def test_a_record_torn_while_the_command_waited_stops_it_too() -> None:
    store, clock = filled(), FakeClock()
    clock.on_sleep = lambda _: store.put(new_journal(store).layout.record(5), b"torn")
    with pytest.raises(CorruptionError, match="may be a claim"):
        operate(journal_on(Contended(store, 1), clock), lambda head: changes.note("x"))


def test_a_command_never_raises_what_a_reader_must_know() -> None:
    store = filled()
    operate(new_journal(store), lambda head: changes.note("x"))
    newest = new_journal(store).read(4)
    assert isinstance(newest, Record)
    assert newest.requires == ()
    forge(store, new_journal(store).layout.record(4), lambda fields: fields.update(requires=["teleport"]))
    with pytest.raises(UnsupportedError, match="teleport"):  # nor writes where it does not know it
        operate(new_journal(store), lambda head: changes.note("x"))


def test_a_tag_too_many_is_refused_and_the_run_stays_readable() -> None:
    store = filled()
    operate(new_journal(store), lambda head: changes.tag(1, add=[f"t{n}" for n in range(16)]))
    with pytest.raises(ConfigError, match="17 tags"):
        operate(new_journal(store), lambda head: changes.tag(1, add=["one more"]))
    assert len(new_journal(store).head().state.live[0].tags) == 16


def test_an_unknown_outcome_is_reported_and_a_certain_failure_is_one() -> None:
    for fault, error in ((AnswerLost(), OutcomeUnknownError), (FailBefore(), UnavailableError)):
        store = filled()
        faulty = FaultyStore(store, FaultPlan({("publish", 0): fault}))
        with pytest.raises(error):
            operate(new_journal(faulty), lambda head: changes.tag(1, add=["x"]))
        assert new_journal(store).head().seq == (4 if error is OutcomeUnknownError else 3)


def test_a_loop_of_commands_beside_a_committing_writer_loses_nothing_on_either_side() -> None:
    store = new_store()
    session = new_session(store)
    take(session)
    save(session, 1)
    failed: list[BaseException] = []
    tagged: list[str] = []
    finished = threading.Event()

    def command() -> None:
        clock = FakeClock()
        clock.on_sleep = lambda _: None  # the back-off passes at once: the worst case for the writer
        try:
            for number in itertools.count():
                if finished.is_set() or number == 15:
                    return
                tag = f"t{number}"
                if operate(journal_on(store, clock), partial(decided, changes.tag(1, add=[tag]))) is not None:
                    tagged.append(tag)
        except ConflictError:
            return
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=command)
    thread.start()
    for step in range(2, 60):
        save(session, step)
    finished.set()
    thread.join()
    assert failed == []
    assert session.owns
    head = assert_sound(store)
    assert steps(head) == list(range(1, 60))
    assert head.state.live[0].tags == tuple(sorted(tagged))
    abandon(session)


def test_commands_never_fence_a_writer_and_a_claim_does() -> None:
    store = new_store()
    session, other = new_session(store), new_session(store)
    take(session)
    save(session, 1)
    for act in (changes.tag(1, add=["x"]), changes.note("x"), changes.retire([1], policy="p", reasons={})):
        operate(new_journal(store), partial(decided, act))
    session.refresh()
    save(session, 2)
    take(other)
    operate(new_journal(store), lambda head: changes.note("x"))
    with pytest.raises(FencedError):
        save(session, 3)
    assert steps(assert_sound(store)) == [2]
    abandon(session, other)


def test_two_commands_at_once_both_take_effect() -> None:
    store = filled()
    errors: list[CkptStoreError] = []
    start = threading.Barrier(4)

    def command(number: int) -> None:
        start.wait()
        try:
            operate(journal_on(store, FakeClock()), lambda head: changes.tag(1, add=[f"t{number}"]))
        except CkptStoreError as error:
            errors.append(error)

    threads = [threading.Thread(target=command, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert new_journal(store).head().state.live[0].tags == ("t0", "t1", "t2", "t3")
