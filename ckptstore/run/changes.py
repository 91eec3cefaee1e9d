"""What does one change do to the live set, and what is the lineage?

Pure functions. Every record is its one change applied to its predecessor, and a lost set can be rebuilt by applying the
changes again: both use ``apply``, so they can't disagree. The lineage decides what "latest" means: never the highest
step, never a file's time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ckptstore.errors import CorruptionError
from ckptstore.run.records import Row, row_from_json, row_to_json

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
        # A parent is always older; anything else would be a cycle made by hand.
        at = by_seq.get(at.parent) if at.parent is not None and at.parent < at.seq else None
    return found


def claim(**fields: Any) -> dict[str, Any]:
    """A writer takes the run; *fields* as in PROTOCOL 2."""
    resume_from = fields.pop("resume_from")
    return {"kind": "claim", "resume_from": None if resume_from is None else row_to_json(resume_from), **fields}


def commit(row: Row) -> dict[str, Any]:
    """A checkpoint comes into being."""
    return {"kind": "commit", "row": row_to_json(row)}


def retire(targets: Iterable[int], *, policy: str, reasons: dict[str, str]) -> dict[str, Any]:
    """Checkpoints leave the live set for ever."""
    return {"kind": "retire", "targets": sorted(targets), "policy": policy, "reasons": reasons}


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
    state = _without_swept(state, change)
    kind = change.get("kind")
    try:
        if kind == "claim":
            source = change["resume_from"]
            row = None if source is None else row_from_json(source, what)
            return msgspec.structs.replace(state, epoch=seq, resume_from=row, keep=change.get("keep", state.keep))
        if kind == "commit":
            row = row_from_json(change["row"], what)
            return msgspec.structs.replace(state, live=(*state.live, row))
        if kind == "retire":
            return _retire(state, frozenset(change["targets"]))
        if kind == "tag":
            return _tag(state, change)
        if kind == "note":
            return msgspec.structs.replace(state, keep=change.get("keep", state.keep))
    except (KeyError, TypeError) as error:
        message = f"{what}: the change {kind!r} is malformed: {error!r}"
        raise CorruptionError(message, key=what) from error
    message = f"{what}: the change {kind!r} is unknown"
    raise CorruptionError(message, key=what)


def _without_swept(state: RunState, change: dict[str, Any]) -> RunState:
    swept = frozenset(change.get("swept", ()))
    if not swept:
        return state
    return msgspec.structs.replace(state, retired=tuple(row for row in state.retired if row.seq not in swept))


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


def _tag(state: RunState, change: dict[str, Any]) -> RunState:
    def edit(row: Row) -> Row:
        if row.seq != change["target"]:
            return row
        tags = tuple(sorted((set(row.tags) | set(change["add"])) - set(change["remove"])))
        damaged = row.damaged if change["damaged"] is None else change["damaged"]
        return msgspec.structs.replace(row, tags=tags, damaged=damaged)

    resume_from = None if state.resume_from is None else edit(state.resume_from)
    return msgspec.structs.replace(state, live=tuple(edit(row) for row in state.live), resume_from=resume_from)
