"""The reference keeps the contract that it is the reference for."""

from __future__ import annotations

import pytest

from ckptstore.memory import MemoryStore
from ckptstore.testing.contract import StoreConformance, Subject
from ckptstore.testing.raw import RawMemory


class TestMemory(StoreConformance):
    @pytest.fixture
    def subject(self, request: pytest.FixtureRequest) -> Subject:
        name = request.node.nodeid
        return Subject(store=MemoryStore(name), raw=RawMemory(name), reopen=lambda: MemoryStore(name))
