"""What may an operator, the collector and a pinning reader do next (PROTOCOL 7, 8, 9)?"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ckptstore.testing.model.plans import known_record, plan_operator
from ckptstore.testing.model.records import Attempt, Record, Row, row_of
from ckptstore.testing.model.world import (
    Collector,
    Operator,
    Reader,
    Rules,
    Step,
    ViolationError,
    World,
    discard,
    during,
    holds,
    present,
    publish,
    read_head,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["collectable", "collector_steps", "operator_steps", "reader_steps"]


def operator_steps(world: World, rules: Rules) -> Iterator[Step]:
    """Every action of the operator: a new command may be given at any moment, and then the one before was killed."""
    operator = world.operator
    if operator.used < rules.profile.commands and world.journal:
        known = read_head(world, rules)
        head = known_record(world, known)
        for verb in rules.profile.verbs:
            for row in head.live:
                if plan_operator(head, 0, verb, row.seq, rules) is not None:
                    ready = Operator("ready", operator.used + 1, verb, row.seq, known)
                    detail = f"row {row.seq}, head {known}"
                    yield f"operator: reads, will {verb}", detail, world._replace(operator=ready)
    done = Operator(used=operator.used)
    if operator.pc == "ready":
        body = plan_operator(known_record(world, operator.known), operator.used, operator.verb, operator.target, rules)
        if body is None:
            yield "operator: command is void now", "", world._replace(operator=done)
        else:
            yield from _send(world, body, rules, again=False)
    elif operator.unknown is not None:
        body = operator.unknown
        there = world.journal[body.seq] if body.seq < len(world.journal) else None
        if there is not None:
            what = "published" if there.write_id == body.write_id else "conflict"
            yield f"operator: settles, {what}", f"number {body.seq}", _learn(world, body, what, rules)
        for step in _send(world, body, rules, again=True):
            yield (f"again, {step[0]}", *step[1:])


def _send(world: World, body: Record, rules: Rules, *, again: bool) -> Iterator[Step]:
    for answer in publish(world, body, rules, again=again):
        detail = f"{body.write_id} at {body.seq}, epoch {body.epoch}, {body.change.kind} {body.change.targets}"
        yield f"operator: {answer.how}", detail, _learn(answer.world, body, answer.what, rules)


def _learn(world: World, body: Record, what: str, rules: Rules) -> World:
    operator = world.operator
    if what == "conflict":
        # Judge the command again on the new head, taking its epoch.
        return world._replace(operator=operator._replace(pc="ready", known=read_head(world, rules), unknown=None))
    if what == "unknown":
        return world._replace(operator=operator._replace(pc="unknown", unknown=body))
    return world._replace(operator=Operator(used=operator.used))


def collectable(world: World, head: Record, key: Attempt, rules: Rules) -> bool:
    """Tell whether *head* proves the attempt under *key* dead: of an older epoch, and named by no row."""
    if rules.bug == "gc spares manifests" and any(item[:2] == (key, "manifest") for item in world.data):
        return False
    rows = head.live if rules.bug == "gc forgets retired rows" else head.live + head.retired
    epoch = head.epoch + 1 if rules.bug == "gc takes the head's epoch" else head.epoch
    return key[0] < epoch and all(row.key != key for row in rows)


def collector_steps(world: World, rules: Rules) -> Iterator[Step]:
    """Every action of the collector: owner's retention, gc and a sweep delete by the same steps."""
    collector = world.collector
    if not rules.profile.collector or not world.journal:
        return
    if collector.pc != "off":
        yield "collector: killed", "", world._replace(collector=Collector())
    if collector.pc == "off":
        head = known_record(world, read_head(world, rules))
        for row in head.retired:
            if present(world, row.key):
                waiting = world._replace(collector=Collector("grace", row))
                yield "collector: read the retire, waits", f"row {row.seq}", waiting
        if rules.bug == "pins listed before the retire":
            for row in head.live:
                if not _pinned(world, row):
                    listed = world._replace(collector=Collector("early", row))
                    yield "collector: lists pins early", f"row {row.seq}", listed
        for key in sorted({item[0] for item in world.data}):
            if collectable(world, head, key, rules):
                chosen = world._replace(collector=Collector("dead", key=key))
                yield "collector: judges an attempt dead", f"{key}, head {head.seq}", chosen
    elif collector.key is not None:
        # The head may have moved on since: a stale one is safe.
        deletes = "collector: deletes a dead attempt"
        swept = during(f"{deletes} ({collector.key})", partial(_swept, world, collector.key))
        yield deletes, str(collector.key), swept
    elif collector.row is not None:
        yield from _delete_row(world, collector.pc, collector.row, rules)


