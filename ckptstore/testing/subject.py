"""What does the kit need of a backend, and how does it look at it?

The kit meets a backend as a Subject: a store, a raw view of the same data, and ways to open it again. What several
parts of the contract share stands here: the marker of a promise, records, and the comparison of a listing with the
truth.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ckptstore.store import CheckpointStore, PartWriter
    from ckptstore.testing.raw import RawView

__all__ = ["Subject", "assert_listed", "must", "record_of", "should", "write_parts"]


def must(clause: str) -> pytest.MarkDecorator:
    """Mark a test of a safety promise: a store that fails it must not hold checkpoints."""
    return pytest.mark.promise("MUST", clause)


def should(clause: str) -> pytest.MarkDecorator:
    """Mark a test of a bound or a courtesy: a store that fails it is safe, but wasteful or unfriendly."""
    return pytest.mark.promise("SHOULD", clause)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One backend under test, on data that nothing else touches and that starts empty.

    Attributes:
        store: The store that is judged.
        raw: The same data past the store.
        reopen: Opens another store object on the same data, as another process would.
        open_elsewhere: Picklable; opens the data in another process. None if another process can't see them.
    """

    store: CheckpointStore
    raw: RawView
    reopen: Callable[[], CheckpointStore]
    open_elsewhere: Callable[[], CheckpointStore] | None = None


def record_of(write_id: str, *, n_bytes: int = 0, **fields: object) -> bytes:
    """Return a record with *write_id*, padded to *n_bytes* where it would be shorter."""
    line = json.dumps({"write_id": write_id, **fields}).encode() + b"\n"
    return line + b"." * (n_bytes - len(line))


def write_parts(writer: PartWriter, body: bytes, part_bytes: int, offsets: Iterable[int] | None = None) -> None:
    """Write the parts of *body* that start at *offsets* (all of them, if None)."""
    for offset in range(0, len(body), part_bytes) if offsets is None else offsets:
        writer.write(offset, body[offset : offset + part_bytes])


def assert_listed(store: CheckpointStore, prefix: str, expected: Iterable[str], *, after: str | None = None) -> None:
    """Assert that the listing holds exactly *expected*, in key order.

    At once, or within the bound that the store declares; in any order, if it declares that it has none.
    """
    promised = store.capabilities()
    wanted = sorted(expected)
    deadline = time.monotonic() + promised.stale_bound_s
    while True:
        found = [info.key for info in store.list(prefix, after=after)]
        if promised.listing == "unordered":
            found.sort()
        if found == wanted or time.monotonic() >= deadline:
            break
        threading.Event().wait(promised.stale_bound_s / 20)
    assert found == wanted
