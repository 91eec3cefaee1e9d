"""What happens to saves in flight when the process ends?

At a normal end they are drained, each within its manager's limit; a storage that never answers can't hold the process,
since every thread of ours is a daemon. A failure that nobody has seen by then is logged and turned into the exit code
1: a script that lost its last checkpoint must not look like one that did not. A signal only sets a flag, which the
training loop reads.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import FrameType

__all__ = ["Signals", "drain_at_exit"]

_LOG = logging.getLogger(__name__)


class _Drains(Protocol):
    def drain_for_exit(self) -> bool:
        """Wait for what is in flight; return whether all of it is durable and no failure is unseen."""
        ...


_open: weakref.WeakSet[_Drains] = weakref.WeakSet()
_pid = os.getpid()


def drain_at_exit(manager: _Drains) -> None:
    """Drain *manager* when the interpreter ends, if it still lives and was not closed."""
    _open.add(manager)


def forget(manager: _Drains) -> None:
    """Drain *manager* no longer: it was closed."""
    _open.discard(manager)


@atexit.register
def _drain_all() -> None:
    if os.getpid() != _pid:  # a forked child owns none of these
        return
    results = [manager.drain_for_exit() for manager in list(_open)]
    if not all(results):
        # Nothing an exit handler raises can change the exit code, so this is the last word: flush, and leave.
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(1)


class Signals:
    """A flag that signals set, readable from any thread at any moment.

    The handler that was there before is called too. Only the main thread can install handlers, which Python demands.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        self.received = threading.Event()
        for number in numbers:
            self._before[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received.set()
        before = self._before.get(number)
        if callable(before):
            before(number, frame)

    def restore(self) -> None:
        """Put the earlier handlers back where ours is still installed."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, before if before is not None else signal.SIG_DFL)
        self._before = {}