def _delete_row(world: World, pc: str, row: Row, rules: Rules) -> Iterator[Step]:
    detail = f"row {row.seq}"
    first, last = ("payload", "manifest") if rules.bug == "payload before manifest" else ("manifest", "payload")
    if pc == "grace":
        if _pinned(world, row) and rules.bug != "pin ignored":
            yield "collector: finds a pin", detail, world._replace(collector=Collector())
        else:
            yield "collector: finds no pin", detail, world._replace(collector=Collector("unpinned", row))
    elif pc == "unpinned":
        after = discard(world, row.key, first)._replace(collector=Collector("half", row))
        yield f"collector: deletes {first}", detail, after
    elif pc == "half":
        yield f"collector: deletes {last}", detail, discard(world, row.key, last)._replace(collector=Collector())
    else:  # the bug: the pins were listed before the retire was read
        head = known_record(world, read_head(world, rules))
        if row_of(head, row.seq) is None:
            yield "collector: reads the retire late", detail, world._replace(collector=Collector("unpinned", row))


def _pinned(world: World, row: Row) -> bool:
    reader = world.reader
    return reader.pc in ("pinned", "valid", "half") and reader.row is not None and reader.row.seq == row.seq


def _swept(world: World, key: Attempt) -> World:
    """Delete an attempt, and assert I13 where it bites: it is of an older epoch and named by no row, by now as well."""
    head = known_record(world, len(world.journal) - 1)
    named = [row.seq for row in head.live + head.retired if row.key == key]
    if key[0] >= head.epoch or named:
        text = f"gc deletes attempt {key} at head {head.seq} of epoch {head.epoch}, named by rows {named}"
        raise ViolationError(text, "I13")
    return discard(world, key)._replace(collector=Collector())


def reader_steps(world: World, rules: Rules) -> Iterator[Step]:
    """Every action of a reader: choose, pin, read the head again, read manifest and payload, take the pin away."""
    reader = world.reader
    row = reader.row
    if reader.pc == "off":
        if reader.used < rules.profile.reads and world.journal:
            head = known_record(world, read_head(world, rules))
            for found in head.live:
                chosen = Reader("chosen", reader.used + 1, found)
                yield "reader: chooses", f"row {found.seq}, head {head.seq}", world._replace(reader=chosen)
        return
    if row is None:
        return
    detail = f"row {row.seq}"
    gone = world._replace(reader=Reader(used=reader.used))
    if reader.pc == "chosen":
        yield "reader: pins", detail, world._replace(reader=reader._replace(pc="pinned"))
        yield from _bare(world, row, "manifest", "bare")
    elif reader.pc == "bare":
        yield from _bare(world, row, "payload", "off")
    elif reader.pc == "pinned":
        head = known_record(world, read_head(world, rules))
        if row_of(head, row.seq) is None and rules.bug != "pin not re-read":
            yield "reader: pinned too late", detail, gone
        else:
            yield "reader: pin holds", detail, world._replace(reader=reader._replace(pc="valid"))
    elif reader.pc == "valid":
        half = world._replace(reader=reader._replace(pc="half"))
        after = during(f"reader: reads the manifest ({detail})", partial(_intact, half, row))
        yield "reader: reads the manifest", detail, after
    else:
        after = during(f"reader: reads the payload ({detail})", partial(_intact, gone, row))
        yield "reader: reads the payload, unpins", detail, after


def _bare(world: World, row: Row, kind: str, then: str) -> Iterator[Step]:
    """Read one object without a pin: its right bytes, or a clean error because the row was retired."""
    reader = world.reader
    gone = Reader(used=reader.used)
    if (row.key, kind, row.attempt) in world.data:
        after = gone if then == "off" else reader._replace(pc=then)
        yield f"reader: reads the {kind} without a pin", f"row {row.seq}", world._replace(reader=after)
        return
    head = known_record(world, len(world.journal) - 1)
    if row_of(head, row.seq) is not None:
        text = f"a reader without a pin finds no {kind} of row {row.seq}, which is live"
        raise ViolationError(text, "I12")
    yield f"reader: finds the {kind} gone, a clean error", f"row {row.seq}", world._replace(reader=gone)


def _intact(world: World, row: Row) -> World:
    """Give *world* back if the files of *row* are there for a reader whose pin was validated."""
    if not holds(world, row):
        text = f"a reader with a validated pin on row {row.seq} cannot read it any more"
        raise ViolationError(text, "I12")
    return world
