"""How does a leaf come back from its JSON, and nothing else in its stead?

``decode_leaf`` accepts a tagged leaf only if encoding the result gives the same JSON again. So each decoder needs to be
right only for what its encoder wrote, and damage can't come back as some other value in disguise. No decoder calls
another one by a tag, so the work is bounded by the size of the JSON and the stack by a few frames.
"""

from __future__ import annotations

import base64
import decimal
import importlib
import math
import re
import struct
import uuid
from datetime import date, datetime, time, timedelta, timezone
from enum import Flag
from pathlib import PosixPath, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

from ckptstore.errors import CorruptionError, UnsupportedError
from ckptstore.state import registry
from ckptstore.state._leaves import (
    MAX_KEY_NESTING,
    MAX_PLAIN_INT,
    NUMPY_DTYPE,
    UNHASHABLE,
    RefusedError,
    encode_leaf,
    name_of_type,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from ckptstore.state._leaves import Json

_TORCH_NAME = re.compile(r"[a-z][a-z0-9_]{0,40}(:[0-9]{1,3})?", re.ASCII)


def malformed(what: str) -> CorruptionError:
    """The error for a tree that no encoder wrote."""
    message = f"the tree of the state is malformed: {what}; the manifest is damaged"
    return CorruptionError(message, operation="load")


def parse_list(node: Json, what: str, n: int | None = None) -> list[Json]:
    """*node* if it is a list (of *n* items)."""
    if type(node) is not list or (n is not None and len(node) != n):
        raise malformed(what)
    return node


def parse_text(node: Json, what: str) -> str:
    """The text that ``str`` wrote as *node*."""
    if type(node) is dict and node.keys() == {"str"} and type(node["str"]) is str:
        try:
            return bytes.fromhex(node["str"]).decode("utf-8", "surrogatepass")
        except ValueError as error:
            raise malformed(what) from error
    if type(node) is not str:
        raise malformed(what)
    return node


def parse_int(node: Json, what: str) -> int:
    """The integer that ``int`` wrote as *node*."""
    if type(node) is dict and node.keys() == {"int"} and type(node["int"]) is str:
        try:
            return int(node["int"], 16)
        except ValueError as error:
            raise malformed(what) from error
    if type(node) is not int or not -MAX_PLAIN_INT <= node <= MAX_PLAIN_INT:
        raise malformed(what)
    return node


def _parse_float(node: Json, what: str) -> float:
    if type(node) is dict and node.keys() == {"float"} and type(node["float"]) is str:
        try:
            value: float = struct.unpack(">d", bytes.fromhex(node["float"]))[0]
        except (ValueError, struct.error) as error:
            raise malformed(what) from error
        return value
    if type(node) is not float or not math.isfinite(node):
        raise malformed(what)
    return node


def _parse_ints(node: Json, what: str, n: int | None = None) -> list[int]:
    return [parse_int(item, what) for item in parse_list(node, what, n)]


def _parse_bytes(node: Json, what: str) -> bytes:
    return base64.b64decode(parse_text(node, what), validate=True)


def _parse_zone(node: Json, what: str) -> timezone | None:
    if node is None:
        return None
    days, seconds, microseconds, *name = parse_list(node, what)
    offset = timedelta(parse_int(days, what), parse_int(seconds, what), parse_int(microseconds, what))
    return timezone(offset, *(parse_text(part, what) for part in name))


def _parse_clock(items: list[Json], what: str) -> dict[str, Any]:
    hour, minute, second, microsecond, fold = (parse_int(item, what) for item in items[:5])
    zone = _parse_zone(items[5], what)
    return {"hour": hour, "minute": minute, "second": second, "microsecond": microsecond, "fold": fold, "tzinfo": zone}


def _parse_slice(node: Json, what: str) -> slice:
    return slice(*(None if item is None else parse_int(item, what) for item in parse_list(node, what, 3)))


def _parse_datetime(node: Json, what: str) -> datetime:
    items = parse_list(node, what, 9)
    year, month, day = (parse_int(item, what) for item in items[:3])
    return datetime(year, month, day, **_parse_clock(items[3:], what))  # noqa: DTZ001  # the zone is among them


def _parse_enum(node: Json, what: str) -> object:
    name, member = parse_list(node, what, 2)
    cls: Any = registry.class_of(parse_text(name, what), "enum")
    # Not held against its encoding below: a class that was given a new name is still read under its old one.
    try:
        value = cls[member] if type(member) is str else cls(parse_int(member, what))
    except (KeyError, ValueError) as error:
        message = f"the enum {cls.__module__}.{cls.__qualname__} registered here has no {member!r}, which was saved"
        raise UnsupportedError(message, operation="load") from error
    if type(member) is not str and not isinstance(value, Flag):
        raise malformed(what)
    return value


def _parse_torch(name: str, kind: str) -> object:
    torch = import_optional("torch")
    try:
        return torch.device(name) if kind == "device" else getattr(torch, name)
    except (AttributeError, RuntimeError) as error:
        if _TORCH_NAME.fullmatch(name) is None:
            raise
        message = f"the state holds the {kind} {name!r}; torch {torch.__version__} has no {kind} {name!r}"
        raise UnsupportedError(message, operation="load") from error


def _parse_size(node: Json, what: str) -> object:
    return import_optional("torch").Size(_parse_ints(node, what))


def _parse_numpy(node: Json, what: str) -> object:
    dtype, data = parse_list(node, what, 2)
    return import_optional("numpy").frombuffer(bytes.fromhex(parse_text(data, what)), numpy_dtype(dtype, what))[0]


def numpy_dtype(node: Json, what: str) -> Any:  # numpy may be absent, so its types can't be named
    """The dtype that ``numpy_dtype_name`` wrote as *node*."""
    name = parse_text(node, what)
    if NUMPY_DTYPE.fullmatch(name) is None:
        raise malformed(what)
    return import_optional("numpy").dtype(name)


def import_optional(name: str) -> Any:  # a module
    """Import torch or numpy, wanted by a value of theirs in the file; UnsupportedError where it isn't installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        message = f"the checkpoint holds a value of {name}, which can't be imported here; install it"
        raise UnsupportedError(message, operation="load") from error


DECODERS: dict[str, Callable[[Json, str], object]] = {
    "int": lambda node, what: parse_int({"int": node}, what),
    "float": lambda node, what: _parse_float({"float": node}, what),
    "str": lambda node, what: parse_text({"str": node}, what),
    "complex": lambda node, what: complex(*(_parse_float(item, what) for item in parse_list(node, what, 2))),
    "bytes": _parse_bytes,
    "bytearray": lambda node, what: bytearray(_parse_bytes(node, what)),
    "range": lambda node, what: range(*_parse_ints(node, what, 3)),
    "slice": _parse_slice,
    "date": lambda node, what: date(*_parse_ints(node, what, 3)),
    "datetime": _parse_datetime,
    "time": lambda node, what: time(**_parse_clock(parse_list(node, what, 6), what)),
    "timedelta": lambda node, what: timedelta(*_parse_ints(node, what, 3)),
    "timezone": _parse_zone,
    "Decimal": lambda node, what: decimal.Decimal(parse_text(node, what)),
    "UUID": lambda node, what: uuid.UUID(hex=parse_text(node, what)),
    "Path": lambda node, what: PosixPath(parse_text(node, what)),
    "PurePosixPath": lambda node, what: PurePosixPath(parse_text(node, what)),
    "PureWindowsPath": lambda node, what: PureWindowsPath(parse_text(node, what)),
    "enum": _parse_enum,
    "torch.Size": _parse_size,
    "torch.dtype": lambda node, what: _parse_torch(parse_text(node, what), "dtype"),
    "torch.device": lambda node, what: _parse_torch(parse_text(node, what), "device"),
    "numpy": _parse_numpy,
    "numpy.str": lambda node, what: import_optional("numpy").str_(parse_text(node, what)),
    "numpy.bytes": lambda node, what: import_optional("numpy").bytes_(_parse_bytes(node, what)),
}
"""The decoder of each leaf's tag."""


def decode_leaf(node: Json) -> object:
    """The inverse of ``encode_leaf``.

    Raises:
        CorruptionError: no encoder writes *node*.
        UnsupportedError: the tag is from a newer version, or its class isn't registered, or its package isn't here.
    """
    kind = type(node)
    if node is None or kind is bool or kind is str:
        return node
    if kind is int:
        return parse_int(node, "an integer beyond 2^53")
    if kind is float:
        return _parse_float(node, "a number that isn't finite")
    if type(node) is not dict or len(node) != 1:
        message = "a value that is neither a leaf nor one tag"
        raise malformed(message)
    ((tag, payload),) = node.items()
    decode = DECODERS.get(tag)
    if decode is None:
        message = f"the state holds a value of the kind {tag!r}, which this version doesn't know; use a newer ckptstore"
        raise UnsupportedError(message, operation="load")
    what = f"{tag!r} with an impossible content"
    try:
        value = decode(payload, what)
        # A decoder meets what its encoder wrote, or damage: the second never encodes back to the same.
        if tag == "enum" or encode_leaf(value) == node:
            return value
    except (ArithmeticError, AttributeError, LookupError, RefusedError, RuntimeError, TypeError, ValueError) as error:
        raise malformed(what) from error
    raise malformed(what)


def decode_key(node: Json, nesting: int = MAX_KEY_NESTING) -> Hashable:
    """The inverse of ``encode_key``."""
    if type(node) is list and nesting > 0:
        return tuple(decode_key(part, nesting - 1) for part in node)
    key = decode_leaf(node)
    try:
        hash(key)  # a decimal's signalling NaN refuses too
        if type(key) not in UNHASHABLE:
            return key
    except TypeError:
        pass
    message = f"a key of type {name_of_type(key)}"
    raise malformed(message)
