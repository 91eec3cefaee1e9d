"""What is the state of the model, and what can the store do to a publish?

A state is the store (journal, objects, publishes still in flight) and the volatile memory of every actor, as one
nested tuple. Everything in it is canonical: names come from who made them and not from a global counter, memory that no
longer matters is wiped, and a late copy of a publish that can only be refused is forgotten. So equal situations are
equal values.

The store creates a record if its name is free. It may answer, lose the answer, refuse, delay the request past the end
of the actor that sent it, or deliver it twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ckptstore.testing.model.records import NONE, Attempt, Record, Row, WriteId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "Answer",
    "Collector",
    "Operator",
    "Profile",
    "Reader",
    "Rules",
    "Step",
    "ViolationError",
    "World",
    "Writer",
    "discard",
    "during",
    "holds",
    "land",
    "present",
    "publish",
    "read_head",
    "store_object",
]


class ViolationError(Exception):
    """An invariant is broken."""

    def __init__(self, text: str, invariant: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant
        self.action = ""


def during(action: str, conclude: Callable[[], World]) -> World:
    """Give what *conclude* gives; a violation found there is one of *action*, which then never ends."""
    try:
        return conclude()
    except ViolationError as violation:
        violation.action = action
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One bounded corner of the protocol: who acts, how often, and what may go wrong.

    Attributes:
        name: What the command line calls it.
        says: What is in it, for people.
        writers: One or two.
        starts: Processes started, both writers together; each claims the run. A start may kill the one before.
        saves: Save attempts minted.
        retires: Retirements published by the owner.
        keep_last: The policy of owner and operator.
        troubles: How many publishes go wrong.
        kinds: In which ways: lost (applied, no answer), dropped (not applied, no answer), delayed, refused, doubled.
        rollbacks: Starts that ask for an older step.
        fresh: Starts that ask for a fresh branch.
        commands: Commands of the operator.
        verbs: Which: tag, untag, remove.
        collector: Whether garbage is collected and retired rows are deleted.
        reads: Reads, with a pin or without.
        large: Takes minutes, so it is for the command line and not for the tests.
    """

    name: str
    says: str
    writers: int = 2
    starts: int = 2
    saves: int = 1
    retires: int = 0
    keep_last: int = 1
    troubles: int = 0
    kinds: tuple[str, ...] = ("lost", "dropped", "delayed", "refused", "doubled")
    rollbacks: int = 0
    fresh: int = 0
    commands: int = 0
    verbs: tuple[str, ...] = ()
    collector: bool = False
    reads: int = 0
    large: bool = False


@dataclass(frozen=True, slots=True)
class Rules:
    """The protocol within one profile, with at most one of its rules broken on purpose."""

    profile: Profile
    bug: str = ""


class Writer(NamedTuple):
    """A training process: pc is off, claiming, idle, payload, manifest (what it wrote last), or unknown."""

    pc: str = "off"
    starts: int = 0
    word: str = ""  # until the claim is published: what the caller asked of resume: latest, step or fresh
    asked: int = NONE  # the step asked for
    epoch: int = NONE
    known: int = NONE  # the newest record it has read
    minted: int = 0
    attempt: Attempt | None = None  # the save under way
    step: int = NONE
    unknown: tuple[Record, ...] = ()  # publishes whose outcome it does not know, all of one number, oldest first
    stale: Record | None = None  # a body that met a Conflict; only bugs remember it


class Operator(NamedTuple):
    """A person's command: pc is off, ready (has read the head), or unknown."""

    pc: str = "off"
    used: int = 0
    verb: str = ""
    target: int = NONE
    known: int = NONE
    unknown: Record | None = None


class Collector(NamedTuple):
    """Whoever deletes: pc is off, grace, unpinned, half (manifest gone), dead (a garbage attempt), early (a bug)."""

    pc: str = "off"
    row: Row | None = None
    key: Attempt | None = None


class Reader(NamedTuple):
    """A reader: pc is off, chosen, pinned, valid (re-read the head), half (has the manifest), bare."""

    pc: str = "off"
    used: int = 0
    row: Row | None = None


class World(NamedTuple):
    """The whole state. An object of the store is (key, "manifest" or "payload", whose bytes)."""

    journal: tuple[Record | None, ...] = ()
    flights: tuple[Record, ...] = ()
    data: frozenset[tuple[Attempt, str, Attempt]] = frozenset()
    writers: tuple[Writer, ...] = (Writer(), Writer())
    operator: Operator = Operator()
    collector: Collector = Collector()
    reader: Reader = Reader()
    graves: tuple[tuple[int, WriteId], ...] = ()  # removed records: stays empty unless a bug removes one
    saves: int = 0
    retires: int = 0
    troubles: int = 0
    rollbacks: int = 0
    fresh: int = 0


