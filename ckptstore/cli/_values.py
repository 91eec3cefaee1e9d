"""What do the plain values in a checkpoint look like, without torch and without rebuilding them?

A manifest holds them as the tagged JSON of ``ckptstore.state.tree``. Here it is read for people only: as text cut at a
length, or as JSON in which what JSON can't say is that text. Nothing is imported, called or rebuilt by a stored name.
"""

from __future__ import annotations

import json
import math
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckptstore.state.tree import Json

__all__ = ["as_json", "as_text"]

_MAPPINGS = {"dict": 0, "OrderedDict": 0, "Counter": 0, "Namespace": 0, "SimpleNamespace": 0, "state_dict": 1}
"""Tags whose list is keys and values in turn, after so many items of their own."""
_BRACKETS = {"tuple": "()", "set": "{}", "frozenset": "{}"}


def as_text(node: Json, *, most: int = 120) -> str:
    """Return *node* as text like Python's own, at most *most* characters and a "…". Only so much of it is looked at."""
    text = ""
    for piece in _pieces(node):
        text += piece
        if len(text) > most:
            return text[:most] + "…"
    return text


def as_json(node: Json) -> Any:
    """Return *node* as ordinary JSON: objects for dicts with text keys, lists for sequences, else text."""
    if isinstance(node, list):
        return [as_json(item) for item in node]
    if not isinstance(node, dict):
        return node
    tag, content = _tag_of(node)
    if tag in _MAPPINGS and isinstance(content, list):
        keys, values = content[_MAPPINGS[tag] :: 2], content[_MAPPINGS[tag] + 1 :: 2]
        if all(isinstance(key, str) for key in keys):
            return {str(key): as_json(value) for key, value in zip(keys, values, strict=False)}
    if tag in _BRACKETS and isinstance(content, list):
        return [as_json(item) for item in content]
    return as_text(node)


def _pieces(node: Json) -> Iterator[str]:
    """Yield the text of *node* piece by piece, so that a long one need not be finished."""
    if isinstance(node, list):
        yield from _between("[]", (_pieces(item) for item in node))
        return
    if not isinstance(node, dict):
        yield repr(node)
        return
    tag, content = _tag_of(node)
    if tag in _MAPPINGS and isinstance(content, list):
        own = _MAPPINGS[tag]
        pairs = zip(content[own::2], content[own + 1 :: 2], strict=False)
        yield from _between("{}", (_pair(key, value) for key, value in pairs))
    elif tag in _BRACKETS and isinstance(content, list):
        yield from _between(_BRACKETS[tag], (_pieces(item) for item in content))
    elif tag == "float" and isinstance(content, str):
        yield _float(content)
    elif tag == "int" and isinstance(content, str):
        yield content
    else:
        yield f"{tag}("
        yield json.dumps(content)
        yield ")"


def _pair(key: Json, value: Json) -> Iterator[str]:
    yield from _pieces(key)
    yield ": "
    yield from _pieces(value)


def _between(brackets: str, items: Iterable[Iterator[str]]) -> Iterator[str]:
    yield brackets[0]
    for index, item in enumerate(items):
        if index:
            yield ", "
        yield from item
    yield brackets[1]


def _tag_of(node: dict[str, Json]) -> tuple[str, Json]:
    return next(iter(node.items())) if len(node) == 1 else ("?", node)


def _float(content: str) -> str:
    """Return a number that JSON can't say: a NaN or an infinity, stored as its bits."""
    try:
        (value,) = struct.unpack(">d", bytes.fromhex(content))
    except (ValueError, struct.error):
        return f"float({content!r})"
    return "nan" if math.isnan(value) else str(value)
