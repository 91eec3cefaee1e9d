"""How is the state copied while training goes on, without ever mixing two steps?

Between a save and the next optimizer step, forward and backward only read parameters and optimizer state. So those are
copied beside them, and a hook before every optimizer's step waits for what is left. Fused optimizers bump no version
counter: the hook protects from them. What no hook sees (an edit in place, a freed storage) moves a version counter or an
address, which are compared at the end: such a snapshot is never committed.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckptstore.errors import TornSnapshotError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from ckptstore.engine.capture import Captured
    from ckptstore.handles import SaveHandle
    from ckptstore.seams import Clock

__all__ = ["Later"]

_NICE = 5


class Later:
    """The tensors of one save that are copied while training goes on."""

    def __init__(self, captured: Captured) -> None:
        self.tensors: dict[str, torch.Tensor] = {name: captured.tensors[name] for name in captured.guarded}
        self._before = {name: _mark(tensor) for name, tensor in self.tensors.items()}
        self._done = threading.Event()

    def begin(self, stage: Callable[[], None], handle: SaveHandle, clock: Clock) -> None:
        """Run *stage* on a thread of its own; until it ends, every optimizer's step waits for it.

        The time that a step waits is added to the handle's stall.
        """

        def before_step(*_: Any) -> None:
            started = clock.monotonic()
            self._done.wait()
            handle.stall_s += clock.monotonic() - started

        hook = register_optimizer_step_pre_hook(before_step)

        def run() -> None:
            if hasattr(os, "sched_getaffinity"):
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
            try:
                stage()
            finally:
                hook.remove()
                self._done.set()

        threading.Thread(target=run, name="ckptstore-overlap", daemon=True).start()

    def check(self, step: int) -> None:
        """Raise TornSnapshotError if a tensor changed since the save, whether before or after it was copied."""
        changed = [name for name, tensor in self.tensors.items() if _mark(tensor) != self._before[name]]
        if changed:
            message = (
                f"step {step}: {', '.join(changed[:3])}{f' and {len(changed) - 3} more' if len(changed) > 3 else ''} "  # noqa: PLR2004
                "changed in place between save() and the optimizer's next step, while being copied beside training; "
                'nothing was committed: call manager.staged() before such an edit, or use staging="copy"'
            )
            raise TornSnapshotError(message, operation="save", key=changed[0])

    def wait(self, timeout_s: float | None) -> None:
        """Return when the copy is complete, or has failed."""
        if not self._done.wait(timeout_s):
            message = f"the state is not copied after {timeout_s} s"
            raise UnavailableError(message, operation="staged")


def _mark(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor._version, tensor.data_ptr()  # noqa: SLF001 - autograd's own counter of edits in place
