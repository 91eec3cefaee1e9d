"""How does a test stop a save at a place of its choice, or let it fail there?

A store around a MemoryStore whose calls of chosen verbs wait at a gate, or raise, so that no test has to sleep.
"""

from __future__ import annotations

import itertools
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ckptstore.memory import MemoryStore
from ckptstore.testing.faulty import FaultyStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckptstore.engine.engine import Engine
    from ckptstore.manager import CheckpointManager
    from ckptstore.store import CheckpointStore

T = TypeVar("T")
LIMIT_S = 5.0
_names = itertools.count()


class Gate:
    """Where calls of a verb wait until it is opened."""

    def __init__(self, verb: str, key: str) -> None:
        self.verb = verb
        self.key = key
        self.reached = threading.Event()
        self._opened = threading.Event()

    def open(self) -> None:
        self._opened.set()

    def wait_reached(self) -> None:
        assert self.reached.wait(LIMIT_S), f"no {self.verb} of {self.key!r} came"

    def pass_through(self) -> None:
        self.reached.set()
        assert self._opened.wait(LIMIT_S), f"the gate at {self.verb} was never opened"


class GatedStore(FaultyStore):
    """A store whose calls can be held, or made to fail, by verb and a part of the key."""

    def __init__(self, store: CheckpointStore | None = None) -> None:
        super().__init__(MemoryStore(f"gated-{next(_names)}") if store is None else store)
        self._gates: list[Gate] = []
        self._errors: list[tuple[str, str, BaseException, bool]] = []

    @contextmanager
    def hold(self, verb: str, key: str = "") -> Iterator[Gate]:
        """Within the block, calls of *verb* on keys with *key* in them wait until the gate is opened, or it ends."""
        gate = Gate(verb, key)
        self._gates.append(gate)
        try:
            yield gate
        finally:
            self._gates.remove(gate)
            gate.open()

    def fail(self, verb: str, error: BaseException, key: str = "", *, after: bool = False) -> None:
        """Let the next such call raise, *after* it has happened or instead."""
        self._errors.append((verb, key, error, after))

    def meet(self, verb: str, key: str, act: Callable[[], T], torn: Callable[[int], object] | None = None) -> T:
        for gate in list(self._gates):
            if gate.verb == verb and gate.key in key:
                gate.pass_through()
        for armed in list(self._errors):
            if armed[0] == verb and armed[1] in key:
                self._errors.remove(armed)
                if armed[3]:
                    super().meet(verb, key, act, torn)
                raise armed[2]
        return super().meet(verb, key, act, torn)

    def stored(self, prefix: str = "data/") -> list[str]:
        """The objects and unfinished writes there are."""
        return [info.key for info in self.list(prefix)] + [upload.key for upload in self.uploads(prefix)]


def in_thread(act: Callable[[], Any]) -> Callable[[], Any]:
    """Run *act* on a thread; return a function that waits for its result, or raises what it raised."""
    results: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            results.append((act(), None))
        except BaseException as error:
            results.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(LIMIT_S)
        assert results, "it hangs"
        value, error = results[0]
        if error is not None:
            raise error
        return value

    return result


def engine_of(manager: CheckpointManager) -> Engine:
    """The engine of a manager that has saved."""
    engine = manager._engine
    assert engine is not None
    return engine


def same(loaded: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors are equal in dtype, shape and every byte."""
    return (
        loaded.dtype == expected.dtype
        and loaded.shape == expected.shape
        and torch.equal(
            loaded.contiguous().reshape(-1).view(torch.uint8), expected.contiguous().reshape(-1).view(torch.uint8)
        )
    )
