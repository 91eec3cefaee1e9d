"""What does "comes back exactly" mean, and the way of a state through bytes that the tests send it on."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ckptstore.state.container import plan_containers, read_header
from ckptstore.state.tensors import TensorSpec, byte_view, empty, memory, spec_of
from ckptstore.state.tree import Encoded, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable


def through_bytes(value: object, keys: tuple[str, ...] = ("state",)) -> Any:
    """Encode, write as JSON and container files, read both back, decode."""
    encoded = encode(value, keys)
    return decode(json.loads(json.dumps(encoded.tree, allow_nan=False)), stored(encoded))


def stored(encoded: Encoded, container_bytes: int = 2**30) -> dict[str, torch.Tensor]:
    """New tensors with the bytes that the files hold."""
    specs = [spec_of(name, tensor) for name, tensor in encoded.tensors.items()]
    found: dict[str, torch.Tensor] = {}
    for image, plan_specs in images(encoded.tensors, specs, container_bytes):
        header = read_header(reader(image), len(image))
        for spec in plan_specs:
            entry = header[spec.name]
            found[spec.name] = tensor = empty(spec)
            memory(tensor)[:] = image[entry.start : entry.start + entry.n_bytes]
    return found


def reader(image: bytes | bytearray) -> Callable[[int, int], bytes]:
    return lambda start, n: bytes(image[start : start + n])


def images(
    tensors: dict[str, torch.Tensor], specs: list[TensorSpec], container_bytes: int = 2**30
) -> list[tuple[bytearray, list[TensorSpec]]]:
    """The files of a state, as bytes."""
    written = []
    for plan in plan_containers(specs, container_bytes=container_bytes):
        image = bytearray(plan.n_bytes)
        image[: len(plan.header)] = plan.header
        for entry in plan.entries:
            data = bytes(memory(byte_view(tensors[entry.spec.name].detach().contiguous())))
            image[entry.start : entry.start + entry.n_bytes] = data
        written.append((image, [entry.spec for entry in plan.entries]))
    return written


def assert_same(left: Any, right: Any) -> None:  # noqa: PLR0912  # one branch for each kind of value
    """Equal types, order, bits, attributes that matter."""
    assert type(left) is type(right), (type(left), type(right))
    if isinstance(left, torch.Tensor):
        assert_same_tensor(left, right)
    elif isinstance(left, np.ndarray | np.generic):
        assert left.dtype == right.dtype
        assert left.dtype.str == right.dtype.str
        assert left.shape == right.shape
        assert left.tobytes() == right.tobytes()
    elif isinstance(left, float):
        assert struct.pack("d", left) == struct.pack("d", right)
    elif isinstance(left, complex):
        assert struct.pack("dd", left.real, left.imag) == struct.pack("dd", right.real, right.imag)
    elif isinstance(left, dict):
        assert_same(list(left.keys()), list(right.keys()))
        assert_same(list(left.values()), list(right.values()))
        if isinstance(left, OrderedDict | Counter):
            assert_same(vars(left), vars(right))
        if isinstance(left, defaultdict):
            assert left.default_factory is right.default_factory
    elif isinstance(left, set | frozenset):
        assert_same(sorted(left, key=_order), sorted(right, key=_order))
    elif isinstance(left, list | tuple | deque):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
        if isinstance(left, deque):
            assert left.maxlen == right.maxlen
    elif dataclasses.is_dataclass(left):
        for field in dataclasses.fields(left):
            assert_same(getattr(left, field.name), getattr(right, field.name))
    elif hasattr(left, "__dict__") and type(left).__name__ in {"Namespace", "SimpleNamespace"}:
        assert_same(vars(left), vars(right))
    else:
        assert isinstance(left, Decimal) or left == right  # a decimal NaN can't be compared
        assert type(left) is int or repr(left) == repr(right)  # a huge integer can't be shown


def _order(value: object) -> tuple[str, str]:
    return type(value).__name__, repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)


def assert_same_tensor(left: torch.Tensor, right: torch.Tensor) -> None:
    assert (left.dtype, left.shape, left.layout) == (right.dtype, right.shape, right.layout)
    assert left.requires_grad == right.requires_grad
    if left.layout is torch.sparse_coo:
        assert left.is_coalesced() == right.is_coalesced()
        assert_same_tensor(left.detach()._indices(), right.detach()._indices())
        assert_same_tensor(left.detach()._values(), right.detach()._values())
    elif left.layout is torch.strided:
        plain = left.detach().resolve_conj().resolve_neg().contiguous()
        assert bytes(memory(byte_view(plain))) == bytes(memory(byte_view(right.detach().contiguous())))
    else:
        rows = left.layout in {torch.sparse_csr, torch.sparse_bsr}
        parts = ("crow_indices", "col_indices") if rows else ("ccol_indices", "row_indices")
        for part in (*parts, "values"):
            assert_same_tensor(getattr(left.detach(), part)(), getattr(right.detach(), part)())
