"""JSON from a store has one meaning or none."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import CorruptionError
from ckptstore.run.strict_json import MAX_DEPTH, canonical, compact, read_json, sign, unsign


def nested(depth: int) -> bytes:
    """Return an object whose innermost container is at *depth*."""
    return b'{"a":' * (depth - 1) + b"{}" + b"}" * (depth - 1)


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":1,"a":1}',
        b'{"x":{"a":1,"b":2,"a":3}}',
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":-Infinity}',
        b'{"a":1e999}',
        b'{"a":9007199254740993}',
        b'{"a":-9007199254740993}',
        b'{"a":' + b"9" * 5000 + b"}",
        nested(MAX_DEPTH + 1),
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"[1]",
        b"",
        b"{",
        b'{"a":1} x',
        b'{"a":"\xff"}',
        b'\xef\xbb\xbf{"a":1}',
        b"{'a':1}",
        b'{"a":01}',
    ],
)
def test_what_two_readers_could_read_differently_is_refused(body: bytes) -> None:
    with pytest.raises(CorruptionError, match="the key"):
        read_json(body, "the key")


def test_the_limits_themselves_are_allowed() -> None:
    assert read_json(b'{"a":[9007199254740992,-9007199254740992]}', "k") == {"a": [1 << 53, -(1 << 53)]}
    assert read_json(nested(MAX_DEPTH), "k")


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 53), 1 << 53) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(blacklist_categories=[])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(st.dictionaries(st.text(), values, max_size=5))
def test_what_is_written_is_read_back_exactly(value: dict[str, object]) -> None:
    for body in (canonical(value), compact(value)):
        found = read_json(body, "k")
        assert found == value
        assert repr(found) == repr(json.loads(body))  # -0.0, 1 and 1.0 kept apart
    assert list(read_json(compact(value), "k")) == list(value)


@given(st.dictionaries(st.text(), values, max_size=3))
def test_canonical_json_does_not_depend_on_the_order_of_keys(value: dict[str, object]) -> None:
    assert canonical(dict(reversed(value.items()))) == canonical(value)


@given(st.binary(max_size=60), st.data())
def test_every_flipped_bit_and_every_cut_of_a_signed_line_is_detected(line: bytes, data: st.DataObject) -> None:
    line = line.replace(b"\n", b"")
    body = sign(line)
    assert unsign(body, "k") == line
    bit = data.draw(st.integers(0, len(body) * 8 - 1))
    flipped = bytearray(body)
    flipped[bit // 8] ^= 1 << bit % 8
    cut = data.draw(st.integers(0, len(body) - 1))
    for damaged in (bytes(flipped), body[:cut], body + b"x", body + b"\n"):
        with pytest.raises(CorruptionError, match="torn or damaged"):
            unsign(damaged, "k")
