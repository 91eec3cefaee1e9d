"""Which names does a user of ckptstore write? All of them, and importing this module costs nearly nothing.

Names load their module on first use (PEP 562), so that ``import ckptstore`` pays for neither torch nor a cloud client:
a command line that only lists checkpoints, or a script that only names an error, never waits for them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ckptstore import errors

if TYPE_CHECKING:
    from ckptstore.api import load, open_run, restore, save
    from ckptstore.checkpoint import Checkpoint, Run
    from ckptstore.manager import CheckpointManager, Resumed, SaveHandle
    from ckptstore.opening import open_store
    from ckptstore.state.registry import register_type
    from ckptstore.store import CheckpointStore

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "CheckpointStore",
    "Resumed",
    "Run",
    "SaveHandle",
    "__version__",
    "errors",
    "load",
    "open_run",
    "open_store",
    "register_type",
    "restore",
    "save",
]

__version__ = "0.1.0"

_HOME_OF = {
    "Checkpoint": "ckptstore.checkpoint",
    "CheckpointManager": "ckptstore.manager",
    "CheckpointStore": "ckptstore.store",
    "Resumed": "ckptstore.manager",
    "Run": "ckptstore.checkpoint",
    "SaveHandle": "ckptstore.manager",
    "load": "ckptstore.api",
    "open_run": "ckptstore.api",
    "open_store": "ckptstore.opening",
    "register_type": "ckptstore.state.registry",
    "restore": "ckptstore.api",
    "save": "ckptstore.api",
}


if not TYPE_CHECKING:  # a type checker that saw it would accept every misspelt name

    def __getattr__(name: str) -> object:
        home = _HOME_OF.get(name)
        if home is None:
            message = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(message)
        value = getattr(importlib.import_module(home), name)
        globals()[name] = value  # the next use finds it without coming here
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
