"""Checkpoints in a directory of a local disk: the schemes ``file`` and a bare path."""

from __future__ import annotations

from ckptstore_posix.config import PosixConfig
from ckptstore_posix.store import PosixStore

__all__ = ["PosixConfig", "PosixStore"]
