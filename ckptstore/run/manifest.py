"""What does a checkpoint consist of, and how is a stored manifest read without trusting it?

The manifest is written after all payload and never changed. It names every file with its size and the digest of each
part, every tensor with the range it occupies, and holds the nesting and all plain values as JSON. Its own bytes are
named by the commit record, so whoever holds a sound record can prove every byte below it.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import msgspec

from ckptstore.errors import ConfigError, CorruptionError, NotFoundError
from ckptstore.run.layout import MANIFEST_NAME, MIGRATED, attempt_epoch
from ckptstore.run.records import ManifestRef, refuse_newer
from ckptstore.run.strict_json import compact, convert, read_json, sha256_hex
from ckptstore.store import check_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptstore.run.layout import Layout
    from ckptstore.run.records import Row
    from ckptstore.store import CheckpointStore

__all__ = [
    "MAX_MANIFEST_BYTES",
    "FileEntry",
    "Manifest",
    "Piece",
    "TensorEntry",
    "decode_manifest",
    "encode_manifest",
    "find_missing",
    "read_manifest",
    "root_of",
]

FORMAT = "ckptstore.manifest"
VERSION = 1
MAX_MANIFEST_BYTES = 64 * 1024 * 1024
MAX_USER_BYTES = 1024 * 1024
SIDE_BYTES = 4 * 1024 * 1024
SIDE_OBJECTS = ("tensors", "tree")
MAX_FILES = 1 << 20


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One payload file: its path below the attempt, size in bytes, the rank that wrote it, and its digests.

    ``parts`` are the digests, in hexadecimal, of consecutive pieces of ``part_bytes`` from offset 0; ``digest`` is
    the sha256 over them.
    """

    path: str
    size: int
    rank: int
    part_bytes: int
    algorithm: str
    parts: tuple[str, ...]
    digest: str


