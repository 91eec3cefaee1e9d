"""One owner at a time: it keeps what others added, stops for good when it is fenced, and settles what it can't know."""

from __future__ import annotations

import os
import threading
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from ckptstore.errors import (
    AlreadyExistsError,
    CkptStoreError,
    ConfigError,
    ConflictError,
    CorruptionError,
    FencedError,
    NotFoundError,
    OutcomeUnknownError,
    StorageFullError,
    UnavailableError,
)
from ckptstore.memory import MemoryStore
from ckptstore.run import changes
from ckptstore.run.operators import operate
from ckptstore.run.records import Record
from ckptstore.run.session import Lost, Session, open_session, release
from ckptstore.run.strict_json import sha256_hex
from ckptstore.testing.faulty import AnswerLost, FailBefore, FaultPlan, FaultyStore, Late
from ckptstore.testing.recording import RecordingStore
from tests.unit.run.world import (
    CountedIds,
    FakeClock,
    abandon,
    assert_sound,
    forge,
    new_journal,
    new_session,
    new_store,
    numbered,
    push,
    push_commit,
    records_of,
    save,
    steps,
    take,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckptstore.run.journal import Head
    from ckptstore.store import CheckpointStore


@pytest.fixture
def store() -> MemoryStore:
    return new_store()


@pytest.fixture
def writers() -> Iterator[Callable[..., Session]]:
    """Makes sessions whose threads end with the test."""
    made: list[Session] = []

    def make(store: CheckpointStore, **fields: Any) -> Session:
        made.append(new_session(store, **fields))
        return made[-1]

    yield make
    abandon(*made)


def tag(store: CheckpointStore, seq: int, *add: str) -> Head | None:
    return operate(new_journal(store), lambda head: changes.tag(seq, add=add))


def retire(store: CheckpointStore, *seqs: int) -> Head | None:
    return operate(new_journal(store), lambda head: changes.retire(seqs, policy="p", reasons={}))


def note(store: CheckpointStore) -> Head | None:
    return operate(new_journal(store), lambda head: changes.note("hello"))


# ── the ordinary life of a run ───────────────────────────────────────────────────────────────────────────────────────


def test_making_a_session_and_looking_publishes_nothing(store: MemoryStore) -> None:
    session = new_session(store)
    assert session.refresh().seq == -1
    assert session.tip() is None
    session.close()
    assert list(store.list("")) == []


def test_a_run_begins_with_a_claim_that_repeats_its_run_file_and_names_its_writer(
    store: MemoryStore, writers: Callable[..., Session]
) -> None:
    session = writers(store, job="slurm:1")
    head = take(session, keep="last=3", world_size=4)
    assert (head.seq, session.epoch, session.owns) == (0, 0, True)
    claim = head.record
    assert claim is not None
    assert claim.run == session.journal.run.file
    assert claim.writer["pid"] == os.getpid()
    assert claim.writer["job"] == "slurm:1"
    assert claim.change == {
        "kind": "claim",
        "resume_from": None,
        "branch": None,
        "reason": "a test",
        "world_size": 4,
        "takeover_of": None,
        "exclusive": "atomic",
        "keep": "last=3",
    }
    assert assert_sound(store) == head


def test_commits_follow_each_other_and_are_parents_of_the_next(
    store: MemoryStore, writers: Callable[..., Session]
) -> None:
    session = writers(store)
    take(session)
    rows = [save(session, step, tags=("x",), metrics={"loss": 0.5}, permanent=step == 2) for step in (1, 2, 3)]
    assert [row.parent for row in rows] == [None, 1, 2]
    assert session.tip() == rows[-1]
    assert assert_sound(store).state.live == tuple(rows)


def test_the_next_writer_goes_on_and_names_whom_it_took_over_from(
    store: MemoryStore, writers: Callable[..., Session]
) -> None:
    first, second = writers(store), writers(store)
    take(first)
    save(first, 1)
    head = take(second)
    assert head.record is not None
    assert head.record.change["takeover_of"]["id"] == first.me.id
    assert head.record.change["resume_from"]["step"] == 1
    save(second, 2)
    assert steps(assert_sound(store)) == [1, 2]


def test_a_rollback_and_a_fresh_start_decide_the_lineage_and_survive_a_crash(
    store: MemoryStore, writers: Callable[..., Session]
) -> None:
    session = writers(store)
    take(session)
    rows = [save(session, step) for step in (100, 200, 300)]
    take(session, row=rows[0], branch={"seq": 1, "step": 100})
    assert steps(assert_sound(store)) == [100]  # crashed here: the claim is the decision
    after = writers(store)
    take(after)
    save(after, 150)
    assert steps(assert_sound(store)) == [100, 150]
    take(after, row=None)
    assert steps(assert_sound(store)) == []
    save(after, 50)
    assert steps(assert_sound(store)) == [50]
    assert [row.step for row in assert_sound(store).state.live] == [100, 200, 300, 150, 50]


def test_a_step_that_is_not_above_the_lineage_is_refused_and_steps_of_other_branches_do_not_count(
    store: MemoryStore, writers: Callable[..., Session]
) -> None:
    session = writers(store)
    take(session)
    first = save(session, 100)
    save(session, 200)
    for step in (200, 150):
        with pytest.raises(AlreadyExistsError, match="not above step 200"):
            save(session, step)
    take(session, row=first)
    save(session, 200)
    assert steps(assert_sound(store)) == [100, 200]


def test_nothing_is_saved_without_a_claim(store: MemoryStore) -> None:
    session = new_session(store)
    with pytest.raises(ConflictError, match="not claimed"):
        session.mint(1)
    with pytest.raises(ConfigError, match="holds no run"):
        session.journal  # noqa: B018
    take(session)
    other = new_session(store)
    other.refresh()
    with pytest.raises(ConflictError, match="not claimed"):
        other.mark_damaged(push_commit(other.journal, 1).state.live[0])
    abandon(session)


def test_an_attempt_of_an_older_claim_can_t_be_committed(store: MemoryStore, writers: Callable[..., Session]) -> None:
    session = writers(store)
    take(session)
    attempt = session.mint(1)
    take(session)
    with pytest.raises(ConflictError, match="begun under claim 0"):
        commit_of(session, attempt)
    assert session.owns
    save(session, 1)


def commit_of(session: Session, attempt: Any) -> Any:
    from ckptstore.run.manifest import manifest_ref

    return session.commit(attempt, manifest=manifest_ref(b"{}"), n_bytes=0, metrics={}, tags=(), permanent=False)


@pytest.mark.parametrize(
    "fields",
    numbered(
        {"tags": tuple(f"t{n}" for n in range(17))},
        {"metrics": {f"m{n}": 0.0 for n in range(33)}},
        {"tags": ("x" * 2100,)},
        {"metrics": {"x": float("nan")}},
        {"metrics": {"x": 1 << 60}},
    ),
)
def test_tags_and_metrics_beyond_their_bounds_leave_the_run_as_it_was(
    fields: dict[str, Any], store: MemoryStore, writers: Callable[..., Session]
) -> None:
    session = writers(store)
    take(session)
    with pytest.raises(ConfigError):
        save(session, 1, **fields)
    assert assert_sound(store).seq == 0
    save(session, 1)


def test_a_policy_that_would_fill_records_is_refused(store: MemoryStore) -> None:
    session = new_session(store)
    with pytest.raises(ConfigError, match="more than 1024"):
        session.claim(session.refresh(), resume_from=None, branch=None, reason="r", keep="x" * 1025)


# ── beside operators ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_commit_after_records_of_operators_keeps_what_they_did(
    store: MemoryStore, writers: Callable[..., Session]
) -> None:
    session = writers(store)
    take(session)
    for step in (1, 2, 3):
        save(session, step)
    tag(store, 1, "good")
    retire(store, 2)
    note(store)
    row = save(session, 4)
    head = assert_sound(store)
    assert [(item.step, item.tags, item.parent) for item in head.state.live] == [
        (1, ("good",), None),
        (3, (), 1),
        (4, (), 3),
    ]
    assert [item.step for item in head.state.retired] == [2]
    assert row.seq == head.seq == 7


