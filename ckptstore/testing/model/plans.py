"""Which record does an actor derive from the head it has read?

Pure functions of what the actor knows. A plan is made from exactly one record, its ``prev``, and holds that record's
whole truth plus one change; so a plan that lost its number is made again from the new head and never mended.
"""

from __future__ import annotations

from ckptstore.testing.model.records import (
    NONE,
    Attempt,
    Change,
    Record,
    Row,
    WriteId,
    follow,
    lineage,
    may_retire,
    policy,
    record,
    relinked,
    row_of,
)
from ckptstore.testing.model.world import Rules, ViolationError, World, Writer, present

__all__ = ["key_of", "known_record", "plan_claim", "plan_commit", "plan_operator", "plan_retire"]


def known_record(world: World, seq: int) -> Record:
    """Give record *seq*, which someone has read; journals have no gaps."""
    body = world.journal[seq] if seq < len(world.journal) else None
    if body is None:
        text = f"record {seq} was read, and is gone or was never there"
        raise ViolationError(text, "I4")
    return body


def key_of(attempt: Attempt, step: int, rules: Rules) -> Attempt:
    """Give the prefix of an attempt: its own, in its final place."""
    return (attempt[0], 0, step) if rules.bug == "keys by step" else attempt


def _swept(world: World, head: Record, rules: Rules) -> tuple[Row, ...]:
    """Give the retired rows a new record carries: those whose prefix a fresh listing shows empty leave (R5)."""
    if rules.bug == "swept unseen":
        return ()
    return tuple(row for row in head.retired if present(world, row.key))


def _restore_row(head: Record, word: str, asked: int, rules: Rules) -> tuple[int, int] | None:
    """Choose the row to resume from and the step of the branch; None when the row asked for does not exist."""
    line = lineage(head)
    latest = line[0].seq if line else NONE
    if rules.bug == "latest is max step":
        latest = max(((row.step, row.seq) for row in head.live), default=(NONE, NONE))[1]
    elif rules.bug == "latest is newest commit":
        latest = max((row.seq for row in head.live), default=NONE)
    if word == "fresh":
        return NONE, NONE
    if word == "latest" or (head.branch == asked and rules.bug != "branch starts again"):
        return latest, head.branch
    found = next((row.seq for row in line if row.step == asked), None)
    return None if found is None else (found, asked)


def plan_claim(world: World, who: int, rules: Rules, *, fall_back: bool = False) -> Record | None:
    """Plan the claim after the newest record known; None when the row that the caller asked for is gone."""
    writer = world.writers[who]
    write_id: WriteId = ("claim", who, writer.starts, 0)
    if writer.known == NONE:
        return record(0, write_id, None, 0, Change("claim", word=writer.word, step=writer.asked), (), (), NONE, NONE)
    head = known_record(world, writer.known)
    chosen = _restore_row(head, writer.word, writer.asked, rules)
    if chosen is None:
        return None
    resume_from, branch = chosen
    if fall_back and (row := row_of(head, resume_from)) is not None:
        resume_from = row.parent
    targets = () if resume_from == NONE else (resume_from,)
    return follow(
        head,
        write_id,
        Change("claim", targets, writer.word, writer.asked),
        # Only a bug knows an epoch before its claim is published.
        epoch=head.seq + 1 if writer.epoch == NONE else writer.epoch,
        retired=_swept(world, head, rules),
        resume_from=resume_from,
        branch=branch,
    )


def plan_commit(world: World, writer: Writer, attempt: Attempt, rules: Rules) -> Record:
    """Plan the commit after the newest record known: one row more, its parent the lineage's tip."""
    head = known_record(world, writer.known)
    write_id: WriteId = ("commit", *attempt)
    skipped = 1 if writer.unknown and rules.bug == "unknown number skipped" else 0
    stale = writer.stale
    if stale is not None and rules.bug == "same body at the next number":
        return record(
            head.seq + 1, write_id, stale.prev, stale.epoch, stale.change, stale.live, stale.retired, stale.resume_from,
            stale.branch,
        )  # fmt: skip
    line = lineage(head)
    row = Row(
        seq=head.seq + 1 + skipped,
        epoch=writer.epoch,
        step=writer.step,
        attempt=attempt,
        key=key_of(attempt, writer.step, rules),
        parent=line[0].seq if line else NONE,
        tagged=False,
    )
    carried = head.live
    if stale is not None and rules.bug == "commit carries its own rows":
        carried = stale.live[:-1]
    return follow(
        head,
        write_id,
        Change("commit", row=row),
        epoch=writer.epoch,
        live=(*carried, row),
        retired=_swept(world, head, rules),
        skipped=skipped,
    )


def plan_retire(world: World, who: int, rules: Rules) -> Record | None:
    """Plan the owner's retirement by policy, on the newest record known; None when there is nothing to drop."""
    writer = world.writers[who]
    head = known_record(world, writer.known)
    targets = policy(head, rules.profile.keep_last, drop_foreign=rules.bug == "fresh branch drops predecessors")
    if rules.bug == "retention by step":
        newest = max(head.live, key=lambda row: row.step, default=None)
        targets = tuple(row.seq for row in head.live if row is not newest and may_retire(head, row, 1))
    if writer.stale is not None and rules.bug == "retire targets kept":
        targets = writer.stale.change.targets
    if not targets:
        return None
    # One body a number: no second retirement is planned while one at this number is Unknown.
    write_id: WriteId = ("retire", writer.epoch, who, head.seq + 1)
    return _retirement(head, write_id, targets, rules, by="owner", retired=_swept(world, head, rules))


def _retirement(
    head: Record, write_id: WriteId, targets: tuple[int, ...], rules: Rules, *, by: str, retired: tuple[Row, ...]
) -> Record:
    live, resume_from = relinked(head, targets)
    if rules.bug == "retire leaves parents":
        live = tuple(row for row in head.live if row.seq not in targets)
    gone = tuple(row for row in head.live if row.seq in targets)
    return follow(
        head,
        write_id,
        Change("retire", targets, by),
        epoch=head.epoch,
        live=live,
        retired=tuple(sorted((*retired, *gone))),
        resume_from=resume_from,
    )


def plan_operator(head: Record, number: int, verb: str, target: int, rules: Rules) -> Record | None:
    """Judge an operator's command on *head*; None when it is void or refused there."""
    row = row_of(head, target)
    if row is None:
        return None
    write_id: WriteId = ("operator", number, 0, 0)
    epoch = head.seq + 1 if rules.bug == "operator raises the epoch" else head.epoch
    if verb in ("tag", "untag"):
        tagged = verb == "tag"
        if row.tagged == tagged:
            return None
        live = tuple(other._replace(tagged=tagged) if other is row else other for other in head.live)
        return follow(head, write_id, Change("tag", (target,), verb), epoch=epoch, live=live)
    line = lineage(head)
    last_one = len(line) == 1 and row in line and rules.bug != "floor ignored"
    guard = rules.bug != "resume_from unprotected"
    if last_one or not may_retire(head, row, rules.profile.keep_last, guard_resume=guard):
        return None
    return _retirement(head, write_id, (target,), rules, by="operator", retired=head.retired)
