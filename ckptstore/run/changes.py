"""What does one change do to the live set, and what is the lineage?

Pure functions. Every record is its one change applied to its predecessor, and a lost set can be rebuilt by applying the
changes again: both use ``apply``, so they can't disagree. The lineage decides what "latest" means: never the highest
step, never a file's time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ckptstore.errors import ConfigError, CorruptionError
from ckptstore.run.records import MAX_TARGETS, Row, row_from_json, row_to_json
from ckptstore.run.strict_json import convert

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["RunState", "apply", "claim", "commit", "lineage", "note", "retire", "tag"]


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is after some record.

    Attributes:
        epoch: The seq of the newest claim; -1 before the first.
        live: All checkpoints, ascending by seq.
        retired: Retired ones whose data may still exist.
        resume_from: What the newest claim resumed from.
        keep: The stored retention policy, or None.
    """

    epoch: int = -1
    live: tuple[Row, ...] = ()
    retired: tuple[Row, ...] = ()
    resume_from: Row | None = None
    keep: str | None = None


def lineage(state: RunState) -> list[Row]:
    """Return the checkpoints of the present branch, newest first: parents from the newest commit of the epoch on.

    Before the epoch has a commit, from what its claim resumed from.
    """
    by_seq = {row.seq: row for row in state.live}
    own = [row for row in state.live if row.epoch == state.epoch]
    at = own[-1] if own else None
    if at is None and state.resume_from is not None:
        at = by_seq.get(state.resume_from.seq)
    found = []
    while at is not None:
        found.append(at)
        at = None if at.parent is None else by_seq.get(at.parent)  # a parent is always older: no row read is without it
    return found


def claim(**fields: Any) -> dict[str, Any]:
    """A writer takes the run; *fields* as in PROTOCOL 2."""
    resume_from = fields.pop("resume_from")
    return {"kind": "claim", "resume_from": None if resume_from is None else row_to_json(resume_from), **fields}


def commit(row: Row) -> dict[str, Any]:
    """A checkpoint comes into being."""
    return {"kind": "commit", "row": row_to_json(row)}


def retire(targets: Iterable[int], *, policy: str, reasons: dict[str, str]) -> dict[str, Any]:
    """Checkpoints leave the live set for ever; ConfigError for more than 256 in one record."""
    chosen = sorted(targets)
    if len(chosen) > MAX_TARGETS:
        message = f"{len(chosen)} checkpoints can't be retired by one record; at most {MAX_TARGETS}"
        raise ConfigError(message)
    return {"kind": "retire", "targets": chosen, "policy": policy, "reasons": reasons}


def tag(
    target: int, *, add: Iterable[str] = (), remove: Iterable[str] = (), damaged: bool | None = None
) -> dict[str, Any]:
    """A checkpoint's words or its damaged mark change."""
    return {"kind": "tag", "target": target, "add": sorted(add), "remove": sorted(remove), "damaged": damaged}


def note(text: str, **fields: Any) -> dict[str, Any]:
    """Something worth telling, without effect on the sets."""
    return {"kind": "note", "text": text, **fields}


def apply(state: RunState, change: dict[str, Any], seq: int, what: str) -> RunState:
    """Return the state after record *seq* did *change*.

    Raises:
        CorruptionError: the change is malformed.
    """
    kind = change.get("kind")
    swept = convert(change.get("swept", ()), frozenset[int], what)
    if swept:
        state = msgspec.structs.replace(state, retired=tuple(row for row in state.retired if row.seq not in swept))
    if kind == "claim":
        source = change.get("resume_from")
        row = None if source is None else row_from_json(source, what)
        return msgspec.structs.replace(state, epoch=seq, resume_from=row, keep=_keep(state, change, what))
    if kind == "commit":
        row = row_from_json(change.get("row"), what)
        if (row.seq, row.epoch) != (seq, state.epoch):
            message = f"{what} commits number {row.seq} of epoch {row.epoch}, and the run is at epoch {state.epoch}"
            raise CorruptionError(message, key=what)
        return msgspec.structs.replace(state, live=(*state.live, row))
    if kind == "retire":
        return _retire(state, convert(change.get("targets"), frozenset[int], what))
    if kind == "tag":
        return _tag(state, convert(change, _Tag, what))
    if kind == "note":
        return msgspec.structs.replace(state, keep=_keep(state, change, what))
    message = f"{what}: the change {kind!r:.40} is unknown"
    raise CorruptionError(message, key=what)


def _keep(state: RunState, change: dict[str, Any], what: str) -> str | None:
    return convert(change["keep"], str | None, what) if "keep" in change else state.keep  # type: ignore[arg-type]


def _retire(state: RunState, targets: frozenset[int]) -> RunState:
    by_seq = {row.seq: row for row in state.live}

    def surviving(seq: int | None) -> int | None:
        while seq is not None and seq in targets:
            seq = by_seq[seq].parent if seq in by_seq else None
        return seq

    def relink(row: Row) -> Row:
        parent = surviving(row.parent)
        return row if parent == row.parent else msgspec.structs.replace(row, parent=parent)

    live = tuple(relink(row) for row in state.live if row.seq not in targets)
    gone = tuple(row for row in state.live if row.seq in targets)
    retired = tuple(sorted((*state.retired, *gone), key=lambda row: row.seq))
    resume_from = state.resume_from
    if resume_from is not None:
        ancestor = surviving(resume_from.seq)
        resume_from = next((row for row in live if row.seq == ancestor), None)
    return msgspec.structs.replace(state, live=live, retired=retired, resume_from=resume_from)


class _Tag(msgspec.Struct, frozen=True, kw_only=True):
    target: int
    add: frozenset[str]
    remove: frozenset[str]
    damaged: bool | None


def _tag(state: RunState, change: _Tag) -> RunState:
    def edit(row: Row) -> Row:
        if row.seq != change.target:
            return row
        tags = tuple(sorted((set(row.tags) | change.add) - change.remove))
        damaged = row.damaged if change.damaged is None else change.damaged
        return msgspec.structs.replace(row, tags=tags, damaged=damaged)

    resume_from = None if state.resume_from is None else edit(state.resume_from)
    return msgspec.structs.replace(state, live=tuple(edit(row) for row in state.live), resume_from=resume_from)
