"""A manifest names exactly the bytes of one checkpoint, inside its own folder, or it is refused."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from ckptstore.errors import ConfigError, CorruptionError, UnsupportedError
from ckptstore.run import manifest as module
from ckptstore.run.layout import Layout
from ckptstore.run.manifest import (
    FileEntry,
    Manifest,
    Piece,
    TensorEntry,
    decode_manifest,
    encode_manifest,
    find_missing,
    manifest_ref,
    read_manifest,
    root_of,
)
from ckptstore.run.strict_json import compact
from tests.unit.run.world import manifest_of, new_row, new_store, numbered

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptstore.run.records import Row
    from ckptstore.store import CheckpointStore

UID = "0123456789abcdef" * 2
LAYOUT = Layout(UID)


def file_of(path: str = "data.bin", size: int = 1000, part_bytes: int = 400, **fields: Any) -> FileEntry:
    parts = [hashlib.sha256(f"{path}{n}".encode()).digest() for n in range(-(-size // part_bytes))]
    base: dict[str, Any] = {
        "path": path,
        "size": size,
        "rank": 0,
        "part_bytes": part_bytes,
        "algorithm": "sha256",
        "parts": tuple(part.hex() for part in parts),
        "digest": "sha256:" + hashlib.sha256(b"".join(parts)).hexdigest(),
    }
    return FileEntry(**{**base, **fields})


TENSOR = TensorEntry(
    dtype="float32",
    shape=(10, 10),
    pieces=(
        Piece(file=0, start=0, n_bytes=200, offsets=(0, 0), sizes=(5, 10)),
        Piece(file=0, start=800, n_bytes=200, offsets=(5, 0), sizes=(5, 10)),
    ),
)


def some(**fields: Any) -> Manifest:
    files = fields.pop("files", (file_of(), file_of("empty.bin", 0)))
    base: dict[str, Any] = {
        "tensors": {"w": TENSOR},
        "tree": {"b": 1, "a": [None, "x"]},
        "user": {"lr": 0.1},
        "env": {"torch": "2"},
    }
    epoch = fields.pop("epoch", 4)
    return manifest_of(UID, "000000000005-e4-aaaaaaaaaaaa", 5, epoch, files, **{**base, **fields})


def no_side(*_: object) -> Any:
    raise AssertionError


def encode(manifest: Manifest) -> bytes:
    return encode_manifest(manifest, no_side)[0]


def decode(body: bytes, read_side: Callable[[FileEntry], bytes] = no_side) -> Manifest:
    return decode_manifest(body, "the manifest", read_side)


def edited(edit: Callable[[dict[str, Any]], object], **fields: Any) -> bytes:
    found = json.loads(encode(some(**fields)))
    edit(found)
    found["root"] = root_of(msgspec.convert(found["files"], list[FileEntry])) if found["root"] else ""
    return compact(found)


def test_a_manifest_is_read_as_it_was_written_in_the_order_it_was_written() -> None:
    found = decode(encode(some()))
    assert found == some()
    assert list(found.tree) == ["b", "a"]


def test_a_newer_manifest_is_refused_as_newer() -> None:
    for edit in (lambda f: f.update(version=2), lambda f: f.update(requires=["zstd"])):
        with pytest.raises(UnsupportedError, match="upgrade"):
            decode(edited(edit))


def test_fields_of_a_later_version_are_no_obstacle() -> None:
    assert decode(edited(lambda f: (f.update(colour=1), f["files"][0].update(colour=1)))) == some()


@pytest.mark.parametrize(
    "path",
    ["../x", "/etc/passwd", "a/../../x", ".hidden", "a//b", "", "a b", "a\n", "a" * 300, "MANIFEST.json", "\\x", "a/."],
)
def test_a_path_that_leaves_the_folder_is_refused(path: str) -> None:
    with pytest.raises(CorruptionError):
        decode(edited(lambda f: f["files"][0].update(path=path)))


@pytest.mark.parametrize("path", ["../x", "/etc/passwd"])
def test_a_path_that_leaves_the_folder_is_refused_before_it_is_followed(path: str) -> None:
    with pytest.raises(CorruptionError, match="is refused"):
        decode(edited(lambda f: (f["files"][0].update(path=path), f.update(side={"tree": 0}))))


@pytest.mark.parametrize(
    "edit",
    numbered(
        lambda f: f["files"][0].update(size=1201),
        lambda f: f["files"][0].update(size=800),
        lambda f: f["files"][0].update(size=-1),
        lambda f: f["files"][0].update(part_bytes=0),
        lambda f: f["files"][0].update(part_bytes=-400),
        lambda f: f["files"][0].update(parts=f["files"][0]["parts"][:2]),
        lambda f: f["files"][0].update(parts=[f["files"][0]["parts"][0]] * 3),
        lambda f: f["files"][0].update(parts=["zz", *f["files"][0]["parts"][1:]]),
        lambda f: f["files"][0].update(parts=[f["files"][0]["parts"][0].upper(), *f["files"][0]["parts"][1:]]),
        lambda f: f["files"][0].update(digest="sha256:" + "0" * 64),
        lambda f: f["files"][0].update(rank=1),
        lambda f: f["files"][0].update(rank=-1),
        lambda f: f["files"].append(f["files"][0]),
        lambda f: f["files"].pop(0),
        lambda f: f.update(n_bytes=999),
        lambda f: f.update(root=""),
        lambda f: f.update(ranks=[]),
        lambda f: f.update(ranks=[0, 1]),
        lambda f: f.update(ranks=[1]),
        lambda f: f.update(world_size=2, ranks=[0, 0]),
        lambda f: f.update(world_size=1 << 50),
        lambda f: f.update(side={"tree": 2}),
        lambda f: f.update(side={"tree": -1}),
        lambda f: f.update(side={"files": 0}),
        lambda f: f.update(format="ckptstore.record"),
        lambda f: f.update(step="5"),
        lambda f: f.update(tree=[]),
        lambda f: f.pop("tensors"),
        lambda f: f["tensors"]["w"]["pieces"][0].update(file=2),
        lambda f: f["tensors"]["w"]["pieces"][0].update(file=-1),
        lambda f: f["tensors"]["w"]["pieces"][0].update(start=801),
        lambda f: f["tensors"]["w"]["pieces"][0].update(start=-1),
        lambda f: f["tensors"]["w"]["pieces"][0].update(n_bytes=1001),
        lambda f: f["tensors"]["w"]["pieces"][0].update(n_bytes=-1),
        lambda f: f["tensors"]["w"].update(shape=[-10, -10]),
        lambda f: f["tensors"]["w"]["pieces"][0].update(offsets=[0]),
        lambda f: f["tensors"]["w"]["pieces"][0].update(offsets=[6, 0]),
        lambda f: f["tensors"]["w"]["pieces"][0].update(offsets=[-1, 0]),
        lambda f: f["tensors"]["w"]["pieces"][0].update(sizes=[-1, 0]),
        lambda f: f["tensors"]["w"]["pieces"][0].pop("sizes"),
    ),
)
def test_a_manifest_that_contradicts_itself_is_refused(edit: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(CorruptionError, match="the manifest"):
        decode(edited(edit))


@pytest.mark.parametrize("name", ["tensors", "tree"])
def test_a_large_part_goes_into_an_object_of_its_own_and_comes_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SIDE_BYTES", 30 if name == "tree" else 130)
    written = some(tree={"a": "x" * 40} if name == "tree" else {})
    sides: dict[str, bytes] = {}

    def put_side(path: str, body: bytes) -> FileEntry:
        sides[path] = body
        return file_of(path, len(body))

    body, n_bytes = encode_manifest(written, put_side)
    assert list(sides)[-1] == f"{name}.json"
    assert b"xxxx" not in body
    found = decode(body, lambda file: sides[file.path])
    assert (found.tree, found.tensors) == (written.tree, written.tensors)
    assert n_bytes == found.n_bytes == sum(file.size for file in found.files)
    with pytest.raises(CorruptionError, match="not valid"):
        decode(body, lambda file: b'{"a":1,"a":2}')


def test_a_side_object_above_the_bound_is_neither_written_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    huge = file_of("tree.json", (64 << 20) + 1, 1 << 26)
    with pytest.raises(CorruptionError, match="over 67108864"):
        decode(edited(lambda f: f.update(side={"tree": 0}), files=(huge,), tensors={}))
    monkeypatch.setattr(module, "MAX_MANIFEST_BYTES", 1000)
    with pytest.raises(ConfigError, match="tree would take"):
        encode(some(tree={"a": "x" * 1000}))


def test_a_manifest_above_the_bound_is_neither_written_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    store = new_store()
    row = committed(store, some())
    size = row.manifest.size
    monkeypatch.setattr(module, "MAX_MANIFEST_BYTES", size - 1)
    with pytest.raises(ConfigError, match="over"):
        encode(some())
    with pytest.raises(CorruptionError):
        read(store, row)
    monkeypatch.setattr(module, "MAX_MANIFEST_BYTES", size)
    assert read(store, row) == some()


@pytest.mark.parametrize(
    "fields",
    numbered(
        {"user": {"x": float("nan")}},
        {"user": {"x": 1 << 60}},
        {"user": {"x": {1: "a", "1": "b"}}},
        {"user": {"x": object()}},
        {"user": {"x": "y" * (1 << 20)}},
        {"tree": {"x": 1 << 60}},
        {"tree": {"x": float("inf")}},
        {"env": {"x": float("-inf")}},
        {"origin": {"x": 1 << 60}},
    ),
)
def test_what_a_reader_would_refuse_is_refused_when_it_is_saved(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="step 5"):
        encode(some(**fields))


def test_values_as_deep_as_a_reader_takes_are_saved_and_deeper_ones_refused() -> None:
    def nested(levels: int) -> dict[str, Any]:
        value: dict[str, Any] = {}
        for _ in range(levels - 1):
            value = {"a": value}
        return value

    assert decode(encode(some(tree=nested(63)))).tree == nested(63)
    with pytest.raises(ConfigError, match="nested deeper"):
        encode(some(tree=nested(64)))


# ── on a store ───────────────────────────────────────────────────────────────────────────────────────────────────────


def committed(store: CheckpointStore, manifest: Manifest, **row: Any) -> Row:
    body = encode(manifest)
    store.put(LAYOUT.manifest(manifest.attempt), body)
    base = new_row(6, 4, 5, None)
    fields: dict[str, Any] = {"attempt": manifest.attempt, "manifest": manifest_ref(body), **row}
    return msgspec.structs.replace(base, **fields)


def read(store: CheckpointStore, row: Row) -> Manifest:
    return read_manifest(store, LAYOUT, row, no_side)


def test_every_flipped_bit_and_cut_of_a_manifest_and_its_absence_are_detected() -> None:
    store = new_store()
    row = committed(store, some())
    assert read(store, row) == some()
    key = LAYOUT.manifest(row.attempt)
    body = store.get(key, max_bytes=1 << 20)
    for bit in range(0, len(body) * 8, 7):
        flipped = bytearray(body)
        flipped[bit // 8] ^= 1 << bit % 8
        store.put(key, bytes(flipped))
        with pytest.raises(CorruptionError):
            read(store, row)
    for cut in (body[:-1], body + b" ", b""):
        store.put(key, cut)
        with pytest.raises(CorruptionError):
            read(store, row)
    store.delete([key])
    with pytest.raises(CorruptionError, match="missing, though step 5 was committed"):
        read(store, row)


@pytest.mark.parametrize(
    "fields, row",
    [
        ({}, {"step": 6}),
        ({}, {"epoch": 3}),
        ({"epoch": None}, {}),  # only a migrated attempt may leave it out
        ({"run_uid": "f" * 32}, {}),
        ({"attempt": "000000000005-m-aaaaaaaaaaaa"}, {}),
    ],
)
def test_a_manifest_of_another_checkpoint_is_a_misplaced_copy(fields: dict[str, Any], row: dict[str, Any]) -> None:
    store = new_store()
    manifest = msgspec.structs.replace(some(), **fields)
    with pytest.raises(CorruptionError, match="misplaced copy"):
        read(store, committed(store, manifest, **row))


def test_a_migrated_manifest_has_no_epoch() -> None:
    store = new_store()
    manifest = msgspec.structs.replace(some(), attempt="000000000005-m-aaaaaaaaaaaa", epoch=None)
    assert read(store, committed(store, manifest)).epoch is None


def test_missing_and_resized_files_are_named_without_reading_them() -> None:
    store = new_store()
    manifest = some(files=(file_of(),))
    assert "data/x/data.bin is missing" in str(find_missing(store, "data/x/", manifest))
    store.put("data/x/data.bin", b"x" * 999)
    assert "999 bytes instead of 1000" in str(find_missing(store, "data/x/", manifest))
    store.put("data/x/data.bin", b"x" * 1000)
    assert find_missing(store, "data/x/", manifest) is None
