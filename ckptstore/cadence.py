"""Is a checkpoint due?

A cadence is a number of steps, a time, or either: ``500``, ``"500 steps"``, ``"15 min"``, ``"500 steps or 15 min"``. It
is due when a multiple of the number was reached or crossed since the last save, so a loop that skips steps still saves.
"""

from __future__ import annotations

import numbers
import re
from dataclasses import dataclass

from ckptstore.errors import ConfigError

__all__ = ["Cadence", "parse_cadence"]

_TERM = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*([a-z]*)\Z", re.ASCII)
_SECONDS = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
}


@dataclass(frozen=True, slots=True)
class Cadence:
    """When to save: every so many steps, every so many seconds, or whichever comes first."""

    steps: int | None = None
    seconds: float | None = None

    def due(self, step: int, last_step: int, elapsed_s: float) -> bool:
        """Tell whether a save is due at *step*, when the last was at *last_step*, *elapsed_s* seconds ago."""
        by_step = self.steps is not None and step // self.steps > last_step // self.steps
        return by_step or (self.seconds is not None and elapsed_s >= self.seconds)


def parse_cadence(every: int | str | None) -> Cadence | None:
    """Return the cadence that *every* means, or None for None; ConfigError says which forms there are."""
    if every is None:
        return None
    if isinstance(every, numbers.Integral) and not isinstance(every, bool):
        every = f"{every} steps"
    terms = [_parse(term.strip().lower()) for term in every.split(" or ")] if isinstance(every, str) else [None]
    steps = [int(number) for number, unit in (term for term in terms if term) if unit == "steps"]
    seconds = [number for number, unit in (term for term in terms if term) if unit == "seconds"]
    if None in terms or len(steps) > 1 or len(seconds) > 1 or min([*steps, *seconds]) <= 0:
        message = f'every={every!r} is not a cadence; write 500, "500 steps", "15 min" or "500 steps or 15 min"'
        raise ConfigError(message)
    return Cadence(steps=steps[0] if steps else None, seconds=seconds[0] if seconds else None)


def _parse(term: str) -> tuple[float, str] | None:
    match = _TERM.match(term)
    if match is None:
        return None
    number, unit = float(match[1]), match[2]
    if unit in {"", "step", "steps"} and number == int(number):
        return number, "steps"
    return (number * _SECONDS[unit], "seconds") if unit in _SECONDS else None
