"""What does the caller do when a verb fails, and when it only seems to?

A store around a store that fails on purpose. A plan says which call of which verb meets which fault, counted per verb
from 0, so a test runs a scenario once without faults, reads how often each verb was called, and runs it again with
every single fault at every verb (``single_faults``) or with sampled ones (``FaultPlan.sampled``). The verbs of a
PartWriter count too.

The faults are those of real storage: nothing happened; it happened and the answer was lost; it happens later, when
the caller has moved on; it happened twice; a part of it happened; the caller was killed. What a store promises still
holds: a lost answer of ``publish`` is OutcomeUnknownError, ``abort`` never raises, ``put`` and ``publish`` are never
torn.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn, TypeAlias, TypeVar, assert_never

from ckptstore.errors import CkptStoreError, ConfigError, OutcomeUnknownError, StorageFullError, UnavailableError
from ckptstore.store import CheckpointStore, DeleteResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Self

    from ckptstore.store import Capabilities, ObjectInfo, Outcome, PartWriter, Upload, WritableBuffer

__all__ = [
    "AnswerLost",
    "Die",
    "Duplicated",
    "FailBefore",
    "Fault",
    "FaultPlan",
    "FaultyStore",
    "Killed",
    "Late",
    "Torn",
    "possible_faults",
    "single_faults",
]

_T = TypeVar("_T")


class Killed(BaseException):
    """The process of the caller is dead: nothing that it still tries reaches the store.

    A BaseException, so that no handler that stands for a living caller's decision takes it for an error of the store.
    """


@dataclass(frozen=True, slots=True)
class FailBefore:
    """Nothing happens, and the caller gets *error*. With OutcomeUnknownError: nothing happened, but who knows."""

    error: type[CkptStoreError] = UnavailableError


@dataclass(frozen=True, slots=True)
class AnswerLost:
    """It happens, and the caller is not told: OutcomeUnknownError from publish, UnavailableError from other verbs."""


@dataclass(frozen=True, slots=True)
class Late:
    """The caller gets the error of a lost answer, and it happens only before the *calls*-th call from then on.

    With None it happens in ``FaultyStore.release()``, which also lets happen whatever else is under way.
    """

    calls: int | None = None


@dataclass(frozen=True, slots=True)
class Duplicated:
    """It happens twice, as under a client that retries by itself; the caller gets the second answer."""


@dataclass(frozen=True, slots=True)
class Torn:
    """A part of it happens, then the caller gets UnavailableError, or is killed.

    Attributes:
        kept: How much happens: bytes of ``write`` (the rest of the part is garbage) and ``read_into``, keys of
            ``delete`` (an error for each of the others), objects of ``list``, uploads of ``uploads``.
        kill: Whether the caller dies of it.
    """

    kept: int
    kill: bool = False


@dataclass(frozen=True, slots=True)
class Die:
    """The caller is killed in this call: before anything happened, or when it had happened."""

    after: bool = False


Fault: TypeAlias = FailBefore | AnswerLost | Late | Duplicated | Torn | Die

_KILLS = (Die(), Die(after=True))
_CHANGES = (AnswerLost(), Late(), Late(calls=1), Late(calls=3), Duplicated(), *_KILLS)
_POSSIBLE: dict[str, tuple[Fault, ...]] = {
    "publish": (FailBefore(), FailBefore(OutcomeUnknownError), FailBefore(StorageFullError), *_CHANGES),
    "put": (FailBefore(), FailBefore(StorageFullError), *_CHANGES),
    "get": (FailBefore(), Die()),
    "create": (FailBefore(), FailBefore(StorageFullError), *_CHANGES),
    "write": (FailBefore(), FailBefore(StorageFullError), Torn(100), Torn(100, kill=True), *_CHANGES),
    "finish": (FailBefore(), FailBefore(StorageFullError), *_CHANGES),
    "abort": (FailBefore(), Late(), *_KILLS),
    "read_into": (FailBefore(), Torn(100), Die()),
    "stat": (FailBefore(), Die()),
    "list": (FailBefore(), Torn(1), Die()),
    "delete": (FailBefore(), Torn(1), Torn(1, kill=True), *_CHANGES),
    "uploads": (FailBefore(), Torn(0), Die()),
    "abort_upload": (FailBefore(), *_CHANGES),
}


def possible_faults(verb: str) -> tuple[Fault, ...]:
    """Return the faults that make a difference for *verb*; ConfigError for a name that is none."""
    if verb not in _POSSIBLE:
        message = f"{verb!r} is not a verb that can fail; those are {', '.join(_POSSIBLE)}"
        raise ConfigError(message)
    return _POSSIBLE[verb]


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Which call meets which fault.

    Attributes:
        faults: By verb and number of the call of that verb, from 0.
    """

    faults: Mapping[tuple[str, int], Fault] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for (verb, _), fault in self.faults.items():
            if not any(type(fault) is type(possible) for possible in possible_faults(verb)):
                message = f"{verb} can't meet {fault}: a store promises more, or it would make no difference"
                raise ConfigError(message, operation=verb)

    @classmethod
    def sampled(cls, seed: int, calls: Mapping[str, int], n_faults: int = 2) -> Self:
        """Draw *n_faults* faults among the *calls* (number of calls of each verb); the same seed draws the same."""
        drawn = random.Random(seed)  # noqa: S311  repeatable on purpose
        places = [(verb, call) for verb, n_calls in sorted(calls.items()) for call in range(n_calls)]
        chosen = drawn.sample(places, min(n_faults, len(places)))
        return cls({(verb, call): drawn.choice(possible_faults(verb)) for verb, call in chosen})


