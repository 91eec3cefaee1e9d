"""The races of the kit see a second winner, a lost number, and a winner that is not the one that is stored."""

from __future__ import annotations

import itertools

import pytest

from ckptstore.errors import OutcomeUnknownError, UnavailableError
from ckptstore.memory import MemoryStore
from ckptstore.testing.evil import HidesTheWinnerStore, IgnoresConditionStore, InvertedStore, OverwritingStore
from ckptstore.testing.faulty import AnswerLost, FailBefore, FaultPlan, FaultyStore
from ckptstore.testing.publish import Win, assert_sequence, climb, race_for_key, race_threads
from ckptstore.testing.raw import RawMemory

names = itertools.count()


def climbed(wins: int) -> tuple[RawMemory, list[Win]]:
    name = f"climbed-{next(names)}"
    told = climb(MemoryStore(name), "climb", "one", wins, wins)
    return RawMemory(name), told


def test_a_lonely_climber_wins_every_number() -> None:
    raw, told = climbed(3)
    assert told == [Win(number=number, write_id=f"one-{number}") for number in range(3)]
    assert_sequence(raw, "climb", told)


def test_a_gap_is_seen() -> None:
    raw, told = climbed(3)
    raw.delete("climb/0000000001.json")
    with pytest.raises(AssertionError):
        assert_sequence(raw, "climb", told)
    with pytest.raises(AssertionError, match="each once"):
        assert_sequence(raw, "climb", [told[0], told[2]])


def test_a_number_that_two_were_told_they_won_is_seen() -> None:
    raw, told = climbed(3)
    with pytest.raises(AssertionError, match="each once"):
        assert_sequence(raw, "climb", [*told, Win(number=2, write_id="two-2")])


def test_a_stored_record_that_is_not_the_told_winners_is_seen() -> None:
    raw, told = climbed(3)
    with pytest.raises(AssertionError, match="told Published"):
        assert_sequence(raw, "climb", [*told[:2], Win(number=2, write_id="two-2")])


def test_a_record_that_no_one_was_told_of_is_seen() -> None:
    raw, told = climbed(3)
    raw.write("climb/0000000003.json", b"{}\n")
    with pytest.raises(AssertionError, match="differ"):
        assert_sequence(raw, "climb", told)


@pytest.mark.parametrize("kind", [OverwritingStore, IgnoresConditionStore, HidesTheWinnerStore, InvertedStore])
def test_a_race_for_one_key_is_lost_by_a_store_that_cheats(kind: type[MemoryStore]) -> None:
    name = f"race-{next(names)}"
    with pytest.raises(AssertionError):
        race_for_key([kind(name) for _ in range(4)], "race", RawMemory(name))


def test_a_climber_that_wins_nothing_gives_up_at_the_limit() -> None:
    with pytest.raises(AssertionError, match="won 0 of the 5"):
        climb(InvertedStore("inverted-climb"), "climb", "one", wins=2, limit=5)


def test_racers_settle_answers_that_decide_nothing() -> None:
    name = f"race-{next(names)}"
    plan = FaultPlan(
        {
            ("publish", 0): AnswerLost(),
            ("publish", 3): FailBefore(OutcomeUnknownError),
            ("publish", 5): FailBefore(UnavailableError),
        }
    )
    stores = [FaultyStore(MemoryStore(name), plan) for _ in range(3)]
    told = race_threads(stores, "climb", name="thread", wins=4, limit=12)
    assert_sequence(RawMemory(name), "climb", told)


def test_racers_give_up_on_a_store_that_never_answers() -> None:
    plan = FaultPlan({("publish", call): FailBefore() for call in range(100)})
    with pytest.raises(UnavailableError):
        climb(FaultyStore(MemoryStore("silent"), plan), "climb", "one", wins=1, limit=1)
