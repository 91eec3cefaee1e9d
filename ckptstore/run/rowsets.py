"""How does a record hold ten thousand rows in 64 KiB?

As a small difference from a base: an immutable object under ``index/`` that many records share. A record that would
need a large difference introduces a new base, put before the record is published, so no record ever names a base that
was not durable.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ckptstore.errors import CorruptionError
from ckptstore.run.records import Based, BaseRef, Row, decode_rows, row_to_json
from ckptstore.run.strict_json import canonical, read_json, sha256_hex

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptstore.run.records import RowSet
    from ckptstore.store import CheckpointStore

__all__ = ["DIFF_BYTES", "BaseCache", "fits_inline"]

INLINE_ROWS = 64
INLINE_BYTES = 48 * 1024 - 8 * 1024  # the rest of a record stays below 8 KiB but for a retire, whose set shrinks
DIFF_ROWS = 64
DIFF_BYTES = 20 * 1024
MAX_BASE_BYTES = 64 * 1024 * 1024
_CACHED_BASES = 4
FORMAT = "ckptstore.index"


def _n_bytes(rows: Iterable[Row]) -> int:
    return sum(len(canonical(row_to_json(row))) + 1 for row in rows)


def fits_inline(live: tuple[Row, ...], retired: tuple[Row, ...], *, budget: int = INLINE_BYTES) -> bool:
    """Tell whether both sets may stand in the record itself."""
    return len(live) + len(retired) <= INLINE_ROWS and _n_bytes((*live, *retired)) <= budget


class BaseCache:
    """Bases of one store, read once. Thread-safe."""

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._held: dict[str, dict[int, Row]] = {}

    def rows(self, stored: RowSet) -> tuple[Row, ...]:
        """Return the rows of a stored set, ascending by seq; NotFoundError or CorruptionError if its base is gone."""
        if not isinstance(stored, Based):
            return stored
        found = dict(self._base(stored.base))
        for seq in stored.drop:
            found.pop(seq, None)
        found.update({row.seq: row for row in stored.add})
        return tuple(found[seq] for seq in sorted(found))

    def difference(self, rows: tuple[Row, ...], base: BaseRef | None) -> Based | None:
        """Return *rows* as a difference from *base*, or None if there is no base or it would be too large."""
        if base is None:
            return None
        held = self._base(base)
        add = tuple(row for row in rows if held.get(row.seq) is not row and held.get(row.seq) != row)
        kept = {row.seq for row in rows}
        drop = tuple(seq for seq in held if seq not in kept)
        if len(add) + len(drop) > DIFF_ROWS or _n_bytes(add) + 20 * len(drop) > DIFF_BYTES:
            return None
        return Based(base=base, add=add, drop=drop)

    def introduce(self, key: str, rows: tuple[Row, ...]) -> Based:
        """Put *rows* as a new base under *key*, durable before this returns."""
        body = canonical({"format": FORMAT, "rows": [row_to_json(row) for row in rows]})
        self._store.put(key, body)
        base = BaseRef(key=key, size=len(body), sha256=sha256_hex(body))
        self._remember(key, rows)
        return Based(base=base, add=(), drop=())

    def _base(self, base: BaseRef) -> dict[int, Row]:
        with self._lock:
            held = self._held.get(base.key)
        if held is not None:
            return held
        body = self._store.get(base.key, max_bytes=min(base.size, MAX_BASE_BYTES))
        if len(body) != base.size or sha256_hex(body) != base.sha256:
            message = f"{base.key}: its bytes are not those that the journal names"
            raise CorruptionError(message, operation="get", key=base.key)
        rows = decode_rows(read_json(body, base.key).get("rows"), base.key)
        return self._remember(base.key, rows)

    def _remember(self, key: str, rows: tuple[Row, ...]) -> dict[int, Row]:
        found = {row.seq: row for row in rows}
        with self._lock:
            while len(self._held) >= _CACHED_BASES:
                self._held.pop(next(iter(self._held)))
            self._held[key] = found
        return found
