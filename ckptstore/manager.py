"""What does a training loop hold?

One object that saves, and that finds its way back. ``resume`` is a decision, published as a claim before anything is
loaded, so a crash right after it does not change what "latest" means. ``save`` returns a handle; what it says is
committed can be restored.
"""

from __future__ import annotations

import json
import logging
import math
import numbers
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from ckptstore.cadence import parse_cadence
from ckptstore.checkpoint import Checkpoint
from ckptstore.endings import Signals, drain_at_exit, forget
from ckptstore.errors import AlreadyExistsError, ConfigError, FencedError
from ckptstore.events import SaveSkipped
from ckptstore.handles import SaveHandle
from ckptstore.opening import open_store
from ckptstore.resuming import Request, Resumed, may_claim, resume
from ckptstore.run.changes import lineage
from ckptstore.run.identity import job_from_environment
from ckptstore.run.manifest import MAX_USER_BYTES
from ckptstore.run.records import check_words
from ckptstore.run.session import Lost, open_session, release
from ckptstore.seams import SYSTEM_CLOCK
from ckptstore.store import CheckpointStore

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from ckptstore.engine.engine import Engine, OnBusy
    from ckptstore.engine.saver import SaveRequest
    from ckptstore.events import Event, Observer
    from ckptstore.reader.restore import Verify
    from ckptstore.run.alive import Takeover

__all__ = ["CheckpointManager", "Resumed", "SaveHandle", "Status"]

_LOG = logging.getLogger(__name__)
_MAX_STEP = (1 << 53) - 1
MIN_MEMORY_BYTES = 64 << 20


