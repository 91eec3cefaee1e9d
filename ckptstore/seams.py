"""Where do time and randomness enter?

Only here, so that a test can hold the clock still and a simulator can repeat a run exactly.
"""

from __future__ import annotations

import secrets
import time
from typing import Protocol

__all__ = ["SYSTEM_CLOCK", "SYSTEM_IDS", "Clock", "IdSource"]


class Clock(Protocol):
    """Time, in seconds."""

    def now(self) -> float:
        """Return Unix time: informational only, nothing is decided by it."""
        ...

    def monotonic(self) -> float:
        """Return this process's own steady clock."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


class IdSource(Protocol):
    """Names that no one else has."""

    def new_id(self) -> str:
        """Return 32 hexadecimal characters, unique for ever."""
        ...


class _SystemClock:
    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class _SystemIds:
    def new_id(self) -> str:
        return secrets.token_hex(16)


SYSTEM_CLOCK: Clock = _SystemClock()
SYSTEM_IDS: IdSource = _SystemIds()
