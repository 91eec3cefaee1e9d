"""The protocol holds in every interleaving within the bounds, and a search that should find a broken rule finds it."""

from __future__ import annotations

import pytest

from ckptstore.testing.model import BUGS, CHECKED, PROFILES, explore, must_fire
from ckptstore.testing.model.__main__ import main

# At least so many states, so that an exploration that became empty by accident is not taken for a proof.
STATES = {
    "takeover": 20_000,
    "answers": 19_000,
    "operator": 16_000,
    "retention": 140_000,
    "unknown-retire": 8_000,
    "pins": 50_000,
    "garbage": 14_000,
    "rollback": 130_000,
    "branches": 50_000,
    "keep-two": 40_000,
    "everyone": 220_000,
}

# The invariant that falls first, and after how many steps at the earliest.
FALLS = {
    "412 believed": ("I7", 6),
    "settled by the live set": ("I7", 11),
    "same body at the next number": ("I21", 10),
    "commit carries its own rows": ("I21", 10),
    "claim keeps its epoch": ("I5", 5),
    "retire targets kept": ("I11", 12),
    "gc takes the head's epoch": ("I13", 5),
    "gc forgets retired rows": ("I13", 13),
    "gc spares manifests": ("I13", 4),
    "unknown attempt deleted": ("I10", 5),
    "unknown retire deletes": ("I10", 9),
    "unknown rolled back": ("I3", 8),
    "unknown number skipped": ("I4", 9),
    "write id at two numbers": ("I7", 7),
    "told while unknown": ("I2", 5),
    "fenced goes on": ("I5", 8),
    "fenced before settling": ("I10", 9),
    "any record fences": ("I22", 9),
    "operator raises the epoch": ("I5", 7),
    "deleted before the retire": ("I10", 11),
    "payload before manifest": ("I9", 12),
    "retire leaves parents": ("I21", 9),
    "swept unseen": ("I21", 11),
    "resume_from unprotected": ("I11", 12),
    "floor ignored": ("I11", 7),
    "retention by step": ("I11", 11),
    "fresh branch drops predecessors": ("I11", 11),
    "pin not re-read": ("I12", 16),
    "pin ignored": ("I12", 16),
    "pins listed before the retire": ("I12", 16),
    "publish overwrites": ("I3", 4),
    "keys by step": ("I1", 8),
    "step not judged again": ("I15", 11),
    "commit before manifest": ("I10", 4),
    "minted before the claim": ("I13", 3),
    "hint believed": ("I6", 5),
    "latest is max step": ("I15", 9),
    "latest is newest commit": ("I15", 9),
    "branch starts again": ("I15", 12),
    "unavailable falls back": ("I14", 7),
}


def test_every_profile_that_is_not_large_is_searched_here() -> None:
    assert set(STATES) == {name for name, profile in PROFILES.items() if not profile.large}


@pytest.mark.parametrize("name", STATES)
def test_the_protocol_breaks_no_invariant_in_any_interleaving(name: str) -> None:
    report = explore(PROFILES[name])
    assert report.found is None, "\n".join([report.found.text, *report.found.trace])
    assert report.exhausted
    assert report.states >= STATES[name]
    assert report.transitions > report.states
    # What the profile is about has really happened: zombies, late publishes, commands that lost their number, …
    assert must_fire(PROFILES[name]) - set(report.fired) == set()


def test_the_profiles_together_let_everyone_act() -> None:
    kinds: set[str] = set().union(*(must_fire(PROFILES[name]) for name in STATES))
    assert {
        "A commit: conflict, fenced",  # a zombie
        "store: late publish lands",
        "A commit: left unknown",
        "operator: conflict",
        "A retire: conflict",
        "collector: finds a pin",
        "reader: pinned too late",
        "B crash and start: older step",
        "A crash and start: fresh",
    } <= kinds


def test_every_broken_rule_has_a_test() -> None:
    assert set(FALLS) == set(BUGS)
    assert len(BUGS) >= 20


@pytest.mark.parametrize("name", FALLS)
def test_a_rule_broken_on_purpose_is_found_by_a_shortest_trace(name: str) -> None:
    invariant, steps = FALLS[name]
    report = explore(PROFILES[BUGS[name].profile], bug=name)
    assert report.found is not None
    assert (report.found.invariant, report.depth) == (invariant, steps)
    assert len(report.found.trace) == steps
    assert report.found.trace[0].startswith("A start: latest")


def test_every_checked_invariant_is_the_first_to_fall_to_some_bug() -> None:
    # I8 cannot be the first: hints can only disagree about a journal with a gap, which is I4.
    assert {invariant for invariant, _ in FALLS.values()} == set(CHECKED) - {"I8"}


def test_the_command_line_tells_what_was_explored_and_what_held(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--profile", "unknown-retire"]) == 0
    out = capsys.readouterr().out
    assert "exhausted    yes" in out
    assert f"held         {' '.join(CHECKED)}" in out
    assert "never" not in out


def test_the_command_line_stops_at_a_limit_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--profile", "everyone-large", "--limit", "500"]) == 0
    assert "exhausted    no" in capsys.readouterr().out


def test_the_command_line_shows_the_trace_of_a_violation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--bug", "told while unknown"]) == 1
    out = capsys.readouterr().out
    assert "violated     I2" in out
    assert "   5  A commit: " in out


def test_a_bug_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="no such bug"):
        explore(PROFILES["takeover"], bug="typo")
