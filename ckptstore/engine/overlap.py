"""How is the state copied while training goes on, without ever mixing two steps?

Between a save and the next optimizer step, forward and backward only read parameters and optimizer state. So those are
copied beside them, and a hook before every optimizer's step waits for what is left. Fused optimizers bump no version
counter: the hook protects from them. What no hook sees (an edit in place, a freed storage) moves a version counter or
an address, which are compared before each part is copied, since freed memory must not be read, and again at the end:
such a snapshot is never committed.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from ckptstore.errors import TornSnapshotError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from ckptstore.handles import SaveHandle
    from ckptstore.seams import Clock

__all__ = ["Later"]

_N_NAMED = 3


class Later:
    """The tensors of one save that are copied while training goes on.

    Args:
        tensors: Those tensors, by name, as they are now.
        handle: The save's; what a step waits for it is added to its stall.
        clock: For timings.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], handle: SaveHandle, clock: Clock) -> None:
        self.tensors = dict(tensors)
        self._before = {name: _mark(tensor) for name, tensor in self.tensors.items()}
        self._handle = handle
        self._clock = clock
        self._pid = os.getpid()
        self._taken = threading.Lock()
        self._done = threading.Event()

    def take(self) -> bool:
        """Tell whether the caller is the one who may copy, or may call it off. True once."""
        return self._taken.acquire(blocking=False)

    def end(self) -> None:
        """Let training change the tensors: they are copied, or the copy was given up."""
        self.tensors = {}
        self._done.set()

    def check(self, names: Iterable[str]) -> None:
        """Raise TornSnapshotError if one of the tensors changed since the save, whether copied by now or not."""
        changed = [name for name in names if name in self._before and _mark(self.tensors[name]) != self._before[name]]
        if changed:
            more = f" and {len(changed) - _N_NAMED} more" if len(changed) > _N_NAMED else ""
            message = (
                f"step {self._handle.step}: {', '.join(changed[:_N_NAMED])}{more} changed in place between save() and "
                "the optimizer's next step, while being copied beside training; nothing was committed: call "
                'manager.staged() before such an edit, or use staging="copy"'
            )
            raise TornSnapshotError(message, operation="save", key=changed[0])

    def wait(self, timeout_s: float | None) -> None:
        """Return when the copy is complete, or was given up; UnavailableError if not within *timeout_s* seconds."""
        if not self._done.wait(timeout_s):
            message = f"the state of step {self._handle.step} is not copied after {timeout_s} s"
            raise UnavailableError(message, operation="staged")

    def hold_step(self) -> None:
        """Before an optimizer's step: wait for the copy, and count that as the save's stall."""
        # A forked child has the flag but not the thread that would set it, and memory of its own.
        if self._done.is_set() or os.getpid() != self._pid:
            return
        started = self._clock.monotonic()
        self._done.wait()
        self._handle.stall_s += self._clock.monotonic() - started


def _mark(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor._version, tensor.data_ptr()  # noqa: SLF001 - autograd's own counter of edits in place
