"""Which threads do the writing, so that neither training nor the end of the process waits for them?

A few daemon threads at a lower scheduling priority: they give way to training when cores are scarce, and a storage that
never answers can't keep the process alive, which non-daemon threads and executors would.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Workers"]

_NICE = 5


class Workers:
    """Runs jobs in the order given on *count* threads, which start with the first job. A job must not raise."""

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, job: Callable[[], None]) -> None:
        """Run *job* soon."""
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._run, name=f"{self._name}-{number}", daemon=True)
                for number in range(self._count)
            ]
            for thread in self._threads:
                thread.start()
        self._jobs.put(job)

    def stop(self, timeout_s: float) -> None:
        """Let the threads end after the jobs given so far; wait at most *timeout_s* seconds for them."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(timeout_s)
        self._threads = []

    def _run(self) -> None:
        # On Linux a priority belongs to a thread; elsewhere this would slow the whole process, so it is left alone.
        if hasattr(os, "sched_getaffinity"):
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while (job := self._jobs.get()) is not None:
            job()
            del job  # a finished job must not keep a save's memory until the next one comes
