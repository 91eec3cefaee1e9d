"""Are the stored bytes of a checkpoint those that were written?

Files are digested part by part from several threads into a few reused buffers, so checking a checkpoint of any size
takes the memory of a few parts. Needs no torch.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptstore.errors import CkptStoreError, CorruptionError, NotFoundError
from ckptstore.reader.parts import PartReader
from ckptstore.run.manifest import find_missing, read_manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ckptstore.run.layout import Layout
    from ckptstore.run.manifest import FileEntry, Manifest
    from ckptstore.run.records import Row
    from ckptstore.store import CheckpointStore

__all__ = [
    "Problem",
    "VerifyReport",
    "digest_parts",
    "name_tensors",
    "open_manifest",
    "read_side",
    "verify_checkpoint",
]

THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong: in which object, and what."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What a verification of one checkpoint found.

    Attributes:
        step: The checkpoint's step.
        seq: The checkpoint's number.
        deep: Whether digests were computed, or only presence and sizes looked at.
        n_bytes: Bytes that were digested.
        problems: Empty if everything is as it was written.
    """

    step: int
    seq: int
    deep: bool
    n_bytes: int
    problems: tuple[Problem, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def read_side(store: CheckpointStore, key: str, file: FileEntry) -> bytes:
    """Return a whole small file, every part proven."""
    body = bytearray(file.size)
    reader = PartReader(store, key.removesuffix(file.path))
    try:
        for index in range(len(file.parts)):
            start = index * file.part_bytes
            reader.read(file, index, [(0, memoryview(body)[start : start + file.part_bytes])], verify=True)
    except NotFoundError as error:
        message = f"{key} is missing"
        raise CorruptionError(message, operation="read_into", key=key) from error
    return bytes(body)


def open_manifest(store: CheckpointStore, layout: Layout, row: Row) -> Manifest:
    """Return the proven manifest of *row*, after seeing that every file is there with its size."""
    manifest = read_manifest(store, layout, row, lambda key, file: read_side(store, key, file))
    missing = find_missing(store, layout.attempt(row.attempt), manifest)
    if missing is not None:
        raise missing
    return manifest


def digest_parts(
    reader: PartReader,
    parts: Iterable[tuple[FileEntry, int]],
    on_problem: Callable[[CkptStoreError, FileEntry, int], None],
) -> int:
    """Read and digest parts of files; report each that is wrong, with its file and part number.

    Returns:
        The number of bytes that were right.

    Raises:
        UnavailableError: the store did not answer; nothing is proven.
    """

    def one(part: tuple[FileEntry, int]) -> int:
        file, index = part
        try:
            return reader.read(file, index, (), verify=True)
        except (CorruptionError, NotFoundError) as error:
            on_problem(error, file, index)
            return 0

    with ThreadPoolExecutor(THREADS, thread_name_prefix="ckptstore-verify") as pool:
        return sum(pool.map(one, parts))


def verify_checkpoint(store: CheckpointStore, layout: Layout, row: Row, *, deep: bool) -> VerifyReport:
    """Check one checkpoint from its row down: manifest, presence, sizes, and with *deep* every byte."""
    problems: list[Problem] = []
    n_bytes = 0
    try:
        manifest = open_manifest(store, layout, row)
    except CorruptionError as error:
        return VerifyReport(
            step=row.step, seq=row.seq, deep=deep, n_bytes=0, problems=(Problem(key=error.key, reason=str(error)),)
        )
    if deep:

        def found(error: CkptStoreError, file: FileEntry, index: int) -> None:
            problems.append(Problem(key=error.key, reason=name_tensors(error, manifest, file, index)))

        parts = [(file, index) for file in manifest.files for index in range(len(file.parts))]
        n_bytes = digest_parts(PartReader(store, layout.attempt(row.attempt)), parts, found)
    return VerifyReport(step=row.step, seq=row.seq, deep=deep, n_bytes=n_bytes, problems=tuple(problems))


def name_tensors(error: CkptStoreError, manifest: Manifest, file: FileEntry, index: int, *, most: int = 5) -> str:
    """Return the message of *error* and which tensors lie in that part, at most a few."""
    number = manifest.files.index(file)
    start, end = index * file.part_bytes, (index + 1) * file.part_bytes
    names = [
        name
        for name, entry in manifest.tensors.items()
        for piece in entry.pieces
        if piece.file == number and piece.start < end and piece.start + piece.n_bytes > start
    ]
    if not names:
        return str(error)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{error}; tensors there: {', '.join(names[:most])}{more}"
