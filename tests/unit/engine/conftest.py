"""What the engine's tests share: a gated store, and managers on it that are closed at the end."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from ckptstore.manager import CheckpointManager
from tests.unit.engine.gates import LIMIT_S, GatedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def store() -> GatedStore:
    return GatedStore()


@pytest.fixture
def manage(store: GatedStore) -> Iterator[Callable[..., CheckpointManager]]:
    made: list[CheckpointManager] = []

    def make(**options: Any) -> CheckpointManager:
        options.setdefault("rng", False)
        options.setdefault("drain_timeout_s", LIMIT_S)
        made.append(CheckpointManager(options.pop("store", store), **options))
        return made[-1]

    yield make
    for manager in made:
        with contextlib.suppress(Exception):
            manager.close()