def test_a_commit_whose_parent_was_retired_meanwhile_follows_the_nearest_survivor(
    store: MemoryStore, writers: Callable[..., Session]
) -> None:
    session = writers(store)
    take(session)
    save(session, 1)
    save(session, 2)
    retire(store, 2)
    assert save(session, 3).parent == 1
    assert_sound(store)


def test_a_writer_that_resumed_from_a_row_retired_meanwhile_goes_on(
    store: MemoryStore, writers: Callable[..., Session]
) -> None:
    first, second = writers(store), writers(store)
    take(first)
    save(first, 1)
    save(first, 2)
    take(second)
    retire(store, 1, 2)
    assert save(second, 3).parent is None
    assert steps(assert_sound(store)) == [3]


def test_the_same_body_is_never_sent_under_two_numbers(store: MemoryStore, writers: Callable[..., Session]) -> None:
    sent: dict[str, dict[int, bytes]] = {}

    class Watching(MemoryStore):
        def publish(self, key: str, record: bytes, *, write_id: str) -> Any:
            if key.startswith("journal/"):
                sent.setdefault(write_id, {})[int(key[-15:-5])] = record
            return super().publish(key, record, write_id=write_id)

    session = writers(Watching(store.url.removeprefix("memory://")))
    take(session)
    save(session, 1)
    tag(store, 1, "a")
    tag(store, 1, "b")
    row = save(session, 2)
    bodies = next(bodies for bodies in sent.values() if len(bodies) == 2)
    assert sorted(bodies) == [2, 4]
    assert bodies[2] != bodies[4]
    assert b'"a"' in bodies[4]
    assert b'"b"' in bodies[4]
    assert row.seq == 4
    assert_sound(store)


