"""HAZARDS, "Serialisation fidelity": each line that this package can answer alone, as one test."""

from __future__ import annotations

import dataclasses
import enum
import json
import pathlib
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from ckptstore.errors import UnstorableError
from ckptstore.state.container import plan_containers
from ckptstore.state.registry import register_type
from ckptstore.state.tensors import byte_view, memory, spec_of
from ckptstore.state.tree import decode, encode
from tests.unit.state.same import assert_same, stored, through_bytes

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")  # torch's own notices, once per process


@register_type
class Phase(enum.Enum):
    WARMUP = "warmup"


@register_type
@dataclasses.dataclass
class Settings:
    rate: float


def test_of_a_small_view_of_a_large_tensor_only_the_views_data_are_stored() -> None:
    view = torch.arange(10**6, dtype=torch.float32).reshape(1000, 1000)[3:5, ::500]
    encoded = encode(view, ("v",))
    (plan,) = plan_containers([spec_of(name, tensor) for name, tensor in encoded.tensors.items()])
    assert plan.n_bytes - len(plan.header) == 16
    assert_same(decode(encoded.tree, stored(encoded)), view)


def test_tied_tensors_are_stored_once_and_every_name_is_restored() -> None:
    embedding = torch.nn.Embedding(4, 2)
    head = torch.nn.Linear(2, 4, bias=False)
    head.weight = embedding.weight
    model = torch.nn.ModuleDict({"embedding": embedding, "head": head})
    encoded = encode(model.state_dict(), ("model",))
    assert list(encoded.tensors) == ["model/embedding.weight"]
    back: Any = decode(encoded.tree, stored(encoded))
    assert list(back) == ["embedding.weight", "head.weight"]
    assert back["embedding.weight"] is back["head.weight"]


def test_a_tensor_of_more_than_2_to_the_31_elements_is_reached_to_its_last_byte() -> None:
    tensor = torch.empty(2**31 + 8, dtype=torch.int8)  # its pages are touched only at the end
    assert spec_of("t", tensor).n_bytes == 2**31 + 8
    memory(tensor)[-2:] = b"\x01\x02"
    assert tensor[-2:].tolist() == byte_view(tensor)[-2:].tolist() == [1, 2]


@pytest.mark.parametrize(
    "name", ["float8_e4m3fn", "float8_e5m2fnuz", "uint16", "uint64", "complex128", "bool", "bfloat16"]
)
def test_an_uncommon_dtype_is_restored_exactly(name: str) -> None:
    dtype = getattr(torch, name)
    tensor = (torch.arange(48, dtype=torch.uint8) % (2 if name == "bool" else 251)).view(dtype)
    assert_same(
        through_bytes({"t": tensor, "scalar": tensor[1], "none": tensor[:0]}),
        {"t": tensor, "scalar": tensor[1].clone(), "none": tensor[:0]},
    )


def test_a_quantised_tensor_is_refused_naming_key_and_dtype() -> None:
    with pytest.warns(UserWarning, match="quantize_per_tensor"):
        tensor = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)
    with pytest.raises(UnstorableError, match=r"key path model/w: a tensor of dtype torch\.quint8"):
        encode({"w": tensor}, ("model",))


@pytest.mark.parametrize(
    "layout",
    ["coo", "uncoalesced", "hybrid", "nothing", "csr", "csc", "bsr", "bsc", "batched", "int32", "grad", "parameter"],
)
def test_a_sparse_tensor_keeps_layout_indices_and_values(layout: str) -> None:
    dense = torch.tensor([[0.0, 1, 0, 2], [3, 0, 0, 0]])
    twice = torch.tensor([[1, 1, 0]])
    one = torch.tensor([0, 1]).int(), torch.tensor([1]).int()
    makers: dict[str, Any] = {
        "coo": dense.to_sparse,
        "uncoalesced": lambda: torch.sparse_coo_tensor(twice, torch.ones(3), (3,), check_invariants=True),
        "hybrid": lambda: dense.to_sparse(1),
        "nothing": lambda: torch.zeros(2, 3).to_sparse(),
        "csr": dense.to_sparse_csr,
        "csc": dense.to_sparse_csc,
        "bsr": lambda: dense.to_sparse_bsr((2, 2)),
        "bsc": lambda: dense.to_sparse_bsc((1, 2)),
        "batched": lambda: torch.stack([dense, dense]).to_sparse_csr(),
        "int32": lambda: torch.sparse_csr_tensor(*one, torch.ones(1), (1, 2), check_invariants=True),
        "grad": lambda: dense.to_sparse().requires_grad_(),
        "parameter": lambda: torch.nn.Parameter(dense.to_sparse(), requires_grad=False),
    }  # fmt: skip
    tensor = makers[layout]()
    back = through_bytes([tensor, tensor, {"again": tensor}])
    assert_same(back[0], tensor)
    assert back[0] is back[1] is back[2]["again"]


def test_a_tensor_subclass_is_never_turned_into_a_plain_tensor() -> None:
    class Scaled(torch.Tensor):
        pass

    with pytest.raises(UnstorableError, match=r"a tensor of the subclass .*Scaled"):
        encode(torch.ones(1).as_subclass(Scaled), ("w",))


def test_numpy_scalars_rng_states_enums_paths_and_dataclasses_load_without_unpickling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = {
        "scalar": np.float64(0.1), "rng": torch.get_rng_state(), "phase": Phase.WARMUP, "path": pathlib.Path("a/b"),
        "settings": Settings(0.1), "numpy": np.random.default_rng(0).bit_generator.state,
    }  # fmt: skip

    def never(*args: object, **kwargs: object) -> None:
        pytest.fail("something was unpickled")

    monkeypatch.setattr(pickle, "loads", never)
    monkeypatch.setattr(pickle, "load", never)
    monkeypatch.setattr(pickle, "Unpickler", never)
    monkeypatch.setattr(torch, "load", never)
    assert_same(through_bytes(state), state)


def test_an_unstorable_object_is_refused_in_the_call_itself_naming_the_key_path() -> None:
    with pytest.raises(UnstorableError, match="key path scheduler/lr_lambdas/0: a function"):
        encode({"lr_lambdas": [lambda step: step]}, ("scheduler",))


@pytest.mark.parametrize("value", [[], {}, [[]], {"a": {}}, {"a": []}, (), set(), "", None, False, 0, 0.0], ids=repr)
def test_empty_containers_and_plain_values_come_back_as_what_they_were(value: Any) -> None:
    assert_same(through_bytes({"epoch": value}), {"epoch": value})


def test_names_of_many_tensors_with_odd_characters_stay_inside_the_file() -> None:
    state = {f"layers.{n}/~@\n\ud800é": torch.tensor([n]) for n in range(3000)}
    encoded = encode(state, ("model",))
    plans = plan_containers([spec_of(name, tensor) for name, tensor in encoded.tensors.items()])
    assert len(plans) == 1
    json.loads(plans[0].header[8:])
    assert_same(decode(encoded.tree, stored(encoded)), state)
