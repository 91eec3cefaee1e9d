"""Paths and patterns find pieces of a state's tree without decoding it."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from ckptstore.state import selection
from ckptstore.state.registry import register_type
from ckptstore.state.tree import decode, encode


class Pair(NamedTuple):
    left: Any
    right: Any


register_type(Pair, "tests.selection.Pair")

STATE: dict[Any, Any] = {
    "plain": torch.ones(1),
    "a/b": {"~": torch.ones(2)},
    3: {"0": torch.ones(3), 0: torch.ones(4)},
    (1, "x"): torch.ones(5),
    "ordered": OrderedDict(w=torch.ones(6)),
    "default": defaultdict(list, {"v": [torch.ones(7)]}),
    "tuple": (torch.ones(8), [torch.ones(9)]),
    "deque": deque([torch.ones(10)], maxlen=3),
    "space": SimpleNamespace(t=torch.ones(11)),
    "pair": Pair(torch.ones(12), {"deep": torch.ones(13)}),
    "array": np.ones(2),
    "sparse": torch.eye(2).to_sparse(),
    "grad": torch.nn.Parameter(torch.ones(14)),
    "leaf": None,
}


def test_every_tensor_is_found_under_the_path_that_it_is_stored_by() -> None:
    encoded = encode(STATE, ("s",))
    assert list(selection.references(encoded.tree)) == list(encoded.tensors)
    for name in encoded.tensors:
        path = name.removeprefix("s/")
        if "~." in path or path == "array":  # a part of a sparse tensor, an array: not found alone
            continue
        node = selection.find(encoded.tree, path)
        assert selection.tensor_name(node) == name
        assert decode(node, encoded.tensors).shape == encoded.tensors[name].shape  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", ["absent", "plain/deeper", "tuple/2", "tuple/-1", "3/1", "leaf/x", "pair/middle", "a"])
def test_what_is_not_there_is_a_key_error(path: str) -> None:
    with pytest.raises(KeyError):
        selection.find(encode(STATE, ("s",)).tree, path)


def test_references_tell_arrays_and_parts_of_sparse_tensors_from_tensors() -> None:
    tags = selection.references(encode(STATE, ("s",)).tree)
    assert tags["s/array"] == "ndarray"
    assert tags["s/sparse~.indices"] == "sparse"
    assert tags["s/grad"] == "parameter+grad"
    assert tags["s/plain"] == "tensor"


@pytest.mark.parametrize(
    "path,pattern,fits",
    [
        ("model", "model", True),
        ("model/a", "model", True),
        ("models", "model", False),
        ("model", "model/a", False),
        ("model/encoder.0.weight", "model/encoder.*", True),
        ("model/a/b", "model/*", True),
        ("model/a[0]", "model/a[0]", True),
        ("model/a", "MODEL/a", False),
        ("model/a", "model/?", True),
    ],
)
def test_patterns(path: str, pattern: str, *, fits: bool) -> None:
    assert selection.matches(path, [pattern]) is fits
    assert selection.matches(path, ["other", pattern]) is fits
    assert not selection.matches(path, [])


def test_a_pruned_tree_keeps_order_and_kind_and_loses_only_what_was_dropped() -> None:
    value = {"a": OrderedDict(x=1, y=2), "b": [1, 2], "c": {"z": None}, "d": 4}
    encoded = encode(value, ("s",))

    def pruned(only: list[str], skip: list[str]) -> Any:
        left = selection.prune(
            encoded.tree, "s", lambda path: selection.matches(path, only), lambda path: selection.matches(path, skip)
        )
        return [decode(item, {}) for item in left]

    assert pruned(["s"], []) == [value]
    assert pruned(["s"], ["s"]) == []
    assert pruned(["s/absent"], []) == []
    assert pruned(["s/c/z", "s/a/y"], []) == [{"a": OrderedDict(y=2), "c": {"z": None}}]
    assert pruned(["s"], ["s/a/*", "s/c/z", "s/b"]) == [{"a": OrderedDict(), "c": {}, "d": 4}]
    assert pruned(["s/b/0"], []) == []
    assert list(selection.choices(encoded.tree, "s")) == ["s", "s/a", "s/a/x", "s/a/y", "s/b", "s/c", "s/c/z", "s/d"]
