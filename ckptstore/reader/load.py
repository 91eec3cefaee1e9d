"""How is a checkpoint, or a piece of it, read into new objects?

The nesting is cut down to what was asked for first, and only the tensors that are left are read.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from ckptstore.errors import ConfigError, NotFoundError
from ckptstore.state import selection, tree
from ckptstore.state.paths import component

if TYPE_CHECKING:
    from ckptstore.reader.source import Source
    from ckptstore.state.tree import Json

__all__ = ["load_states", "load_tensor"]


def load_states(
    source: Source,
    *,
    only: list[str] | None,
    skip: list[str],
    map_location: str | torch.device,
    mmap: bool,
    verify: bool,
) -> dict[str, Any]:
    """Return states by name, as new objects; see ``Checkpoint.load``."""
    try:
        device = torch.device(map_location)
    except RuntimeError as error:
        message = f"map_location={map_location!r:.80} is no device: {str(error).partition(chr(10))[0]}"
        raise ConfigError(message) from error
    _check_patterns(source, [*(only or ()), *skip])
    wanted = {
        name: left
        for name in source.states
        for left in selection.prune(
            source.tree(name),
            component(name),
            lambda path: only is None or selection.matches(path, only),
            lambda path: selection.matches(path, skip),
        )
    }
    references = selection.references(list(wanted.values()))
    # Arrays and the states of generators live on the host, wherever the rest goes.
    host = selection.references([item for name, item in wanted.items() if source.kind(name) == "generator"])
    tensors = {
        name: tensor if name in host or references[name] == "ndarray" else tensor.to(device)
        for name, tensor in (source.mapped if mmap else source.read)(references, verify=verify).items()
    }
    return {name: tree.decode(item, tensors) for name, item in wanted.items()}


def load_tensor(source: Source, path: str) -> torch.Tensor:
    """Return one tensor by its path, verified."""
    state, _, rest = path.partition("/")
    try:
        node = selection.find(_by_component(source)[state], rest)
    except KeyError as error:
        message = f"{source.what} holds nothing at {path}; its states are {_shown(source)}"
        raise NotFoundError(message, operation="load", key=path) from error
    if selection.tensor_name(node) is None and not (isinstance(node, dict) and "sparse" in node):
        message = f"{path} is no tensor in {source.what}: use load(only={path!r})"
        raise NotFoundError(message, operation="load", key=path)
    value = tree.decode(node, source.read(selection.references(node), verify=True))
    assert isinstance(value, torch.Tensor)
    return value


def _by_component(source: Source) -> dict[str, Json]:
    """Return the trees of the states by the first component of their paths."""
    return {component(name): source.tree(name) for name in source.states}


def _check_patterns(source: Source, patterns: list[str]) -> None:
    """Refuse patterns that choose nothing: a slip of the pen must not load less, or more, than was meant."""
    trees = _by_component(source)
    paths = [path for name, item in trees.items() for path in selection.choices(item, name)]
    unused = [item for item in patterns if not any(selection.matches(path, [item]) for path in paths)]
    if not unused:
        return
    message = f"{source.what} holds nothing at {', '.join(unused)}; its states are {_shown(source)}"
    for item in unused:
        state, _, rest = item.partition("/")
        with suppress(KeyError):
            selection.find(trees[state], rest)
            message = f"{item} lies inside a list or another container that is loaded as a whole: name that instead"
    raise NotFoundError(message, operation="load", key=source.key)


def _shown(source: Source) -> str:
    """Return the names of the states, as they are written in paths."""
    return ", ".join(_by_component(source)) or "none"
