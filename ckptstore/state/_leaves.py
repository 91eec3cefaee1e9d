"""How is a value without parts written in JSON, so that exactly it comes back?

What JSON can say exactly is written as such: None, bool, text, small integers, finite floats. Everything else is an
object with one key, the tag: ``{"complex": [0.0, {"float": "7ff8000000000000"}]}``. An object never stands for a dict,
so no dict can be mistaken for a tag, and no tool that reorders the keys of objects can change what was saved.

Types are compared exactly: a subclass of ``int`` or ``str`` is another type, which may carry more than its base.
torch and numpy are looked up, never imported, on the way in: a value of theirs exists only if they are loaded.
"""

from __future__ import annotations

import base64
import decimal
import math
import re
import struct
import sys
import uuid
from datetime import date, datetime, time, timedelta, timezone
from enum import Enum, Flag
from pathlib import PosixPath, PurePosixPath, PureWindowsPath
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeAlias

from ckptstore.state import registry

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

MAX_PLAIN_INT = 2**53  # beyond it, readers that keep numbers as doubles would round
MAX_KEY_NESTING = 4  # tuples within tuples as a key of a dict

_SURROGATE = re.compile("[\ud800-\udfff]")
NUMPY_DTYPE = re.compile(r"[<>|](?:[biufcSU][0-9]{1,9}|[mM]8(?:\[[0-9A-Za-z]{1,20}\])?)", re.ASCII)


class RefusedError(Exception):
    """This value can't be stored: what it is, and what to do instead. The caller knows where it stands."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what, remedy)
        self.what = what
        self.remedy = remedy


def _int(value: int) -> Json:
    return value if -MAX_PLAIN_INT <= value <= MAX_PLAIN_INT else {"int": hex(value)}


def _float(value: float) -> Json:
    return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}  # every bit of a NaN counts


def _str(value: str) -> Json:
    # Lone surrogates aren't text to a strict JSON reader, and two in a row would come back as one character.
    if value.isascii() or _SURROGATE.search(value) is None:
        return value
    return {"str": value.encode("utf-8", "surrogatepass").hex()}


def _same(value: bool | None) -> Json:
    return value


def _base64(value: bytes | bytearray) -> str:
    return base64.b64encode(value).decode("ascii")


def _slice(value: slice) -> Json:
    parts: list[Json] = []
    for part in (value.start, value.stop, value.step):
        if type(part) not in (int, NoneType):
            what = f"a slice of {name_of_type(part)}"
            remedy = "store a slice of int or None"
            raise RefusedError(what, remedy)
        parts.append(ENCODERS[type(part)](part))
    return {"slice": parts}


def _timedelta_parts(value: timedelta) -> list[Json]:
    return [value.days, value.seconds, value.microseconds]


def _zone(value: object) -> Json:
    if value is None:
        return None
    if type(value) is not timezone:
        what = f"a time in the zone type {name_of_type(value)}"
        remedy = "store it at a fixed offset (value.astimezone(datetime.timezone.utc)), and the zone's name beside it"
        raise RefusedError(what, remedy)
    offset, *name = value.__getinitargs__()  # type: ignore[attr-defined]  # what pickle uses: tells "no name" from a name
    return [*_timedelta_parts(offset), *map(_str, name)]


def _clock(value: datetime | time) -> list[Json]:
    return [value.hour, value.minute, value.second, value.microsecond, value.fold, _zone(value.tzinfo)]


ENCODERS: dict[type, Callable[[Any], Json]] = {
    NoneType: _same,
    bool: _same,
    int: _int,
    float: _float,
    str: _str,
    complex: lambda value: {"complex": [_float(value.real), _float(value.imag)]},
    bytes: lambda value: {"bytes": _base64(value)},
    bytearray: lambda value: {"bytearray": _base64(value)},
    range: lambda value: {"range": [_int(value.start), _int(value.stop), _int(value.step)]},
    slice: _slice,
    date: lambda value: {"date": [value.year, value.month, value.day]},
    datetime: lambda value: {"datetime": [value.year, value.month, value.day, *_clock(value)]},
    time: lambda value: {"time": _clock(value)},
    timedelta: lambda value: {"timedelta": _timedelta_parts(value)},
    timezone: lambda value: {"timezone": _zone(value)},
    decimal.Decimal: lambda value: {"Decimal": str(value)},
    uuid.UUID: lambda value: {"UUID": value.hex},
    PosixPath: lambda value: {"Path": _str(str(value))},
    PurePosixPath: lambda value: {"PurePosixPath": _str(str(value))},
    PureWindowsPath: lambda value: {"PureWindowsPath": _str(str(value))},
}
"""The encoder of each leaf type of the standard library, by exact type."""

UNHASHABLE = frozenset({bytearray, slice})
"""Leaf types that can't be keys. (Later versions of Python hash slices; files must load on all.)"""

