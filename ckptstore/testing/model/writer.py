"""What may a training process do next (PROTOCOL 4, 5, 8 and the owner's part of 9)?

Starting is allowed at any moment and kills the process that was there before: that is a crash at that moment. A crash
without a restart needs no action of its own, for safety it is a process that is never scheduled again. A process whose
run was taken over while it lives is a zombie; it goes on with what it remembers until the journal tells it to stop.

Planning a record and sending it are one action, because a plan is a function of what the process has read, and that
does not change in between. Everything else of the world may change between any two actions.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ckptstore.testing.model.plans import key_of, known_record, plan_claim, plan_commit, plan_retire
from ckptstore.testing.model.records import NONE, Attempt, Record, lineage
from ckptstore.testing.model.world import (
    Rules,
    Step,
    ViolationError,
    World,
    Writer,
    discard,
    during,
    publish,
    read_head,
    store_object,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["writer_steps"]


def writer_steps(world: World, who: int, rules: Rules) -> Iterator[Step]:
    """Every action that writer *who* may take."""
    writer = world.writers[who]
    # The two writers are alike: the first to start is A.
    if sum(other.starts for other in world.writers) < rules.profile.starts and (who == 0 or world.writers[0].starts):
        yield from _start(world, who, rules)
    if writer.pc == "claiming":
        yield from _claiming(world, who, rules)
    elif writer.pc == "unknown":
        yield from _unknown(world, who, rules)
    elif writer.pc == "payload":
        if writer.attempt is not None:
            key = key_of(writer.attempt, writer.step, rules)
            written = store_object(world, key, "manifest", writer.attempt)
            yield "save: manifest", str(key), _with(written, who, writer._replace(pc="manifest"))
            if rules.bug == "commit before manifest":
                yield from _commit(world, who, writer.attempt, rules)
    elif writer.pc in ("idle", "manifest"):
        if writer.unknown and _taken(world, writer.unknown[-1]):
            # Before planning any record: settle every Unknown number.
            action = f"{'AB'[who]} settle: earlier number"
            settled = during(action, partial(_read_forward, world, who, writer.unknown, rules))
            yield "settle: earlier number", f"{writer.unknown[-1].seq}", settled
        elif writer.attempt is not None:
            yield from _commit(world, who, writer.attempt, rules)
        else:
            yield from _idle(world, who, rules)


def _with(world: World, who: int, writer: Writer) -> World:
    return world._replace(writers=(*world.writers[:who], writer, *world.writers[who + 1 :]))


def _stopped(writer: Writer) -> Writer:
    return Writer(starts=writer.starts)


def _taken(world: World, body: Record) -> Record | None:
    return world.journal[body.seq] if body.seq < len(world.journal) else None


def _start(world: World, who: int, rules: Rules) -> Iterator[Step]:
    """Start a process that reads the head and chooses what to resume; one that lived before is killed."""
    writer = world.writers[who]
    head = read_head(world, rules)
    fresh = Writer(pc="claiming", starts=writer.starts + 1, known=head, word="latest")
    kind = "start" if writer.pc == "off" else "crash and start"
    started = world
    if rules.bug == "minted before the claim":
        attempt = (head + 1, who, 0)
        started = store_object(store_object(world, attempt, "payload", attempt), attempt, "manifest", attempt)
        fresh = fresh._replace(attempt=attempt, minted=1)
    yield f"{kind}: latest", f"head {head}", _with(started, who, fresh)
    if head == NONE:
        return
    line = lineage(known_record(world, head))
    if world.rollbacks < rules.profile.rollbacks:
        budget = started._replace(rollbacks=world.rollbacks + 1)
        for row in line:
            chosen = fresh._replace(word="step", asked=row.step)
            yield f"{kind}: older step", f"step {row.step}, head {head}", _with(budget, who, chosen)
    if world.fresh < rules.profile.fresh and line:
        budget = started._replace(fresh=world.fresh + 1)
        yield f"{kind}: fresh", f"head {head}", _with(budget, who, fresh._replace(word="fresh"))


def _send(world: World, who: int, body: Record, rules: Rules, *, again: bool) -> Iterator[Step]:
    """Publish *body* and let the writer draw its conclusion."""
    kind = body.change.kind
    for answer in publish(world, body, rules, again=again):
        detail = f"{body.write_id} at {body.seq}, epoch {body.epoch}"
        action = f"{'AB'[who]} {kind}: {answer.how} ({detail})"
        after = during(action, partial(_learn, answer.world, who, body, answer.what, rules))
        fenced = ", fenced" if answer.what == "conflict" and after.writers[who].pc == "off" else ""
        yield f"{kind}: {answer.how}{fenced}", detail, after


def _claiming(world: World, who: int, rules: Rules) -> Iterator[Step]:
    writer = world.writers[who]
    body = plan_claim(world, who, rules)
    if body is None:
        yield "claim: step is gone", f"step {writer.asked}", _with(world, who, _stopped(writer))
        return
    yield from _send(world, who, body, rules, again=False)
    if body.change.targets and world.troubles < rules.profile.troubles:
        # The manifest of the row to resume cannot be read now: stop. Unavailable is no reason to fall back.
        spent = world._replace(troubles=world.troubles + 1)
        if rules.bug != "unavailable falls back":
            yield "claim: store unavailable", "", _with(spent, who, _stopped(writer))
        elif (older := plan_claim(world, who, rules, fall_back=True)) is not None:
            yield from _send(spent, who, older, rules, again=False)


def _idle(world: World, who: int, rules: Rules) -> Iterator[Step]:
    writer = world.writers[who]
    if world.saves < rules.profile.saves:
        line = lineage(known_record(world, writer.known))
        tip = line[0].step if line else 0
        steps = {tip + 1}
        # A caller who was told "unknown" may try that step again, or go on with the next.
        for late in writer.unknown:
            if late.change.row is not None:
                steps |= {late.change.row.step, late.change.row.step + 1}
        for step in sorted(steps):
            attempt = (writer.epoch, who, writer.minted)
            key = key_of(attempt, step, rules)
            saving = writer._replace(pc="payload", attempt=attempt, step=step, minted=writer.minted + 1)
            written = store_object(world, key, "payload", attempt)._replace(saves=world.saves + 1)
            yield "save: payload", f"step {step} under {key}", _with(written, who, saving)
    if world.retires < rules.profile.retires and not writer.unknown:
        body = plan_retire(world, who, rules)
        if body is not None:
            spent = world._replace(retires=world.retires + 1)
            if rules.bug == "deleted before the retire":
                spent = _delete_targets(spent, body)
            yield from _send(spent, who, body, rules, again=False)


def _delete_targets(world: World, body: Record) -> World:
    for row in body.retired:
        if row.seq in body.change.targets:
            world = discard(world, row.key)
    return world


def _commit(world: World, who: int, attempt: Attempt, rules: Rules) -> Iterator[Step]:
    yield from _send(world, who, plan_commit(world, world.writers[who], attempt, rules), rules, again=False)


def _unknown(world: World, who: int, rules: Rules) -> Iterator[Step]:
    """Go on after a publish without an answer: read that number, send the same bytes again, or leave it open."""
    writer = world.writers[who]
    body = writer.unknown[-1]
    kind = body.change.kind
    there = _taken(world, body)
    if there is not None:
        ours = there.write_id == body.write_id
        if rules.bug == "settled by the live set" and body.change.row is not None:
            head = known_record(world, len(world.journal) - 1)
            ours = any(row.attempt == body.change.row.attempt for row in head.live)
        what = "published" if ours else "conflict"
        action = f"{'AB'[who]} settle: {kind} {what} (number {body.seq})"
        after = during(action, partial(_learn, world, who, body, what, rules))
        yield f"settle: {kind} {what}", f"number {body.seq}", after
    for step in _send(world, who, body, rules, again=True):
        yield (f"again, {step[0]}", *step[1:])
    if kind != "claim":
        # The save is reported as unknown and its files stay; a later record will compete for the same number.
        left = writer._replace(pc="idle", attempt=None, step=NONE)
        yield f"{kind}: left unknown", f"number {body.seq}", _with(world, who, left)
    if rules.bug == "write id at two numbers" and kind == "commit":
        moved = writer._replace(pc="manifest", known=read_head(world, rules), unknown=())
        yield "commit: sent anew", "", _with(world, who, moved)
    if rules.bug == "unknown rolled back" and kind == "commit" and there is body and body is world.journal[-1]:
        undone = world._replace(journal=world.journal[:-1], graves=((body.seq, body.write_id),))
        undone = undone._replace(flights=tuple(late for late in undone.flights if late is not body))
        back = writer._replace(pc="idle", attempt=None, step=NONE, unknown=())
        yield "commit: record deleted", str(body.seq), _with(undone, who, back)


def _learn(world: World, who: int, body: Record, what: str, rules: Rules) -> World:
    writer = world.writers[who]
    there = _taken(world, body)
    if what == "published":
        if there is None or there.write_id != body.write_id:
            text = f"{'AB'[who]} concludes Published, but record {body.seq} is not its {body.write_id}"
            raise ViolationError(text, "I7")
        return _published(world, who, body)
    if what == "conflict":
        if there is None or there.write_id == body.write_id:
            text = f"{'AB'[who]} concludes Conflict, but record {body.seq} is its own {body.write_id}"
            raise ViolationError(text, "I7")
        if body.change.kind != "claim":
            pending = (*(late for late in writer.unknown if late is not body), body)
            return _read_forward(world, who, pending, rules)
        # Decide again from the head: restore row, live set and epoch.
        epoch = body.epoch if rules.bug == "claim keeps its epoch" else NONE
        again = writer._replace(pc="claiming", known=read_head(world, rules), epoch=epoch, unknown=())
        return _with(world, who, again)
    if what == "refused":
        # The first answer, so nothing is under way: the save has failed and its files are freed.
        if body.change.kind == "claim":
            return _with(world, who, _stopped(writer))
        world = _free(world, body)
        return _with(world, who, writer._replace(pc="idle", attempt=None, step=NONE))
    if rules.bug == "told while unknown" and body.change.kind == "commit":
        _tell(world, body)
    if rules.bug == "unknown attempt deleted":
        world = _free(world, body)
    if rules.bug == "unknown retire deletes" and body.change.kind == "retire":
        world = _delete_targets(world, body)
    unknown = (*(late for late in writer.unknown if late is not body), body)
    return _with(world, who, writer._replace(pc="unknown", unknown=unknown))


def _published(world: World, who: int, body: Record) -> World:
    writer = world.writers[who]
    for late in writer.unknown:
        if late is not body:
            world = _free(world, late)  # its number holds this record, so it is lost for good
    writer = writer._replace(known=body.seq, pc="idle", unknown=(), stale=None)
    if body.change.kind == "commit":
        _tell(world, body)
        writer = writer._replace(attempt=None, step=NONE)
    elif body.change.kind == "claim":
        writer = writer._replace(epoch=body.epoch, word="", asked=NONE)
        if writer.attempt is not None:
            line = lineage(body)
            writer = writer._replace(pc="manifest", step=line[0].step + 1 if line else 1)
    return _with(world, who, writer)


def _tell(world: World, body: Record) -> None:
    """Tell the caller "committed"."""
    if not any(there is not None and there.write_id == body.write_id for there in world.journal):
        text = f"the caller was told that {body.write_id} is committed, and no record says so"
        raise ViolationError(text, "I2")


def _free(world: World, body: Record) -> World:
    """Free the files of a commit; the caller has the proof that it is lost."""
    return world if body.change.row is None else discard(world, body.change.row.key)


def _read_forward(world: World, who: int, pending: tuple[Record, ...], rules: Rules) -> World:
    """Read from the last record known to the head and settle *pending* on the way; then go on, or stop as fenced."""
    writer = world.writers[who]
    head = known_record(world, read_head(world, rules))
    ours = {body.write_id for body in pending}
    lost = []
    adopted: set[Attempt | None] = set()
    for body in pending:
        there = _taken(world, body)
        if there is None or there.write_id != body.write_id:
            lost.append(body)
        elif body.change.row is not None:
            _tell(world, body)
            adopted.add(body.change.row.attempt)
    foreign = [there for there in world.journal[writer.known + 1 :] if there is not None and there.write_id not in ours]
    fenced = head.epoch > writer.epoch
    if rules.bug == "any record fences" and foreign:
        fenced = True
    if fenced and rules.bug != "fenced goes on":
        return _fenced(world, who, pending if rules.bug == "fenced before settling" else tuple(lost), adopted, rules)
    if not fenced:
        _one_owner(who, writer, head, foreign)
    for body in lost:
        if body.change.row is None or body.change.row.attempt != writer.attempt:
            world = _free(world, body)
    if rules.bug in ("same body at the next number", "commit carries its own rows", "retire targets kept"):
        writer = writer._replace(stale=pending[-1])
    writer = writer._replace(known=head.seq, unknown=())
    line = lineage(head)
    late = bool(line) and writer.step <= line[0].step and rules.bug != "step not judged again"
    if writer.attempt is not None and late and writer.attempt not in adopted:
        # An earlier attempt at this step was committed after all: this one comes too late.
        world = discard(world, key_of(writer.attempt, writer.step, rules))
    if writer.attempt is None or late or writer.attempt in adopted:
        return _with(world, who, writer._replace(pc="idle", attempt=None, step=NONE))
    return _with(world, who, writer._replace(pc="manifest"))


def _fenced(world: World, who: int, lost: tuple[Record, ...], adopted: set[Attempt | None], rules: Rules) -> World:
    """Stop for ever; only what is proven lost, or was never sent, is freed."""
    writer = world.writers[who]
    newer = world.journal[writer.epoch + 1 :]
    if not any(there is not None and there.change.kind == "claim" for there in newer):
        text = f"{'AB'[who]} of epoch {writer.epoch} is fenced, and no newer claim exists"
        raise ViolationError(text, "I22")
    for body in lost:
        world = _free(world, body)
    if writer.attempt is not None and writer.attempt not in adopted:
        world = discard(world, key_of(writer.attempt, writer.step, rules))
    return _with(world, who, _stopped(writer))


def _one_owner(who: int, writer: Writer, head: Record, foreign: list[Record]) -> None:
    """Assert what the protocol promises a writer that is not fenced: nobody else claims or commits in its epoch."""
    others = [there for there in foreign if there.change.kind in ("claim", "commit")]
    if others or head.epoch < writer.epoch:
        met = [there.write_id for there in others]
        text = f"{'AB'[who]} owns epoch {writer.epoch} and meets {met}, head epoch {head.epoch}"
        raise ViolationError(text, "I5")
