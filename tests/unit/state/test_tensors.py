"""Specs, byte views and memory of tensors."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from ckptstore.errors import CorruptionError, UnsupportedError
from ckptstore.state.dtypes import CODES, ITEM_BYTES, NAMES_BY_CODE
from ckptstore.state.tensors import DTYPES, TensorSpec, byte_view, empty, memory, spec_of

every_dtype = pytest.mark.parametrize("name", sorted(DTYPES))


@every_dtype
def test_the_table_of_dtypes_agrees_with_torch(name: str) -> None:
    assert DTYPES[name].itemsize == ITEM_BYTES[name]
    assert str(DTYPES[name]) == f"torch.{name}"


def test_every_code_stands_for_one_dtype() -> None:
    assert len(NAMES_BY_CODE) == len(CODES)
    assert CODES.keys() <= ITEM_BYTES.keys()


@every_dtype
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 1, 2)])
def test_the_bytes_of_a_new_tensor_are_reached_two_ways_without_a_copy(name: str, shape: tuple[int, ...]) -> None:
    tensor = empty(TensorSpec("t", name, shape, torch.Size(shape).numel() * ITEM_BYTES[name]))
    assert spec_of("t", tensor) == ("t", name, shape, tensor.nbytes)
    view = memory(tensor)
    assert (view.format, view.ndim, view.readonly, len(view)) == ("B", 1, False, tensor.nbytes)
    view[:] = bytes(n % 2 for n in range(len(view)))
    assert byte_view(tensor).tolist() == list(view)
    assert byte_view(tensor).data_ptr() == tensor.data_ptr()


def test_a_parameter_gives_its_bytes_without_its_gradient() -> None:
    view = byte_view(torch.nn.Parameter(torch.ones(2)))
    assert not view.requires_grad
    view.zero_()


def test_the_memory_outlives_the_name_of_its_tensor() -> None:
    tensor = torch.ones(1000)
    view, alive = memory(tensor), weakref.ref(tensor)
    del tensor
    gc.collect()
    assert alive() is not None
    assert bytes(view[:4]) == b"\x00\x00\x80?"
    del view
    gc.collect()
    assert alive() is None


def test_a_tensor_whose_memory_is_not_one_run_on_the_host_is_refused() -> None:
    for tensor in (torch.ones(3, 2).t(), torch.ones(3, device="meta")):
        with pytest.raises(ValueError, match="not one run of bytes"):
            memory(tensor)
    with pytest.raises(RuntimeError):
        byte_view(torch.ones(3, 2).t())


@pytest.mark.parametrize("spec", [("t", "float32", (2,), 4), ("t", "float32", (-1, -1), 4), ("t", "odd", (), 1)])
def test_a_spec_that_does_not_add_up_is_refused_before_memory_is_asked_for(
    spec: tuple[str, str, tuple[int, ...], int],
) -> None:
    with pytest.raises(CorruptionError, match=r"tensor t: dtype .* don't make"):
        empty(TensorSpec(*spec))


def test_a_dtype_that_this_torch_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(DTYPES, "uint16")
    with pytest.raises(UnsupportedError, match="has no dtype uint16"):
        empty(TensorSpec("t", "uint16", (1,), 2))