NEVER_REFUSED = frozenset({NoneType, bool, int, float, str, complex, bytes})
"""Leaf types whose encoders can't raise: a list of only these needs no key paths."""


def encode_leaf(value: object) -> Json:
    """The JSON of a leaf; a RefusedError for anything else."""
    encode = ENCODERS.get(type(value))
    return encode(value) if encode is not None else _encode_foreign(value)


def encode_key(key: object, nesting: int = MAX_KEY_NESTING) -> Json:
    """The JSON of a key of a dict: a hashable leaf, or a tuple of keys, which is written as a list."""
    if type(key) is tuple and nesting > 0:
        return [encode_key(part, nesting - 1) for part in key]
    if type(key) in UNHASHABLE or type(key) is tuple:
        what = f"a {name_of_type(key)}" + (" nested too deep" if type(key) is tuple else "")
        remedy = "use plain text or numbers as keys"
        raise RefusedError(what, remedy)
    return encode_leaf(key)


def _encode_foreign(value: object) -> Json:
    if isinstance(value, Enum):
        return _enum(value)
    torch = sys.modules.get("torch")
    if torch is not None:
        if isinstance(value, torch.Size):
            return {"torch.Size": [_int(n) for n in value]}
        if type(value) in (torch.dtype, torch.device):
            return {f"torch.{type(value).__name__}": str(value).removeprefix("torch.")}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return _numpy(value)
    what = describe_type(value)
    remedy = "store its plain values instead"
    raise RefusedError(what, remedy)


def _enum(value: Enum) -> Json:
    cls = type(value)
    name = registry.name_of(cls)
    if name is None:
        raise unregistered(value, "enum")
    if cls.__members__.get(value.name) is value:
        return {"enum": [name, value.name]}
    if isinstance(value, Flag):  # a combination has no member of its own
        return {"enum": [name, _int(value.value)]}
    what = f"a member of {name_of_type(value)} that its class does not list"
    remedy = "store its value"
    raise RefusedError(what, remedy)


def _numpy(value: np.generic) -> Json:
    if value.dtype.char == "U":
        return {"numpy.str": _str(str(value))}
    if value.dtype.char == "S":
        return {"numpy.bytes": _base64(bytes(value))}  # type: ignore[call-overload]
    return {"numpy": [numpy_dtype_name(value.dtype), value.tobytes().hex()]}


def numpy_dtype_name(dtype: np.dtype[Any]) -> str:
    """The name of a dtype whose elements are the same bytes on every machine; others are refused."""
    name = str(dtype.str)
    # "g" and "G" are the long doubles, whose bytes differ by machine; what isn't rebuilt from its name (records,
    # objects, dtypes of other packages) is more than its name says.
    if dtype.char in "gG" or NUMPY_DTYPE.fullmatch(name) is None or sys.modules["numpy"].dtype(name) != dtype:
        what = f"a numpy value of dtype {dtype.name}"
        remedy = "store it with a plain dtype: one array per field, numbers of at most 64 bits, text as str"
        raise RefusedError(what, remedy)
    return name


def unregistered(value: object, kind: str) -> RefusedError:
    """The refusal of an instance of a class that could be registered."""
    article = "an" if kind == "enum" else "a"
    short = type(value).__qualname__
    return RefusedError(
        f"{article} {kind} ({name_of_type(value)})",
        f"register the class before saving and before loading: ckptstore.register_type({short})",
    )


def name_of_type(value: object) -> str:
    """The module and qualified name of a value's type: the value itself may hold secrets and stays out of messages."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def describe_type(value: object) -> str:
    """What a value is, for a message that refuses it."""
    for base in type(value).__mro__[1:]:
        if base in ENCODERS:
            return f"a subclass of {base.__name__} ({name_of_type(value)})"
    return f"an object ({name_of_type(value)})"
