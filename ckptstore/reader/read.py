"""How do the bytes of many tensors get from a few files into their final memory, proven on the way?

Part by part, from several threads: a part is the unit of digest, so it is read whole, checked, and its pieces handed
out. A part that lies inside one tensor is read straight into that tensor; only parts shared by several go through a
small reused buffer.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from typing import TYPE_CHECKING

from ckptstore.errors import CorruptionError, NotFoundError
from ckptstore.reader.parts import PartReader
from ckptstore.reader.verify import THREADS, digest_parts, name_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ckptstore.errors import CkptStoreError
    from ckptstore.reader.parts import Slices
    from ckptstore.run.manifest import FileEntry, Manifest
    from ckptstore.store import CheckpointStore

__all__ = ["PartPlan", "check_tensors"]


class PartPlan:
    """Which parts hold the wanted tensors, and where each piece of them goes.

    Args:
        store: Where the files are.
        prefix: The attempt's.
        manifest: The checkpoint's, proven.
        targets: For each wanted tensor the memory for its bytes, in full. No two may overlap.
    """

    def __init__(
        self, store: CheckpointStore, prefix: str, manifest: Manifest, targets: Mapping[str, memoryview]
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._manifest = manifest
        self._parts: dict[tuple[int, int], Slices] = {}
        for name, memory in targets.items():
            filled = 0
            for piece in manifest.tensors[name].pieces:
                self._add(piece.file, piece.start, memory[filled : filled + piece.n_bytes])
                filled += piece.n_bytes

    def _add(self, number: int, start: int, memory: memoryview) -> None:
        part_bytes = self._manifest.files[number].part_bytes
        done = 0
        while done < len(memory):
            index, within = divmod(start + done, part_bytes)
            length = min(part_bytes - within, len(memory) - done)
            self._parts.setdefault((number, index), []).append((within, memory[done : done + length]))
            done += length

    def read(self, *, verify: bool) -> None:
        """Fill every target. With *verify* each part is proven after it was read; CorruptionError on the first wrong.

        After an error the targets' content is undefined.
        """
        reader, files = PartReader(self._store, self._prefix), self._manifest.files

        def one(place: tuple[int, int], slices: Slices) -> None:
            file, index = files[place[0]], place[1]
            try:
                reader.read(file, index, sorted(slices, key=itemgetter(0)), verify=verify)
            except (CorruptionError, NotFoundError) as error:
                raise damage(error, self._manifest, file, index) from error

        with ThreadPoolExecutor(THREADS, thread_name_prefix="ckptstore-read") as pool:
            for _ in pool.map(one, self._parts.keys(), self._parts.values()):
                pass


def check_tensors(store: CheckpointStore, prefix: str, manifest: Manifest, names: Iterable[str]) -> None:
    """Prove every part that holds bytes of these tensors, touching no target; CorruptionError names the first wrong."""
    problems: list[CorruptionError] = []

    def found(error: CkptStoreError, file: FileEntry, index: int) -> None:
        problems.append(damage(error, manifest, file, index))

    files = manifest.files
    parts = {
        (piece.file, index)
        for name in names
        for piece in manifest.tensors[name].pieces
        if piece.n_bytes
        for index in range(
            piece.start // files[piece.file].part_bytes,
            (piece.start + piece.n_bytes - 1) // files[piece.file].part_bytes + 1,
        )
    }
    digest_parts(PartReader(store, prefix), [(files[number], index) for number, index in sorted(parts)], found)
    if problems:
        raise problems[0]


def damage(error: CkptStoreError, manifest: Manifest, file: FileEntry, index: int) -> CorruptionError:
    """Return the error for a part that is wrong, naming file and tensors."""
    return CorruptionError(name_tensors(error, manifest, file, index), operation=error.operation, key=error.key)
