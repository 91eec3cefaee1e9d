"""What happens to saves in flight when the process ends?

At a normal end they are drained, each within its manager's limit; a storage that never answers can't hold the process,
since every thread of ours is a daemon. A failure that nobody has seen by then is logged and turned into the exit code
1: a script that lost its last checkpoint must not look like one that did not. A signal only sets a flag, which the
training loop reads.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Protocol

from ckptstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import FrameType

__all__ = ["Signals", "drain_at_exit", "forget"]


class _Drains(Protocol):
    def drain_for_exit(self) -> bool:
        """Wait for what is in flight; return whether all of it is durable and no failure is unseen."""
        ...


_open: dict[_Drains, None] = {}  # in order of opening, and not weakly: one that no name refers to is drained as well


def drain_at_exit(manager: _Drains) -> None:
    """Drain *manager* when the interpreter ends, unless ``forget`` is called before."""
    _open[manager] = None


def forget(manager: _Drains) -> None:
    """Drain *manager* no longer: it was closed."""
    _open.pop(manager, None)


@atexit.register
def _drain_all() -> None:
    results = [manager.drain_for_exit() for manager in list(_open)]
    if not all(results):
        # Nothing an exit handler raises can change the exit code, so this is the last word: flush, and leave.
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # closed, replaced, or a pipe that no one reads
                stream.flush()
        os._exit(1)


class Signals:
    """A flag that signals set.

    The handler that was there before is called too. Only the main thread can install handlers, which Python demands.

    Attributes:
        received: Whether one of them came. May be read from any thread, at any moment: a plain attribute, since a
            handler that takes a lock may interrupt itself.

    Raises:
        ConfigError: there is no such signal, it can't be caught, or this is not the main thread; none is installed.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        self._listening = True
        self.received = False
        for number in dict.fromkeys(numbers):
            try:
                self._before[number] = signal.getsignal(number)
                signal.signal(number, self._handle)
            except (ValueError, TypeError, OSError) as error:
                self.restore()
                message = f"save_on: signal {number!r} can't be listened for: {error}"
                raise ConfigError(message) from error

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._listening:
            self.received = True
        before = self._before[number]
        if callable(before):
            before(number, frame)
        elif not self._listening and before == signal.SIG_DFL and signal.getsignal(number) == self._handle:
            # Closed, yet still installed: do what the signal does by default.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def restore(self) -> None:
        """Listen no longer, and put the earlier handlers back where ours is on top.

        Where another's is, or on another thread than the main one, ours stays and passes on to the one before it.
        """
        self._listening = False
        for number, before in self._before.items():
            with contextlib.suppress(ValueError, TypeError, OSError):
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, before if before is not None else signal.SIG_DFL)
