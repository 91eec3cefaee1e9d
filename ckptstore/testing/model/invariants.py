"""Does a state, and the step that led to it, keep the invariants of PROTOCOL 12?

What is checked here is derived from the journal by replaying it from record 0, with none of the code by which the
actors plan their records; a rule that is wrong in both places would have to be written wrongly twice. Some invariants
bite at the moment an actor draws a conclusion and are asserted there: I2, I5, I7 and I22 in ``writer``, I6 in
``world.read_head``, I12 and I13 in ``others``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeAlias

from ckptstore.testing.model.others import collectable
from ckptstore.testing.model.records import NONE, Record, Row, follow
from ckptstore.testing.model.world import Rules, ViolationError, World

__all__ = ["CHECKED", "check_state", "check_step"]

CHECKED: dict[str, str] = {
    "I1": "no live row's files hold another attempt's bytes",
    "I2": "told committed: a record says so; what a record committed stays live until retired; live rows are complete",
    "I3": "a number never shows two write ids: a record is never changed or replaced",
    "I4": "the journal has no gap",
    "I5": "epochs: a claim's is its number, any other record's is that of the record before",
    "I6": "a read of the head gives the newest record",
    "I7": "Published iff the record is ours, Conflict iff it is another's; no write id at two numbers",
    "I8": "going forward from any hint gives the same head (so it falls with I4 at the latest)",
    "I9": "a row's manifest exists only while its payload does",
    "I10": "a live row's files are all there, and so are those of an attempt whose writer does not know its outcome",
    "I11": "a retirement leaves the lineage its floor; it spares tags, resume_from and what a fresh branch left",
    "I12": "a reader whose pin was validated reads to the end",
    "I13": "gc deletes dead attempts only; after one more claim nothing unreferenced would remain",
    "I14": "a claim never resumes an older row or nothing where a newer one of the lineage exists",
    "I15": "a claim resumes the newest commit of the lineage of the claim before it, or what its caller asked for",
    "I21": "each record is its one change applied to the record before",
    "I22": "a writer is fenced only when a newer claim exists",
}
"""Invariant to what exactly the model checks of it. I16 to I20 are about ranks, migration, formats, costs and seeds."""

_Journal: TypeAlias = tuple[Record | None, ...]


def _require(invariant: str, fact: bool, text: str) -> None:
    if not fact:
        raise ViolationError(text, invariant)


def check_step(before: World, after: World, rules: Rules) -> None:
    """Check what a step did to the journal."""
    if before.journal is after.journal:
        return
    for seq, (old, new) in enumerate(zip(before.journal, after.journal, strict=False)):
        _require("I3", old is None or old is new, f"record {seq} was changed")
    for seq, write_id in after.graves:
        there = after.journal[seq] if seq < len(after.journal) else None
        fine = there is None or there.write_id == write_id
        _require("I3", fine, f"number {seq} showed {write_id} and now shows {there and there.write_id}")
    missing = [seq for seq, body in enumerate(after.journal) if body is None]
    _require("I4", not missing, f"records {missing} are missing")
    if len(after.journal) > len(before.journal):
        _check_journal(after.journal, rules.profile.keep_last)
    for new, prev in zip(after.journal[len(before.journal) :], after.journal[len(before.journal) - 1 :], strict=False):
        if before.journal and new is not None and prev is not None:
            kept = {row.seq for row in new.retired} | {row.seq for row in new.live}
            for row in prev.retired:
                gone = row.seq in kept or all(item[0] != row.key for item in after.data)
                _require("I21", gone, f"row {row.seq} left retired while its files exist")


def check_state(before: World, world: World, rules: Rules) -> None:
    """Check what must hold at every instant; *before* has been checked."""
    if before.data is world.data and before.journal is world.journal and before.writers is world.writers:
        return  # nothing below reads anything else
    head = world.journal[-1] if world.journal else None
    if head is None:
        return
    for row in head.live:
        for key, kind, content in world.data:
            fine = key != row.key or content == row.attempt
            _require("I1", fine, f"{kind} of row {row.seq} holds the bytes of {content}")
    there = {item[:2] for item in world.data}
    for row in head.live + head.retired:
        fine = (row.key, "payload") in there or (row.key, "manifest") not in there
        _require("I9", fine, f"row {row.seq} has a manifest and no payload")
    unsettled = [body for writer in world.writers for body in writer.unknown if body.seq >= len(world.journal)]
    for row in head.live + tuple(body.change.row for body in unsettled if body.change.row is not None):
        whole = {(row.key, "payload"), (row.key, "manifest")} <= there
        _require("I10", whole, f"row {row.seq} is live, or its outcome unknown, and its files are not all there")
    _no_leftovers(world, head, rules)


def _no_leftovers(world: World, head: Record, rules: Rules) -> None:
    """If everyone stopped here, would one more claim make everything unreferenced collectable?"""
    claimed = follow(head, ("claim", 0, 0, 0), head.change, epoch=head.seq + 1)
    named = {row.key for row in head.live + head.retired}
    for key, _, _ in world.data:
        fine = key in named or collectable(world, claimed, key, rules)
        _require("I13", fine, f"after a claim and gc, attempt {key} would stay for ever")


@lru_cache(maxsize=1 << 16)
def _check_journal(journal: _Journal, keep_last: int) -> None:
    """Check a dense journal whose proper prefixes have been checked: replay it, then judge the newest record."""
    *earlier, new = [body for body in journal if body is not None]
    past = _Past()
    for body in earlier:
        past.add(body)
    before = earlier[-1] if earlier else None
    _require("I8", all(_forward(journal, hint) == len(journal) - 1 for hint in range(len(journal))), "hints disagree")
    _require("I7", new.write_id not in {body.write_id for body in earlier}, f"{new.write_id} stands at two numbers")
    epoch = new.seq if new.change.kind == "claim" or before is None else before.epoch
    _require("I5", new.epoch == epoch, f"record {new.seq} has epoch {new.epoch}, not {epoch}")
    if new.change.kind == "claim":
        _check_claim(past, before, new)
    elif new.change.kind == "retire" and before is not None:
        _check_retire(past, new, keep_last)
    _check_change(past, before, new)
    for row in past.rows.values():
        fine = row.seq in past.retired or row.seq in new.change.targets or any(row.seq == live.seq for live in new.live)
        _require("I2", fine, f"row {row.seq} was committed, never retired, and is not live")


def _forward(journal: _Journal, hint: int) -> int:
    while hint + 1 < len(journal) and journal[hint + 1] is not None:
        hint += 1
    return hint


class _Past:
    """What the records up to some number say, kept by replay alone."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}  # as they were committed
        self.retired: set[int] = set()
        self.tagged: set[int] = set()
        self.latest = NONE
        self.resumed = NONE
        self.branch = NONE
        self.claimed = NONE
        self.fresh = NONE  # number of the newest claim that started from nothing while there were rows

    def surviving(self, seq: int, gone: set[int] | None = None) -> int:
        """Give *seq*, or its nearest ancestor that is not retired."""
        while seq in self.retired or (gone is not None and seq in gone):
            seq = self.rows[seq].parent
        return seq

    def add(self, body: Record) -> None:
        change = body.change
        if change.kind == "claim":
            self.latest = self.resumed = change.targets[0] if change.targets else NONE
            self.claimed = body.seq
            self.branch = body.branch
            if self.latest != NONE and self.latest < self.fresh:
                self.fresh = NONE
            elif change.word == "fresh":
                self.fresh = body.seq
        elif change.kind == "commit" and change.row is not None:
            self.rows[body.seq] = change.row
            self.latest = body.seq
        elif change.kind == "retire":
            self.retired |= set(change.targets)
            self.latest = self.surviving(self.latest)
            self.resumed = self.surviving(self.resumed)
        elif change.kind == "tag":
            self.tagged ^= set(change.targets)

    def line(self) -> list[int]:
        found = []
        at = self.latest
        while at != NONE:
            found.append(at)
            at = self.surviving(self.rows[at].parent)
        return found


