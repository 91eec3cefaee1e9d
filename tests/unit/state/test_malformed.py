"""A tree that no encoder wrote is refused by name, whatever was done to it."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import CorruptionError, UnsupportedError
from ckptstore.state.registry import name_of
from ckptstore.state.tree import decode, encode, entries
from tests.unit.state.same import assert_same
from tests.unit.state.test_tree import LEAVES, Access, Color, Config, Point, containers, simple

if TYPE_CHECKING:
    import random

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")  # torch's own notices, once per process

WEIGHT = torch.nn.Parameter(torch.ones(2, 2))
STATE: dict[Any, Any] = {
    "leaves": [leaf for leaf in LEAVES if not isinstance(leaf, float) or leaf == leaf],  # noqa: PLR0124
    "tensors": [
        WEIGHT,
        WEIGHT.detach(),
        torch.ones(3, dtype=torch.int8),
        torch.eye(3).to_sparse(),
        np.ones((2, 3), ">f4"),
    ],
    "classes": [Config("a", [1], torch.ones(1)), Point(1, 2), Color.BLUE],
    3: {("a", None): {1, 2}, None: frozenset("a")},
}
ENCODED = encode(STATE)

fragments = st.one_of(
    st.tuples(st.sampled_from(["int", "str", "float"]), st.sampled_from(["", "zz", "ff", "0x5"])).map(
        lambda pair: dict([pair])
    ),
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2**53 + 1, 2**63, -(2**70), 10**30, float("nan"), float("inf"), 0.5, 1e308]),
    st.sampled_from(
        [*ENCODED.tensors, "", "zz", "7ff0000000000001", "0x", "_1", "<f8", "O", "|V8", "cuda:999", "meta", "__class__"]
    ),
    st.text(max_size=3),
    st.builds(list),
    st.builds(dict),
    st.builds(lambda: [[]]),
    st.dictionaries(st.sampled_from(["dict", "tuple", "set", "int", "nope"]), st.none(), max_size=2),
)
TAGS = [
    "dict", "OrderedDict", "Counter", "state_dict", "defaultdict", "tuple", "deque", "set", "frozenset", "Namespace",
    "SimpleNamespace", "dataclass", "namedtuple", "tensor", "tensor+grad", "parameter", "parameter+grad", "sparse",
    "ndarray", "int", "float", "str", "complex", "bytes", "bytearray", "range", "slice", "date", "datetime", "time",
    "timedelta", "timezone", "Decimal", "UUID", "Path", "PurePosixPath", "PureWindowsPath", "enum", "torch.Size",
    "torch.dtype",
    "torch.device", "numpy", "numpy.str", "numpy.bytes",
]  # fmt: skip


def places(node: Any) -> list[tuple[Any, Any]]:
    """Every (container, index) below *node*."""
    found = []
    members = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for index, child in members:
        found.append((node, index))
        found.extend(places(child))
    return found


def decodes_or_refuses(tree: Any, tensors: dict[str, torch.Tensor]) -> None:
    try:
        value = decode(tree, tensors)
    except (CorruptionError, UnsupportedError):
        return
    again = encode(value)  # whatever it is, it is a state that can be stored
    assert_same(decode(again.tree, again.tensors), value)


@settings(max_examples=500)
@given(st.data())
def test_a_mutated_tree_decodes_to_a_state_or_is_refused_with_one_of_two_errors(data: st.DataObject) -> None:
    tree: Any = copy.deepcopy(ENCODED.tree)
    for _ in range(data.draw(st.integers(1, 3))):
        spots = places(tree)
        if not spots:
            break
        node, index = spots[data.draw(st.integers(0, len(spots) - 1))]
        act = data.draw(st.sampled_from(["put", "put", "put", "drop", "tag", "double", "swap"]))
        if act == "put":
            node[index] = data.draw(fragments)
        elif act == "drop":
            del node[index]
        elif act == "tag" and isinstance(node, dict):
            node[data.draw(st.sampled_from(TAGS))] = node.pop(index)
        elif act == "double" and isinstance(node, list):
            node.insert(index, copy.deepcopy(node[index]))
        else:
            other, spot = spots[data.draw(st.integers(0, len(spots) - 1))]
            node[index] = copy.deepcopy(other[spot])
    decodes_or_refuses(tree, ENCODED.tensors)


@settings(max_examples=300)
@given(st.sampled_from(TAGS), st.recursive(fragments, lambda inner: st.lists(inner, max_size=4), max_leaves=6))
def test_any_content_under_any_tag_decodes_to_a_state_or_is_refused(tag: str, content: Any) -> None:
    decodes_or_refuses({tag: content}, ENCODED.tensors)
    decodes_or_refuses({"dict": [{tag: content}, 1]}, ENCODED.tensors)
    decodes_or_refuses({"set": [{tag: content}]}, ENCODED.tensors)


@settings(max_examples=200)
@given(st.recursive(simple, containers, max_leaves=6), st.randoms(use_true_random=False))
def test_a_flipped_byte_in_the_text_of_a_tree_decodes_to_a_state_or_is_refused(state: Any, rng: random.Random) -> None:
    text = bytearray(json.dumps(encode(state).tree).encode())
    text[rng.randrange(len(text))] ^= 1 << rng.randrange(7)
    try:
        tree = json.loads(text)
    except (UnicodeDecodeError, ValueError):
        return
    decodes_or_refuses(tree, {})


@pytest.mark.parametrize(
    "tree",
    [
        2**53 + 1,
        float("nan"),
        {},
        {"int": "0x1", "float": "00"},
        {"int": "0x1"},
        {"int": "1"},
        {"float": "3ff0000000000000"},
        {"str": "41"},
        {"dict": [1]},
        {"dict": ["a", 1, "a", 2]},
        {"dict": [{"bytearray": ""}, 1]},
        {"dict": [[[[[["a"]]]]], 1]},
        {"dict": [{"Decimal": "sNaN"}, 1]},
        {"set": [1, 1]},
        {"set": [[1]]},
        {"deque": [1, 1, 2]},
        {"deque": [-1]},
        {"deque": [{"int": "0x8000000000000000"}]},
        {"deque": [{"int": "zz"}]},
        {"defaultdict": ["eval"]},
        {"float": ""},
        {"str": "e"},
        {"str": "ff"},
        {"dataclass": [{"str": "ff"}]},
        {"ndarray": [{"str": "ff"}, [], "bytes"]},
        {"ndarray": ["<f8", [{"int": ""}], "bytes"]},
        {"Counter": None},
        {"tuple": {"list": []}},
        {"bytes": "a"},
        {"bytes": "YQ==\n"},
        {"Path": "a//b"},
        {"UUID": "{00000000-0000-0000-0000-000000000000}"},
        {"Decimal": " 1"},
        {"date": [2024, 2, 30]},
        {"datetime": [2024, 1, 1, 0, 0, 0, 0, 2, None]},
        {"time": [1, 0, 0, 0, 0, [2, 0, 0]]},
        {"timezone": None},
        {"range": [0, 1, 0]},
        {"slice": [None, None]},
        {"torch.dtype": "Tensor"},
        {"torch.dtype": "a.b"},
        {"enum": [name_of(Color), 1]},
        {"torch.dtype": "long"},
        {"torch.device": "cuda:0:0"},
        {"torch.Size": [2**70]},
        {"numpy": ["O", "00"]},
        {"numpy": ["<f8", "00"]},
        {"numpy": ["<f8", "00" * 16]},
        {"ndarray": ["<f8", [3], "w"]},
        {"ndarray": ["<f8", [0, {"int": "0x8000000000000000"}], "empty"]},
        {"ndarray": ["<f8", [0] * 100, "empty"]},
        {"ndarray": ["<f8", [-1, -2], "bytes"]},
        {"tensor": 1},
        {"tensor": "absent"},
        {"tensor+grad": "bytes"},
        {"parameter+grad": "bytes"},
        {"sparse": ["coo", [2], True, False, False, "w", "w"]},
        {"sparse": ["coo", [2], None, False, False, "w", "w"]},
        {"sparse": ["csr", [2], True, False, False, "w", "w", "w"]},
        {"sparse": ["csr", [2, 2], None, 1, False, "w", "w", "w"]},
        {"sparse": ["csr", [2, 2], None, False, False, "w", "w", "w"]},
        {"sparse": []},
        {"sparse": ["odd"]},
    ],
    ids=lambda tree: json.dumps(tree)[:60],
)
def test_what_no_encoder_writes_is_corruption(tree: Any) -> None:
    tensors = {
        "w": torch.ones(2),
        "bytes": torch.ones(16, dtype=torch.uint8),
        "empty": torch.ones(0, dtype=torch.uint8),
    }
    with pytest.raises(CorruptionError):
        decode(tree, tensors)
    with pytest.raises(CorruptionError):
        decode([{"tuple": [tree]}], tensors)


def test_indices_that_point_outside_a_sparse_tensor_are_refused_before_any_kernel_sees_them() -> None:
    encoded = encode(torch.eye(3).to_sparse(), ("s",))
    encoded.tensors["s~.indices"][0, 0] = 7
    with pytest.raises(CorruptionError, match="parts of a sparse coo tensor don't fit together"):
        decode(encoded.tree, encoded.tensors)


@pytest.mark.parametrize(
    "tree, message",
    [
        ({"enum": [name_of(Color), "GREEN"]}, "Color registered here has no 'GREEN'"),
        ({"enum": [name_of(Access), 8]}, "Access registered here has no 8"),
        ({"torch.dtype": "float1"}, "has no dtype 'float1'"),
        ({"torch.device": "npu:0"}, "has no device 'npu:0'"),
    ],
)
def test_a_value_that_only_another_version_of_its_class_or_torch_has_is_named(tree: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        decode([tree], {})


def test_a_kind_of_value_from_a_newer_version_is_named() -> None:
    with pytest.raises(UnsupportedError, match="kind 'quaternion', which this version doesn't know"):
        decode({"dict": ["q", {"quaternion": [1, 2, 3, 4]}]}, {})


def test_a_tree_nested_without_end_is_refused_before_the_stack_overflows() -> None:
    for wrap in (lambda node: [node], lambda node: {"tuple": [node]}, lambda node: {"dict": ["a", node]}):
        tree: Any = 1
        for _ in range(100_000):
            tree = wrap(tree)
        with pytest.raises(CorruptionError, match="nested deeper than 64 levels"):
            decode(tree, {})
        while isinstance(tree, list | dict) and tree:  # freed one level at a time
            tree = tree.pop() if isinstance(tree, list) else tree.popitem()[1]


def test_entries_refuse_a_key_that_no_dict_can_have() -> None:
    with pytest.raises(CorruptionError):
        entries({"dict": [{"slice": [1, 2, 3]}, 1]})
