"""Tensor paths: one per sequence of keys, and back."""

from __future__ import annotations

import enum
import json
import string
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load as load_safetensors

from ckptstore.errors import CkptStoreError, CorruptionError, UnstorableError
from ckptstore.state.container import plan_containers
from ckptstore.state.paths import parse_path, tensor_path
from ckptstore.state.registry import register_type
from ckptstore.state.tensors import TensorSpec
from tests.unit.state.same import assert_same

texts = st.text(alphabet=st.characters(blacklist_categories=[]), max_size=8)  # lone surrogates included
scalars = st.one_of(
    texts,
    st.from_regex(r"-?[0-9]{1,20}", fullmatch=True),
    st.text(alphabet="~/@.s0123tu-" + string.whitespace, max_size=6),
    st.integers(),
    st.booleans(),
    st.none(),
    st.floats(),
    st.complex_numbers(),
    st.binary(max_size=8),
    st.dates(),
    st.decimals().filter(lambda value: not value.is_snan()),
)
keys = st.one_of(scalars, st.tuples(scalars, scalars), st.tuples(st.tuples(scalars)))


@given(st.lists(keys, max_size=4))
@example(["", "0", 0, "-0", "007", True, 1, None, "None", "~", "/", "@", "~s", "~t1", "\ud800", "\x00", "a\nb"])
def test_keys_come_back_from_their_path_with_their_types(way: list[Any]) -> None:
    path = tensor_path(way)
    assert_same(list(parse_path(path)), way)
    assert path.isprintable() or not path.isascii()
    assert path.encode("utf-8").decode("utf-8") == path
    assert "@" not in path
    assert "~." not in path


@given(st.lists(keys, max_size=3), st.lists(keys, max_size=3))
def test_different_keys_have_different_paths(left: list[Any], right: list[Any]) -> None:
    try:
        assert_same(left, right)
    except AssertionError:
        assert tensor_path(left) != tensor_path(right)


@pytest.mark.parametrize(
    "way, path",
    [
        ((), ""),
        (("model", "blocks", 0, "weight"), "model/blocks/0/weight"),
        (("",), "~s"),
        (("0",), "~s0"),
        (("-0",), "~s-0"),
        (("007",), "~s007"),
        ((-3,), "-3"),
        (("a/b", "c~d", "e@f"), "a~1b/c~0d/e~2f"),
        ((True, 1, None), "~ttrue/1/~tnull"),
        ((1.5,), "~t1.5"),
        ((2**53 + 1,), '~t{"int":"0x20000000000001"}'),
        ((("a", 1),), '~t["a",1]'),
        ((("~/@",),), '~t["\\u007e\\u002f\\u0040"]'),
        (("a\nb\ud800",), "a~u000ab~ud800"),
    ],
)
def test_paths_read_as_the_design_says(way: tuple[Any, ...], path: str) -> None:
    assert tensor_path(way) == path
    assert parse_path(path) == way


@given(st.text(alphabet='~/@.st0123u-a"[]{},:nulltrue \x00\ud800', max_size=12))
@example("~t" + "[" * 100_000)
@example("9" * 5000)
@example("~tNaN")
@example("~tnull ")
@example("~u0041")
@example("a//b")
def test_any_other_text_is_refused_as_a_path(text: str) -> None:
    try:
        way = parse_path(text)
    except CkptStoreError:
        return
    assert tensor_path(way) == text


def test_what_no_file_can_name_is_refused_as_a_key() -> None:
    with pytest.raises(UnstorableError, match=r"key path model: an object \(builtins.object\) can't be part of a path"):
        tensor_path(("model", object()))
    deep: Any = "a"
    for _ in range(6):
        deep = (deep,)
    with pytest.raises(UnstorableError, match="nested too deep"):
        tensor_path((deep,))
    with pytest.raises(CorruptionError):
        parse_path("~t" + "[" * 6 + '"a"' + "]" * 6)


def test_a_registered_enum_can_be_a_key() -> None:
    @register_type
    class Split(enum.Enum):
        TRAIN = "train"

    path = tensor_path((Split.TRAIN, "x"))
    assert parse_path(path) == (Split.TRAIN, "x")


@given(st.sets(st.lists(keys, max_size=2).map(tensor_path), max_size=4))
def test_every_path_can_be_a_name_in_a_safetensors_file(names: set[str]) -> None:
    specs = [TensorSpec(name, "uint8", (0,), 0) for name in names]
    for plan in plan_containers(specs):
        header = json.loads(plan.header[8:])
        assert set(header) - {"__metadata__"} == names - {"__metadata__"} | ({"~.__metadata__"} & set(header))
        assert len(load_safetensors(plan.header)) == len(names)