class Piece(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where some of a tensor's bytes are: file number, absolute offset, length; offsets and sizes only if not all."""

    file: int
    start: int
    n_bytes: int
    offsets: tuple[int, ...] | None = None
    sizes: tuple[int, ...] | None = None


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor: dtype by torch's name, shape, and its pieces."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The list of everything in one checkpoint. ``tree`` and ``user`` are JSON values."""

    run_uid: str
    attempt: str
    step: int
    epoch: int | None
    world_size: int
    ranks: tuple[int, ...]
    files: tuple[FileEntry, ...]
    n_bytes: int
    root: str
    tensors: dict[str, TensorEntry]
    tree: dict[str, Any]
    user: dict[str, Any] | None = None
    env: dict[str, Any] = msgspec.field(default_factory=dict)
    timings: dict[str, Any] = msgspec.field(default_factory=dict)
    origin: dict[str, Any] | None = None
    side: dict[str, int] = msgspec.field(default_factory=dict)


def root_of(files: Sequence[FileEntry]) -> str:
    """Return the one digest that stands for all payload: over the sorted (path, size, digest) list."""
    lines = sorted(f"{file.path}\0{file.size}\0{file.digest}\n" for file in files)
    return "sha256:" + hashlib.sha256("".join(lines).encode()).hexdigest()


def encode_manifest(manifest: Manifest, put_side: Callable[[str, bytes], FileEntry]) -> tuple[bytes, int]:
    """Return MANIFEST.json and the bytes of payload; large parts go through *put_side* into files of their own first.

    Args:
        manifest: ``files``, ``n_bytes``, ``root`` and ``side`` are completed here.
        put_side: Stores a side object under a name, durably, and returns its entry.

    Raises:
        ConfigError: the user's metadata or the whole would pass its bound, or could not be read back.
    """
    _check_free(manifest)
    fields: dict[str, Any] = msgspec.to_builtins(manifest)
    files = list(manifest.files)
    side: dict[str, int] = {}
    for name in SIDE_OBJECTS:
        body = compact(fields[name])
        if len(body) > MAX_MANIFEST_BYTES:
            message = f"step {manifest.step}: its {name} would take {len(body)} bytes, over {MAX_MANIFEST_BYTES}"
            raise ConfigError(message)
        if len(body) > SIDE_BYTES:
            side[name] = len(files)
            files.append(put_side(f"{name}.json", body))
            fields[name] = {}
    fields |= {
        "format": FORMAT,
        "version": VERSION,
        "requires": [],
        "files": msgspec.to_builtins(files),
        "n_bytes": sum(file.size for file in files),
        "root": root_of(files),
        "side": side,
    }
    body = compact(fields)
    if len(body) > MAX_MANIFEST_BYTES:
        message = f"step {manifest.step}: the manifest would take {len(body)} bytes, over {MAX_MANIFEST_BYTES}"
        raise ConfigError(message)
    return body, fields["n_bytes"]


def decode_manifest(body: bytes, what: str, read_side: Callable[[FileEntry], bytes]) -> Manifest:
    """Read MANIFEST.json strictly.

    Args:
        body: Its bytes.
        what: Its key, for messages.
        read_side: Returns the bytes of a side object, verified.

    Raises:
        CorruptionError: it is not a sound manifest, or points outside its attempt.
        UnsupportedError: a newer version wrote it.
    """
    fields = read_json(body, what)
    refuse_newer(fields, FORMAT, VERSION, what)
    manifest = convert(fields, Manifest, what)
    _check_files(manifest, what)  # before any of the paths is followed
    found: dict[str, Any] = {}
    for name, index in manifest.side.items():
        if name not in SIDE_OBJECTS or not 0 <= index < len(manifest.files):
            message = f"{what}: its side object {name[:40]!r} is impossible"
            raise CorruptionError(message, key=what)
        file = manifest.files[index]
        if file.size > MAX_MANIFEST_BYTES:
            message = f"{what}: its side object {file.path[:200]} takes {file.size} bytes, over {MAX_MANIFEST_BYTES}"
            raise CorruptionError(message, key=what)
        found[name] = read_json(read_side(file), f"{what} ({file.path})")
    if found:
        manifest = convert({**fields, **found}, Manifest, what)
    _check_tensors(manifest, what)
    return manifest


def read_manifest(
    store: CheckpointStore, layout: Layout, row: Row, read_side: Callable[[str, FileEntry], bytes]
) -> Manifest:
    """Return the manifest that *row* names, proven byte for byte.

    Raises:
        CorruptionError: it is absent, its bytes differ, or it belongs to another checkpoint.
    """
    key = layout.manifest(row.attempt)
    try:
        body = store.get(key, max_bytes=min(row.manifest.size, MAX_MANIFEST_BYTES))
    except NotFoundError as error:
        message = f"{key} is missing, though step {row.step} was committed"
        raise CorruptionError(message, operation="get", key=key) from error
    if len(body) != row.manifest.size or sha256_hex(body) != row.manifest.sha256:
        message = f"{key} is damaged: its bytes are not those that the commit of step {row.step} names"
        raise CorruptionError(message, operation="get", key=key)
    prefix = layout.attempt(row.attempt)
    manifest = decode_manifest(body, key, lambda file: read_side(prefix + file.path, file))
    epoch = None if attempt_epoch(row.attempt) == MIGRATED else row.epoch
    if (manifest.run_uid, manifest.attempt, manifest.step, manifest.epoch) != (
        layout.run_uid,
        row.attempt,
        row.step,
        epoch,
    ):
        message = f"{key} belongs to step {manifest.step} of run {manifest.run_uid[:40]}: it is a misplaced copy"
        raise CorruptionError(message, key=key)
    return manifest


def manifest_ref(body: bytes) -> ManifestRef:
    """Return what a commit names of a manifest."""
    return ManifestRef(size=len(body), sha256=sha256_hex(body))


def find_missing(store: CheckpointStore, prefix: str, manifest: Manifest) -> CorruptionError | None:
    """Return what is wrong with the presence and sizes of the files, or None. Reads no payload."""
    for file in manifest.files:
        key = prefix + file.path
        try:
            found = store.stat(key).n_bytes
        except NotFoundError:
            message = f"{key} is missing (step {manifest.step})"
            return CorruptionError(message, operation="stat", key=key)
        if found != file.size:
            message = (
                f"{key} has {found} bytes instead of {file.size} (step {manifest.step}): it is truncated or foreign"
            )
            return CorruptionError(message, operation="stat", key=key)
    return None


def _check_free(manifest: Manifest) -> None:
    """Refuse what a caller handed in and a reader would refuse: it must not be found out when it is needed."""
    try:
        n_bytes = len(compact(manifest.user))
        body = compact({name: getattr(manifest, name) for name in ("tree", "user", "env", "timings", "origin")})
        read_json(body, f"step {manifest.step}: its tree or metadata")
    except (CorruptionError, TypeError, ValueError, RecursionError) as error:
        message = f"step {manifest.step} can't be written as JSON that can be read back: {error}"
        raise ConfigError(message) from error
    if n_bytes > MAX_USER_BYTES:
        message = f"step {manifest.step}: metadata takes more than {MAX_USER_BYTES} bytes as JSON"
        raise ConfigError(message)


def _check_files(manifest: Manifest, what: str) -> None:
    if len(manifest.files) > MAX_FILES or root_of(manifest.files) != manifest.root:
        message = f"{what}: its list of files does not match its root digest"
        raise CorruptionError(message, key=what)
    seen = set()
    for file in manifest.files:
        try:
            check_key(file.path)
        except ConfigError as error:
            message = f"{what}: the file path {file.path[:200]!r} is refused: {error}"
            raise CorruptionError(message, key=what) from error
        n_parts = -(-file.size // file.part_bytes) if file.size >= 0 and file.part_bytes > 0 else -1
        if (
            len(file.parts) != n_parts
            or file.path in seen
            or file.path == MANIFEST_NAME
            or file.digest != _digest_of(file.parts)
            or not 0 <= file.rank < manifest.world_size
        ):
            message = f"{what}: the entry of {file.path[:200]} contradicts itself"
            raise CorruptionError(message, key=what)
        seen.add(file.path)
    all_ranks = len(manifest.ranks) == manifest.world_size and set(manifest.ranks) == set(range(len(manifest.ranks)))
    if manifest.n_bytes != sum(file.size for file in manifest.files) or not all_ranks:
        message = f"{what}: its totals are not those of its files and ranks"
        raise CorruptionError(message, key=what)


def _digest_of(parts: tuple[str, ...]) -> str | None:
    """Return the digest over part digests; None if one is not canonical hexadecimal."""
    digest = hashlib.sha256()
    for part in parts:
        try:
            raw = bytes.fromhex(part)
        except ValueError:
            return None
        if raw.hex() != part:
            return None
        digest.update(raw)
    return "sha256:" + digest.hexdigest()


def _check_tensors(manifest: Manifest, what: str) -> None:
    sizes = [file.size for file in manifest.files]
    for name, entry in manifest.tensors.items():
        for piece in entry.pieces:
            inside = 0 <= piece.file < len(sizes) and piece.start >= 0 and piece.n_bytes >= 0
            if not inside or piece.start + piece.n_bytes > sizes[piece.file] or any(size < 0 for size in entry.shape):
                message = f"{what}: tensor {name[:200]} lies outside its file"
                raise CorruptionError(message, key=what)
            if not _fits(piece, entry.shape):
                message = f"{what}: a piece of tensor {name[:200]} lies outside its shape"
                raise CorruptionError(message, key=what)


def _fits(piece: Piece, shape: tuple[int, ...]) -> bool:
    if piece.offsets is None or piece.sizes is None:
        return piece.offsets is piece.sizes
    if not len(piece.offsets) == len(piece.sizes) == len(shape):
        return False
    ranges = zip(piece.offsets, piece.sizes, shape, strict=True)
    return all(offset >= 0 and size >= 0 and offset + size <= extent for offset, size, extent in ranges)
