"""Every record holds the whole live set, however large, in 64 KiB: inline, or as a small difference from a base."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import ConfigError, CorruptionError, UnavailableError
from ckptstore.run import changes
from ckptstore.run.audit import audit_journal
from ckptstore.run.changes import RunState, apply
from ckptstore.run.journal import Damaged, Head, Journal
from ckptstore.run.records import Based, Record
from ckptstore.store import MAX_RECORD_BYTES
from ckptstore.testing.faulty import FailBefore, FaultPlan, FaultyStore
from ckptstore.testing.recording import RecordingStore
from tests.unit.run.world import (
    claim_change,
    forge,
    new_journal,
    new_row,
    new_store,
    push,
    push_commit,
    records_of,
)

if TYPE_CHECKING:
    from ckptstore.memory import MemoryStore
    from ckptstore.run.records import Row

BIG = {f"metric-{n}": 1 / 3 for n in range(32)}


def grow(journal: Journal, n_rows: int, head: Head | None = None, **fields: Any) -> Head:
    at = push(journal, claim_change()) if head is None else head
    start = len(at.state.live) + len(at.state.retired)
    for number in range(start, start + n_rows):
        at = push_commit(journal, number + 1, at, **fields)
    return at


def bases(store: MemoryStore) -> list[str]:
    return [info.key for info in store.list("index/")]


def stored(store: MemoryStore) -> list[Record]:
    found = records_of(store)
    assert all(isinstance(record, Record) for record in found)
    assert all(len(record.raw) <= MAX_RECORD_BYTES for record in found)
    return [record for record in found if isinstance(record, Record)]


def test_up_to_64_small_rows_stand_in_the_record_itself() -> None:
    store = new_store()
    grow(new_journal(store), 64)
    assert bases(store) == []
    assert stored(store)[-1].live == new_journal(store).head().state.live


def test_more_rows_share_a_base_until_the_difference_is_large_and_then_a_new_one() -> None:
    store = new_store()
    head = grow(new_journal(store), 200)
    assert [row.step for row in new_journal(store).head().state.live] == list(range(1, 201))
    shared = [record.live.base.key for record in stored(store) if isinstance(record.live, Based)]
    assert len(shared) == 200 - 64
    assert len(set(shared)) == len(bases(store)) == 3
    assert head == new_journal(store).head()
    assert list(audit_journal(new_journal(store))) == []


def test_few_large_rows_pass_into_a_base_by_their_bytes() -> None:
    store = new_store()
    grow(new_journal(store), 64, metrics=BIG)
    assert bases(store)
    assert len(new_journal(store).head().state.live) == 64
    assert list(audit_journal(new_journal(store))) == []
    stored(store)


def test_a_base_is_durable_before_the_record_that_names_it_is_published() -> None:
    store = RecordingStore(new_store())
    grow(new_journal(store), 65)
    calls = [verb for verb, key in store.calls if key.startswith(("index/", "journal/")) and verb in ("put", "publish")]
    assert calls == ["publish"] * 65 + ["put", "publish"]


def test_ten_thousand_rows_with_retirements_of_256_stay_within_a_record_and_are_read_exactly() -> None:
    store = new_store()
    journal = new_journal(store)
    head = push(journal, claim_change())
    rows = tuple(new_row(seq, 0, seq, seq - 1 if seq > 1 else None) for seq in range(1, 10_001))
    # Ten thousand commits take a while; the set as they would leave it is put in place instead.
    many = Head(
        seq=10_000, prev=head.prev, record=head.record, state=RunState(epoch=0, live=rows, keep="permanent_every=500")
    )
    for seq in range(1, 10_001):
        store.put(journal.layout.record(seq), b"")
    head = push(journal, claim_change(rows[-1]), many)
    reasons = {str(seq): f"not among the last 3, not a multiple of 500 (step {seq})" for seq in range(1, 10_001)}
    for start in range(1, 2561, 256):
        targets = range(start, start + 256)
        chosen = {str(seq): reasons[str(seq)] for seq in targets}
        head = push(journal, changes.retire(targets, policy="permanent_every=500", reasons=chosen), head)
        head = push_commit(journal, 20_000 + start, head)
    head = push(journal, {**changes.note("swept"), "swept": list(range(1, 2001))}, head)
    found = new_journal(store).head()
    assert found.state == head.state
    assert len(found.state.live) == 10_000 - 2560 + 10
    assert [row.seq for row in found.state.retired] == list(range(2001, 2561))
    for seq in range(10_001, head.seq + 1):
        assert len(store.get(journal.layout.record(seq), max_bytes=1 << 20)) <= MAX_RECORD_BYTES


def test_the_sets_make_room_for_the_longest_change() -> None:
    store = new_store()
    journal = new_journal(store)
    head = grow(journal, 60, metrics={"loss": 0.1})
    text = "x" * 55_000
    head = push(journal, changes.note(text), head)
    assert new_journal(store).head() == head
    assert isinstance(stored(store)[-1].live, Based)
    head = push(journal, changes.note("short"), head)
    assert stored(store)[-1].live == head.state.live  # and come back into the record
    with pytest.raises(ConfigError, match="at most 65536"):
        push(journal, changes.note("x" * 66_000), head)
    assert new_journal(store).head() == head


@pytest.mark.parametrize("harm", ["lost", "flipped", "cut", "longer", "empty"])
def test_a_lost_or_damaged_base_is_rebuilt_from_the_changes_and_the_next_record_brings_a_new_one(
    harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = new_store()
    journal = new_journal(store)
    head = grow(journal, 80)
    head = push(journal, changes.retire([3, 4], policy="p", reasons={}), head)
    head = push(journal, changes.tag(7, add=["x"]), head)
    key = bases(store)[-1]
    body = store.get(key, max_bytes=1 << 20)
    harmed = {"flipped": b"}" + body[1:], "cut": body[:-1], "longer": body + b" ", "empty": b""}
    store.delete([key]) if harm == "lost" else store.put(key, harmed[harm])
    found = new_journal(store).head()
    assert found == head
    assert "rebuilding" in caplog.text
    assert any(key in problem for problem in audit_journal(new_journal(store)))
    fresh = new_journal(store)
    after = push_commit(fresh, 500)
    assert bases(store)[-1] != key
    caplog.clear()
    assert new_journal(store).head() == after
    assert "rebuilding" not in caplog.text


def test_a_lost_base_that_can_t_be_rebuilt_makes_its_records_damaged() -> None:
    store = new_store()
    journal = new_journal(store)
    grow(journal, 70)
    store.delete(bases(store))
    middle = journal.layout.record(64)
    body = store.get(middle, max_bytes=1 << 20)
    store.put(middle, b"")
    head = new_journal(store).head()
    assert head.seq == 70
    assert [item.seq for item in head.damaged] == list(range(64, 71))
    assert len(head.state.live) == 63
    store.put(middle, body)
    assert len(new_journal(store).head().state.live) == 70
    store.delete([middle])
    assert new_journal(store).head().record == journal.read(63)


def test_a_base_that_can_t_be_read_for_now_is_an_outage_not_a_loss() -> None:
    store = new_store()
    grow(new_journal(store), 70)
    faulty = FaultyStore(store, FaultPlan({("get", 3): FailBefore()}))
    with pytest.raises(UnavailableError):  # RUN.json, LATEST, the record, its base
        new_journal(faulty).head()
    assert faulty.met


def test_a_base_in_the_cache_is_told_from_another_under_the_same_key() -> None:
    store = new_store()
    journal = new_journal(store)
    grow(journal, 70)
    key = journal.layout.record(70)
    forge(store, key, lambda fields: fields["live"]["base"].update(sha256="sha256:" + "0" * 64))
    found = journal.read(70)
    assert isinstance(found, Record)
    assert journal.lost_bases(found) == bases(store)


# ── random histories ─────────────────────────────────────────────────────────────────────────────────────────────────

acts = st.lists(
    st.one_of(
        st.tuples(st.just("commit"), st.integers(0, 3)),
        st.tuples(st.just("claim"), st.integers(0, 100)),
        st.tuples(st.just("retire"), st.sets(st.integers(0, 100), max_size=6)),
        st.tuples(st.just("tag"), st.integers(0, 100)),
        st.tuples(st.just("sweep"), st.integers(0, 100)),
    ),
    max_size=40,
)


def change_of(act: tuple[str, Any], state: RunState, seq: int) -> dict[str, Any]:
    kind, value = act
    rows: tuple[Row, ...] = state.live
    pick = rows[value % len(rows)] if rows and isinstance(value, int) else None
    if kind == "commit":
        line = changes.lineage(state)
        step = (line[0].step if line else 0) + 1
        row = new_row(seq, state.epoch, step, line[0].seq if line else None, metrics=BIG if value == 3 else {})
        return changes.commit(row)
    if kind == "claim":
        return claim_change(pick)
    if kind == "retire":
        return changes.retire((row.seq for row in rows if row.seq in value), policy="p", reasons={})
    if kind == "tag" and pick is not None:
        return changes.tag(pick.seq, add=[f"t{value % 20}"], remove=[f"t{value % 7}"], damaged=value % 2 == 0)
    swept = [row.seq for row in state.retired][: value % 3] if isinstance(value, int) else []
    return {**changes.note("x"), "swept": swept}


@settings(max_examples=40)
@given(acts, st.integers(0, 90))
def test_each_record_is_its_change_applied_to_the_one_before_in_any_history(
    history: list[tuple[str, Any]], start: int
) -> None:
    store = new_store()
    journal = new_journal(store)
    head = grow(journal, start)
    state = head.state
    for act in history:
        seq = head.seq + 1
        change = change_of(act, state, seq)
        expected = apply(state, change, seq, "k")
        head = push(journal, change, head)
        assert head.state == expected
        state = new_journal(store).head().state  # as a fresh process reads it
        assert state == expected
    assert list(audit_journal(new_journal(store))) == []
    live: set[int] = set()
    for seq, record in enumerate(stored(store)):  # nothing leaves the live set without a retirement
        now = {row.seq for row in journal.state_of(record).live}
        assert live - now == set(record.change.get("targets", [])) & live
        assert now - live == ({seq} if record.kind == "commit" else set())
        live = now


@settings(max_examples=30)
@given(acts, st.integers(0, 12))
def test_losing_every_base_but_keeping_one_inline_record_loses_nothing(
    history: list[tuple[str, Any]], start: int
) -> None:
    store = new_store()
    journal = new_journal(store)
    head = grow(journal, start + 60)
    for act in history:
        head = push(journal, change_of(act, head.state, head.seq + 1), head)
    store.delete(bases(store))
    found = new_journal(store).head()
    assert (found.state, found.seq, found.damaged) == (head.state, head.seq, ())


# ── the audit ────────────────────────────────────────────────────────────────────────────────────────────────────────


def audited(store: MemoryStore) -> str:
    return "\n".join(audit_journal(new_journal(store)))


def test_the_audit_names_a_row_that_disappeared_without_a_retirement() -> None:
    store = new_store()
    journal = new_journal(store)
    grow(journal, 5)
    forge(store, journal.layout.record(4), lambda fields: fields["live"].pop(0))
    found = audited(store)
    assert "0000000004.json: its list of checkpoints is not its change applied" in found
    assert "0000000005.json was not computed from the record before it" in found


def test_the_audit_names_damaged_missing_and_misplaced_records_and_a_lost_run_file() -> None:
    store = new_store()
    journal = new_journal(store)
    grow(journal, 6)
    assert audited(store) == ""
    store.put(journal.layout.record(2), b"torn")
    store.delete([journal.layout.record(4), "RUN.json"])
    store.put(journal.layout.record(5), store.get(journal.layout.record(6), max_bytes=1 << 16))
    found = audited(store)
    for part in (
        "RUN.json is absent",
        "02.json is damaged",
        "04.json is missing",
        "05.json is damaged",
        "another place",
    ):
        assert part in found
    assert not isinstance(journal.read(3), Damaged)


def test_the_audit_names_a_first_claim_that_does_not_repeat_the_run_file() -> None:
    store = new_store()
    journal = new_journal(store)
    push(journal, claim_change())
    forge(store, journal.layout.record(0), lambda fields: fields["run"].update(created=5))
    assert "does not repeat RUN.json" in audited(store)


def test_a_state_whose_base_is_lost_and_whose_past_is_unreadable_is_reported_not_raised() -> None:
    store = new_store()
    journal = new_journal(store)
    grow(journal, 70)
    store.delete(bases(store))
    store.put(journal.layout.record(64), b"")
    assert "can't be read or rebuilt" in audited(store)
    found = journal.read(70)
    assert isinstance(found, Record)
    with pytest.raises(CorruptionError):
        new_journal(store).state_of(found)
