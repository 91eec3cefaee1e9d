"""Does ``publish`` really have one winner, for threads and for processes?

Two races. On one key: everybody publishes a record of their own at the same moment, again and again. Over a sequence:
each racer goes up the numbers from 0 and publishes at the first free one until it has won so many times, as writers
of a journal do. Afterwards the told outcomes are compared with what is stored: one body per number, no gaps, every
number given to exactly one racer, and every loser shown the winner's record. Imports no pytest, so that a racing
process starts quickly.
"""

from __future__ import annotations

import json
import multiprocessing
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptstore.errors import OutcomeUnknownError, UnavailableError
from ckptstore.store import Published, write_id_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.synchronize import Barrier as ProcessBarrier

    from ckptstore.store import CheckpointStore, Outcome
    from ckptstore.testing.raw import RawView

__all__ = ["Win", "assert_sequence", "climb", "race_for_key", "race_processes", "race_threads"]

START_S = 60.0
"""How long the racers wait for the slowest of them to be ready, s."""
ATTEMPTS = 20
"""How often a racer asks again after an answer that decides nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Win:
    """A racer was told Published for this number with this write id."""

    number: int
    write_id: str


def race_for_key(stores: Sequence[CheckpointStore], key: str, raw: RawView) -> None:
    """Let one thread per store publish under *key* at the same moment, and assert one winner whom all others saw."""
    start = threading.Barrier(len(stores), timeout=START_S)

    def run(racer: int) -> Outcome:
        start.wait()
        return _settled(stores[racer], key, _record(f"racer-{racer}"), f"racer-{racer}")

    with ThreadPoolExecutor(len(stores)) as pool:
        outcomes = list(pool.map(run, range(len(stores))))
    winners = [f"racer-{racer}" for racer, outcome in enumerate(outcomes) if isinstance(outcome, Published)]
    held = raw.read(key)
    assert held is not None, f"{key}: everybody was answered, and there is no record"
    assert winners == [write_id_of(held)], f"{key}: told Published: {winners}; stored: {held!r:.200}"
    for outcome in outcomes:
        assert isinstance(outcome, Published) or outcome.record == held, f"{key}: a loser was shown another record"


def climb(store: CheckpointStore, prefix: str, name: str, wins: int, limit: int) -> list[Win]:
    """Publish at the first free number below *prefix*, from 0 on, until *wins* numbers were won.

    Args:
        store: Where.
        prefix: Of the keys, without a trailing "/".
        name: Makes this racer's write ids its own.
        wins: How many numbers to win.
        limit: Of the numbers; to be driven beyond it is an AssertionError, since all racers together fill no more.
    """
    won: list[Win] = []
    for number in range(limit):
        write_id = f"{name}-{number}"
        outcome = _settled(store, _key(prefix, number), _record(write_id), write_id)
        if isinstance(outcome, Published):
            won.append(Win(number=number, write_id=write_id))
            if len(won) == wins:
                return won
    message = f"{name} won {len(won)} of the {limit} numbers below {prefix}, and there are enough for {wins}"
    raise AssertionError(message)


def race_threads(stores: Sequence[CheckpointStore], prefix: str, *, name: str, wins: int, limit: int) -> list[Win]:
    """Let one thread per store climb, all from the same moment on; return what they were told."""
    start = threading.Barrier(len(stores), timeout=START_S)

    def run(racer: int) -> list[Win]:
        start.wait()
        return climb(stores[racer], prefix, f"{name}-{racer}", wins, limit)

    with ThreadPoolExecutor(len(stores)) as pool:
        return [win for told in pool.map(run, range(len(stores))) for win in told]


def race_processes(
    open_store: Callable[[], CheckpointStore], prefix: str, *, processes: int, threads: int, wins: int
) -> list[Win]:
    """Let *processes* × *threads* racers climb, each process with a store of its own; return what they were told.

    Args:
        open_store: Picklable: it is called in each process.
        prefix: Of the keys.
        processes: Started afresh (spawned), so that none inherits a lock or a connection.
        threads: In each process, sharing its store.
        wins: For each thread.
    """
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(processes, timeout=START_S)
    limit = processes * threads * wins
    # Each worker waits at the barrier before it takes a task, so each takes exactly one.
    with ProcessPoolExecutor(processes, context, initializer=_arrive, initargs=(start,)) as pool:
        racing = [
            pool.submit(
                _race_in_process, open_store, threads, prefix, name=f"process-{process}", wins=wins, limit=limit
            )
            for process in range(processes)
        ]
        return [win for future in racing for win in future.result()]


def assert_sequence(raw: RawView, prefix: str, told: Sequence[Win]) -> None:
    """Assert that the numbers are dense from 0, and each holds the record of the one racer who was told it won."""
    numbers = sorted(win.number for win in told)
    assert numbers == list(range(len(told))), f"the numbers won are not 0..{len(told) - 1}, each once: {numbers}"
    temporaries = f"{prefix}/."
    below = {key for key in raw.keys() if key.startswith(f"{prefix}/")}  # noqa: SIM118  a raw view is no dict
    stored = {key for key in below if not key.startswith(temporaries)}
    assert stored == {_key(prefix, number) for number in numbers}, "stored numbers and won numbers differ"
    for win in told:
        held = raw.read(_key(prefix, win.number))
        assert held == _record(win.write_id), f"{win} was told Published; stored is {held!r:.200}"


def _arrive(start: ProcessBarrier) -> None:
    start.wait()


def _race_in_process(
    open_store: Callable[[], CheckpointStore], threads: int, prefix: str, *, name: str, wins: int, limit: int
) -> list[Win]:
    with open_store() as store:
        return race_threads([store] * threads, prefix, name=name, wins=wins, limit=limit)


def _settled(store: CheckpointStore, key: str, record: bytes, write_id: str) -> Outcome:
    """Publish until the answer decides: with the same record and write id that is always allowed."""
    for _ in range(ATTEMPTS - 1):
        try:
            return store.publish(key, record, write_id=write_id)
        except (OutcomeUnknownError, UnavailableError):
            continue
    return store.publish(key, record, write_id=write_id)


def _key(prefix: str, number: int) -> str:
    return f"{prefix}/{number:010d}.json"


def _record(write_id: str) -> bytes:
    return json.dumps({"write_id": write_id, "pad": "." * 2000}).encode() + b"\n"
