"""What does a caller hold while a save goes on?

A handle tells "staged" from "committed", hands out the checkpoint or the error, and never loses either.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Literal, NoReturn

from ckptstore.errors import NotSavedError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptstore.checkpoint import Checkpoint

__all__ = ["SaveHandle", "Status"]

Status = Literal["staging", "writing", "committed", "failed", "skipped", "superseded"]
_LOG = logging.getLogger(__name__)


class SaveHandle:
    """One save. Any thread.

    Attributes:
        step: Its step.
        stall_s: Seconds that the ``save`` call kept the caller.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.stall_s = 0.0
        self._status: Status = "staging"
        self._checkpoint: Checkpoint | None = None
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[SaveHandle], object]] = []

    @property
    def status(self) -> Status:
        """Where it stands: staging, writing, committed, failed, skipped or superseded."""
        return self._status

    def done(self) -> bool:
        """Whether it ended, in whichever way."""
        return self._done.is_set()

    def result(self, timeout_s: float | None = None) -> Checkpoint:
        """Return the checkpoint once it is durable.

        Raises:
            NotSavedError: the save was skipped or superseded.
            UnavailableError: it has not ended within *timeout_s* seconds; it goes on.
            CkptStoreError: why it failed.
        """
        if not self._done.wait(timeout_s):
            message = f"step {self.step} is not durable after {timeout_s} s; the save goes on"
            raise UnavailableError(message, operation="result")
        if self._error is not None:
            raise self._error
        if self._checkpoint is None:
            message = f"step {self.step} was {self._status}: there is no checkpoint of it"
            raise NotSavedError(message, operation="result")
        return self._checkpoint

    def add_done_callback(self, callback: Callable[[SaveHandle], object]) -> None:
        """Call *callback* with this handle when it ends, or now if it has; what the callback raises is logged."""
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        self._call(callback)

    def staged(self) -> None:
        """Record that the state is staged. For the engine."""
        with self._lock:
            if self._status == "staging":
                self._status = "writing"

    def settle(
        self, status: Status, *, checkpoint: Checkpoint | None = None, error: BaseException | None = None
    ) -> bool:
        """Record how the save ended, unless that is known; tell whether it was not. For the engine."""
        with self._lock:
            if self._done.is_set():
                return False
            self._status, self._checkpoint, self._error = status, checkpoint, error
            self._done.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._call(callback)
        return True

    def _call(self, callback: Callable[[SaveHandle], object]) -> None:
        try:
            callback(self)
        except Exception:  # noqa: BLE001 - a caller's code must not end the publisher
            _LOG.exception("a callback for the save of step %d failed", self.step)

    def __reduce__(self) -> NoReturn:
        message = "a SaveHandle belongs to the process that saves; it can't be pickled"
        raise TypeError(message)

    def __repr__(self) -> str:
        return f"<SaveHandle step {self.step}, {self._status}>"
