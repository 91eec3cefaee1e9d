"""Is there any interleaving that breaks an invariant, and which is the shortest?

Breadth first over all states within a profile's bounds: every state is reached by a shortest path, so the first
violation comes with a shortest trace, and an exhausted search is a proof within the bounds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptstore.testing.model.invariants import check_state, check_step
from ckptstore.testing.model.others import collector_steps, operator_steps, reader_steps
from ckptstore.testing.model.profiles import BUGS
from ckptstore.testing.model.world import Profile, Rules, Step, ViolationError, World, land
from ckptstore.testing.model.writer import writer_steps

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Found", "Report", "explore"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A violation: which invariant, what was found, and the steps that lead to it, the last one included."""

    invariant: str
    text: str
    trace: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a search saw.

    Attributes:
        profile: Where it searched.
        bug: The rule that was broken on purpose, or "".
        states: Distinct states.
        transitions: Steps taken, those to known states included.
        depth: Length in steps of the longest shortest path.
        exhausted: Whether nothing within the bounds is left to explore.
        fired: How often each kind of action was taken.
        found: The violation, if there is one.
    """

    profile: Profile
    bug: str
    states: int
    transitions: int
    depth: int
    exhausted: bool
    fired: Counter[str] = field(repr=False)
    found: Found | None


def _steps(world: World, rules: Rules) -> Iterator[Step]:
    for who in range(rules.profile.writers):
        for kind, detail, after in writer_steps(world, who, rules):
            yield f"{'AB'[who]} {kind}", detail, after
    yield from operator_steps(world, rules)
    yield from collector_steps(world, rules)
    yield from reader_steps(world, rules)
    yield from land(world, rules)


def explore(profile: Profile, *, bug: str = "", limit: int | None = None) -> Report:
    """Search *profile* breadth first, with the rule named *bug* broken, until done, a violation, or *limit* states."""
    if bug and bug not in BUGS:
        message = f"no such bug: {bug!r}; there are {sorted(BUGS)}"
        raise ValueError(message)
    rules = Rules(profile, bug)
    origin = World()
    came_from: dict[World, tuple[World, str] | None] = {origin: None}
    level = [origin]
    fired: Counter[str] = Counter()
    depth = 0

    def report(*, exhausted: bool, found: Found | None = None) -> Report:
        return Report(
            profile=profile,
            bug=bug,
            states=len(came_from),
            transitions=fired.total(),
            depth=depth,
            exhausted=exhausted,
            fired=fired,
            found=found,
        )

    while level:
        following: list[World] = []
        for world in level:
            line = ""
            try:
                for kind, detail, after in _steps(world, rules):
                    fired[kind] += 1
                    line = f"{kind} ({detail})" if detail else kind
                    check_step(world, after, rules)
                    if after not in came_from:
                        check_state(world, after, rules)
                        came_from[after] = (world, line)
                        following.append(after)
                    line = ""
            except ViolationError as violation:
                depth += 1
                trace = (*_path(came_from, world), violation.action or line or "an actor reads the journal")
                found = Found(invariant=violation.invariant, text=str(violation), trace=trace)
                return report(exhausted=False, found=found)
            if limit is not None and len(came_from) >= limit:
                return report(exhausted=False)
        level = following
        depth += bool(level)
    return report(exhausted=True)


def _path(came_from: dict[World, tuple[World, str] | None], world: World) -> list[str]:
    lines = []
    while (step := came_from[world]) is not None:
        world, line = step
        lines.append(line)
    return lines[::-1]
