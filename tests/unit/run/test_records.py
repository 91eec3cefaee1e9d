"""A record is what its writer wrote, at the place where it was written, or it is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import ConfigError, CorruptionError, UnsupportedError
from ckptstore.run import changes
from ckptstore.run.records import (
    Based,
    BaseRef,
    Prev,
    Record,
    check_row,
    decode_record,
    encode_record,
    row_from_json,
    row_to_json,
)
from ckptstore.run.strict_json import canonical, sign
from ckptstore.store import MAX_RECORD_BYTES, write_id_of
from tests.unit.run.world import claim_change, new_row, numbered

if TYPE_CHECKING:
    from collections.abc import Callable

UID = "0123456789abcdef" * 2
KEY = "journal/01234567/0000000007.json"
ROW = new_row(3, 2, 100, None, metrics={"loss": 0.5, "n": 7, "bad": "nan"}, tags=("good",), extra={"new": [1]})


def record(**fields: Any) -> Record:
    base: dict[str, Any] = {
        "run_uid": UID,
        "seq": 7,
        "write_id": "w7",
        "prev": Prev(write_id="w6", sha256="sha256:" + "0" * 64),
        "epoch": 2,
        "writer": {"id": "me", "host": "h"},
        "time": 5.0,
        "change": changes.note("hello"),
        "live": (ROW,),
        "retired": (),
        "resume_from": ROW,
        "keep": "last=3",
        "extra": {"later": {"x": 1}},
    }
    return Record(**{**base, **fields})


def decode(raw: bytes, **place: Any) -> Record:
    return decode_record(raw, **{"run_uid": UID, "seq": 7, "what": KEY, **place})


def edited(edit: Callable[[dict[str, Any]], object]) -> bytes:
    fields = json.loads(encode_record(record()).raw.split(b"\n")[0])
    edit(fields)
    return sign(canonical(fields))


BASE = BaseRef(key="index/01234567/0000000005-abcdefabcdef.json", size=10, sha256="sha256:" + "1" * 64)


@pytest.mark.parametrize(
    "written",
    [
        record(),
        record(live=(), retired=(ROW,), resume_from=None, keep=None),
        record(live=Based(base=BASE, add=(ROW,), drop=(1, 2)), retired=Based(base=BASE, add=(), drop=())),
        record(seq=0, epoch=0, prev=None, change=claim_change(), live=(), resume_from=None, run={"run_uid": UID}),
        record(prev=Prev(write_id=None, sha256="sha256:" + "2" * 64)),
    ],
)
def test_a_record_is_read_as_it_was_written(written: Record) -> None:
    encoded = encode_record(written)
    assert decode(encoded.raw, seq=written.seq) == encoded == msgspec.structs.replace(written, raw=encoded.raw)
    assert write_id_of(encoded.raw) == written.write_id
    assert encoded.raw.count(b"\n") == 2


def test_every_flipped_bit_and_every_cut_of_a_record_is_detected() -> None:
    raw = encode_record(record()).raw
    for bit in range(len(raw) * 8):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptionError):
            decode(bytes(flipped))
    for length in range(len(raw)):
        with pytest.raises(CorruptionError):
            decode(raw[:length])


@pytest.mark.parametrize("place", [{"seq": 8}, {"seq": 6}, {"run_uid": "f" * 32}])
def test_a_copy_in_another_place_is_refused(place: dict[str, Any]) -> None:
    with pytest.raises(CorruptionError, match="copy from another place"):
        decode(encode_record(record()).raw, **place)


@pytest.mark.parametrize(
    "edit",
    numbered(
        lambda f: f.update(version=2),
        lambda f: f.update(requires=["teleport"]),
        lambda f: f.update(requires=[{}]),
        lambda f: f.update(requires="teleport"),
        lambda f: f.update(version="1"),
    ),
)
def test_a_newer_record_is_refused_as_newer_not_as_damaged(edit: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(UnsupportedError, match="upgrade ckptstore"):
        decode(edited(edit))


@pytest.mark.parametrize(
    "edit",
    numbered(
        lambda f: f.update(format="ckptstore.manifest"),
        lambda f: f.update(version=True),
        lambda f: f.update(epoch=8),
        lambda f: f.update(epoch=-1),
        lambda f: f.update(epoch=7),  # only a claim carries its own number
        lambda f: f.update(change=claim_change()),  # and a claim no other
        lambda f: f.update(prev=None),
        lambda f: f.update(change={}),
        lambda f: f.update(change={"kind": 5}),
        lambda f: f.update(time="now"),
        lambda f: f.update(write_id=None),
        lambda f: f.pop("live"),
        lambda f: f.pop("keep"),
        lambda f: f.update(live=[f["live"][0], f["live"][0]]),
        lambda f: f.update(live=[{**f["live"][0], "seq": 9}]),
        lambda f: f.update(live="all"),
        lambda f: f.update(live=["row"]),
        lambda f: f.update(live={}),
        lambda f: f["live"][0].update(attempt="../../other"),
        lambda f: f["live"][0].update(attempt=".hidden"),
        lambda f: f["live"][0].update(attempt="a/b"),
        lambda f: f["live"][0].update(attempt=""),
        lambda f: f["live"][0].update(attempt="a" * 201),
        lambda f: f["live"][0].update(step=-1),
        lambda f: f["live"][0].update(step=1.0),
        lambda f: f["live"][0].update(seq=True),
        lambda f: f["live"][0].update(bytes=-1),
        lambda f: f["live"][0]["manifest"].update(size=-1),
        lambda f: f["live"][0].update(epoch=3),
        lambda f: f["live"][0].update(parent=3),
        lambda f: f["live"][0].update(parent=-1),
        lambda f: f["live"][0].update(metrics={"x": "much"}),
        lambda f: f["live"][0].update(metrics={"x": True}),
        lambda f: f["live"][0].update(metrics={str(n): 1 for n in range(33)}),
        lambda f: f["live"][0].update(tags=[str(n) for n in range(17)]),
        lambda f: f["live"][0].update(tags=["x" * 2048]),
        lambda f: f["live"][0].update(extra_field="x" * 2048),
        lambda f: f["resume_from"].update(attempt="../x"),
    ),
)
def test_a_signed_record_with_an_impossible_value_is_refused(edit: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(CorruptionError, match="0000000007"):
        decode(edited(edit))


@pytest.mark.parametrize(
    "key",
    [
        "index/01234567/../../other.json",
        "index/ffffffff/0000000005-abcdefabcdef.json",
        "index/01234567/0000000008-abcdefabcdef.json",
        "index/01234567/0000000005-abcdefabcdef",
        "/etc/passwd",
        "journal/01234567/0000000005.json",
    ],
)
def test_a_base_outside_the_index_of_this_run_or_of_a_later_record_is_refused(key: str) -> None:
    base = {"key": key, "size": 1, "sha256": "sha256:" + "0" * 64}
    with pytest.raises(CorruptionError, match="can't be the base"):
        decode(edited(lambda f: f.update(live={"base": base, "add": [], "drop": []})))


def test_fields_of_a_later_version_survive_a_rewrite_in_records_and_rows() -> None:
    found = decode(edited(lambda f: (f.update(colour="red"), f["live"][0].update(shade=[1, {"a": None}]))))
    again = json.loads(encode_record(found).raw.split(b"\n")[0])
    assert again["colour"] == "red"
    assert again["later"] == {"x": 1}
    assert again["live"][0]["shade"] == [1, {"a": None}]
    assert again["live"][0]["new"] == [1]


@pytest.mark.parametrize(
    "fields",
    [
        {"change": changes.note("x" * MAX_RECORD_BYTES)},
        {"change": changes.note("x", number=1 << 54)},
        {"change": changes.note("x", number=float("nan"))},
        {"change": changes.note("x", value=object())},
        {"time": float("inf")},
        {"live": (new_row(3, 2, 1 << 54, None),)},
        {"live": (ROW, ROW)},
        {"epoch": 9},
        {"writer": {"host": "x" * MAX_RECORD_BYTES}},
    ],
)
def test_a_record_that_could_not_be_read_is_never_written(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        encode_record(record(**fields))


def test_a_deep_change_is_never_written() -> None:
    deep: Any = 1
    for _ in range(70):
        deep = [deep]
    with pytest.raises(ConfigError, match="nested deeper"):
        encode_record(record(change=changes.note("x", deep=deep)))


@pytest.mark.parametrize(
    "fields",
    [
        {"tags": tuple(f"t{n}" for n in range(17))},
        {"metrics": {f"m{n}": 1.0 for n in range(33)}},
        {"tags": ("x" * 2100,)},
        {"metrics": {"x" * 2100: 1}},
        {"metrics": {"x": float("nan")}},
        {"metrics": {"x": 1 << 60}},
        {"metrics": {"x": "large"}},
    ],
)
def test_tags_and_metrics_beyond_their_bounds_are_refused_before_anything_is_written(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="step 5"):
        check_row(new_row(3, 2, 5, None, **fields))


def test_tags_and_metrics_at_their_bounds_are_stored() -> None:
    row = new_row(
        3,
        2,
        5,
        None,
        tags=tuple(f"t{n}" for n in range(16)),
        metrics={f"m{n}": 1 / 3 for n in range(31)} | {"x": "inf"},
    )
    assert row_from_json(json.loads(canonical(row_to_json(check_row(row)))), "k") == row


metrics = st.dictionaries(
    st.text(max_size=8),
    st.floats(allow_nan=False, allow_infinity=False)
    | st.integers(-(1 << 53), 1 << 53)
    | st.sampled_from(["nan", "inf"]),
    max_size=8,
)


@given(st.integers(1, 1 << 53), metrics, st.lists(st.text(max_size=8), max_size=8), st.booleans(), st.data())
def test_any_row_is_read_as_it_was_written(
    seq: int, values: dict[str, Any], tags: list[str], mark: bool, data: st.DataObject
) -> None:
    parent = data.draw(st.none() | st.integers(0, seq - 1))
    row = new_row(seq, seq - 1, 12, parent, metrics=values, tags=tuple(tags), permanent=mark, damaged=not mark)
    assert row_from_json(json.loads(canonical(row_to_json(row))), "k") == row
