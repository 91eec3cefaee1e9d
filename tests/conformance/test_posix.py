"""A directory of a local disk keeps the contract, for threads and for processes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import pytest

from ckptstore.testing.contract import StoreConformance, Subject
from ckptstore.testing.raw import RawDirectory
from ckptstore_posix import PosixConfig, PosixStore

if TYPE_CHECKING:
    from pathlib import Path


class TestPosix(StoreConformance):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> Subject:
        config = PosixConfig(root=tmp_path)
        return Subject(
            store=PosixStore(config),
            raw=RawDirectory(tmp_path),
            reopen=lambda: PosixStore(config),
            open_elsewhere=functools.partial(PosixStore, config),
        )