def test_marking_damage_is_published_once_and_only_for_what_is_there(
    store: MemoryStore, writers: Callable[..., Session]
) -> None:
    session = writers(store)
    take(session)
    row, other = save(session, 1), save(session, 2)
    session.mark_damaged(row)
    session.mark_damaged(row)
    retire(store, other.seq)
    session.mark_damaged(other)
    head = assert_sound(store)
    assert [item.damaged for item in head.state.live] == [True]
    assert head.seq == 4


# ── fencing ──────────────────────────────────────────────────────────────────────────────────────────────────────────

METHODS: dict[str, Callable[[Session, Head], object]] = {
    "refresh": lambda session, head: session.refresh(),
    "claim": lambda session, head: session.claim(head, resume_from=None, branch=None, reason="again"),
    "mint": lambda session, head: session.mint(9),
    "commit": lambda session, head: save(session, 9),
    "mark_damaged": lambda session, head: session.mark_damaged(head.state.live[0]),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("learns_by", ["commit", "refresh", "mark_damaged"])
def test_a_fenced_writer_stops_for_good_in_every_method_and_harms_nothing(
    method: str, learns_by: str, store: MemoryStore, writers: Callable[..., Session]
) -> None:
    loser, winner = writers(store), writers(store)
    take(loser)
    save(loser, 1)
    take(winner)
    save(winner, 2)
    with pytest.raises(FencedError, match=rf"process {os.getpid()} on .* took this run over \(claim 2"):
        METHODS[learns_by](loser, winner.refresh())
    before = {info.key: store.get(info.key, max_bytes=1 << 20) for info in store.list("journal/")}
    for _ in range(2):
        with pytest.raises(FencedError):
            METHODS[method](loser, winner.refresh())
    assert before == {info.key: store.get(info.key, max_bytes=1 << 20) for info in store.list("journal/")}
    assert (loser.fenced, loser.owns) == (True, False)
    save(winner, 3)
    assert steps(assert_sound(store)) == [1, 2, 3]


def test_a_fenced_writer_does_not_take_the_run_back_even_if_the_winner_closed(
    store: MemoryStore, writers: Callable[..., Session]
) -> None:
    loser, winner = writers(store, job="same"), writers(store, job="same")
    take(loser)
    take(winner)
    winner.close()
    with pytest.raises(FencedError):
        take(loser)
    assert assert_sound(store).seq == 1


def test_a_fenced_writer_gives_no_further_sign_of_life(store: MemoryStore, writers: Callable[..., Session]) -> None:
    loser, winner = writers(store), writers(store)
    take(loser)
    take(winner)
    pulse = loser._pulse
    assert pulse is not None
    with pytest.raises(FencedError):
        save(loser, 1)
    assert pulse._stop.is_set()


def test_the_name_of_the_winner_is_not_needed_to_be_fenced(store: MemoryStore, writers: Callable[..., Session]) -> None:
    class Once(MemoryStore):
        seen = False

        def get(self, key: str, *, max_bytes: int) -> bytes:
            if key.endswith("0000000001.json"):
                if self.seen:
                    raise UnavailableError(key)
                self.seen = True
            return super().get(key, max_bytes=max_bytes)

    loser, winner = writers(Once(store.url.removeprefix("memory://"))), writers(store)
    take(loser)
    take(winner)
    save(winner, 1)
    with pytest.raises(FencedError, match="another writer took this run over"):
        save(loser, 1)


def test_two_owners_of_one_epoch_stop_since_the_store_is_not_exclusive(
    store: MemoryStore, writers: Callable[..., Session]
) -> None:
    session = writers(store)
    take(session)
    push_commit(new_journal(store), 5)  # by "someone", under our epoch, without a claim
    with pytest.raises(FencedError, match="two writers win one number"):
        save(session, 6)
    assert session.fenced
    assert new_journal(store).head().seq == 1


def test_a_claim_that_the_store_lost_stops_the_writer(store: MemoryStore, writers: Callable[..., Session]) -> None:
    first = writers(store)
    take(first)
    session = writers(store)
    take(session)
    session._head = first._head  # as if the store had shown a journal without our claim
    store.delete([session.journal.layout.record(1)])
    with pytest.raises(UnavailableError, match="lost or hides"):
        save(session, 1)


def test_a_claim_on_a_head_that_moved_is_lost_and_publishes_nothing(
    store: MemoryStore, writers: Callable[..., Session]
) -> None:
    first, second = writers(store), writers(store)
    take(first)
    stale = second.refresh()
    save(first, 1)
    lost = second.claim(stale, resume_from=None, branch=None, reason="r")
    assert isinstance(lost, Lost)
    assert lost.head == first._head
    assert not second.owns
    save(first, 2)
    assert steps(assert_sound(store)) == [1, 2]


def test_of_two_that_start_a_run_at_once_one_decides(store: MemoryStore, writers: Callable[..., Session]) -> None:
    first, second = writers(store), writers(store)
    empty = second.refresh()
    take(first)
    assert isinstance(second.claim(empty, resume_from=None, branch=None, reason="r"), Lost)
    save(first, 1)
    assert_sound(store)


# ── unknown outcomes ─────────────────────────────────────────────────────────────────────────────────────────────────


def faulty_publish(store: MemoryStore, call: int, *faults: Any) -> FaultyStore:
    return FaultyStore(store, FaultPlan({("publish", call + n): fault for n, fault in enumerate(faults)}))


UNKNOWN = [AnswerLost(), FailBefore(OutcomeUnknownError), Late(), Late(calls=1), Late(calls=2)]


@pytest.mark.parametrize("fault", numbered(*UNKNOWN))
def test_a_commit_of_unknown_outcome_is_settled_by_its_number_before_anything_else(
    fault: Any, store: MemoryStore, writers: Callable[..., Session]
) -> None:
    faulty = faulty_publish(store, 2, fault)  # RUN.json, the claim
    session = writers(faulty)
    take(session)
    with pytest.raises(OutcomeUnknownError):
        save(session, 1)
    assert save(session, 2).parent == 1
    faulty.release()
    assert steps(assert_sound(store)) == [1, 2]
    assert len(records_of(store)) == 3


@pytest.mark.parametrize("fault", numbered(*UNKNOWN))
def test_a_claim_of_unknown_outcome_is_adopted_if_it_is_there(
    fault: Any, store: MemoryStore, writers: Callable[..., Session]
) -> None:
    faulty = faulty_publish(store, 1, fault)
    session = writers(faulty)
    with pytest.raises(OutcomeUnknownError):
        take(session)
    head = session.refresh()
    assert (head.seq, session.epoch, session.owns) == (0, 0, True)
    save(session, 1)
    faulty.release()
    assert steps(assert_sound(store)) == [1]


def test_the_outcome_of_creating_the_run_may_be_unknown_too(
    store: MemoryStore, writers: Callable[..., Session]
) -> None:
    for fault in UNKNOWN:
        faulty = faulty_publish(new_store_of := new_store(), 0, fault)
        session = writers(faulty)
        with pytest.raises(OutcomeUnknownError):
            take(session)
        take(session)
        faulty.release()
        save(session, 1)
        assert steps(assert_sound(new_store_of)) == [1]


@pytest.mark.parametrize("fault", numbered(*UNKNOWN))
def test_a_tag_of_unknown_outcome_is_settled_too(
    fault: Any, store: MemoryStore, writers: Callable[..., Session]
) -> None:
    faulty = faulty_publish(store, 3, fault)
    session = writers(faulty)
    take(session)
    row = save(session, 1)
    with pytest.raises(OutcomeUnknownError):
        session.mark_damaged(row)
    assert session.refresh().state.live[0].damaged
    save(session, 2)
    faulty.release()
    assert_sound(store)


def test_a_commit_that_is_there_counts_even_if_it_was_retired_since(
    store: MemoryStore, writers: Callable[..., Session]
) -> None:
    session = writers(faulty_publish(store, 2, AnswerLost()))
    take(session)
    with pytest.raises(OutcomeUnknownError):
        save(session, 1)
    retire(store, 1)
    row = save(session, 2)
    assert (row.seq, row.parent) == (3, None)
    head = assert_sound(store)
    assert ([item.step for item in head.state.live], [item.step for item in head.state.retired]) == ([2], [1])


def test_a_commit_that_lost_its_number_to_an_operator_is_gone_and_its_write_id_is_not_used_again(
    store: MemoryStore, writers: Callable[..., Session]
) -> None:
    session = writers(faulty_publish(store, 3, FailBefore(OutcomeUnknownError)))
    take(session)
    save(session, 1)
    with pytest.raises(OutcomeUnknownError):
        save(session, 2)
    lost_id = session._pending and session._pending.write_id
    tag(store, 1, "x")
    save(session, 3)
    head = assert_sound(store)
    assert steps(head) == [1, 3]
    assert lost_id not in {record.write_id for record in records_of(store) if isinstance(record, Record)}


def test_a_commit_that_lost_its_number_to_a_claim_ends_the_writer(
    store: MemoryStore, writers: Callable[..., Session]
) -> None:
    session, winner = writers(faulty_publish(store, 2, FailBefore(OutcomeUnknownError))), writers(store)
    take(session)
    with pytest.raises(OutcomeUnknownError):
        save(session, 1)
    take(winner)
    with pytest.raises(FencedError):
        save(session, 2)
    assert steps(assert_sound(store)) == []


def test_a_commit_that_is_there_below_a_newer_claim_stays_and_the_writer_ends(
    store: MemoryStore, writers: Callable[..., Session]
) -> None:
    session, winner = writers(faulty_publish(store, 2, AnswerLost())), writers(store)
    take(session)
    with pytest.raises(OutcomeUnknownError):
        save(session, 1)
    take(winner)
    with pytest.raises(FencedError):
        session.refresh()
    assert steps(assert_sound(store)) == [1]


def test_a_claim_that_is_there_below_a_newer_one_is_adopted_and_fenced(
    store: MemoryStore, writers: Callable[..., Session]
) -> None:
    session, winner = writers(faulty_publish(store, 1, AnswerLost())), writers(store)
    with pytest.raises(OutcomeUnknownError):
        take(session)
    take(winner)
    with pytest.raises(FencedError):
        session.refresh()
    assert session.epoch == 0
    with pytest.raises(FencedError):
        take(session)
    assert assert_sound(store).state.epoch == 1


def test_a_claim_that_lost_its_number_may_be_decided_again(store: MemoryStore, writers: Callable[..., Session]) -> None:
    session, winner = writers(faulty_publish(store, 1, FailBefore(OutcomeUnknownError))), writers(store)
    with pytest.raises(OutcomeUnknownError):
        take(session)
    take(winner)
    save(winner, 1)
    session.refresh()
    assert not session.owns
    with pytest.raises(ConflictError, match="not claimed"):
        save(session, 2)
    head = take(session)  # it never owned the run, so nothing ended
    assert head.seq == 2
    assert head.record is not None
    assert head.record.change["resume_from"]["step"] == 1


def test_while_the_outcome_stays_unknown_nothing_moves_past_it(
    store: MemoryStore, writers: Callable[..., Session]
) -> None:
    faulty = faulty_publish(
        store, 2, Late(), FailBefore(OutcomeUnknownError), FailBefore(UnavailableError), FailBefore(StorageFullError)
    )
    session = writers(faulty)
    take(session)
    with pytest.raises(OutcomeUnknownError):
        save(session, 1)
    with pytest.raises(OutcomeUnknownError):
        save(session, 2)
    with pytest.raises(UnavailableError):
        session.refresh()
    with pytest.raises(StorageFullError):
        session.claim(new_journal(store).head(), resume_from=None, branch=None, reason="r")
    assert new_journal(store).head().seq == 0
    faulty.release()
    save(session, 3)
    assert steps(assert_sound(store)) == [1, 3]


def test_a_claim_too_settles_what_is_unknown_first(store: MemoryStore, writers: Callable[..., Session]) -> None:
    session = writers(faulty_publish(store, 2, FailBefore(OutcomeUnknownError)))
    take(session)
    with pytest.raises(OutcomeUnknownError):
        save(session, 1)
    head = new_journal(store).head()
    assert isinstance(session.claim(head, resume_from=None, branch=None, reason="r"), Lost)
    assert steps(assert_sound(store)) == [1]


def test_a_writer_that_was_taken_over_can_t_claim_on_the_winner_s_head(
    store: MemoryStore, writers: Callable[..., Session]
) -> None:
    session, winner = writers(faulty_publish(store, 2, AnswerLost())), writers(store)
    take(session)
    with pytest.raises(OutcomeUnknownError):
        save(session, 1)
    head = take(winner)
    with pytest.raises(FencedError):
        session.claim(head, resume_from=None, branch=None, reason="r")
    save(winner, 2)
    assert steps(assert_sound(store)) == [1, 2]


def test_a_number_that_is_settled_and_reads_as_absent_stays_unsettled(
    store: MemoryStore, writers: Callable[..., Session]
) -> None:
    class Hidden(MemoryStore):
        hidden = True

        def get(self, key: str, *, max_bytes: int) -> bytes:
            if self.hidden and key.endswith("0000000001.json"):
                raise NotFoundError(key)
            return super().get(key, max_bytes=max_bytes)

    inner = Hidden(store.url.removeprefix("memory://"))
    session = writers(FaultyStore(inner, FaultPlan({("publish", 2): AnswerLost()})))
    take(session)
    with pytest.raises(OutcomeUnknownError):
        save(session, 1)
    for _ in range(2):  # else it would be told an older checkpoint
        with pytest.raises(UnavailableError, match="reads as absent"):
            session.refresh()
    inner.hidden = False
    save(session, 2)
    assert steps(assert_sound(store)) == [1, 2]


def test_an_outage_while_settling_leaves_the_number_to_be_settled_again(
    store: MemoryStore, writers: Callable[..., Session]
) -> None:
    for second in (AnswerLost(), FailBefore(OutcomeUnknownError)):
        inner = new_store()
        faulty = faulty_publish(inner, 1, second)
        session = writers(faulty)
        with pytest.raises(OutcomeUnknownError):
            take(session)
        reads = faulty.calls["get"]
        # The number is settled, and then reading the head fails: at LATEST (no matter), then at the record.
        faulty._faults.update(
            {("get", reads): FailBefore(), ("get", reads + 1): FailBefore(), ("stat", 1): FailBefore()}
        )
        with pytest.raises(UnavailableError):
            session.refresh()
        for _ in range(3):
            if not isinstance(caught(session.refresh), CkptStoreError):
                break
        assert session.owns
        save(session, 1)
        assert steps(assert_sound(inner)) == [1]


def caught(act: Callable[[], object]) -> object:
    try:
        return act()
    except CkptStoreError as error:
        return error


def test_two_unknown_outcomes_in_a_row_are_settled_in_order(
    store: MemoryStore, writers: Callable[..., Session]
) -> None:
    session = writers(faulty_publish(store, 2, AnswerLost(), FailBefore(OutcomeUnknownError), AnswerLost()))
    take(session)
    assert isinstance(caught(lambda: save(session, 1)), OutcomeUnknownError)
    assert isinstance(caught(lambda: save(session, 2)), OutcomeUnknownError)  # the first is still not known
    assert isinstance(caught(lambda: save(session, 3)), OutcomeUnknownError)  # settled without an answer once more
    save(session, 4)
    assert steps(assert_sound(store)) == [1, 4]


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("call", [1, 2, 3])
def test_an_interrupt_inside_publish_is_settled_like_a_lost_answer(
    applied: bool, call: int, store: MemoryStore, writers: Callable[..., Session]
) -> None:
    class Interrupted(MemoryStore):
        calls = 0

        def publish(self, key: str, record: bytes, *, write_id: str) -> Any:
            self.calls += 1
            if self.calls - 1 == call:
                if applied:
                    super().publish(key, record, write_id=write_id)
                raise KeyboardInterrupt
            return super().publish(key, record, write_id=write_id)

    session = writers(Interrupted(store.url.removeprefix("memory://")))

    def train() -> None:
        while not session.owns:
            take(session)
        for step in (1, 2):
            if (tip := session.tip()) is None or tip.step < step:
                save(session, step)

    with pytest.raises(KeyboardInterrupt):
        train()
    session.refresh()
    train()
    assert steps(assert_sound(store)) == [1, 2]
    assert len(records_of(store)) == 3


def test_an_interrupt_right_after_publish_loses_nothing(store: MemoryStore, writers: Callable[..., Session]) -> None:
    session = writers(store)
    take(session)
    save(session, 1)
    journal = session.journal
    real = journal.append

    def interrupted(*args: Any, **fields: Any) -> Any:
        real(*args, **fields)
        raise KeyboardInterrupt

    journal.append = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        save(session, 2)
    with pytest.raises(KeyboardInterrupt):
        take(session)
    journal.append = real  # type: ignore[method-assign]
    session.refresh()
    save(session, 3)
    assert session.owns
    assert steps(assert_sound(store)) == [1, 2, 3]


# ── damage ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("n_torn", [1, 3])
@pytest.mark.parametrize("what", ["commit", "claim"])
def test_over_damaged_records_only_a_claim_follows_and_it_names_their_bytes(
    n_torn: int, what: str, store: MemoryStore, writers: Callable[..., Session]
) -> None:
    first = writers(store)
    take(first)
    save(first, 1)
    sound = first._head
    assert sound is not None
    for number in range(n_torn):
        if what == "claim":
            take(first)
        else:
            save(first, 2 + number)
    key = first.journal.layout.record
    for seq in range(2, 2 + n_torn):
        store.put(key(seq), b"torn")
    session = writers(store)
    head = session.refresh()
    assert (head.state, head.seq) == (sound.state, 1 + n_torn)
    claimed = take(session)
    assert claimed.seq == head.seq + 2
    claim, noted = records_of(store)[head.seq + 1 :]
    assert isinstance(claim, Record)
    assert isinstance(noted, Record)
    assert claim.prev is not None
    assert (claim.prev.write_id, claim.prev.sha256) == (None, sha256_hex(b"torn"))
    assert claim.epoch == claim.seq
    assert noted.kind == "note"
    assert noted.change["damaged"] == list(range(2, 2 + n_torn))
    save(session, 50)
    with pytest.raises(FencedError):
        save(first, 60)
    assert steps(new_journal(store).head()) == [1, 50]


def test_a_living_writer_that_meets_a_damaged_record_publishes_nothing_after_it_but_a_claim(
    store: MemoryStore, writers: Callable[..., Session]
) -> None:
    session = writers(store)
    take(session)
    save(session, 1)
    store.put(session.journal.layout.record(2), b"torn, and perhaps a claim")
    for _ in range(2):
        with pytest.raises(CorruptionError, match="may have been a claim"):
            save(session, 2)
    take(session)
    save(session, 2)
    assert steps(new_journal(store).head()) == [1, 2]


def test_a_run_without_a_single_sound_record_can_be_claimed_anew(
    store: MemoryStore, writers: Callable[..., Session]
) -> None:
    first = writers(store)
    take(first)
    save(first, 1)
    for seq in (0, 1):
        store.put(first.journal.layout.record(seq), b"torn")
    session = writers(store)
    assert session.refresh().record is None
    take(session, row=None)
    save(session, 5)
    assert steps(new_journal(store).head()) == [5]


def test_a_damaged_claim_below_the_head_harms_nothing(store: MemoryStore, writers: Callable[..., Session]) -> None:
    first = writers(store)
    take(first)
    save(first, 1)
    store.put(first.journal.layout.record(0), b"torn")
    save(first, 2)
    session = writers(store)
    take(session)
    save(session, 3)
    assert steps(new_journal(store).head()) == [1, 2, 3]


def test_a_note_that_can_t_be_published_does_not_undo_the_claim(
    store: MemoryStore, writers: Callable[..., Session]
) -> None:
    first = writers(store)
    take(first)
    store.put(first.journal.layout.record(1), b"torn")
    session = writers(faulty_publish(store, 1, AnswerLost()))
    with pytest.raises(OutcomeUnknownError):
        take(session)
    assert session.owns
    save(session, 1)
    assert [record.kind for record in records_of(store) if isinstance(record, Record)] == [
        "claim",
        "claim",
        "note",
        "commit",
    ]


def test_a_mismatching_record_above_the_own_head_is_damage_to_a_living_writer(
    store: MemoryStore, writers: Callable[..., Session]
) -> None:
    session = writers(store)
    take(session)
    tag(store, 0, "x")
    forge(store, session.journal.layout.record(1), lambda fields: fields["prev"].update(sha256="sha256:" + "0" * 64))
    with pytest.raises(CorruptionError, match="was not computed from record 0"):
        save(session, 1)


# ── sharing within a process ─────────────────────────────────────────────────────────────────────────────────────────


def test_all_who_ask_share_one_session_and_the_last_one_closes_it(store: MemoryStore) -> None:
    first = open_session(store, anew=False, job=None)
    second = open_session(MemoryStore(store.url.removeprefix("memory://")), anew=False, job=None)
    assert first is second
    take(first)
    release(second)
    assert b'"closed": false' in alive_of(store, first)
    release(first)
    assert b'"closed": true' in alive_of(store, first)
    third = open_session(store, anew=False, job=None)
    assert third is not first
    release(third)


def alive_of(store: MemoryStore, session: Session) -> bytes:
    return store.get(session.journal.layout.alive(session.me.id), max_bytes=1 << 16)


def test_a_session_made_anew_fences_the_earlier_one_of_the_same_process(store: MemoryStore) -> None:
    first = open_session(store, anew=False, job=None)
    take(first)
    save(first, 1)
    second = open_session(store, anew=True, job=None)
    assert second is not first
    take(second)
    with pytest.raises(FencedError):
        save(first, 2)
    save(second, 2)
    release(first)
    assert open_session(store, anew=False, job=None) is second
    release(second)
    release(second)
    assert steps(assert_sound(store)) == [1, 2]


def test_a_fenced_session_is_not_handed_out_again(store: MemoryStore) -> None:
    first = open_session(store, anew=False, job=None)
    take(first)
    winner = new_session(store)
    take(winner)
    with pytest.raises(FencedError):
        save(first, 1)
    second = open_session(store, anew=False, job=None)
    assert second is not first
    take(second)
    save(second, 1)
    for session in (first, second):
        release(session)
    abandon(winner)


def test_threads_of_one_session_commit_one_after_the_other(store: MemoryStore, writers: Callable[..., Session]) -> None:
    session = writers(store)
    take(session)
    done: list[object] = []

    def work() -> None:
        done.extend(caught(partial(save, session, step)) for step in range(1, 9))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(not isinstance(item, AlreadyExistsError) for item in done) == assert_sound(store).seq
    assert steps(assert_sound(store))[-1] == 8


def test_a_forked_child_can_t_use_the_session_and_the_parent_s_goes_on(store: MemoryStore) -> None:
    session = open_session(store, anew=False, job=None)
    take(session)
    save(session, 1)
    head = session.refresh()

    def in_child() -> bool:
        refused = [caught(partial(act, session, head)) for act in METHODS.values()]
        other = open_session(store, anew=False, job=None)
        before = dict(store._space.objects)
        release(session)
        silent = before == store._space.objects  # nor does it say that the parent closed
        return all(isinstance(error, ConfigError) for error in refused) and other is not session and silent

    with session._lock, warnings.catch_warnings():  # as if a thread of the parent published: the child must not wait
        warnings.simplefilter("ignore", DeprecationWarning)  # later Pythons warn of a fork beside threads: just so
        child = os.fork()
        if child == 0:
            try:
                os._exit(0 if in_child() else 1)
            finally:
                os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pulse = session._pulse
    assert pulse is not None
    assert pulse._thread is not None
    assert pulse._thread.is_alive()
    save(session, 2)
    release(session)
    assert steps(assert_sound(store)) == [1, 2]


def test_the_sign_of_life_stands_before_the_claim(store: MemoryStore) -> None:
    recording = RecordingStore(store)
    session = Session(recording, clock=FakeClock(), ids=CountedIds())
    take(session)
    keys = [key.split("/")[0] for verb, key in recording.calls if verb in ("put", "publish")]
    assert keys == ["RUN.json", "alive", "journal", "LATEST"]
    session.close()
    session.close()


def test_a_record_by_hand_under_a_claim_of_ours_counts_as_foreign_unless_it_is_an_operator_s(
    store: MemoryStore, writers: Callable[..., Session]
) -> None:
    session = writers(store)
    take(session)
    push(new_journal(store), changes.note("by someone"))
    save(session, 1)
    assert steps(assert_sound(store)) == [1]
