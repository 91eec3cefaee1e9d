"""Why can't this object be stored, and what should its owner do instead?

The message names types and functions, never values: a value may be a secret.
"""

from __future__ import annotations

import enum
import functools
import io
import types
from collections import Counter, OrderedDict, defaultdict, deque

import torch

from ckptstore.state import registry
from ckptstore.state._leaves import RefusedError, describe_type, name_of_type, unregistered

CONTAINERS = (Counter, OrderedDict, defaultdict, dict, deque, list, tuple, set, frozenset)


def refusal(value: object) -> RefusedError:
    """The refusal of an object that no encoder takes."""
    if isinstance(value, torch.Tensor):
        return _tensor_refusal(value)
    kind = None if isinstance(value, enum.Enum) else registry.kind_of(type(value))
    if kind is not None:
        return unregistered(value, kind)
    for types_, what, remedy in _KNOWN:
        if isinstance(value, types_):
            return RefusedError(f"{what} ({_identity(value)})", remedy)
    if hasattr(type(value), "state_dict"):
        return RefusedError(describe_type(value), "pass it as a state of its own, or store its state_dict()")
    for base in CONTAINERS:
        if isinstance(value, base):
            return RefusedError(
                f"a subclass of {base.__name__} ({name_of_type(value)})", f"convert it to a plain {base.__name__} first"
            )
    return RefusedError(describe_type(value), "store its plain values instead, or take it out of the state")


def _identity(value: object) -> str:
    name = getattr(value, "__qualname__", None) if isinstance(value, _NAMED) else None
    return f"{name_of_type(value)} {name}" if name else name_of_type(value)


def _tensor_refusal(tensor: torch.Tensor) -> RefusedError:
    bases = {base.__name__ for base in type(tensor).__mro__}
    what = f"a tensor of the subclass {name_of_type(tensor)}"
    if "FakeTensor" in bases:
        return RefusedError(f"a fake tensor ({name_of_type(tensor)}), which has no data,", "save real tensors")
    if "DTensor" in bases:
        remedy = "it spans processes: save with the process group up (ckptstore.integrations.dcp), or its full_tensor()"
        return RefusedError(what, remedy)
    if "UninitializedTensorMixin" in bases:
        return RefusedError(f"an uninitialised lazy tensor ({name_of_type(tensor)})", "run the module once, then save")
    return RefusedError(what, "store the plain tensors that it is made of, or tensor.as_subclass(torch.Tensor)")


_FUNCTION = "store a name or a number that selects it, or take it out of the state"
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_KNOWN: tuple[tuple[type | tuple[type, ...], str, str], ...] = (
    (torch.nn.Module, "a module", "pass the module as a state of its own, or store its state_dict()"),
    ((types.FunctionType, types.BuiltinFunctionType, types.MethodType), "a function", _FUNCTION),
    (functools.partial, "a partial function", _FUNCTION),
    (type, "a class", "store a name that selects it"),
    (types.ModuleType, "an imported module", "take it out of the state"),
    (io.IOBase, "an open file", "store its path and position"),
    (torch.Generator, "a random generator", "store its get_state()"),
    ((types.GeneratorType, types.CoroutineType), "a generator", "store what it takes to start it again"),
)