class CheckpointManager:
    """Saves a training run's state and resumes from it. Use it as a context manager, from one training thread.

    Making one publishes nothing; the first ``resume`` or ``save`` claims the run.

    Args:
        url_or_store: The run: a path, a URL, or an open store.
        every: How often ``step`` saves: ``500``, ``"500 steps"``, ``"15 min"``, ``"500 steps or 15 min"``.
        on_busy: What ``save`` does while *max_pending* saves are in flight: "wait"; "skip"; or "replace", which
            supersedes the newest one that has not begun to be written (needs *max_pending* of 2 or more).
        max_pending: How many saves may be in flight, staged or being written. Each takes the state's size in memory.
        on_error: "raise": the next ``save``, ``wait`` or ``close`` raises what failed in the background. "log": it is
            logged and counted in ``status()``.
        staging: "copy": ``save`` returns when the state is copied. "overlap": it returns at once, and parameters and
            optimizer state are copied during the next forward and backward; an optimizer's step waits for the rest.
            Edits in place that bypass autograd's version counter (``.data``, NumPy views) must wait for ``staged()``.
        memory_bytes: Bound of the staging memory, at least 64 MiB; a larger state streams through it, which makes
            ``save`` wait for the storage. By default *max_pending* times the state.
        rng: Save and restore the random generators too.
        save_on: Signals, such as ``signal.SIGTERM``, that set ``preempted`` and make the next ``step`` save.
        takeover: "auto": claim the run if its last writer ended, is gone, or shows no sign of life for 15 s. True:
            claim it now, fencing whoever writes. False: only if it ended or is proven gone.
        job: The scheduler's id of this job; by default SLURM_JOB_ID or TORCHELASTIC_RUN_ID. Writers of the same job
            replace each other at once.
        drain_timeout_s: How long ``close`` and the end of the process wait for saves in flight.
        observers: Called with each event of ``ckptstore.events``.
        metadata: JSON kept with every checkpoint.
        storage_options: The backend's own options.
    """

    def __init__(
        self,
        url_or_store: str | os.PathLike[str] | CheckpointStore,
        *,
        every: int | str | None = None,
        on_busy: OnBusy = "wait",
        max_pending: int = 1,
        on_error: Literal["raise", "log"] = "raise",
        staging: Literal["copy", "overlap"] = "copy",
        memory_bytes: int | None = None,
        rng: bool = True,
        save_on: Sequence[int] = (),
        takeover: Takeover = "auto",
        job: str | None = None,
        drain_timeout_s: float = 600.0,
        observers: Sequence[Observer] = (),
        metadata: Mapping[str, Any] | None = None,
        storage_options: Mapping[str, object] | None = None,
    ) -> None:
        _check_choice("takeover", takeover, ("auto", True, False))
        _check_choice("on_busy", on_busy, ("wait", "skip", "replace"))
        _check_choice("on_error", on_error, ("raise", "log"))
        _check_choice("staging", staging, ("copy", "overlap"))
        if not drain_timeout_s >= 0:
            message = f"drain_timeout_s={drain_timeout_s!r}: a number of seconds is wanted, 0 or more"
            raise ConfigError(message)
        if type(max_pending) is not int or max_pending < (2 if on_busy == "replace" else 1):
            message = (
                f'max_pending={max_pending!r}: an integer is wanted, 1 or more, and 2 or more with on_busy="replace"'
            )
            raise ConfigError(message)
        if memory_bytes is not None and (type(memory_bytes) is not int or memory_bytes < MIN_MEMORY_BYTES):
            message = f"memory_bytes={memory_bytes!r}: an integer of at least {MIN_MEMORY_BYTES} (64 MiB) is wanted"
            raise ConfigError(message)
        self._on_busy: OnBusy = on_busy
        self._max_pending = max_pending
        self._on_error = on_error
        self._overlap = staging == "overlap"
        self._told_no_overlap = False
        self._memory_bytes = memory_bytes
        self._drain_timeout_s = drain_timeout_s
        self._observers = tuple(observers)
        self._cadence = parse_cadence(every)
        self._rng = rng
        self._takeover = takeover
        self._metadata = _json_object(metadata)
        self._owns_store = not isinstance(url_or_store, CheckpointStore)
        self._store = (
            url_or_store
            if isinstance(url_or_store, CheckpointStore)
            else open_store(url_or_store, **(storage_options or {}))
        )
        self._engine: Engine | None = None
        self._last_save_s = SYSTEM_CLOCK.monotonic()
        self._closed = False
        self._signals = Signals(save_on)
        try:
            self._session = open_session(
                self._store,
                anew=takeover is True,
                job=job if job is not None else job_from_environment(os.environ),
            )
        except BaseException:
            self._signals.restore()
            raise
        drain_at_exit(self)

    def resume(
        self,
        *,
        step: int | None = None,
        fresh: bool = False,
        required: bool = False,
        strict: bool = True,
        fallback: Literal["verified", "never"] = "verified",
        verify: Verify = "full",
        branch_again: bool = False,
        strip_prefix: str | None = None,
        **state: Any,
    ) -> Resumed:
        """Fill live objects with the newest valid checkpoint, all or nothing, and own the run from there.

        Args:
            step: Start a branch at this step instead. A restarted script that asks for it again goes on from that
                branch's newest checkpoint.
            fresh: Start anew at step 0, leaving what is there.
            required: Raise NotFoundError when there is nothing, instead of starting fresh.
            strict: Names, keys, shapes and dtypes must agree.
            fallback: "verified": pass over checkpoints proven damaged. "never": raise.
            verify: "full": every byte is proven before a live object changes; "inline": while it is filled; "sizes":
                not.
            branch_again: With *step*, start the branch once more.
            strip_prefix: A wrapper's key prefix to ignore, such as "module." or "_orig_mod.".
            state: The objects and values, by the names they are saved under.

        Raises:
            MismatchError: the objects do not fit; nothing was claimed or changed.
            ConflictError: another writer lives; the message says who.
            CorruptionError: nothing valid is left, or the step that was named is damaged.
            UnavailableError: the store did not answer: nothing is decided, try again.
        """
        from ckptstore.engine.capture import check_names

        self._check_open()
        check_names(state)
        if step is not None:
            step = _check_step(step)
            if fresh:
                message = "resume() takes either step= or fresh=True"
                raise ConfigError(message)
        _check_choice("fallback", fallback, ("verified", "never"))
        _check_choice("verify", verify, ("full", "inline", "sizes"))
        self.wait()  # what is in flight belongs to the claim that this resume replaces
        request = Request(
            states=state,
            step=step,
            fresh=fresh,
            required=required,
            strict=strict,
            fallback=fallback,
            verify=verify,
            branch_again=branch_again,
            strip_prefix=strip_prefix,
            with_rng=self._rng,
            takeover=self._takeover,
        )
        resumed = resume(self._session, request)
        self._last_save_s = SYSTEM_CLOCK.monotonic()
        return resumed

    def save(
        self,
        step: int,
        *,
        metrics: Mapping[str, Any] | None = None,
        tags: Sequence[str] = (),
        permanent: bool | None = None,
        metadata: Mapping[str, Any] | None = None,
        wait: bool = False,
        if_exists: Literal["raise", "skip"] = "raise",
        **state: Any,
    ) -> SaveHandle:
        """Save the state of a step: return once it is copied, write it in the background.

        Args:
            step: Above the newest step of the lineage, saves in flight included.
            metrics: Numbers, or tensors with one element.
            tags: Words to find it by.
            permanent: Never dropped by a rolling policy.
            metadata: JSON kept with it.
            wait: Return only when it is durable.
            if_exists: "skip": a step that is not above the newest is no error; the handle says "skipped".
            state: Anything with ``state_dict`` and ``load_state_dict``, and plain values, by name.

        Raises:
            UnstorableError: something in the state can't be stored exactly; nothing was written.
            AlreadyExistsError: the step is not above the newest of the lineage; nothing was written.
            FencedError: another writer took the run over.
            CkptStoreError: an earlier save failed in the background; this one was not begun: call again.
        """
        from ckptstore.engine.capture import capture

        self._check_open()
        started = SYSTEM_CLOCK.monotonic()
        step = _check_step(step)
        _check_choice("if_exists", if_exists, ("raise", "skip"))
        if self._engine is not None:
            self._engine.raise_failure()
        if self._session.fenced:
            message = (
                f"{self._store.url}: another writer took this run over, so step {step} can't be saved; to take it "
                "back, make a new CheckpointManager and resume()"
            )
            raise FencedError(message, operation="save", key=self._store.url)
        handle = SaveHandle(step)
        newest = self._newest_step()
        if newest is not None and step <= newest:
            if if_exists == "skip":
                return self._skipped(handle, f"step {step} is not above {newest}")
            raise self._step_taken(step, newest)
        request = _request(step, metrics, tags, permanent, {**(self._metadata or {}), **(_json_object(metadata) or {})})
        # Before the claim: what can't be stored leaves nothing behind.
        captured = capture(state, with_rng=self._rng, overlap=self._overlap)
        self._claim()
        if self._overlap and not captured.guarded and not self._told_no_overlap:
            self._told_no_overlap = True
            _LOG.warning('staging="overlap" needs an optimizer among the states; the state is copied within save()')
        engine = self._running()
        # The save that a signal asked for may be the last: it is never skipped.
        if not engine.save(captured, request, handle, patient=self.preempted, eager=wait):
            return self._skipped(handle, "an earlier save is still being written")
        self._last_save_s = SYSTEM_CLOCK.monotonic()
        handle.stall_s += self._last_save_s - started
        if wait:
            try:
                handle.result()
            except BaseException as error:
                engine.forget_failure(handle, error)  # the caller sees it here
                raise
        return handle

    def step(self, step: int, **arguments: Any) -> SaveHandle | None:
        """Save if *every* says that a checkpoint is due, or on pre-emption; else return None. Arguments as ``save``.

        A step that this run's own lineage has is skipped. Without a ``resume``, and with checkpoints there, such a step
        is an error.
        """
        self._check_open()
        step = _check_step(step)
        if not self.preempted:
            if self._cadence is None:
                message = (
                    "step() saves by a cadence, and none was given: CheckpointManager(..., every=500), or call save()"
                )
                raise ConfigError(message)
            # Before the run is ours the store would have to be asked, at every step.
            newest = (self._newest_step() if self._session.owns else None) or 0
            if not self._cadence.due(step, newest, SYSTEM_CLOCK.monotonic() - self._last_save_s):
                return None
        return self.save(step, if_exists="skip" if self._session.owns else "raise", **arguments)

    def latest(self) -> Checkpoint | None:
        """Return the newest durable checkpoint of the lineage that is not marked damaged, as of now in the store."""
        self._check_open()
        head = self._session.refresh()
        row = next((row for row in lineage(head.state) if not row.damaged), None)
        return None if row is None else Checkpoint(self._store, self._session.journal.layout, row, on_lineage=True)

    @property
    def preempted(self) -> bool:
        """Whether one of the ``save_on`` signals came. May be read at any moment, from any thread."""
        return self._signals.received

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when every save made so far is durable.

        Raises:
            UnavailableError: it is not, after *timeout_s* seconds; the message names the steps.
            CkptStoreError: why one failed.
        """
        self._check_open()
        if self._engine is not None:
            self._engine.wait(timeout_s)
            self._engine.raise_failure()

    def staged(self, timeout_s: float | None = None) -> None:
        """Return when every save made so far has its own copy of the state, so that any write to it is safe.

        Raises:
            UnavailableError: not within *timeout_s* seconds.
        """
        self._check_open()
        if self._engine is not None:
            self._engine.wait_staged(timeout_s)

    def status(self) -> Status:
        """Return where saving stands: what is durable, what is at risk, what failed."""
        self._check_open()
        engine = self._engine
        pending = [] if engine is None else engine.pending
        tip = self._session.tip()
        committed_s = None if engine is None else engine.committed_s
        return Status(
            committed_step=None if tip is None else tip.step,
            committed_age_s=None if committed_s is None else SYSTEM_CLOCK.monotonic() - committed_s,
            pending_steps=tuple(handle.step for handle in pending),
            bytes_at_risk=0 if engine is None else engine.bytes_in_flight,
            failures=0 if engine is None else engine.failures,
            uncleaned=0 if engine is None else engine.uncleaned,
            owns_run=self._session.owns,
        )

    def close(self) -> None:
        """Wait for saves in flight, at most ``drain_timeout_s``, then give the run free for the next writer.

        Idempotent. In a forked child, which owns nothing, it does nothing.

        Raises:
            UnavailableError: naming the steps that are not durable by then. They are still being written, so the run is
                not given free.
            CkptStoreError: what failed in the background and no call has raised yet.
        """
        if self._closed or self._is_forked():
            return
        try:
            if self._engine is not None:
                self._engine.close(self._drain_timeout_s)
        finally:
            self._closed = True
            forget(self)
            self._signals.restore()
            if self._engine is None or not self._engine.pending:
                release(self._session)
                if self._owns_store and self._session.users == 0:
                    self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception:
            if error is None or (isinstance(error, SystemExit) and not error.code):  # an exit that claims success
                raise
            _LOG.exception("%s: closing failed, while another error is on its way", self._store.url)

    def drain_for_exit(self) -> bool:
        """Drain at the end of the process; return whether everything is durable and every failure was seen."""
        try:
            self.close()
        except BaseException as error:  # noqa: BLE001 - there is no caller left to raise to
            why = [str(error) or type(error).__name__, *getattr(error, "__notes__", [])]
            steps = [] if self._engine is None else [handle.step for handle in self._engine.pending]
            lost = f" (not durable: step {', '.join(map(str, steps))})" if steps else ""
            _LOG.critical("%s: at the end of the process: %s%s", self._store.url, "; ".join(why), lost)
            return False
        return True

    def __reduce__(self) -> NoReturn:
        message = "a CheckpointManager owns a run and can't be pickled; make one where it is used"
        raise TypeError(message)

    def __repr__(self) -> str:
        return f"<CheckpointManager {self._store.url}>"

    def _newest_step(self) -> int | None:
        """Return the newest step of the lineage, saves in flight included."""
        if not self._session.owns:
            line = lineage(self._session.refresh().state)
            return line[0].step if line else None
        if self._engine is not None:
            pending = self._engine.pending
            if pending:  # the newest of them is above the lineage
                return pending[-1].step
            if self._engine.unsettled:  # the last commit may be there; only the store knows
                self._session.refresh()
                self._engine.unsettled = False
        tip = self._session.tip()
        return None if tip is None else tip.step

    def _claim(self) -> None:
        """Own the run, going on from its newest checkpoint: for a save without a resume."""
        while not self._session.owns:
            head = self._session.refresh()
            reason = may_claim(self._session, head, self._takeover)
            line = lineage(head.state)
            claimed = self._session.claim(
                head, resume_from=line[0] if line else None, branch=None, reason=f"{reason}; save without resume"
            )
            if isinstance(claimed, Lost):
                continue

    def _step_taken(self, step: int, newest: int) -> AlreadyExistsError:
        if self._session.owns:
            message = f"{self._store.url}: step {step} is not above {newest}, the newest of this lineage"
        else:
            message = (
                f"{self._store.url}: this run is at {newest}, and step {step} was to be saved: call resume() to go "
                "on from there, resume(fresh=True) to start anew beside it, or use a new URL"
            )
        return AlreadyExistsError(message, operation="save", key=self._store.url)

    def _skipped(self, handle: SaveHandle, reason: str) -> SaveHandle:
        _LOG.info("%s: step %d is not saved: %s", self._store.url, handle.step, reason)
        handle.settle("skipped")
        self._observe(SaveSkipped(step=handle.step, reason=reason))
        return handle

    def _running(self) -> Engine:
        if self._engine is None:
            from ckptstore.engine.engine import Engine

            self._engine = Engine(
                self._session,
                clock=SYSTEM_CLOCK,
                on_busy=self._on_busy,
                max_pending=self._max_pending,
                memory_bytes=self._memory_bytes,
                keep_failures=self._on_error == "raise",
                observe=self._observe,
            )
        return self._engine

    def _observe(self, event: Event) -> None:
        for observer in self._observers:
            try:
                observer(event)
            except Exception:  # noqa: BLE001 - a caller's code must not fail a save
                _LOG.exception("an observer failed at %r", event)

    def _check_open(self) -> None:
        if self._closed:
            message = f"this CheckpointManager of {self._store.url} is closed"
            raise ConfigError(message)
        if self._is_forked():  # before any lock is touched: one that a thread of the parent held is never released
            message = (
                f"this CheckpointManager of {self._store.url} belongs to process {self._session.me.pid}; a forked "
                "child can't use it: make a new one in the child, on its own URL"
            )
            raise ConfigError(message)

    def _is_forked(self) -> bool:
        return os.getpid() != self._session.me.pid


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Where saving stands.

    Attributes:
        committed_step: The newest durable step of the lineage, or None.
        committed_age_s: Seconds since this process last committed, or None.
        pending_steps: Saves in flight, oldest first.
        bytes_at_risk: Bytes that are staged and not durable.
        failures: Failures that no call has raised.
        uncleaned: Objects of failed saves that could not be removed; the next claim's garbage collection can.
        owns_run: Whether this process owns the run.
    """

    committed_step: int | None
    committed_age_s: float | None
    pending_steps: tuple[int, ...]
    bytes_at_risk: int
    failures: int
    uncleaned: int
    owns_run: bool


