"""How is JSON from a store read without trusting it?

Strictly: duplicate keys, NaN and Infinity tokens, numbers that overflow to infinity, integers beyond 2^53 and nesting
deeper than 64 levels are refused, so that two readers can never see two meanings in the same bytes. The standard
library's parser is used because its hooks see duplicate keys; faster ones keep the last silently.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ckptstore.errors import CorruptionError

if TYPE_CHECKING:
    from typing import NoReturn

__all__ = ["MAX_DEPTH", "MAX_INT", "canonical", "compact", "convert", "read_json", "sha256_hex", "sign", "unsign"]

MAX_DEPTH = 64
MAX_INT = 1 << 53

T = TypeVar("T")


def canonical(value: object) -> bytes:
    """Return the one spelling of *value*: UTF-8, sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def compact(value: object) -> bytes:
    """Return JSON without spaces, keys in the order given: for manifests, where the order of a dict is content."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def sha256_hex(body: bytes) -> str:
    """Return ``sha256:`` and the digest in hexadecimal."""
    return "sha256:" + hashlib.sha256(body).hexdigest()


def sign(line: bytes) -> bytes:
    """Return the body of a record file: the line, and a second line with its digest."""
    return line + b"\n" + sha256_hex(line).encode() + b"\n"


def unsign(body: bytes, what: str) -> bytes:
    """Return the line of a record file; CorruptionError unless its digest is right."""
    line, _, rest = body.partition(b"\n")
    if rest != sha256_hex(line).encode() + b"\n":
        message = f"{what}: its bytes do not match its digest line: it is torn or damaged"
        raise CorruptionError(message, key=what)
    return line


def read_json(body: bytes, what: str) -> dict[str, Any]:
    """Parse *body* strictly into a dict.

    Args:
        body: UTF-8 JSON whose top level is an object.
        what: Its address, for messages.

    Raises:
        CorruptionError: it is not such JSON.
    """

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            message = "a key appears twice in one object"
            raise ValueError(message)
        return found

    def integer(text: str) -> int:
        value = int(text)
        if not -MAX_INT <= value <= MAX_INT:
            message = f"the integer {text[:40]} is beyond 2^53"
            raise ValueError(message)
        return value

    def real(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            message = f"the number {text[:40]} is too large"
            raise ValueError(message)
        return value

    def constant(token: str) -> NoReturn:
        message = f"the token {token} is not JSON"
        raise ValueError(message)

    try:
        found = json.loads(
            body.decode("utf-8"),
            object_pairs_hook=pairs,
            parse_int=integer,
            parse_float=real,
            parse_constant=constant,
        )
        _check_depth(found)
    except (ValueError, RecursionError) as error:
        message = f"{what} is not valid: {str(error)[:200]}"
        raise CorruptionError(message, key=what) from error
    if not isinstance(found, dict):
        message = f"{what} is not valid: its top level is not an object"
        raise CorruptionError(message, key=what)
    return found


def convert(value: object, kind: type[T], what: str) -> T:
    """Return *value* as the typed *kind*, or CorruptionError naming the field that does not fit."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, ValueError, TypeError) as error:
        message = f"{what} is not valid: {error}"
        raise CorruptionError(message, key=what) from error


def _check_depth(value: object) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            if isinstance(parent, dict | list)
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    message = f"nested deeper than {MAX_DEPTH} levels"
    raise ValueError(message)