def _check_claim(past: _Past, before: Record | None, new: Record) -> None:
    got = new.change.targets[0] if new.change.targets else NONE
    word, asked = new.change.word, new.change.step
    if word == "fresh":
        _require("I15", got == NONE, f"a fresh claim resumes {got}")
    elif word == "step" and past.branch != asked:
        fine = got in past.line() and past.rows[got].step == asked
        _require("I15", fine, f"asked for step {asked}, resumes row {got}")
    elif got != past.latest:
        older = got == NONE or got in past.line()
        text = f"claim {new.seq} resumes row {got}, the newest of the lineage is {past.latest}"
        raise ViolationError(text, "I15" if word == "step" or not older else "I14")
    branch = NONE if word == "fresh" or before is None else asked if word == "step" else before.branch
    _require("I15", new.branch == branch, f"claim {new.seq} loses the branch at {branch}")


def _check_retire(past: _Past, new: Record, keep_last: int) -> None:
    targets = set(new.change.targets)
    line = past.line()
    left = [seq for seq in line if seq not in targets]
    floor = min(len(line), keep_last if new.change.word == "owner" else 1)
    _require("I11", len(left) >= floor, f"a retirement leaves {len(left)} rows of a lineage of {len(line)}")
    _require("I11", not targets & past.tagged, f"a retirement takes tagged rows {targets & past.tagged}")
    own = [row for row in past.rows.values() if row.seq > past.claimed and row.seq not in past.retired]
    early = past.resumed in targets and len(own) < keep_last
    _require("I11", not early, f"retires {past.resumed}, which the run resumed from, after {len(own)} commits")
    if new.change.word == "owner":
        for seq in targets - set(line):
            _require("I11", seq > past.fresh, f"a fresh branch drops its predecessor's row {seq}")
            newer = sum(other > seq for other in line)
            _require("I11", newer >= keep_last, f"drops abandoned row {seq} when the new branch has {newer} commits")