def _check_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if not any(value is item or (isinstance(value, str) and value == item) for item in allowed):
        message = f"{name}={value!r:.80}: use one of {', '.join(map(repr, allowed))}"
        raise ConfigError(message)


def _check_step(step: object) -> int:
    if not isinstance(step, numbers.Integral) or isinstance(step, bool):
        message = f"step {step!r:.80} is a {type(step).__name__}; steps are integers"
        raise ConfigError(message)
    if not 0 <= int(step) <= _MAX_STEP:
        message = f"step {step} is not between 0 and 2^53 - 1"
        raise ConfigError(message)
    return int(step)


def _request(
    step: int,
    metrics: Mapping[str, Any] | None,
    tags: Sequence[str],
    permanent: bool | None,
    metadata: dict[str, Any],
) -> SaveRequest:
    from ckptstore.engine.saver import SaveRequest

    if isinstance(tags, str) or not all(isinstance(tag, str) and tag for tag in tags):
        message = f"tags={tags!r:.200}: a list of non-empty strings is wanted"
        raise ConfigError(message)
    numbers_ = {name: _number(name, value) for name, value in (metrics or {}).items()}
    words = tuple(sorted(set(tags)))
    check_words(step, words, numbers_)  # here, and not in the background: the caller can still mend it
    if len(json.dumps(metadata)) > MAX_USER_BYTES:
        message = f"step {step}: metadata takes more than {MAX_USER_BYTES} bytes as JSON"
        raise ConfigError(message)
    return SaveRequest(
        step=step,
        metrics=numbers_,
        tags=words,
        permanent=bool(permanent),
        metadata=metadata or None,
    )


def _number(name: str, value: Any) -> float | int | str:
    """Return a metric as JSON can hold it; non-finite ones become words."""
    if hasattr(value, "item") and getattr(value, "numel", lambda: getattr(value, "size", 1))() == 1:
        value = value.item()
    if not isinstance(name, str) or isinstance(value, bool) or not isinstance(value, int | float):
        message = f"metric {name!r}: {value!r:.80} ({type(value).__name__}) is not a number"
        raise ConfigError(message)
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value if abs(value) <= _MAX_STEP else float(value)


def _json_object(value: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return free metadata as it will be read back; ConfigError if JSON can't hold it."""
    if value is None:
        return None
    try:
        found = json.loads(json.dumps(dict(value), allow_nan=False))
    except (TypeError, ValueError) as error:
        message = f"metadata must be JSON: {error}"
        raise ConfigError(message) from error
    assert isinstance(found, dict)
    return found
