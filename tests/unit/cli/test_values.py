"""Plain values are shown from their stored form, whatever that holds, and nothing is rebuilt by a stored name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.cli._values import as_json, as_text
from ckptstore.state.tree import encode

TAGS = st.sampled_from(["dict", "state_dict", "tuple", "set", "float", "int", "tensor", "Counter", "new tag"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | TAGS, inner, max_size=2),
)


@given(JSON)
def test_no_stored_value_is_too_odd_to_be_shown(node: Any) -> None:
    assert len(as_text(node, most=50)) <= 51
    json.dumps(as_json(node), allow_nan=False)


@pytest.mark.parametrize(
    "value",
    [None, True, -3, 0.1, "it's", [], [1, [2]], (), {}, {"a": {"b": [None]}}, {1: "x", None: 2}, {(1, "k"): 0}],
)
def test_what_python_can_say_is_said_as_python_says_it(value: object) -> None:
    text = as_text(encode(value).tree)
    assert text == repr(value).replace("(1, 'k')", "[1, 'k']")  # a tuple that is a key is stored as a list


@pytest.mark.parametrize("value", [{"a": [1, {"b": None}]}, [], "x", {"": 1.5}, {"dict": {"tuple": []}}])
def test_what_json_can_say_comes_back_as_json(value: object) -> None:
    assert as_json(encode(value).tree) == value


def test_a_long_value_is_cut_without_being_walked_to_its_end() -> None:
    class Endless(list[Any]):
        def __iter__(self) -> Any:
            while True:
                yield 7

    assert as_text({"tuple": Endless([7])}, most=10) == "(7, 7, 7, …"
