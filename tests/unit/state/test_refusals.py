"""What can't come back exactly is refused in the encode call, with key path, type and a way out."""

from __future__ import annotations

import collections
import datetime as dt
import functools
import io
import threading
import zoneinfo
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from ckptstore.errors import UnstorableError
from ckptstore.state.tree import encode


class Text(str):
    __slots__ = ()


class Number(int):
    pass


class Table(dict):  # type: ignore[type-arg]
    pass


class Wrapped(torch.Tensor):
    pass


class Kept:
    def state_dict(self) -> dict[str, int]:
        return {}


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(2)


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=layout)


def freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def broken_sparse() -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[9]]), torch.ones(1), (2,), check_invariants=False)


def in_a_cycle() -> list[Any]:
    inner: list[Any] = [1]
    inner.append((2, inner))
    return inner


CASES: dict[str, tuple[Any, str, str]] = {
    "lambda": (lambda: lambda: 1, r"a function \(builtins.function .*<lambda>\)", "store a name or a number"),
    "function": (lambda: fake, r"a function \(builtins.function fake\)", "store a name"),
    "builtin": (lambda: len, r"a function \(builtins.builtin_function_or_method len\)", "store a name"),
    "method": (lambda: Kept().state_dict, r"a function \(builtins.method Kept.state_dict\)", "store a name"),
    "partial": (lambda: functools.partial(len), r"a partial function \(functools.partial\)", "store a name"),
    "module": (lambda: torch.nn.Linear(1, 1), r"a module \(torch.nn.modules.linear.Linear\)", "state_dict"),
    "class": (lambda: Kept, r"a class \(builtins.type Kept\)", "store a name"),
    "python module": (lambda: io, r"an imported module \(builtins.module\)", "take it out"),
    "file": (lambda: Path(__file__).open("rb"),  # noqa: SIM115
             r"an open file \(_io.BufferedReader\)", "store its path"),
    "generator": (torch.Generator, r"a random generator \(torch._C.Generator\)", r"get_state\(\)"),
    "lock": (threading.Lock, r"an object \(_thread.lock\)", "plain values"),
    "object": (object, r"an object \(builtins.object\)", "plain values"),
    "stateful": (Kept, r"an object \(.*Kept\)", r"state_dict\(\)"),
    "not implemented": (lambda: NotImplemented, r"an object \(builtins.NotImplementedType\)", "plain values"),
    "subclass of str": (lambda: Text("secret-value"), r"a subclass of str \(.*Text\)", "plain"),
    "subclass of int": (lambda: Number(1), r"a subclass of int \(.*Number\)", "plain"),
    "subclass of dict": (Table, r"a subclass of dict \(.*Table\)", "plain dict"),
    "chain map": (collections.ChainMap, r"an object \(collections.ChainMap\)", "plain values"),
    "structseq": (lambda: torch.ones(2, 2).max(0), r"a subclass of tuple \(torch.return_types.max\)", "plain tuple"),
    "memoryview": (lambda: memoryview(b"x"), r"an object \(builtins.memoryview\)", "plain values"),
    "iterator": (lambda: (n for n in [1]), r"a generator \(builtins.generator", "store what it takes"),
    "zone": (lambda: dt.time(1, tzinfo=zoneinfo.ZoneInfo("UTC")), r"zone type zoneinfo.ZoneInfo", "fixed offset"),
    "slice": (lambda: slice("a", None), r"a slice of builtins.str", "slice of int"),
    "factory": (lambda: collections.defaultdict(lambda: 1), r"a defaultdict whose factory is a function", "use one"),
    "cycle": (in_a_cycle, r"a list that contains itself", "break the cycle"),
    "meta": (lambda: torch.ones(2, device="meta"), r"a meta tensor", "materialise"),
    "empty meta": (lambda: torch.ones(0, device="meta"), r"a meta tensor", "materialise"),
    "fake": (fake, r"a fake tensor", "real tensors"),
    "quantized": (quantized, r"a tensor of dtype torch.qint8", "dequantize"),
    "sub-byte": (lambda: torch.empty(2, dtype=vars(torch)["uint4"]), r"a tensor of dtype torch.uint4", "convert"),
    "nested": (lambda: nested(torch.strided), r"a nested tensor", "unbind"),
    "jagged": (lambda: nested(torch.jagged), r"a tensor of the subclass .*NestedTensor", "plain tensors"),
    "mkldnn": (lambda: torch.ones(2, 2).to_mkldnn(), r"a tensor of layout torch._mkldnn", "to_dense"),
    "beyond JSON": (lambda: torch.empty(0, 2**54), r"an empty tensor of shape \[0, \d+\]", "a shape a file can hold"),
    "freed": (freed, r"a tensor whose memory can't be reached", "store"),
    "broken sparse": (broken_sparse, r"a sparse coo tensor whose indices break the layout's rules", "check_invariants"),
    "meta sparse": (lambda: torch.eye(2).to_sparse().to("meta"), r"a meta tensor", "materialise"),
    "lazy": (lambda: torch.nn.LazyLinear(1).weight, r"an uninitialised lazy tensor", "run the module"),
    "subclass": (lambda: torch.ones(1).as_subclass(Wrapped), r"a tensor of the subclass .*Wrapped", "as_subclass"),
    "object array": (lambda: np.array([object()]), r"a numpy value of dtype object", "plain dtype"),
    "record array": (lambda: np.zeros(1, "i4,f4"), r"a numpy value of dtype void", "one array per field"),
    "long double": (lambda: np.longdouble(1), r"a numpy value of dtype (longdouble|float\d+)", "64 bits"),
    "void": (lambda: np.void(b"ab"), r"a numpy value of dtype void", "plain dtype"),
    "matrix": (lambda: np.ones((1, 1)).view(np.recarray), r"an object \(numpy.*recarray\)", "plain"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::ResourceWarning", "ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("case", CASES)
def test_an_object_is_refused_with_its_key_path_its_type_and_what_to_do(case: str) -> None:
    make, what, remedy = CASES[case]
    value = make()
    with pytest.raises(UnstorableError, match=what) as caught:
        encode({"blocks": [{"fn": value}]}, ("model",))
    message = str(caught.value)
    assert message.startswith('state "model": key path model/blocks/0/fn')
    if case != "cycle":
        assert caught.value.key == "model/blocks/0/fn"
    assert remedy.replace("\\", "") in message
    assert "can't be stored; " in message
    assert "secret-value" not in message


def test_a_refusal_at_the_root_or_without_keys_names_what_there_is() -> None:
    with pytest.raises(UnstorableError, match=r'^state "lr": key path lr: an object \(builtins.object\) can\'t'):
        encode(object(), ("lr",))
    with pytest.raises(UnstorableError, match=r"^state: an object \(builtins.object\) can't"):
        encode(object())


@pytest.mark.parametrize(
    "key",
    [Text("a"), Number(1), object(), lambda: 1, (1, [2].append), torch.ones(1), slice],
    ids=["str subclass", "int subclass", "object", "function", "tuple of a method", "tensor", "class"],
)
def test_a_key_that_is_no_plain_value_is_refused_at_its_dict(key: Any) -> None:
    with pytest.raises(UnstorableError, match=r"key path model/0: a dict with .* among its keys can't be stored"):
        encode([{key: 1}], ("model",))


def test_a_lambda_in_a_scheduler_is_refused_naming_the_key_path() -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1), 1)
    state = scheduler.state_dict() | {"schedule": lambda step: step}
    with pytest.raises(UnstorableError, match="key path scheduler/schedule: a function"):
        encode(state, ("scheduler",))


def test_a_tensor_inside_a_function_transform_is_refused() -> None:
    def stores(tensor: torch.Tensor) -> torch.Tensor:
        with pytest.raises(UnstorableError, match="key path s: a tensor whose memory can't be reached"):
            encode(tensor, ("s",))
        return tensor

    torch.func.vmap(stores)(torch.ones(2, 2))


def test_a_container_that_stands_in_two_places_is_no_cycle() -> None:
    shared = [1, {"a": 2}]
    assert encode([shared, shared, (shared, {"b": shared})]).tensors == {}
