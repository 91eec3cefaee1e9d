"""A cadence is due when a multiple was reached or crossed, or the time is up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ckptstore.cadence import Cadence, parse_cadence
from ckptstore.errors import ConfigError


@pytest.mark.parametrize(
    "every,expected",
    [
        (None, None),
        (500, Cadence(steps=500)),
        (np.int64(500), Cadence(steps=500)),
        ("500", Cadence(steps=500)),
        ("500 steps", Cadence(steps=500)),
        ("1 step", Cadence(steps=1)),
        ("15 min", Cadence(seconds=900.0)),
        ("1.5h", Cadence(seconds=5400.0)),
        ("30 s", Cadence(seconds=30.0)),
        (" 2 Hours ", Cadence(seconds=7200.0)),
        ("500 steps or 15 min", Cadence(steps=500, seconds=900.0)),
        ("15 min or 500", Cadence(steps=500, seconds=900.0)),
    ],
)
def test_the_forms_that_are_understood(every: Any, expected: Cadence | None) -> None:
    assert parse_cadence(every) == expected


@pytest.mark.parametrize(
    "every",
    [0, -1, True, 1.5, "", "steps", "0 steps", "-5", "1.5 steps", "0 min", "5 parsecs", "5 steps or", "5 or 6",
     "1 h or 2 s", "5 steps and 1 h", "9" * 400, "٣ steps", "1e3", [500], b"500"],
    ids=repr,
)  # fmt: skip
def test_anything_else_is_refused_with_the_forms_there_are(every: Any) -> None:
    with pytest.raises(ConfigError, match='write 500, "500 steps", "15 min" or "500 steps or 15 min"'):
        parse_cadence(every)


@pytest.mark.parametrize(
    "step,last,due",
    [(1, 0, False), (10, 0, True), (10, 10, False), (19, 10, False), (20, 10, True), (35, 10, True), (0, 0, False)],
)
def test_a_multiple_that_was_reached_or_crossed_makes_a_save_due(step: int, last: int, *, due: bool) -> None:
    assert Cadence(steps=10).due(step, last, 1e9) is due


def test_time_makes_a_save_due_whatever_the_step() -> None:
    assert not Cadence(seconds=60.0).due(100, 0, 59.0)
    assert Cadence(seconds=60.0).due(1, 0, 60.0)
    both = Cadence(steps=10, seconds=60.0)
    assert both.due(10, 0, 0.0)
    assert both.due(1, 0, 61.0)
    assert not both.due(1, 0, 1.0)
