"""Which corners of the protocol are searched, and which rules are broken on purpose to see that the search finds it?

A profile is small enough to be exhausted; together they put every actor next to every other. A planted bug names the
profile that must find it and the invariants that may be the first to fall: a search that finds no planted bug proves
nothing about the protocol either.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptstore.testing.model.world import Profile

__all__ = ["BUGS", "PROFILES", "Bug", "must_fire"]

_VERBS = ("tag", "untag", "remove")

_ALL = (
    Profile(name="takeover", says="two writers take the run from each other", starts=3, saves=2, troubles=2),
    Profile(name="answers", says="one process after another, many publishes go wrong", starts=2, saves=3, troubles=3),
    Profile(
        name="operator", says="commands between commits, answers lost", saves=2, commands=2, verbs=_VERBS, troubles=1
    ),
    Profile(
        name="retention",
        says="owner and operator retire, rows are deleted",
        saves=3,
        retires=2,
        commands=1,
        verbs=("tag", "remove"),
        collector=True,
    ),
    Profile(
        name="unknown-retire",
        says="retirements and commands whose answers are lost",
        saves=2,
        retires=2,
        commands=1,
        verbs=("tag", "remove"),
        troubles=1,
    ),
    Profile(name="pins", says="a reader against deletion", saves=3, retires=1, collector=True, reads=1),
    Profile(name="garbage", says="dead attempts are collected", starts=3, saves=2, troubles=1, collector=True),
    Profile(name="rollback", says="older steps and fresh branches", starts=4, saves=3, rollbacks=1, fresh=1),
    Profile(
        name="branches",
        says="retention over abandoned branches",
        starts=3,
        saves=3,
        rollbacks=1,
        fresh=1,
        retires=2,
        commands=1,
        verbs=("tag",),
    ),
    Profile(
        name="keep-two",
        says="keep_last of two, one writer, a rollback",
        writers=1,
        starts=3,
        saves=4,
        rollbacks=1,
        retires=2,
        keep_last=2,
        commands=1,
        verbs=("remove",),
    ),
    Profile(
        name="everyone",
        says="all actors at once",
        saves=2,
        retires=1,
        collector=True,
        reads=1,
        commands=1,
        verbs=("tag", "remove"),
        troubles=1,
        kinds=("delayed",),
    ),
    Profile(name="takeover-large", says="takeover, further", starts=4, saves=4, troubles=2, large=True),
    Profile(name="answers-large", says="answers, further", starts=3, saves=3, troubles=3, large=True),
    Profile(
        name="retention-large",
        says="retention with commands of all kinds and lost answers",
        saves=3,
        retires=2,
        commands=2,
        verbs=_VERBS,
        troubles=1,
        collector=True,
        large=True,
    ),
    Profile(
        name="branches-large",
        says="branches with an operator and two rollbacks",
        starts=4,
        saves=4,
        rollbacks=2,
        fresh=1,
        retires=2,
        commands=1,
        verbs=("tag", "remove"),
        large=True,
    ),
    Profile(
        name="everyone-large",
        says="all actors, all troubles, a rollback",
        starts=3,
        saves=3,
        retires=1,
        rollbacks=1,
        collector=True,
        reads=1,
        commands=1,
        verbs=("tag", "remove"),
        troubles=1,
        large=True,
    ),
)

PROFILES: dict[str, Profile] = {profile.name: profile for profile in _ALL}
"""By name; those not ``large`` are exhausted in seconds each."""


def must_fire(profile: Profile) -> set[str]:
    """List the kinds of action that a search of *profile* has to take at least once to mean anything."""
    last = "AB"[profile.writers - 1]
    kinds = {"A start: latest", "A crash and start: latest", "A claim: published", "A save: payload", "A save: manifest"}
    kinds |= {"A commit: published", f"{last} claim: published", f"{last} commit: published"}
    if profile.writers > 1:
        kinds |= {"A claim: conflict", "B claim: conflict", "A commit: conflict, fenced", "B start: latest"}
    if profile.troubles:
        how = {
            "lost": "applied, answer lost",
            "dropped": "dropped",
            "delayed": "delayed",
            "refused": "refused",
            "doubled": "delivered twice",
        }
        for kind in profile.kinds:
            kinds |= {f"A claim: {how[kind]}", f"A commit: {how[kind]}"}
            if profile.commands:
                kinds.add(f"operator: {how[kind]}")
        kinds |= {"store: late publish lands", "A commit: left unknown", "A settle: earlier number"}
        kinds |= {"A settle: claim published", "A settle: commit published", "A again, commit: published"}
        kinds |= {"A claim: store unavailable", "A again, commit: 412, read back: ours"}
    if profile.retires:
        kinds.add("A retire: published")
        if profile.writers > 1:
            kinds.add("A retire: conflict, fenced")
    if profile.commands:
        kinds |= {f"operator: reads, will {verb}" for verb in profile.verbs}
        kinds |= {"operator: published", "operator: conflict", "A commit: conflict"}
        if profile.retires:
            kinds.add("A retire: conflict")
    if profile.collector:
        kinds |= {"collector: judges an attempt dead", "collector: deletes a dead attempt"}
        if profile.retires:
            kinds |= {"collector: deletes manifest", "collector: deletes payload", "collector: killed"}
    if profile.reads:
        kinds |= {"reader: pins", "reader: reads the payload, unpins", "reader: reads the payload without a pin"}
        if profile.collector:
            kinds |= {"reader: pinned too late", "collector: finds a pin", "reader: finds the payload gone, a clean error"}
    if profile.rollbacks:
        kinds |= {"A crash and start: older step", f"{last} crash and start: older step", "A claim: published"}
    if profile.fresh:
        kinds |= {"A crash and start: fresh"}
    return kinds


@dataclass(frozen=True, slots=True)
class Bug:
    """A rule broken on purpose.

    Attributes:
        says: What the broken code does.
        profile: The name of the profile that must find it.
        invariants: Those of which one must be the first to fall.
    """

    says: str
    profile: str
    invariants: tuple[str, ...]


BUGS: dict[str, Bug] = {
    "412 believed": Bug("a 412 for one's own record means lost; the winner deletes its data", "answers", ("I7",)),
    "settled by the live set": Bug("an Unknown commit is looked up in the live set, not by number", "operator", ("I7",)),
    "same body at the next number": Bug("after a Conflict the same body is sent one number up", "operator", ("I21",)),
    "commit carries its own rows": Bug("after a Conflict a commit adds its row to the old rows", "operator", ("I21",)),
    "claim keeps its epoch": Bug("after a Conflict a claim keeps its old epoch", "takeover", ("I5",)),
    "retire targets kept": Bug("after a Conflict a retire keeps its targets", "retention", ("I11",)),
    "gc takes the head's epoch": Bug("gc collects attempts of the head's own epoch", "garbage", ("I13",)),
    "gc forgets retired rows": Bug("gc collects what only a retired row names", "pins", ("I13",)),
    "gc spares manifests": Bug("gc leaves attempts that have a manifest", "garbage", ("I13",)),
    "unknown attempt deleted": Bug("a commit without an answer is cleaned up", "answers", ("I10",)),
    "unknown retire deletes": Bug("a retire without an answer is acted on", "unknown-retire", ("I10",)),
    "unknown rolled back": Bug("a record without an answer is deleted to roll back", "answers", ("I3",)),
    "unknown number skipped": Bug("a writer moves past an Unknown number", "answers", ("I4",)),
    "write id at two numbers": Bug("an Unknown commit is sent anew without settling", "answers", ("I7",)),
    "told while unknown": Bug("the caller hears committed before there is proof", "answers", ("I2",)),
    "fenced goes on": Bug("a writer that meets a newer claim publishes after it", "takeover", ("I5",)),
    "fenced before settling": Bug("a fenced writer deletes before it settles its numbers", "takeover", ("I10",)),
    "any record fences": Bug("a writer takes an operator's record for a new owner", "operator", ("I22",)),
    "operator raises the epoch": Bug("an operator's record has its own number as epoch", "operator", ("I5",)),
    "deleted before the retire": Bug("retention deletes, then publishes the retire", "retention", ("I10",)),
    "payload before manifest": Bug("deletion takes the payload first", "retention", ("I9",)),
    "retire leaves parents": Bug("a retire does not relink parents", "retention", ("I21",)),
    "swept unseen": Bug("a row leaves retired while its files exist", "retention", ("I21",)),
    "resume_from unprotected": Bug("retention takes what the run resumed from", "keep-two", ("I11",)),
    "floor ignored": Bug("an operator may remove the last checkpoint", "retention", ("I11",)),
    "retention by step": Bug("retention keeps the highest steps, abandoned or not", "branches", ("I11",)),
    "fresh branch drops predecessors": Bug("a fresh branch retires the rows before it", "branches", ("I11",)),
    "pin not re-read": Bug("a reader trusts its pin without reading the head again", "pins", ("I12",)),
    "pin ignored": Bug("deletion does not look for pins", "pins", ("I12",)),
    "pins listed before the retire": Bug("deletion lists pins, then reads the retire", "pins", ("I12",)),
    "publish overwrites": Bug("the store replaces a record that exists", "takeover", ("I3",)),
    "keys by step": Bug("two attempts at a step share their keys", "answers", ("I1",)),
    "step not judged again": Bug("a commit is derived again without judging its step", "answers", ("I15",)),
    "commit before manifest": Bug("the commit is published before the manifest is written", "takeover", ("I10",)),
    "minted before the claim": Bug("an attempt is minted before its claim is published", "garbage", ("I10", "I13")),
    "hint believed": Bug("the head is what LATEST says", "takeover", ("I6",)),
    "latest is max step": Bug("latest is the highest step", "rollback", ("I15",)),
    "latest is newest commit": Bug("latest is the newest commit of any branch", "rollback", ("I15",)),
    "branch starts again": Bug("resume(step=) starts its branch again after each crash", "rollback", ("I15",)),
    "unavailable falls back": Bug("a row that cannot be read now counts as invalid", "answers", ("I14",)),
}
"""By name. Each breaks one rule in one place."""
