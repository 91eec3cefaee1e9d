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
        "permanent", "required", "rng", "self", "skip", "step", "strict", "strip_prefix", "tags", "url", "verify", "wait",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """The state at one step: the tree for the manifest, and live tensors by name (not copies)."""

    tree: dict[str, Any]
    tensors: dict[str, torch.Tensor]


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


def capture(states: Mapping[str, Any], *, with_rng: bool) -> Captured:
    """Return the present state of *states*, encoded.

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
    return Captured(tree={"states": found, "rng": generators}, tensors=encoder.tensors)


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
