"""The head is the newest number, whatever the hint says and whatever is damaged; a number has one winner."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import NotFoundError, OutcomeUnknownError, StorageFullError, UnavailableError, UnsupportedError
from ckptstore.memory import MemoryStore
from ckptstore.run import changes
from ckptstore.run.journal import Damaged, Draft, Journal
from ckptstore.run.records import Record
from ckptstore.run.strict_json import sha256_hex
from ckptstore.testing.faulty import AnswerLost, FailBefore, FaultPlan, FaultyStore
from ckptstore.testing.recording import RecordingStore
from tests.unit.run.world import (
    abandon,
    assert_sound,
    claim_change,
    forge,
    names,
    new_journal,
    new_session,
    new_store,
    push,
    push_commit,
    save,
    take,
)

if TYPE_CHECKING:
    from ckptstore.run.journal import Head, Pending


def filled(n_records: int) -> MemoryStore:
    store = new_store()
    journal = new_journal(store)
    head = journal.head()
    for step in range(n_records):
        head = push_commit(journal, step, head) if step else push(journal, claim_change(), head)
    return store


def with_hint(store: MemoryStore, body: bytes | None) -> Journal:
    store.delete(["LATEST"])
    if body is not None:
        store.put("LATEST", body)
    return new_journal(store)


# ── the hint ─────────────────────────────────────────────────────────────────────────────────────────────────────────

STORES = {n: filled(n) for n in (0, 1, 2, 3, 8, 17, 40)}

hints = st.one_of(
    st.none(),
    st.binary(max_size=600),
    st.integers(-5, 60).map(lambda seq: {"seq": seq}),
    st.integers().map(lambda seq: {"seq": seq}),
    st.sampled_from([None, True, 1.0, "3", [3], {}]).map(lambda seq: {"seq": seq}),
    st.fixed_dictionaries({"seq": st.integers(0, 40), "run_uid": st.sampled_from(["f" * 32, None, 5])}),
    st.sampled_from([[], 5, "seq", None, {"run_uid": 1}]),
)


@given(st.sampled_from(sorted(STORES)), hints)
def test_any_content_of_the_hint_gives_the_same_head(n_records: int, hint: Any) -> None:
    store = STORES[n_records]
    expected = with_hint(store, None).head()
    assert expected.seq == n_records - 1
    if isinstance(hint, dict) and "seq" in hint:
        hint = {"run_uid": new_journal(store).run_uid, **hint}
    body = hint if isinstance(hint, bytes) or hint is None else json.dumps(hint).encode()
    assert with_hint(store, body).head() == expected


@pytest.mark.parametrize("error", [UnavailableError, StorageFullError])
def test_a_hint_that_can_t_be_read_costs_requests_only(error: type[Exception]) -> None:
    class NoHint(MemoryStore):
        def get(self, key: str, *, max_bytes: int) -> bytes:
            if key == "LATEST":
                raise error(key)
            return super().get(key, max_bytes=max_bytes)

    store = filled(9)
    store.put("LATEST", b"{}")
    assert new_journal(NoHint(store.url.removeprefix("memory://"))).head() == new_journal(store).head()


def requests(store: MemoryStore) -> list[tuple[str, str]]:
    recording = RecordingStore(store)
    new_journal(recording).head()
    return recording.calls


def test_opening_with_an_exact_hint_takes_four_requests_however_long_the_history() -> None:
    for n_records in (1, 2, 40, 130):
        store = filled(n_records)
        journal = new_journal(store)
        journal.hint(journal.head())
        newest = journal.layout.record(n_records - 1)
        assert requests(store)[:4] == [
            ("get", "RUN.json"),
            ("get", "LATEST"),
            ("get", newest),
            ("stat", journal.layout.record(n_records)),
        ]
        assert len(requests(store)) == (4 if n_records < 66 else 5)  # and the base of a large set


def test_opening_without_a_hint_takes_logarithmically_many_requests() -> None:
    store = new_store()
    journal = new_journal(store)
    head = push(journal, claim_change())
    raw = store.get(journal.layout.record(0), max_bytes=1 << 16)
    for seq in range(1, 5000):
        store.put(journal.layout.record(seq), raw)
    push(journal, claim_change(), type(head)(seq=4999, prev=head.prev, record=head.record, state=head.state))
    calls = requests(store)
    assert len(calls) <= 2 + 2 * math.ceil(math.log2(5001)) + 2
    assert "list" not in {verb for verb, _ in calls}
    assert new_journal(store).head().seq == 5000


def test_a_stale_hint_costs_as_much_as_it_is_stale() -> None:
    store = filled(40)
    journal = new_journal(store)
    for behind in (1, 3, 30):
        store.put("LATEST", json.dumps({"run_uid": journal.run_uid, "seq": 39 - behind}).encode())
        assert len(requests(store)) <= 4 + 2 * math.ceil(math.log2(behind + 1)) + 2


def test_a_commit_is_the_manifest_the_record_the_payload_and_the_hint_and_lists_nothing() -> None:
    store = RecordingStore(new_store())
    session = new_session(store)
    take(session)
    store.clear()
    save(session, 1)
    verbs = [(verb, key.rsplit("/", 1)[-1]) for verb, key in store.calls]
    assert verbs == [("put", "data.bin"), ("put", "MANIFEST.json"), ("publish", "0000000001.json"), ("put", "LATEST")]
    abandon(session)


def test_the_hint_follows_claims_and_commits_and_its_loss_fails_nothing() -> None:
    store = new_store()
    session = new_session(store)
    take(session)
    hints = []
    for step in (1, 2):
        hints.append(json.loads(store.get("LATEST", max_bytes=512)))
        save(session, step)
    take(session, row=session.refresh().state.live[0])
    hints.append(json.loads(store.get("LATEST", max_bytes=512)))
    uid = session.journal.run_uid
    assert hints == [
        {"run_uid": uid, "seq": 0, "step": None},
        {"run_uid": uid, "seq": 1, "step": 1},
        {"run_uid": uid, "seq": 3, "step": 1},  # a rollback moves it, too
    ]
    broken = new_session(FaultyStore(store, FaultPlan({("put", call): FailBefore() for call in range(20)})))
    take(broken)
    assert broken.owns
    abandon(session, broken)


# ── damage ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("torn", [b"", b"\0" * 100, b"{", "half", "flipped", "misplaced", "huge"])
@pytest.mark.parametrize("n_torn", [1, 2, 4])
@pytest.mark.parametrize("hinted", [True, False])
def test_below_damaged_numbers_the_newest_sound_record_counts(torn: bytes | str, n_torn: int, hinted: bool) -> None:
    store = filled(6)
    journal = new_journal(store)
    last = store.get(journal.layout.record(5), max_bytes=1 << 16)
    forms = {"half": last[:99], "flipped": b"[" + last[1:], "misplaced": last, "huge": b"x" * (1 << 17)}
    body = torn if isinstance(torn, bytes) else forms[torn]
    for seq in range(6, 6 + n_torn):
        store.put(journal.layout.record(seq), body)
    if hinted:
        store.put("LATEST", json.dumps({"run_uid": journal.run_uid, "seq": 5 + n_torn}).encode())
    head = new_journal(store).head()
    assert head.seq == 5 + n_torn
    assert head.record is not None
    assert head.record.seq == 5
    assert [row.step for row in head.state.live] == [1, 2, 3, 4, 5]
    assert [item.seq for item in head.damaged] == list(range(6, 6 + n_torn))
    if torn != "huge":  # more than a record may hold is not read
        assert head.prev is not None
        assert (head.prev.write_id, head.prev.sha256) == (None, sha256_hex(body))
    assert new_journal(store).forward(with_hint(store, None).head()) == head


def test_without_any_sound_record_the_head_says_so() -> None:
    store = filled(3)
    journal = new_journal(store)
    for seq in range(3):
        store.put(journal.layout.record(seq), b"torn")
    head = new_journal(store).head()
    assert (head.seq, head.record, [item.seq for item in head.damaged]) == (2, None, [0, 1, 2])


def test_a_record_is_damaged_only_after_three_fresh_reads() -> None:
    class Flaky(MemoryStore):
        reads = 0

        def get(self, key: str, *, max_bytes: int) -> bytes:
            body = super().get(key, max_bytes=max_bytes)
            self.reads += key.startswith("journal/")
            return body[:-5] if key.startswith("journal/") and self.reads < 3 else body

    store = filled(1)
    assert isinstance(new_journal(Flaky(store.url.removeprefix("memory://"))).read(0), Record)
    store.put(new_journal(store).layout.record(0), b"torn")
    assert isinstance(new_journal(store).read(0), Damaged)


def test_damage_in_the_middle_harms_neither_the_head_nor_what_follows() -> None:
    store = filled(6)
    journal = new_journal(store)
    expected = journal.head()
    store.put(journal.layout.record(2), b"torn")
    store.delete([journal.layout.record(3)])
    store.put("LATEST", json.dumps({"run_uid": journal.run_uid, "seq": 5}).encode())
    assert new_journal(store).head() == expected


def test_a_missing_number_below_damaged_ones_is_damage_not_an_absent_run() -> None:
    store = filled(4)
    journal = new_journal(store)
    store.put("LATEST", json.dumps({"run_uid": journal.run_uid, "seq": 3}).encode())
    store.put(journal.layout.record(3), b"torn")
    store.delete([journal.layout.record(2)])
    head = new_journal(store).head()
    assert ([item.seq for item in head.damaged], head.record and head.record.seq) == ([2, 3], 1)


def test_a_record_that_was_not_computed_from_its_predecessor_is_damage_when_it_is_met() -> None:
    store = filled(2)
    journal = new_journal(store)
    head = journal.head()
    push_commit(journal, 2, head)
    forge(store, journal.layout.record(2), lambda fields: fields["prev"].update(sha256="sha256:" + "0" * 64))
    found = journal.forward(head)
    assert (found.seq, found.state, [item.seq for item in found.damaged]) == (2, head.state, [2])
    assert "was not computed from record 1" in found.damaged[0].reason


def test_a_newer_record_at_the_head_is_refused_and_never_passed_over_as_damaged() -> None:
    store = filled(3)
    journal = new_journal(store)
    forge(store, journal.layout.record(2), lambda fields: fields.update(requires=["teleport"]))
    with pytest.raises(UnsupportedError, match="teleport"):
        new_journal(store).head()


def test_an_outage_is_never_an_older_head() -> None:
    store = filled(20)
    journal = new_journal(store)
    journal.hint(journal.head())
    calls = FaultyStore(store)
    new_journal(calls).head()
    for verb, n_calls in calls.calls.items():
        for call in range(n_calls):
            faulty = FaultyStore(store, FaultPlan({(verb, call): FailBefore()}))
            if (verb, call) == ("get", 1):  # LATEST
                assert new_journal(faulty).head().seq == 19
                continue
            with pytest.raises(UnavailableError):
                new_journal(faulty).head()


def test_a_store_that_shows_a_number_and_then_not_is_unavailable() -> None:
    class Fickle(MemoryStore):
        def get(self, key: str, *, max_bytes: int) -> bytes:
            if key.endswith("0000000002.json"):
                raise NotFoundError(key)
            return super().get(key, max_bytes=max_bytes)

    store = filled(3)
    with pytest.raises(UnavailableError, match="contradicts itself"):
        new_journal(Fickle(store.url.removeprefix("memory://"))).head()


# ── publishing ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Told(list["Pending | None"]):
    """What append said about numbers under way."""

    def __call__(self, pending: Pending | None) -> None:
        self.append(pending)


def append(journal: Journal, head: Head, told: Told, write_id: str = "w", **fields: Any) -> Head | None:
    return journal.append(
        head,
        lambda now: Draft(change=changes.note(f"on {now.seq}"), epoch=now.state.epoch),
        write_id=write_id,
        writer={"id": "me"},
        on_publish=told,
        **fields,
    )


def test_after_a_lost_race_the_body_is_computed_again_under_the_next_number_with_the_same_write_id() -> None:
    store = RecordingStore(filled(2))
    journal = new_journal(store)
    stale = journal.head()
    push_commit(new_journal(store), 2)
    push_commit(new_journal(store), 3)
    store.clear()
    told, met = Told(), []
    head = append(journal, stale, told, watch=lambda found: met.append(found.seq))
    assert head is not None
    assert head.seq == 4
    assert met == [2, 3]
    record = journal.read(4)
    assert isinstance(record, Record)
    assert (record.write_id, record.change["text"]) == ("w", "on 3")
    assert [row.step for row in journal.state_of(record).live] == [1, 2, 3]
    assert [pending and pending.seq for pending in told] == [2, None, 4]  # after a success the caller forgets
    assert [key[-15:-5] for verb, key in store.calls if verb == "publish"] == ["0000000002", "0000000004"]


def test_a_change_that_is_dropped_after_a_lost_race_publishes_nothing() -> None:
    store = filled(2)
    journal = new_journal(store)
    stale = journal.head()
    push_commit(new_journal(store), 2)
    told = Told()
    number = stale.seq + 1

    def derive(now: Head) -> Draft | None:
        return Draft(change=changes.note("x"), epoch=0) if now.seq + 1 == number else None

    assert journal.append(stale, derive, write_id="w", writer={}, on_publish=told) is None
    assert told[-1] is None
    assert new_journal(store).head().seq == 2


@pytest.mark.parametrize(
    "fault, pending",
    [
        (FailBefore(), False),
        (FailBefore(StorageFullError), False),
        (AnswerLost(), True),
        (FailBefore(OutcomeUnknownError), True),
    ],
)
def test_only_an_unknown_outcome_stays_pending(fault: FailBefore | AnswerLost, pending: bool) -> None:
    store = FaultyStore(filled(2), FaultPlan({("publish", 0): fault}))
    journal = new_journal(store)
    told = Told()
    with pytest.raises(
        OutcomeUnknownError if pending else UnavailableError if fault == FailBefore() else StorageFullError
    ):
        append(journal, journal.head(), told)
    assert (told[-1] is not None) == pending


def test_an_interrupt_inside_publish_leaves_the_number_pending() -> None:
    class Interrupted(MemoryStore):
        def publish(self, key: str, record: bytes, *, write_id: str) -> Any:
            super().publish(key, record, write_id=write_id)
            raise KeyboardInterrupt

    store = filled(2)
    journal = new_journal(Interrupted(store.url.removeprefix("memory://")))
    told = Told()
    with pytest.raises(KeyboardInterrupt):
        append(journal, journal.head(), told)
    assert told[-1] is not None


def test_a_number_that_is_taken_and_reads_as_absent_stops_the_writer() -> None:
    class DeleteMarker(MemoryStore):
        def get(self, key: str, *, max_bytes: int) -> bytes:
            if key.endswith("0000000002.json"):
                raise NotFoundError(key)
            return super().get(key, max_bytes=max_bytes)

    store = filled(2)
    journal = new_journal(DeleteMarker(store.url.removeprefix("memory://")))
    head = journal.head()
    push_commit(new_journal(store), 2)
    with pytest.raises(UnavailableError, match="taken but reads as absent"):
        append(journal, head, Told())


def test_a_change_of_a_foreign_epoch_is_never_published() -> None:
    store = filled(2)
    journal = new_journal(store)
    with pytest.raises(UnsupportedError, match="can't follow epoch"):
        journal.append(
            journal.head(),
            lambda now: Draft(change=changes.note("x"), epoch=1),
            write_id="w",
            writer={},
            on_publish=Told(),
        )
    assert new_journal(store).head().seq == 1


def test_fields_and_policy_of_the_record_before_are_carried_over() -> None:
    store = filled(2)
    journal = new_journal(store)
    forge(store, journal.layout.record(1), lambda fields: fields.update(colour="red", keep="last=3"))
    push_commit(journal, 2)
    record = journal.read(2)
    assert isinstance(record, Record)
    assert (record.extra, record.keep, record.run) == ({"colour": "red"}, "last=3", None)


# ── a store without exclusive creation ───────────────────────────────────────────────────────────────────────────────


class Weak(MemoryStore):
    """A store that can't create exclusively, and would be found out if it was asked to."""

    def capabilities(self) -> Any:
        import dataclasses

        return dataclasses.replace(super().capabilities(), exclusive="none")

    def publish(self, key: str, record: bytes, *, write_id: str) -> Any:
        raise UnsupportedError(key)


def test_in_single_writer_mode_a_run_works_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    store = Weak(f"weak-{next(names)}")
    session = new_session(store)
    take(session)
    assert "single-writer mode" in caplog.text
    for step in (1, 2):
        save(session, step)
    abandon(session)
    claim = new_journal(store).read(0)
    assert isinstance(claim, Record)
    assert claim.change["exclusive"] == "none"
    other = new_session(store)
    assert [row.step for row in other.refresh().state.live] == [1, 2]
    take(other)
    save(other, 3)
    abandon(other)
    assert assert_sound(store).seq == 4


def test_in_single_writer_mode_a_put_without_an_answer_is_an_unknown_outcome_and_is_settled() -> None:
    inner = Weak(f"weak-{next(names)}")
    first = new_session(inner)
    take(first)
    abandon(first)
    for fault in (AnswerLost(), FailBefore()):
        session = new_session(FaultyStore(inner, FaultPlan({("put", 5): fault})))  # alive, claim, hint, data, manifest
        take(session)
        with pytest.raises(OutcomeUnknownError):
            save(session, 10)
        assert session.refresh().state.live[-1].step == 10
        take(session, row=None)
        abandon(session)
