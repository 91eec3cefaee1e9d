"""What must be known of a tensor to store its bytes, and how are those bytes reached without a copy?

torch names each dtype, a spec says how many bytes a tensor's elements take in C order, and the views here reach the
memory of a CPU tensor directly, so that it can be written, hashed and read into in place.
"""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from ckptstore.errors import CorruptionError, UnsupportedError
from ckptstore.state.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DTYPES", "DTYPE_NAMES", "TensorSpec", "byte_view", "empty", "memory", "spec_of"]

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES if hasattr(torch, name)}
"""Every dtype that can be stored and that this torch has, by its name without "torch."."""

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


class TensorSpec(NamedTuple):
    """One stored tensor. A tuple: a state may have 100,000 of them, and a frozen dataclass takes thrice the time.

    Attributes:
        name: Its path in the state, as ``paths.tensor_path`` writes it.
        dtype: A key of ``DTYPES``.
        shape: Its sizes, () for a scalar.
        n_bytes: Elements times bytes of one element.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    n_bytes: int


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """The spec of a dense tensor; a view counts its own elements only. The dtype must be one of ``DTYPES``."""
    return TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), tensor.nbytes)


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor in C order: shape ``(n_bytes,)``, uint8, the same memory, no gradient.

    A 0-dim or empty tensor, a Parameter and every dtype of ``DTYPES`` will do; on any device. Conjugate and negative
    views must be resolved first: their memory isn't what they show.
    """
    return tensor.detach().view(tensor.numel()).view(torch.uint8)


def memory(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor: shape ``(n_bytes,)``, format "B", writable. Keeps the tensor alive.

    Writing to it bypasses autograd's version counter.
    """
    n_bytes = tensor.nbytes
    if n_bytes == 0:
        return memoryview(bytearray())
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        message = (
            f"the memory of a {tensor.device.type} tensor with strides {tensor.stride()} is not one run of bytes here"
        )
        raise ValueError(message)
    owner = (ctypes.c_char * n_bytes).from_address(tensor.data_ptr())
    owner.tensor = tensor  # type: ignore[attr-defined]  # the memoryview holds the array, the array holds the tensor
    return memoryview(owner).cast("B")


def empty(spec: TensorSpec) -> torch.Tensor:
    """A new, contiguous CPU tensor of *spec* with whatever its memory held.

    Raises:
        CorruptionError: shape and dtype don't make ``n_bytes``, checked before any memory is asked for.
        UnsupportedError: this torch lacks the dtype.
    """
    if spec.dtype not in ITEM_BYTES or _n_bytes(spec.shape, spec.dtype) != spec.n_bytes:
        message = f"tensor {spec.name}: dtype {spec.dtype} and shape {list(spec.shape)} don't make {spec.n_bytes} bytes"
        raise CorruptionError(message, operation="load", key=spec.name)
    dtype = DTYPES.get(spec.dtype)
    if dtype is None:
        message = f"tensor {spec.name}: torch {torch.__version__} has no dtype {spec.dtype}; use a newer torch"
        raise UnsupportedError(message, operation="load", key=spec.name)
    if dtype is torch.complex32:  # asked for directly, torch warns of missing operators; bytes are all that is needed
        return torch.empty(spec.n_bytes, dtype=torch.uint8).view(dtype).view(spec.shape)
    return torch.empty(spec.shape, dtype=dtype)


def _n_bytes(shape: Sequence[int], dtype: str) -> int:
    return -1 if min(shape, default=0) < 0 else math.prod(shape) * ITEM_BYTES[dtype]
