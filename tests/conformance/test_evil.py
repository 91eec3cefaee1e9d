"""The kit rejects every store that breaks a promise, and rejects it by the test that names the promise."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ckptstore.errors import CkptStoreError, UnsupportedError
from ckptstore.memory import MemoryStore
from ckptstore.testing.contract import StoreConformance, Subject
from ckptstore.testing.evil import EVIL_STORES
from ckptstore.testing.raw import RawMemory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptstore.store import Capabilities, ObjectInfo, Outcome
    from ckptstore.testing.evil import EvilStore

TESTS = sorted(name for name in dir(StoreConformance) if name.startswith("test_"))
names = itertools.count()


@pytest.fixture(autouse=True)
def _unexplained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not explain the failures that are wanted: to compare long bodies for a person takes minutes."""
    monkeypatch.setattr("_pytest.assertion.util._reprcompare", None)


def verdict(kind: type[MemoryStore], test: str) -> Exception | None:
    """Run one test of the kit on an empty store of this kind; return how it failed, None if it passed."""
    name = f"evil-{next(names)}"
    store = kind(name)
    subject = Subject(store=store, raw=RawMemory(name), reopen=lambda: kind(name))
    try:
        getattr(StoreConformance(), test)(subject)
    except (AssertionError, CkptStoreError, pytest.fail.Exception) as failure:
        return failure if isinstance(failure, Exception) else AssertionError(str(failure))
    return None


@pytest.mark.parametrize(
    "kind, test",
    [(kind, test) for kind in EVIL_STORES for test in kind.caught_by],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_named_test_rejects_the_evil_store(kind: type[EvilStore], test: str) -> None:
    assert verdict(kind, test) is not None
    assert verdict(MemoryStore, test) is None


class SingleWriterStore(MemoryStore):
    """Honest about what it can't do."""

    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), exclusive="none")

    def publish(self, key: str, record: bytes, *, write_id: str) -> Outcome:
        message = f"{self.url} can't create a record exclusively"
        raise UnsupportedError(message, operation="publish", key=key)


class UnorderedStore(MemoryStore):
    """Honest about the order of its listings, which is none."""

    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), listing="unordered")

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        yield from sorted(super().list(prefix, after=after), key=lambda info: info.key[::-1])


class LateListingStore(MemoryStore):
    """Honest about listings that are old for a while."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._asked = 0

    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), listing="stale", stale_bound_s=5.0)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        self._asked += 1
        found = list(super().list(prefix, after=after))
        yield from found[: len(found) - self._asked % 2]


@pytest.mark.parametrize("test", TESTS)
@pytest.mark.parametrize("kind", [SingleWriterStore, UnorderedStore])
def test_a_store_that_promises_less_and_says_so_passes(kind: type[MemoryStore], test: str) -> None:
    assert verdict(kind, test) is None


def test_a_listing_that_comes_true_within_its_declared_bound_passes() -> None:
    assert verdict(LateListingStore, "test_list_compares_whole_keys") is None


def test_every_test_of_the_kit_names_its_promise() -> None:
    for test in TESTS:
        marks = [mark for mark in getattr(StoreConformance, test).pytestmark if mark.name == "promise"]
        assert len(marks) == 1, test
        level, clause = marks[0].args
        assert level in {"MUST", "SHOULD", "MAY"}
        assert clause


def test_every_test_of_the_kit_rejects_some_store() -> None:
    assert set(TESTS) == {test for kind in EVIL_STORES for test in kind.caught_by}
