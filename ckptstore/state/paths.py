"""How is the way through nested containers to a tensor written as one line of text, and read back?

Keys are joined by "/". A component says which key it was, type included: text stands for itself with ``~``, ``/``,
``@`` and control characters escaped, an integer for itself, text that looks like an integer (and the empty text) gets
``~s`` in front, every other key is ``~t`` and its JSON. So two different keys never share a component, no component is
empty, and none holds "/" or "@" (which separates a piece's offsets) or "~." (which begins a sparse tensor's parts).
``parse_path`` accepts exactly what ``tensor_path`` writes, which it checks by writing the keys again.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from ckptstore.errors import CorruptionError, UnstorableError
from ckptstore.state._leaf_decoders import decode_key
from ckptstore.state._leaves import MAX_PLAIN_INT, RefusedError, encode_key

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

__all__ = ["component", "parse_path", "tensor_path"]

_PLAIN = re.compile("[^~/@\x00-\x1f\x7f-\x9f\ud800-\udfff]+")
_AWKWARD = re.compile("[~/@\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_INTEGER_LIKE = re.compile(r"-?[0-9]+", re.ASCII)
_ESCAPE = re.compile(r"~([012]|u[0-9a-f]{4})")
_ESCAPED = {"~": "~0", "/": "~1", "@": "~2"}
_UNESCAPED = {"0": "~", "1": "/", "2": "@"}
_JSON_ESCAPES = str.maketrans({"~": "\\u007e", "/": "\\u002f", "@": "\\u0040", "\x7f": "\\u007f"})


def tensor_path(keys: Iterable[Hashable]) -> str:
    """The path of *keys*; "" for no keys. Never empty or ambiguous otherwise, and free of control characters.

    Raises:
        UnstorableError: a key is neither text, a number, None nor another plain value, nor a tuple of those.
    """
    parts: list[str] = []
    for key in keys:
        try:
            parts.append(component(key))
        except RefusedError as refused:
            message = f"key path {'/'.join(parts)}: {refused.what} can't be part of a path; {refused.remedy}"
            raise UnstorableError(message, operation="save", key="/".join(parts)) from None
    return "/".join(parts)


def parse_path(path: str) -> tuple[Hashable, ...]:
    """The keys of *path*: the inverse of ``tensor_path``.

    Raises:
        CorruptionError: ``tensor_path`` writes no such path.
        UnsupportedError: a key is a member of an enum that isn't registered, or of a package that isn't installed.
    """
    if not path:
        return ()
    try:
        keys = tuple(_parse(part) for part in path.split("/"))
    except (RecursionError, ValueError) as error:
        raise _malformed(path) from error
    if tensor_path(keys) != path:
        raise _malformed(path)
    return keys


def component(key: object) -> str:
    """One key of a path; a RefusedError if it can't be one."""
    if type(key) is str:
        if _PLAIN.fullmatch(key) and not _INTEGER_LIKE.fullmatch(key):
            return key
        if not key or _INTEGER_LIKE.fullmatch(key):
            return f"~s{key}"
        return _AWKWARD.sub(lambda match: _ESCAPED.get(match[0]) or f"~u{ord(match[0]):04x}", key)
    if type(key) is int and -MAX_PLAIN_INT <= key <= MAX_PLAIN_INT:
        return str(key)
    return "~t" + json.dumps(encode_key(key), separators=(",", ":"), allow_nan=False).translate(_JSON_ESCAPES)


def _parse(part: str) -> Hashable:
    if part.startswith("~t"):
        return decode_key(json.loads(part[2:]))
    if part.startswith("~s"):
        return part[2:]
    if _INTEGER_LIKE.fullmatch(part):
        return int(part)
    return _ESCAPE.sub(lambda match: _UNESCAPED.get(match[1]) or chr(int(match[1][1:], 16)), part)


def _malformed(path: str) -> CorruptionError:
    message = f"{path!r} is not the path of a tensor"
    return CorruptionError(message, operation="load", key=path)
