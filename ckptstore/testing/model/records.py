"""What is written in the journal, as far as the model needs it, and what can be read off one record alone?

A record holds the whole truth (PROTOCOL 2), so lineage, "latest" and retention are pure functions of one record. Bodies
are interned: two equal bodies are one object. That keeps states small and makes comparing and hashing them cheap.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeAlias

__all__ = [
    "NONE",
    "Attempt",
    "Change",
    "Record",
    "Row",
    "WriteId",
    "follow",
    "lineage",
    "may_retire",
    "policy",
    "record",
    "relinked",
    "row_of",
]

NONE = -1
"""No number: no parent, no epoch, nothing to resume from."""

Attempt: TypeAlias = tuple[int, int, int]
"""One save attempt: the epoch that minted it, the writer, a counter. Also the identity of the bytes it writes."""

WriteId: TypeAlias = tuple[str, int, int, int]
"""Unique for each logical publish, so proof of authorship."""


class Row(NamedTuple):
    """A checkpoint as the live set lists it; *key* is where its files are, *attempt* which bytes they must hold."""

    seq: int
    epoch: int
    step: int
    attempt: Attempt
    key: Attempt
    parent: int
    tagged: bool


class Change(NamedTuple):
    """The one thing a record does: claim, commit, retire or tag."""

    kind: str
    targets: tuple[int, ...] = ()  # claim: the row resumed from, if any; retire: the rows; tag: the row
    word: str = ""  # claim: latest, step or fresh; tag: add or remove; retire: who ran it, owner or operator
    step: int = NONE  # claim "step": the step asked for
    row: Row | None = None  # commit


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """One body, frozen with its number. Equal bodies are the same object: make them with :func:`record`."""

    seq: int
    write_id: WriteId
    prev: WriteId | None
    epoch: int
    change: Change
    live: tuple[Row, ...]
    retired: tuple[Row, ...]
    resume_from: int
    branch: int  # the step at which resume(step=) started the present branch


@cache
def record(  # noqa: PLR0917 - the arguments are the key of the cache
    seq: int,
    write_id: WriteId,
    prev: WriteId | None,
    epoch: int,
    change: Change,
    live: tuple[Row, ...],
    retired: tuple[Row, ...],
    resume_from: int,
    branch: int,
) -> Record:
    """Give the one record object with this content."""
    return Record(seq, write_id, prev, epoch, change, live, retired, resume_from, branch)


def follow(
    head: Record,
    write_id: WriteId,
    change: Change,
    *,
    epoch: int,
    live: tuple[Row, ...] | None = None,
    retired: tuple[Row, ...] | None = None,
    resume_from: int | None = None,
    branch: int | None = None,
    skipped: int = 0,
) -> Record:
    """Derive the record after *head*; what is not given is carried over from it. No honest writer skips a number."""
    return record(
        head.seq + 1 + skipped,
        write_id,
        head.write_id,
        epoch,
        change,
        head.live if live is None else live,
        head.retired if retired is None else retired,
        head.resume_from if resume_from is None else resume_from,
        head.branch if branch is None else branch,
    )


def row_of(body: Record, seq: int) -> Row | None:
    """Find the live row committed at *seq*."""
    return next((row for row in body.live if row.seq == seq), None)


@cache
def lineage(body: Record) -> tuple[Row, ...]:
    """List the lineage newest first: parents from the newest commit of the epoch, else from what the claim resumed."""
    rows = {row.seq: row for row in body.live}
    at = max((row.seq for row in body.live if row.epoch == body.epoch), default=body.resume_from)
    found = []
    while at in rows:
        found.append(rows[at])
        at = rows[at].parent
    return tuple(found)


def relinked(body: Record, targets: tuple[int, ...]) -> tuple[tuple[Row, ...], int]:
    """Give live rows and resume_from without *targets*, each link moved to the nearest surviving ancestor."""
    parents = {row.seq: row.parent for row in body.live}

    def surviving(seq: int) -> int:
        while seq in targets:
            seq = parents[seq]
        return seq

    live = tuple(row._replace(parent=surviving(row.parent)) for row in body.live if row.seq not in targets)
    return live, surviving(body.resume_from)


def may_retire(body: Record, row: Row, keep_last: int, *, guard_resume: bool = True) -> bool:
    """Tell whether retention or an operator may retire *row* at all: not tagged, not what the run resumed from."""
    own = sum(other.epoch == body.epoch for other in body.live)
    protected = guard_resume and row.seq == body.resume_from and own < max(keep_last, 1)
    return not row.tagged and not protected


@cache
def policy(body: Record, keep_last: int, *, drop_foreign: bool = False) -> tuple[int, ...]:
    """Choose what to retire under ``last=keep_last`` (PROTOCOL 9).

    Only lineage rows are counted. Rows that a rollback abandoned go once the new branch has keep_last commits. Rows
    that hang on no lineage row belong to the predecessor of a fresh branch and stay.
    """
    line = lineage(body)
    on_line = {row.seq for row in line}
    keep = {row.seq for row in line[: max(keep_last, 1)]}
    parents = {row.seq: row.parent for row in body.live}

    def abandoned(row: Row) -> bool:
        newer = sum(other.seq > row.seq for other in line)
        at = row.parent
        while at in parents and at not in on_line:
            at = parents[at]
        return newer >= max(keep_last, 1) and (at in on_line or drop_foreign)

    return tuple(
        row.seq
        for row in body.live
        if row.seq not in keep and (row.seq in on_line or abandoned(row)) and may_retire(body, row, keep_last)
    )
