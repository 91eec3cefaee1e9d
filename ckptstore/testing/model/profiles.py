"""Which corners of the protocol are searched, and which rules are broken on purpose to see that the search finds it?

A profile is small enough to be exhausted; together they put every actor next to every other. A planted bug names the
profile that must find it: a search that finds no planted bug proves nothing about the protocol either.
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
    Profile(name="rollback", says="older steps and fresh branches", starts=4, saves=3, rollbacks=2, fresh=1),
    Profile(
        name="branches",
        says="retention over abandoned branches, one writer",
        writers=1,
        starts=3,
        saves=3,
        rollbacks=1,
        fresh=1,
        retires=2,
        commands=1,
        verbs=("tag", "remove"),
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
        verbs=("tag",),
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


_HOW = {
    "lost": "applied, answer lost",
    "dropped": "dropped",
    "delayed": "delayed",
    "refused": "refused",
    "doubled": "delivered twice",
}


def must_fire(profile: Profile) -> set[str]:
    """List the kinds of action that a search of *profile* has to take at least once to mean anything."""
    last = "AB"[profile.writers - 1]
    both = profile.writers > 1
    how = [_HOW[kind] for kind in profile.kinds] if profile.troubles else []
    deletes = profile.collector and profile.retires > 0
    groups: list[tuple[bool, list[str]]] = [
        (True, ["A start: latest", "A crash and start: latest", "A save: payload", "A save: manifest"]),
        (True, ["A claim: published", "A commit: published", f"{last} claim: published", f"{last} commit: published"]),
        (both, ["B start: latest", "A claim: conflict", "B claim: conflict", "A commit: conflict, fenced"]),
        (bool(how), ["store: late publish lands", "A settle: claim published", "A settle: commit published"]),
        (bool(how), ["A commit: left unknown", "A settle: earlier number", "A claim: store unavailable"]),
        (bool(how), ["A again, commit: published", "A again, commit: 412, read back: ours"]),
        (bool(how), [f"A {kind}: {way}" for kind in ("claim", "commit") for way in how]),
        (bool(how) and profile.retires > 0, [f"A retire: {way}" for way in how] + ["A retire: left unknown"]),
        (bool(how) and profile.commands > 0, [f"operator: {way}" for way in how] + ["operator: settles, published"]),
        (profile.retires > 0, ["A retire: published"]),
        (profile.retires > 0 and both, ["A retire: conflict, fenced"]),
        (profile.retires > 0 and profile.commands > 0, ["A retire: conflict"]),
        (profile.commands > 0, [f"operator: reads, will {verb}" for verb in profile.verbs]),
        (profile.commands > 0, ["operator: published", "operator: conflict", "A commit: conflict"]),
        (profile.collector, ["collector: judges an attempt dead", "collector: deletes a dead attempt"]),
        (deletes, ["collector: deletes manifest", "collector: deletes payload", "collector: killed"]),
        (profile.reads > 0, ["reader: pins", "reader: reads the payload, unpins"]),
        (profile.reads > 0, ["reader: reads the payload without a pin"]),
        (profile.reads > 0 and deletes, ["reader: pinned too late", "collector: finds a pin"]),
        (profile.reads > 0 and deletes, ["reader: finds the payload gone, a clean error"]),
        (profile.rollbacks > 0, ["A crash and start: older step", f"{last} crash and start: older step"]),
        (profile.fresh > 0, ["A crash and start: fresh"]),
    ]
    return {kind for applies, kinds in groups if applies for kind in kinds}


@dataclass(frozen=True, slots=True)
class Bug:
    """A rule broken on purpose.

    Attributes:
        says: What the broken code does.
        profile: The name of the profile that must find it.
    """

    says: str
    profile: str


BUGS: dict[str, Bug] = {
    "412 believed": Bug("a 412 for one's own record means lost; the winner deletes its data", "answers"),
    "settled by the live set": Bug("an Unknown commit is looked up in the live set, not by number", "operator"),
    "same body at the next number": Bug("after a Conflict the same body is sent one number up", "operator"),
    "commit carries its own rows": Bug("after a Conflict a commit adds its row to the old rows", "operator"),
    "claim keeps its epoch": Bug("after a Conflict a claim keeps its old epoch", "takeover"),
    "retire targets kept": Bug("after a Conflict a retire keeps its targets", "retention"),
    "gc takes the head's epoch": Bug("gc collects attempts of the head's own epoch", "garbage"),
    "gc forgets retired rows": Bug("gc collects what only a retired row names", "pins"),
    "gc spares manifests": Bug("gc leaves attempts that have a manifest", "garbage"),
    "unknown attempt deleted": Bug("a commit without an answer is cleaned up", "answers"),
    "unknown retire deletes": Bug("a retire without an answer is acted on", "unknown-retire"),
    "unknown rolled back": Bug("a record without an answer is deleted to roll back", "answers"),
    "unknown number skipped": Bug("a writer moves past an Unknown number", "answers"),
    "write id at two numbers": Bug("an Unknown commit is sent anew without settling", "answers"),
    "told while unknown": Bug("the caller hears committed before there is proof", "answers"),
    "fenced goes on": Bug("a writer that meets a newer claim publishes after it", "takeover"),
    "fenced before settling": Bug("a fenced writer deletes before it settles its numbers", "takeover"),
    "any record fences": Bug("a writer takes an operator's record for a new owner", "operator"),
    "operator raises the epoch": Bug("an operator's record has its own number as epoch", "operator"),
    "deleted before the retire": Bug("retention deletes, then publishes the retire", "retention"),
    "payload before manifest": Bug("deletion takes the payload first", "retention"),
    "retire leaves parents": Bug("a retire does not relink parents", "retention"),
    "swept unseen": Bug("a row leaves retired while its files exist", "retention"),
    "resume_from unprotected": Bug("an operator may remove what the run resumed from", "retention"),
    "floor ignored": Bug("an operator may remove the last checkpoint", "retention"),
    "retention by step": Bug("retention keeps the highest steps, abandoned or not", "branches"),
    "fresh branch drops predecessors": Bug("a fresh branch retires the rows before it", "branches"),
    "pin not re-read": Bug("a reader trusts its pin without reading the head again", "pins"),
    "pin ignored": Bug("deletion does not look for pins", "pins"),
    "pins listed before the retire": Bug("deletion lists pins, then reads the retire", "pins"),
    "publish overwrites": Bug("the store replaces a record that exists", "takeover"),
    "keys by step": Bug("two attempts at a step share their keys", "answers"),
    "step not judged again": Bug("a commit is derived again without judging its step", "answers"),
    "commit before manifest": Bug("the commit is published before the manifest is written", "takeover"),
    "minted before the claim": Bug("an attempt is minted before its claim is published", "garbage"),
    "hint believed": Bug("the head is what LATEST says", "takeover"),
    "latest is max step": Bug("latest is the highest step", "rollback"),
    "latest is newest commit": Bug("latest is the newest commit of any branch", "rollback"),
    "branch starts again": Bug("resume(step=) starts its branch again after each crash", "rollback"),
    "unavailable falls back": Bug("a row that cannot be read now counts as invalid", "answers"),
}
"""By name. Each breaks one rule in one place."""
