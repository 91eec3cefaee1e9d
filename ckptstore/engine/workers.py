"""Which threads do the background work, so that neither training nor the end of the process waits for them?

A few daemon threads at a lower scheduling priority: they give way to training when cores are scarce, and a storage that
never answers can't keep the process alive, which non-daemon threads and executors would. They start at once, on the
caller's thread: a save that is drained while the interpreter ends could start none.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Workers"]

_NICER = 5
_LOG = logging.getLogger(__name__)


class Workers:
    """Runs jobs in the order given on *count* threads. A job should not raise; if it does, that is logged."""

    def __init__(self, count: int, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Run *job* soon."""
        self._jobs.put(job)

    def stop(self, timeout_s: float) -> None:
        """Let the threads end after the jobs given so far; wait at most *timeout_s* seconds for each."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(timeout_s)

    def _run(self) -> None:
        # On Linux a priority belongs to a thread; elsewhere this would slow the whole process, so it is left alone.
        if hasattr(os, "sched_getaffinity"):
            thread = threading.get_native_id()
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICER)
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException:  # noqa: BLE001 - a thread that ended would leave the other jobs waiting for ever
                _LOG.exception("a job of %s failed", threading.current_thread().name)
            del job  # a finished job must not keep a save's memory until the next one comes
