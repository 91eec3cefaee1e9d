"""What is the state of the objects a caller passes, and can all of it be stored?

Everything is asked and encoded before a byte is written, so an unstorable object is refused in the save call itself,
with its key path, and nothing is left behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ckptstore.errors import ConfigError, UnstorableError
from ckptstore.state import rng
from ckptstore.state.paths import tensor_path
from ckptstore.state.tree import Encoder

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["RESERVED", "Captured", "capture", "check_names"]

RESERVED = frozenset(
    {
        "branch_again", "fallback", "fresh", "if_exists", "map_location", "metadata", "metrics", "mmap", "only",
        "permanent", "required", "rng", "self", "skip", "step", "strict", "strip_prefix", "tags", "url", "verify",
        "wait",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """The state at one step: the tree for the manifest, and live tensors by name (not copies).

    ``guarded`` names those that only an optimizer's step changes: parameters of passed modules and the state of passed
    optimizers. It is empty unless an optimizer was passed.
    """

    tree: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    guarded: frozenset[str] = frozenset()


def guarded_names(states: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """Return the names of the tensors that stay as they are until an optimizer of *states* makes its next step."""
    optimizers = [item for item in states.values() if isinstance(item, torch.optim.Optimizer)]
    if not optimizers:
        return frozenset()
    owned = {
        tensor.data_ptr()
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        for tensor in (parameter, *optimizer.state.get(parameter, {}).values())
        if isinstance(tensor, torch.Tensor)
    }
    return frozenset(name for name, tensor in tensors.items() if tensor.numel() and tensor.data_ptr() in owned)


def check_names(states: Mapping[str, Any]) -> None:
    """Refuse reserved words as names of states."""
    taken = sorted(RESERVED & states.keys())
    if taken:
        message = f"{', '.join(taken)} can't be the name of a state: the word is reserved; choose another"
        raise ConfigError(message)
    bad = [name for name in states if not isinstance(name, str) or not name]
    if bad:
        message = f"{bad[0]!r} can't be the name of a state: names are non-empty strings"
        raise ConfigError(message)


def capture(states: Mapping[str, Any], *, with_rng: bool, overlap: bool = False) -> Captured:
    """Return the present state of *states*, encoded; with *overlap* say which tensors may be copied later.

    Raises:
        UnstorableError: naming key path and type of what can't be stored exactly.
    """
    check_names(states)
    encoder = Encoder()
    found = {}
    for name, item in states.items():
        kind, value = _state_of(name, item)
        found[name] = {"kind": kind, "tree": encoder.encode(value, tensor_path((name,)))}
    generators = encoder.encode(rng.capture(), "rng") if with_rng else None
    guarded = guarded_names(states, encoder.tensors) if overlap else frozenset()
    return Captured(tree={"states": found, "rng": generators}, tensors=encoder.tensors, guarded=guarded)


def _state_of(name: str, item: Any) -> tuple[str, Any]:
    if isinstance(item, torch.Generator):
        return "generator", {"device": item.device.type, "state": item.get_state()}
    has_save, has_load = callable(getattr(item, "state_dict", None)), callable(getattr(item, "load_state_dict", None))
    if isinstance(item, type) or has_save != has_load:
        what = (
            "a class"
            if isinstance(item, type)
            else f"an object with {'no load_state_dict' if has_save else 'no state_dict'}"
        )
        message = f"state {name!r}: {what} ({_type_name(item)}) can't be stored; pass an object that has both methods"
        raise UnstorableError(message, operation="save", key=name)
    return ("stateful", item.state_dict()) if has_save else ("plain", item)


def _type_name(item: Any) -> str:
    kind = item if isinstance(item, type) else type(item)
    return f"{kind.__module__}.{kind.__qualname__}"