Step: TypeAlias = tuple[str, str, World]
"""The kind of an action, its details for people, the state after it."""


class Answer(NamedTuple):
    """What became of a publish: *what* the actor learns (published, conflict, unknown, refused), *how* in truth."""

    what: str
    how: str
    world: World


def holds(world: World, row: Row) -> bool:
    """Tell whether the files of *row* are all there, with its bytes."""
    return (row.key, "manifest", row.attempt) in world.data and (row.key, "payload", row.attempt) in world.data


def present(world: World, key: Attempt) -> bool:
    """Tell whether anything lies under the prefix *key*."""
    return any(item[0] == key for item in world.data)


def store_object(world: World, key: Attempt, kind: str, content: Attempt) -> World:
    """Put one object; under a key used twice the old bytes are gone."""
    kept = frozenset(item for item in world.data if item[:2] != (key, kind))
    return world._replace(data=kept | {(key, kind, content)})


def discard(world: World, key: Attempt, *kinds: str) -> World:
    """Delete objects under *key*: those of *kinds*, or all."""
    return world._replace(
        data=frozenset(item for item in world.data if item[0] != key or (kinds and item[1] not in kinds))
    )


def read_head(world: World, rules: Rules) -> int:
    """Find the number of the newest record, whatever LATEST says: start anywhere, go forward to the first free one."""
    head = hint = min(len(world.journal) - 1, 0)  # step 6 of a save may fail freely: as old as can be
    while head + 1 < len(world.journal) and world.journal[head + 1] is not None:
        head += 1
    found = hint if rules.bug == "hint believed" else head
    if found != len(world.journal) - 1:
        text = f"record {len(world.journal) - 1} exists, and a later read of the head gives {found}"
        raise ViolationError(text, "I6")
    return found


def _taken(world: World, seq: int) -> Record | None:
    return world.journal[seq] if seq < len(world.journal) else None


def _apply(world: World, body: Record, rules: Rules) -> World:
    """Create *body* under its number if that is free."""
    there = _taken(world, body.seq)
    if there is not None and rules.bug != "publish overwrites":
        return world
    gap: tuple[Record | None, ...] = (None,) * (body.seq - len(world.journal))
    journal = (*(world.journal + gap)[: body.seq], body, *world.journal[body.seq + 1 :])
    # A late copy of a taken name can only be refused: forget it, unless records can vanish or be replaced.
    stale = not rules.bug.startswith(("publish overwrites", "unknown rolled back"))
    flights = tuple(late for late in world.flights if not (stale and late.seq == body.seq))
    return world._replace(journal=journal, flights=flights)


def _fly(world: World, body: Record) -> World:
    flights = sorted({*world.flights, body}, key=lambda late: (late.seq, late.write_id))
    return world._replace(flights=tuple(flights))


def land(world: World, rules: Rules) -> Iterator[Step]:
    """Let a delayed or doubled publish reach the store at last."""
    for body in world.flights:
        rest = tuple(late for late in world.flights if late is not body)
        detail = f"{body.write_id} at {body.seq}"
        yield "store: late publish lands", detail, _apply(world._replace(flights=rest), body, rules)


def publish(world: World, body: Record, rules: Rules, *, again: bool) -> Iterator[Answer]:
    """Try to create *body* under its number; *again* says that an earlier try went unanswered."""
    there = _taken(world, body.seq)
    if there is None or rules.bug == "publish overwrites":
        applied = _apply(world, body, rules)
        yield Answer("published", "published", applied)
    elif there.write_id == body.write_id and not (rules.bug == "412 believed" and body.change.kind == "commit"):
        yield Answer("published", "412, read back: ours", world)
    else:
        yield Answer("conflict", "conflict", world)
    if world.troubles >= rules.profile.troubles:
        return
    world = world._replace(troubles=world.troubles + 1)
    kinds = rules.profile.kinds
    if "dropped" in kinds:
        yield Answer("unknown", "dropped", world)
    if "refused" in kinds:
        # A definite failure is one only as the first answer; after an unanswered try the outcome is unknown.
        yield Answer("unknown" if again else "refused", "refused", world)
    if there is None:
        if "lost" in kinds:
            yield Answer("unknown", "applied, answer lost", _apply(world, body, rules))
        if "delayed" in kinds:
            yield Answer("unknown", "delayed", _fly(world, body))
        if "doubled" in kinds:
            # The name is taken by the first copy, so an honest store has forgotten the second already.
            doubled = _apply(_fly(world, body), body, rules)
            yield Answer("published", "delivered twice", doubled)
