"""Which checkpoint does URL@STEP mean?

The last "@" with nothing but digits behind it separates the step; every other "@" belongs to the address. An address
that ends like that itself is written with a "/" behind it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ckptstore.errors import NotFoundError

if TYPE_CHECKING:
    from ckptstore.checkpoint import Checkpoint, Run

__all__ = ["find_checkpoint", "parse_target"]

_STEP = re.compile(r"(.+)@([0-9]{1,100})", re.DOTALL)


def parse_target(text: str) -> tuple[str, int | None]:
    """Return the address of the run and the step, None if *text* names none."""
    match = _STEP.fullmatch(text)
    return (match[1], int(match[2])) if match else (text, None)


def find_checkpoint(run: Run, step: int | None) -> Checkpoint:
    """Return the checkpoint at *step*, by default the newest that is not marked damaged.

    Raises:
        NotFoundError: there is none.
    """
    found = run.latest() if step is None else run.at(step=step)
    if found is None:
        message = f"{run.url} holds no checkpoint"
        raise NotFoundError(message, operation="show", key=run.url)
    return found