def single_faults(calls: Mapping[str, int]) -> Iterator[FaultPlan]:
    """Yield a plan for every single fault at every one of the *calls*, given as the number of calls of each verb."""
    for verb, n_calls in calls.items():
        for call, fault in itertools.product(range(n_calls), possible_faults(verb)):
            yield FaultPlan({(verb, call): fault})


@dataclass(slots=True)
class _UnderWay:
    """A request that has left the caller and not reached the store."""

    act: Callable[[], object]
    calls_left: int | None


class FaultyStore(CheckpointStore):
    """*store*, failing as *plan* says. Thread-safe; which of several threads meets a fault is up to their order.

    After a kill every call through this object and its PartWriters raises Killed; the data are looked at through
    *store* or another object on them, as by the next process.
    """

    def __init__(self, store: CheckpointStore, plan: FaultPlan | None = None) -> None:
        self._store = store
        self._faults = dict(plan.faults) if plan is not None else {}
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()
        self._under_way: list[_UnderWay] = []
        self._met: list[tuple[str, int, Fault]] = []
        self._killed = False

    @property
    def calls(self) -> dict[str, int]:
        """How often each verb was called so far, in order of the first call."""
        with self._lock:
            return dict(self._calls)

    @property
    def met(self) -> Sequence[tuple[str, int, Fault]]:
        """The faults that calls have met so far: a scenario that met none tested nothing."""
        with self._lock:
            return list(self._met)

    @property
    def killed(self) -> bool:
        """Whether the caller is dead."""
        return self._killed

    def release(self) -> int:
        """Let all that is late happen now, after a kill too; return how many requests that were."""
        with self._lock:
            arriving, self._under_way = self._under_way, []
        for request in arriving:
            _unheard(request.act)
        return len(arriving)

    @property
    def url(self) -> str:
        return self._store.url

    def capabilities(self) -> Capabilities:
        self._check_alive()
        return self._store.capabilities()

    def publish(self, key: str, record: bytes, *, write_id: str) -> Outcome:
        return self.meet("publish", key, lambda: self._store.publish(key, record, write_id=write_id))

    def put(self, key: str, body: bytes) -> None:
        self.meet("put", key, lambda: self._store.put(key, body))

    def get(self, key: str, *, max_bytes: int) -> bytes:
        return self.meet("get", key, lambda: self._store.get(key, max_bytes=max_bytes))

    def create(self, key: str, n_bytes: int, part_bytes: int) -> PartWriter:
        writer = self.meet("create", key, lambda: self._store.create(key, n_bytes, part_bytes))
        return _FaultyPartWriter(self, key, writer)

    def read_into(self, key: str, offset: int, buffer: WritableBuffer) -> None:
        self.meet(
            "read_into",
            key,
            lambda: self._store.read_into(key, offset, buffer),
            lambda kept: self._store.read_into(key, offset, memoryview(buffer)[:kept]),
        )

    def stat(self, key: str) -> ObjectInfo:
        return self.meet("stat", key, lambda: self._store.stat(key))

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        found: list[ObjectInfo] = []
        try:
            found = self.meet(
                "list",
                prefix,
                lambda: list(self._store.list(prefix, after=after)),
                lambda kept: found.extend(itertools.islice(self._store.list(prefix, after=after), kept)),
            )
        except UnavailableError:
            yield from found
            raise
        yield from found

    def delete(self, keys: Iterable[str]) -> Sequence[DeleteResult]:
        asked = tuple(keys)
        results: list[DeleteResult] = []
        try:
            return self.meet(
                "delete",
                " ".join(asked),
                lambda: self._store.delete(asked),
                lambda kept: results.extend(self._store.delete(asked[:kept])),
            )
        except UnavailableError as error:
            if not results:
                raise
            return results + [DeleteResult(key=key, error=error) for key in asked[len(results) :]]

    def uploads(self, prefix: str) -> Iterator[Upload]:
        found: list[Upload] = []
        try:
            found = self.meet(
                "uploads",
                prefix,
                lambda: list(self._store.uploads(prefix)),
                lambda kept: found.extend(itertools.islice(self._store.uploads(prefix), kept)),
            )
        except UnavailableError:
            yield from found
            raise
        yield from found

    def abort_upload(self, upload: Upload) -> None:
        self.meet("abort_upload", upload.key, lambda: self._store.abort_upload(upload))

    def close(self) -> None:
        self._check_alive()
        self._store.close()

    def meet(self, verb: str, key: str, act: Callable[[], _T], torn: Callable[[int], object] | None = None) -> _T:
        """Count the call, let what is due arrive, then *act* as the plan says; *torn* acts in part."""
        self._check_alive()
        with self._lock:
            call = self._calls[verb]
            self._calls[verb] += 1
            fault = self._faults.get((verb, call))
            if fault is not None:
                self._met.append((verb, call, fault))
            due = self._due()
        for request in due:
            _unheard(request.act)
        match fault:
            case None:
                answer = act()
            case FailBefore(error):
                message = f"injected: {verb} number {call} on {key} did not happen"
                raise error(message, operation=verb, key=key)
            case AnswerLost():
                _unheard(act)
                raise _lost(verb, key)
            case Late(calls):
                with self._lock:
                    self._under_way.append(_UnderWay(act, calls))
                raise _lost(verb, key)
            case Duplicated():
                _unheard(act)
                answer = act()
            case Torn(kept, kill):
                assert torn is not None, f"{verb} can't be torn"
                _unheard(lambda: torn(kept))
                if kill:
                    self._kill()
                raise _lost(verb, key)
            case Die(after):
                if after:
                    _unheard(act)
                self._kill()
            case _:
                assert_never(fault)
        self._check_alive()  # another thread was killed meanwhile: it may have happened, and this one never learns
        return answer

    def _due(self) -> Sequence[_UnderWay]:
        """Take out the late requests that arrive before this call; the lock is held."""
        due = []
        for request in list(self._under_way):
            if request.calls_left is None:
                continue
            request.calls_left -= 1
            if request.calls_left <= 0:
                self._under_way.remove(request)
                due.append(request)
        return due

    def _kill(self) -> NoReturn:
        self._killed = True
        raise Killed

    def _check_alive(self) -> None:
        if self._killed:
            raise Killed


class _FaultyPartWriter:
    def __init__(self, owner: FaultyStore, key: str, writer: PartWriter) -> None:
        self._owner = owner
        self._key = key
        self._writer = writer

    def write(self, offset: int, buffer: bytes | bytearray | memoryview) -> None:
        body = bytes(buffer)  # a late write still has it when the caller has long changed the buffer
        self._owner.meet(
            "write",
            self._key,
            lambda: self._writer.write(offset, body),
            lambda kept: self._writer.write(offset, body[:kept] + b"\xdb" * len(body[kept:])),
        )

    def finish(self) -> None:
        self._owner.meet("finish", self._key, self._writer.finish)

    def abort(self) -> None:
        with suppress(CkptStoreError):
            self._owner.meet("abort", self._key, self._writer.abort)


def _unheard(act: Callable[[], object]) -> None:
    """Act; whatever the store answers, no one hears it."""
    with suppress(CkptStoreError):
        act()


def _lost(verb: str, key: str) -> CkptStoreError:
    message = f"injected: no answer to {verb} on {key}"
    if verb == "publish":
        return OutcomeUnknownError(message, operation=verb, key=key)
    return UnavailableError(message, operation=verb, key=key)
