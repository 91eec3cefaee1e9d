"""From which checkpoint does a run go on, and what if it turns out to be damaged?

The answer is published as a claim before any payload is loaded, so it is made once, on a head that is proven to be the
newest, and survives a crash. Only what is proven damaged is passed over; a store that does not answer raises, because
an older checkpoint chosen during an outage would be a lie.
"""

from __future__ import annotations

import errno
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ckptstore.checkpoint import check_vacant
from ckptstore.errors import CkptStoreError, CorruptionError, NotFoundError, UnavailableError, UnsupportedError
from ckptstore.reader.restore import prepare
from ckptstore.reader.source import open_source
from ckptstore.reader.targets import kind_of
from ckptstore.run.alive import permit
from ckptstore.run.changes import lineage
from ckptstore.run.journal import Damaged
from ckptstore.run.session import Lost
from ckptstore.state import rng, tree

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptstore.reader.restore import Prepared, Verify
    from ckptstore.reader.source import Source
    from ckptstore.run.alive import Takeover
    from ckptstore.run.journal import Head
    from ckptstore.run.records import Row
    from ckptstore.run.session import Session

__all__ = ["Request", "Resumed", "Skipped", "may_claim", "resume"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A checkpoint that was passed over because it is proven damaged, and why."""

    step: int
    seq: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Where a run goes on.

    Attributes:
        step: The step of the checkpoint that was loaded; 0 if fresh.
        fresh: Nothing was loaded.
        values: The plain values, as saved (those with tensors or arrays in them only if they were passed); for a
            fresh run as they were passed in.
        skipped: Newer checkpoints that were passed over as damaged.
        lost_steps: Steps between the newest checkpoint that was committed and the one loaded.
    """

    step: int
    fresh: bool
    values: dict[str, Any]
    skipped: tuple[Skipped, ...] = ()
    lost_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the caller of ``resume`` asked for; see there."""

    states: Mapping[str, Any]
    step: int | None = None
    fresh: bool = False
    required: bool = False
    strict: bool = True
    fallback: Literal["verified", "never"] = "verified"
    verify: Verify = "full"
    branch_again: bool = False
    strip_prefix: str | None = None
    with_rng: bool = True
    takeover: Takeover = "auto"


@dataclass(slots=True)
class _Progress:
    """What one resume has learned so far: the damage it met, and the newest step there was."""

    skipped: dict[int, Skipped] = field(default_factory=dict)
    unmarked: list[Row] = field(default_factory=list)
    newest: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decision:
    """Which checkpoints may be resumed from, best first, and where the branch starts."""

    candidates: list[Row]
    branch: dict[str, int] | None
    may_fall_back: bool


def resume(session: Session, request: Request) -> Resumed:
    """Choose a checkpoint, claim the run with it, and load it into the caller's objects.

    Raises:
        MismatchError: the objects do not fit; nothing was claimed or changed.
        CorruptionError: every candidate is damaged, or the one that was named is; nothing was changed.
        UnsupportedError: a class or the random state in the checkpoint is unknown here; nothing was changed.
        NotFoundError: no such step; or nothing at all, and *required* was given.
        ConflictError: another writer lives.
        UnavailableError: the store did not answer; nothing is decided.
    """
    progress = _Progress()
    while True:
        head = session.refresh()
        reason = may_claim(session, head, request.takeover)
        decision = _decide(session, head, request)
        if progress.newest is None and decision.candidates:
            progress.newest = decision.candidates[0].step
        chosen = _choose(session, decision, request, progress)
        row = None if chosen is None else chosen[0]
        claimed = session.claim(head, resume_from=row, branch=decision.branch, reason=reason)
        if isinstance(claimed, Lost):
            continue
        _mark(session, progress)
        if chosen is None:
            return _fresh(session, request, progress)
        try:
            values = _load(chosen[1], chosen[2], request)
        except (CorruptionError, UnavailableError) as error:
            _pass_over(session, chosen[0], error, decision, progress)
            _mark(session, progress)  # now: the next round may find that nothing is left
            continue
        return _resumed(session, chosen[0], values, progress)


def may_claim(session: Session, head: Head, takeover: Takeover) -> str:
    """Return the reason why *session* may claim the run; see ``run.alive.permit``, and ``checkpoint.check_vacant``."""
    if head.seq < 0:
        check_vacant(session.store)
        return "the run is new"
    return permit(session.journal, head, session.me, takeover)


def _decide(session: Session, head: Head, request: Request) -> _Decision:
    if request.fresh:
        return _Decision(candidates=[], branch=None, may_fall_back=False)
    line = lineage(head.state)
    branch = _branch(session, head)
    url = session.store.url
    if request.step is not None:
        if branch is not None and branch.get("step") == request.step and line and not request.branch_again:
            return _Decision(candidates=line[:1], branch=branch, may_fall_back=False)
        row = _at(head, line, request.step, url)
        return _Decision(candidates=[row], branch={"seq": row.seq, "step": row.step}, may_fall_back=False)
    if not line and head.damaged:
        message = (
            f"{url}: the journal's newest records are damaged ({head.damaged[-1].reason}) and no checkpoint is known "
            "below them: verify the run, or resume(fresh=True) to start anew beside it"
        )
        raise CorruptionError(message, operation="resume", key=url)
    return _Decision(candidates=line, branch=branch, may_fall_back=request.fallback == "verified")


def _branch(session: Session, head: Head) -> dict[str, int] | None:
    """Return where the newest claim's branch was started."""
    if head.record is None or head.record.epoch < 0:
        return None
    claim = head.record if head.record.seq == head.record.epoch else session.journal.read(head.record.epoch)
    branch = None if isinstance(claim, Damaged) else claim.change.get("branch")
    return branch if isinstance(branch, dict) else None


def _at(head: Head, line: list[Row], step: int, url: str) -> Row:
    found = [row for row in line if row.step == step] or [row for row in head.state.live if row.step == step]
    if len(found) == 1:
        return found[0]
    if found:
        message = (
            f"{url}: step {step} is on several abandoned branches (seq {', '.join(str(row.seq) for row in found)})"
        )
    else:
        steps = ", ".join(str(row.step) for row in reversed(line[:20])) or "none"
        message = f"{url} has no step {step}; newest steps here: {steps}"
    raise NotFoundError(message, operation="resume", key=url)


def _choose(
    session: Session, decision: _Decision, request: Request, progress: _Progress
) -> tuple[Row, Source, Prepared] | None:
    """Return the first candidate whose manifest and files are whole and that fits the objects; None to start fresh."""
    url = session.store.url
    for row in decision.candidates:
        if row.seq in progress.skipped:
            continue
        if row.damaged and decision.may_fall_back:
            progress.skipped[row.seq] = Skipped(step=row.step, seq=row.seq, reason="it is marked damaged")
            continue
        try:
            source = open_source(session.store, session.journal.layout, row)
            prepared = prepare(source, request.states, strict=request.strict, strip_prefix=request.strip_prefix)
        except (CorruptionError, UnavailableError) as error:
            _pass_over(session, row, error, decision, progress)
            continue
        return row, source, prepared
    if decision.candidates:
        reasons = "; ".join(f"step {item.step}: {item.reason}" for item in progress.skipped.values())
        message = (
            f"{url}: none of the {len(progress.skipped)} newest checkpoints is whole ({reasons[:2000]}): restore the "
            "data, or resume(fresh=True) to start anew beside them"
        )
        raise CorruptionError(message, operation="resume", key=url)
    if request.required and not request.fresh:
        message = f"{url} holds no checkpoint to resume from"
        raise NotFoundError(message, operation="resume", key=url)
    return None


def _pass_over(session: Session, row: Row, error: CkptStoreError, decision: _Decision, progress: _Progress) -> None:
    """Remember a damaged checkpoint and go on to the next, or raise if that is not allowed."""
    lasting = isinstance(error, UnavailableError)
    if not decision.may_fall_back or (lasting and not _bad_sector(session, error)):
        raise error
    _LOG.warning("step %d is passed over: %s", row.step, error)
    progress.skipped[row.seq] = Skipped(step=row.step, seq=row.seq, reason=str(error))
    if not lasting:  # a bad sector may be read again one day: reported, not marked
        progress.unmarked.append(row)


def _bad_sector(session: Session, error: CkptStoreError) -> bool:
    """Tell whether a local disk answered EIO: the file can't be read, though the store itself is there."""
    cause = error.__cause__
    return session.store.capabilities().local and isinstance(cause, OSError) and cause.errno == errno.EIO


def _mark(session: Session, progress: _Progress) -> None:
    while progress.unmarked:
        session.mark_damaged(progress.unmarked.pop())


def _load(source: Source, prepared: Prepared, request: Request) -> dict[str, Any]:
    left = [name for name in source.states if name not in request.states and source.kind(name) != "plain"]
    if left:
        _LOG.warning("%s also holds %s, which resume() was not given: not restored", source.what, ", ".join(left))
    generators = source.manifest.tree.get("rng") if request.with_rng else None
    if generators is None:
        return prepared.load(verify=request.verify)
    saved = tree.decode(generators, source.read(source.rng_references(), verify=request.verify != "sizes"))
    before = rng.capture()
    try:
        _set_generators(source, saved)  # first: what can't be set is known before an object changes
        values = prepared.load(verify=request.verify)
    except BaseException:
        rng.restore(before)
        raise
    for missing in _set_generators(source, saved):  # and last: loading may draw numbers
        _LOG.warning("%s: random state not restored: %s", source.what, missing)
    return values


def _set_generators(source: Source, saved: Any) -> list[str]:
    try:
        return rng.restore(saved)
    except CorruptionError as error:  # not damage, the bytes are proven: a generator of another version
        message = f"{source.what}: {error}; CheckpointManager(..., rng=False) resumes without the random state"
        raise UnsupportedError(message, operation="restore", key=source.key) from error


def _fresh(session: Session, request: Request, progress: _Progress) -> Resumed:
    _LOG.info(
        "%s: %s: starting at step 0",
        session.store.url,
        "a fresh start was asked for" if request.fresh else "no checkpoint to resume from is there",
    )
    plain = {name: value for name, value in request.states.items() if kind_of(value) == "plain"}
    return Resumed(step=0, fresh=True, values=plain, skipped=tuple(progress.skipped.values()))


def _resumed(session: Session, row: Row, values: dict[str, Any], progress: _Progress) -> Resumed:
    lost = max(0, (progress.newest or row.step) - row.step)
    _LOG.info("%s: resumed from step %d%s", session.store.url, row.step, f", {lost} steps lost" if lost else "")
    return Resumed(step=row.step, fresh=False, values=values, skipped=tuple(progress.skipped.values()), lost_steps=lost)