def _check_change(past: _Past, before: Record | None, new: Record) -> None:
    change = new.change
    chained = new.prev == (before.write_id if before else None)
    _require("I21", chained, f"record {new.seq} was derived from another head")
    live = {row.seq: row for row in before.live} if before else {}
    retired = {row.seq for row in before.retired} if before else set()
    resume_from = before.resume_from if before else NONE
    if change.kind == "claim":
        resume_from = change.targets[0] if change.targets else NONE
    elif change.kind == "commit" and change.row is not None:
        live[new.seq] = change.row
        _require("I21", change.row.seq == new.seq, f"commit {new.seq} calls its row {change.row.seq}")
        _require("I21", change.row.parent == past.latest, f"the parent of row {new.seq} is not the lineage's tip")
        tip = past.rows[past.latest].step if past.latest != NONE else NONE
        _require("I15", change.row.step > tip, f"step {change.row.step} of row {new.seq} is not above {tip}")
    elif change.kind == "tag":
        row = live[change.targets[0]]
        live[row.seq] = row._replace(tagged=change.word == "tag")
    else:
        targets = set(change.targets)
        retired |= targets
        live = {
            row.seq: row._replace(parent=past.surviving(past.rows[row.seq].parent, targets))
            for row in live.values()
            if row.seq not in targets
        }
        resume_from = past.surviving(resume_from, targets)
    _require("I21", new.live == tuple(live[seq] for seq in sorted(live)), f"record {new.seq}: live is not its change")
    _require("I21", {row.seq for row in new.retired} <= retired, f"record {new.seq}: retired holds what never was")
    swept = retired - {row.seq for row in new.retired}
    _require("I21", not swept & set(change.targets), f"record {new.seq}: a target is missing from retired")
    _require("I21", new.resume_from == resume_from, f"record {new.seq}: resume_from is not its change")
