"""What one change does to the live set, and what the lineage is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ckptstore.errors import ConfigError, CorruptionError
from ckptstore.run import changes
from ckptstore.run.changes import RunState, apply, lineage
from ckptstore.run.records import row_to_json
from tests.unit.run.world import claim_change, new_row, numbered

if TYPE_CHECKING:
    from ckptstore.run.records import Row


def grown(*acts: int | tuple[str, Any]) -> RunState:
    """Return the state after a first claim and *acts*: a step to commit, or a change to make."""
    state = apply(RunState(), claim_change(), 0, "k")
    for seq, act in enumerate(acts, start=1):
        state = apply(state, change_of(act, state, seq), seq, "k")
    return state


def change_of(act: int | tuple[str, Any], state: RunState, seq: int) -> dict[str, Any]:
    match act:
        case ("claim", step):
            return claim_change(next((row for row in state.live if row.step == step), None))
        case ("retire", targets):
            return changes.retire(targets, policy="last=1", reasons={})
        case ("tag", (target, edit)):
            return changes.tag(target, **edit)
        case ("note", fields):
            return {**changes.note("x"), **fields}
        case int():
            line = lineage(state)
            return changes.commit(new_row(seq, state.epoch, act, line[0].seq if line else None))
    raise AssertionError(act)


def line(state: RunState) -> list[int]:
    return [row.step for row in reversed(lineage(state))]


def parents(state: RunState) -> dict[int, int | None]:
    return {row.seq: row.parent for row in state.live}


def test_the_lineage_goes_from_the_newest_commit_of_the_epoch_to_its_parents() -> None:
    assert line(grown()) == []
    assert line(grown(100, 200, 300)) == [100, 200, 300]


def test_before_its_first_commit_an_epoch_has_the_lineage_it_resumed_from() -> None:
    assert line(grown(100, 200, ("claim", 200))) == [100, 200]
    assert line(grown(100, 200, ("claim", 100))) == [100]
    assert line(grown(100, 200, ("claim", None))) == []


def test_a_rollback_leaves_a_branch_behind_and_grows_another() -> None:
    state = grown(100, 200, 300, ("claim", 100), 150, 160)
    assert line(state) == [100, 150, 160]
    assert [row.step for row in state.live] == [100, 200, 300, 150, 160]
    assert line(grown(100, 200, ("claim", None), 50)) == [50]


def test_a_branch_of_a_branch_goes_on_from_where_the_newest_claim_says() -> None:
    state = grown(100, 200, ("claim", 100), 150, ("claim", 200), 300)
    assert line(state) == [100, 200, 300]


def test_retiring_relinks_children_and_resume_from_to_the_nearest_surviving_ancestor() -> None:
    state = grown(100, 200, 300, 400, ("claim", 400), ("retire", [2, 3]))
    assert parents(state) == {1: None, 4: 1}
    assert line(state) == [100, 400]
    state = grown(100, 200, 300, ("claim", 300), ("retire", [3]))
    assert state.resume_from == state.live[-1]
    assert line(state) == [100, 200]
    state = grown(100, 200, 300, ("claim", 300), ("retire", [1, 2, 3]))
    assert (state.resume_from, line(state), [row.seq for row in state.retired]) == (None, [], [1, 2, 3])


def test_retiring_one_by_one_and_at_once_leaves_the_same() -> None:
    together = grown(100, 200, 300, 400, ("retire", [1, 2, 3]))
    apart = grown(100, 200, 300, 400, ("retire", [3]), ("retire", [1]), ("retire", [2]))
    assert (parents(together), [row.seq for row in together.retired]) == (
        parents(apart),
        [row.seq for row in apart.retired],
    )


def test_retiring_the_own_branch_returns_to_what_was_resumed_from() -> None:
    assert line(grown(100, 200, ("claim", 100), 150, ("retire", [4]))) == [100]


def test_retiring_what_is_not_there_changes_nothing() -> None:
    assert grown(100, ("retire", [9, 0])) == grown(100, ("note", {}))


def test_a_retired_row_leaves_the_record_only_as_swept() -> None:
    state = grown(100, 200, 300, ("retire", [1, 2]), ("note", {"swept": [1]}))
    assert [row.seq for row in state.retired] == [2]
    assert [row.seq for row in grown(100, ("note", {"swept": [1]})).live] == [1]


def test_a_tag_changes_its_row_and_the_copy_that_was_resumed_from() -> None:
    state = grown(
        100, ("claim", 100), ("tag", (1, {"add": ["b", "a"], "damaged": True})), ("tag", (1, {"remove": ["b"]}))
    )
    assert state.live[0].tags == ("a",)
    assert state.live[0].damaged
    assert state.resume_from == state.live[0]
    assert not grown(100, ("tag", (1, {"damaged": True})), ("tag", (1, {"damaged": False}))).live[0].damaged


def test_the_stored_policy_is_carried_on_until_a_claim_or_note_changes_it() -> None:
    state = apply(grown(100), {**claim_change(), "keep": "last=3"}, 2, "k")
    assert apply(state, claim_change(), 3, "k").keep == "last=3"
    assert apply(state, {**changes.note("x"), "keep": "all"}, 3, "k").keep == "all"
    assert apply(state, {**changes.note("x"), "keep": None}, 3, "k").keep is None


def test_more_than_256_retirements_do_not_fit_one_record() -> None:
    assert len(changes.retire(range(256), policy="p", reasons={})["targets"]) == 256
    with pytest.raises(ConfigError, match="257"):
        changes.retire(range(257), policy="p", reasons={})


ROW = row_to_json(new_row(2, 0, 200, 1))


@pytest.mark.parametrize(
    "change",
    numbered(
        {},
        {"kind": "explode"},
        {"kind": "commit"},
        {"kind": "commit", "row": None},
        {"kind": "commit", "row": {**ROW, "seq": 1}},
        {"kind": "commit", "row": {**ROW, "seq": 3}},
        {"kind": "commit", "row": {**ROW, "epoch": 1}},
        {"kind": "claim", "resume_from": "x"},
        {"kind": "claim", "keep": 5},
        {"kind": "retire"},
        {"kind": "retire", "targets": "all"},
        {"kind": "retire", "targets": ["1"]},
        {"kind": "tag", "target": 1},
        {"kind": "tag", "target": 1, "add": "words", "remove": [], "damaged": None},
        {"kind": "tag", "target": 1, "add": [], "remove": [], "damaged": 1},
        {"kind": "note", "swept": 5},
        {"kind": "note", "swept": ["x"]},
    ),
)
def test_a_malformed_change_is_damage(change: dict[str, Any]) -> None:
    with pytest.raises(CorruptionError, match="the record"):
        apply(grown(100), change, 2, "the record")


def test_a_state_is_never_changed_in_place() -> None:
    state = grown(100, 200, 300)
    rows: tuple[Row, ...] = state.live
    apply(state, changes.retire([1, 2], policy="p", reasons={}), 4, "k")
    apply(state, changes.tag(1, add=["x"]), 4, "k")
    assert state.live is rows
    assert state == grown(100, 200, 300)
