"""How is a checkpoint, or a piece of it, read into new objects?

The nesting is cut down to what was asked for first, and only the tensors that are left are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ckptstore.errors import NotFoundError
from ckptstore.state import selection, tree
from ckptstore.state.paths import component

if TYPE_CHECKING:
    from ckptstore.reader.source import Source

__all__ = ["load_states", "load_tensor"]


def load_states(
    source: Source,
    *,
    only: list[str] | None,
    skip: list[str] | None,
    map_location: str | torch.device,
    verify: bool,
) -> dict[str, Any]:
    """Return states by name, as new objects; see ``Checkpoint.load``."""
    used: set[str] = set()

    def chooser(patterns: list[str]) -> Any:
        def chosen(path: str) -> bool:
            found = [item for item in patterns if selection.matches(path, [item])]
            used.update(found)
            return bool(found)

        return chosen

    keep = (lambda _: True) if only is None else chooser(only)
    wanted = {
        name: left
        for name, state in source.states.items()
        for left in selection.prune(state["tree"], component(name), keep, chooser(skip or []))
    }
    unused = [item for item in (*(only or ()), *(skip or ())) if item not in used]
    if unused:
        message = f"{source.what} holds nothing at {', '.join(unused)}; its states are {', '.join(source.states)}"
        raise NotFoundError(message, operation="load", key=source.what)
    tensors = source.read(selection.references(list(wanted.values())), verify=verify)
    target = torch.device(map_location)
    if target.type != "cpu":
        tensors = {name: tensor.to(target) for name, tensor in tensors.items()}
    return {name: tree.decode(item, tensors) for name, item in wanted.items()}


def load_tensor(source: Source, path: str) -> torch.Tensor:
    """Return one tensor by its path, verified."""
    name, _, rest = path.partition("/")
    try:
        node = selection.find(source.states[name]["tree"], rest)
    except KeyError as error:
        message = f"{source.what} holds nothing at {path}; its states are {', '.join(source.states)}"
        raise NotFoundError(message, operation="load", key=path) from error
    value = tree.decode(node, source.read(selection.references(node), verify=True))
    if not isinstance(value, torch.Tensor):
        message = f"{path} is {type(value).__name__}, not a tensor: use load(only={path!r})"
        raise NotFoundError(message, operation="load", key=path)
    return value
