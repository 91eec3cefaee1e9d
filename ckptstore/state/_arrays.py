"""How do numpy's arrays travel as bytes?

An array is stored as one uint8 tensor over its elements in C order; dtype and shape stand in the tree, so dates, text
and foreign byte orders come back exactly. numpy is looked up, not imported: without it there are no arrays to save.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from ckptstore.state._leaf_decoders import import_optional, malformed, numpy_dtype, parse_int, parse_list
from ckptstore.state._leaves import encode_leaf, numpy_dtype_name
from ckptstore.state.tensors import memory

if TYPE_CHECKING:
    import numpy as np

    from ckptstore.state._leaves import Json


def is_array(value: object) -> TypeGuard[np.ndarray[Any, Any]]:
    """Whether *value* is an array and not of a subclass, which may mean more than its elements."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def is_scalar(value: object) -> bool:
    """Whether *value* is one of numpy's scalars."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def as_bytes(array: np.ndarray[Any, Any]) -> tuple[str, list[Json], torch.Tensor]:
    """The name of the dtype, the shape and the elements, which share the array's memory where its order allows."""
    numpy = sys.modules["numpy"]
    dtype = numpy_dtype_name(array.dtype)
    shape = [encode_leaf(size) for size in array.shape]
    if array.nbytes == 0:
        return dtype, shape, torch.empty(0, dtype=torch.uint8)
    flat = numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
    if not flat.flags.writeable:  # torch has no read-only tensors and warns
        flat = flat.copy()
    return dtype, shape, torch.from_numpy(flat)


def from_bytes(dtype_node: Json, shape_node: Json, data: torch.Tensor) -> object:
    """The array over the bytes of *data*, which it shares, on the CPU; for meta data, one of no particular content."""
    what = "'ndarray' with an impossible content"
    dtype = numpy_dtype(dtype_node, what)
    shape = [parse_int(n, what) for n in parse_list(shape_node, what)]
    if min(shape, default=0) < 0 or data.dtype is not torch.uint8 or math.prod(shape) * dtype.itemsize != data.numel():
        raise malformed(what)
    numpy = import_optional("numpy")
    try:
        if data.is_meta:
            return numpy.empty(shape, dtype)
        return numpy.ndarray(shape, dtype, memory(data.detach().cpu().contiguous()))
    except ValueError as error:  # a shape beyond what numpy can have, around no elements
        raise malformed(what) from error
