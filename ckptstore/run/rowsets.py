"""How does a record hold ten thousand rows in 64 KiB?

As a small difference from a base: an immutable object under ``index/`` that many records share. A record that would
need a large difference introduces a new base, put before the record is published, so no record ever names a base that
was not durable.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ckptstore.errors import CorruptionError, NotFoundError
from ckptstore.run.records import Based, BaseRef, Row, decode_rows, row_to_json
from ckptstore.run.strict_json import canonical, read_json, sha256_hex

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ckptstore.run.records import RowSet
    from ckptstore.store import CheckpointStore

__all__ = ["BaseCache", "fit"]

INLINE_ROWS = 64
INLINE_BYTES = 48 * 1024
DIFF_ROWS = 64
DIFF_BYTES = 24 * 1024
REFERENCE_BYTES = 300  # a base's key, size and digest, and the names around them
MAX_BASE_BYTES = 64 * 1024 * 1024
_CACHED_BASES = 4
FORMAT = "ckptstore.index"


def _n_bytes(rows: Iterable[Row]) -> int:
    return sum(len(canonical(row_to_json(row))) + 1 for row in rows)


def _fits_inline(rows: tuple[Row, ...], budget: int) -> bool:
    return len(rows) <= INLINE_ROWS and _n_bytes(rows) <= budget


def fit(
    bases: BaseCache,
    sets: tuple[tuple[Row, ...], tuple[Row, ...]],
    previous: tuple[RowSet, RowSet],
    *,
    room: int,
    new_key: Callable[[], str],
) -> tuple[RowSet, RowSet]:
    """Choose how a record stores its two sets: inline while small, else as differences from shared bases.

    Args:
        bases: Where bases are read and put.
        sets: The live and the retired rows.
        previous: How the record before stored them: its bases are used again while the difference is small.
        room: Bytes of the record that are left for both.
        new_key: Names a new base.
    """
    if _fits_inline((*sets[0], *sets[1]), min(INLINE_BYTES, room)):
        return sets
    budget = min(DIFF_BYTES, room // 2 - REFERENCE_BYTES)

    def one(rows: tuple[Row, ...], before: RowSet) -> RowSet:
        if _fits_inline(rows, budget):
            return rows
        found = bases.difference(rows, before.base, budget) if isinstance(before, Based) else None
        return bases.introduce(new_key(), rows) if found is None else found

    return one(sets[0], previous[0]), one(sets[1], previous[1])


class BaseCache:
    """Bases of one store, read once. Thread-safe."""

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._held: dict[BaseRef, dict[int, Row]] = {}

    def rows(self, stored: RowSet) -> tuple[Row, ...]:
        """Return the rows of a stored set, ascending by seq; NotFoundError or CorruptionError if its base is gone."""
        if not isinstance(stored, Based):
            return stored
        found = dict(self._base(stored.base))
        for seq in stored.drop:
            found.pop(seq, None)
        found.update({row.seq: row for row in stored.add})
        return tuple(found[seq] for seq in sorted(found))

    def difference(self, rows: tuple[Row, ...], base: BaseRef, budget: int) -> Based | None:
        """Return *rows* as a difference from *base*, or None if that is lost or it would be too large."""
        try:
            held = self._base(base)
        except (CorruptionError, NotFoundError):
            return None
        add = tuple(row for row in rows if held.get(row.seq) is not row and held.get(row.seq) != row)
        kept = {row.seq for row in rows}
        drop = tuple(seq for seq in held if seq not in kept)
        if len(add) + len(drop) > DIFF_ROWS or _n_bytes(add) + 20 * len(drop) > budget:
            return None
        return Based(base=base, add=add, drop=drop)

    def introduce(self, key: str, rows: tuple[Row, ...]) -> Based:
        """Put *rows* as a new base under *key*, durable before this returns."""
        body = canonical({"format": FORMAT, "rows": [row_to_json(row) for row in rows]})
        self._store.put(key, body)
        base = BaseRef(key=key, size=len(body), sha256=sha256_hex(body))
        self._remember(base, rows)
        return Based(base=base, add=(), drop=())

    def _base(self, base: BaseRef) -> dict[int, Row]:
        with self._lock:
            held = self._held.get(base)
        if held is not None:
            return held
        body = self._store.get(base.key, max_bytes=min(base.size, MAX_BASE_BYTES))
        if len(body) != base.size or sha256_hex(body) != base.sha256:
            message = f"{base.key}: its bytes are not those that the journal names"
            raise CorruptionError(message, operation="get", key=base.key)
        rows = decode_rows(read_json(body, base.key).get("rows"), base.key)
        return self._remember(base, rows)

    def _remember(self, base: BaseRef, rows: tuple[Row, ...]) -> dict[int, Row]:
        found = {row.seq: row for row in rows}
        with self._lock:
            while len(self._held) >= _CACHED_BASES:
                self._held.pop(next(iter(self._held)))
            self._held[base] = found
        return found
