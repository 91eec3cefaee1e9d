"""How is one part read and proven in a single pass over memory?

In pieces that fit a processor's cache: each is read, digested while it is still there, and either stands in its final
place already or is handed out from a small reused buffer. So proving bytes costs hardly more than reading them.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ckptstore.errors import CorruptionError
from ckptstore.state.digest import new_digest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptstore.run.manifest import FileEntry
    from ckptstore.store import CheckpointStore

__all__ = ["PartReader", "Slices"]

Slices = list[tuple[int, memoryview]]
"""Where bytes of a part go: offset in the part, and memory for the bytes from there on; ascending, not overlapping."""

PIECE_BYTES = 4 << 20
STRAIGHT_BYTES = 64 << 10


class PartReader:
    """Reads parts of the files of one attempt. Any thread, many at once; each thread keeps one small buffer."""

    def __init__(self, store: CheckpointStore, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._local = store.capabilities().local
        self._held = threading.local()

    def key(self, file: FileEntry) -> str:
        """Return a file's key."""
        return self._prefix + file.path

    def read(self, file: FileEntry, index: int, slices: Sequence[tuple[int, memoryview]], *, verify: bool) -> int:
        """Fill *slices* from part *index* of *file*, and with *verify* prove the whole part.

        Returns:
            The part's length.

        Raises:
            CorruptionError: the bytes are not those that were written; the slices' content is undefined.
        """
        key, start = self._prefix + file.path, index * file.part_bytes
        n_bytes = min(file.part_bytes, file.size - start)
        digest = new_digest(file.algorithm)
        # Far away each piece would be a request of its own; there the part is the unit.
        most = PIECE_BYTES if self._local else n_bytes
        for low, high, straight, within in _pieces(n_bytes, slices, most):
            if straight is None and not within and not verify:
                continue
            memory = self._scratch(high - low) if straight is None else straight
            self._store.read_into(key, start + low, memory)
            if verify:
                digest.update(memory)
            for offset, target in within:
                target[:] = memory[offset - low : offset - low + len(target)]
        if verify and digest.digest().hex() != file.parts[index]:
            message = f"{key} is damaged: bytes {start} to {start + n_bytes} are not those that were written"
            raise CorruptionError(message, operation="read_into", key=key)
        return n_bytes

    def _scratch(self, wanted: int) -> memoryview:
        held: memoryview | None = getattr(self._held, "memory", None)
        if held is None or len(held) < wanted:
            held = self._held.memory = memoryview(bytearray(wanted))
        return held[:wanted]


def _pieces(
    n_bytes: int, slices: Sequence[tuple[int, memoryview]], most: int
) -> Iterator[tuple[int, int, memoryview | None, Slices]]:
    """Cut a part into pieces of at most *most* bytes, in order.

    Yields:
        Where it begins and ends in the part; its final memory, if it lies within one large slice; else the slices, or
        parts of slices, that lie in it.
    """
    waiting = [item for item in reversed(slices) if len(item[1])]
    low = 0
    while low < n_bytes:
        if waiting and waiting[-1][0] == low and len(waiting[-1][1]) >= min(STRAIGHT_BYTES, n_bytes):
            offset, target = waiting.pop()
            high = low + min(most, len(target))
            if high - low < len(target):
                waiting.append((high, target[high - low :]))
            yield low, high, target[: high - low], []
        else:
            high = min(low + most, n_bytes)
            within: Slices = []
            while waiting and waiting[-1][0] < high:
                offset, target = waiting.pop()
                if offset > low and len(target) >= STRAIGHT_BYTES:
                    waiting.append((offset, target))  # read straight into its place, next
                    high = offset
                    break
                fits = target[: high - offset]
                within.append((offset, fits))
                if len(fits) < len(target):
                    waiting.append((high, target[len(fits) :]))
            yield low, high, None, within
        low = high
