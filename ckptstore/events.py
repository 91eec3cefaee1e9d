"""What does an observer learn of a save?

Frozen values with sizes in bytes and times in seconds. "Staged" and "committed" are different events: only the second
means that the step can be restored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Committed", "Event", "Observer", "SaveFailed", "SaveSkipped", "StagingDone"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingDone:
    """The state of *step* is copied; training goes on. It can't be restored yet."""

    step: int
    n_bytes: int
    wait_s: float
    staging_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """The checkpoint of *step* is durable and can be restored."""

    step: int
    n_bytes: int
    wait_s: float
    staging_s: float
    write_s: float
    commit_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed:
    """The save of *step* failed; earlier checkpoints are whole."""

    step: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSkipped:
    """The save of *step* was not made, or superseded before it was written, and why."""

    step: int
    reason: str


Event: TypeAlias = StagingDone | Committed | SaveFailed | SaveSkipped

if TYPE_CHECKING:
    Observer: TypeAlias = Callable[[Event], object]
"""Called with each event on the thread where it happens, training's or the publisher's; what it raises is logged."""
