"""Which bytes make a file of tensors that both we and every reader of safetensors can trust?

A container is 8 bytes of length, a JSON header padded with spaces so that data start on a page of 4 KiB, then the
tensors' bytes in order of falling element size, then name: every tensor is aligned to its elements, and there is no gap
and no trailing byte, which readers refuse. Planning needs names, dtypes and shapes only, so the plan of a state can be
kept between saves and the staging buffer can be the file image itself.

Reading believes nothing: the header's own size, every offset, shape and name are checked against each other and against
the size of the file before anything is allocated.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from ckptstore.errors import ConfigError, CorruptionError
from ckptstore.state.dtypes import CODES, ITEM_BYTES, NAMES_BY_CODE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ckptstore.state.tensors import TensorSpec

__all__ = ["ALIGNMENT", "MAX_HEADER_BYTES", "ContainerPlan", "Entry", "Stored", "plan_containers", "read_header"]

ALIGNMENT = 4096
"""Where data start in a file: a multiple of this, so that they can be written past the page cache."""

MAX_HEADER_BYTES = 100_000_000
"""The most bytes of JSON that readers of safetensors accept."""

_LENGTH_BYTES = 8
_N_OFFSETS = 2  # start and end
_HEAD = '{"__metadata__":{"format":"pt"}'
_RESERVED = re.compile(r"(~\.)*__metadata__")


class Entry(NamedTuple):
    """Where one tensor's bytes lie: ``n_bytes`` from ``start``, counted from the beginning of the file."""

    spec: TensorSpec
    start: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class ContainerPlan:
    """One file to be written.

    Attributes:
        header: The file's first bytes, a multiple of ``ALIGNMENT`` of them. The first entry starts right behind.
        n_bytes: The size of the whole file.
        entries: The tensors in file order, one right behind the other up to the end.
    """

    header: bytes
    n_bytes: int
    entries: tuple[Entry, ...]


class Stored(NamedTuple):
    """What a header says of one tensor; ``start`` is counted from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    n_bytes: int


def plan_containers(specs: Iterable[TensorSpec], *, container_bytes: int = 8 * 2**30) -> tuple[ContainerPlan, ...]:
    """Lay out *specs* in as few files as the limits allow, in one order whatever order they come in; none for no specs.

    Args:
        specs: The tensors, no name twice.
        container_bytes: The most bytes of data in one file; a larger tensor gets a file of its own.

    Raises:
        ConfigError: two specs share a name, or one name is longer than a header may be.
    """
    ordered = sorted(specs, key=lambda spec: (-ITEM_BYTES[spec.dtype], spec.name))
    if len({spec.name for spec in ordered}) != len(ordered):
        message = "two tensors of the state have the same name"
        raise ConfigError(message, operation="save")
    plans: list[ContainerPlan] = []
    entries: list[tuple[TensorSpec, int]] = []
    lines: list[str] = [_HEAD]
    header_bytes, offset = len(_HEAD), 0
    for spec in ordered:
        end = offset + spec.n_bytes
        line = _line(spec, offset, end)
        if entries and (end > container_bytes or _padded(header_bytes + len(line)) > MAX_HEADER_BYTES):
            plans.append(_plan(lines, entries, offset))
            entries, lines = [], [_HEAD]
            header_bytes, offset, end = len(_HEAD), 0, spec.n_bytes
            line = _line(spec, offset, end)
        header_bytes += len(line)
        if _padded(header_bytes) > MAX_HEADER_BYTES:
            message = f"the tensor {spec.name[:200]!r}… has a name too long for the header of a file"
            raise ConfigError(message, operation="save", key=spec.name[:200])
        lines.append(line)
        entries.append((spec, offset))
        offset = end
    if entries:
        plans.append(_plan(lines, entries, offset))
    return tuple(plans)


def _line(spec: TensorSpec, start: int, end: int) -> str:
    code = CODES.get(spec.dtype)
    shape: Sequence[int] = spec.shape
    if code is None:  # no name for it in this format: so many bytes, and the manifest says of what
        code, shape = "U8", (spec.n_bytes,)
    name = encode_basestring_ascii(_header_name(spec.name))
    return f',{name}:{{"dtype":"{code}","shape":[{",".join(map(str, shape))}],"data_offsets":[{start},{end}]}}'


def _padded(n_chars: int) -> int:
    """The bytes of JSON in a header whose text, without its closing brace, has *n_chars* (ASCII) characters."""
    return -(-(n_chars + 1 + _LENGTH_BYTES) // ALIGNMENT) * ALIGNMENT - _LENGTH_BYTES


def _plan(lines: list[str], entries: list[tuple[TensorSpec, int]], n_data_bytes: int) -> ContainerPlan:
    text = "".join(lines).encode("ascii")
    n_bytes = _padded(len(text))
    header = n_bytes.to_bytes(_LENGTH_BYTES, "little") + (text + b"}").ljust(n_bytes)
    base = len(header)
    placed = tuple([Entry(spec, base + offset, spec.n_bytes) for spec, offset in entries])
    return ContainerPlan(header, base + n_data_bytes, placed)


def _header_name(name: str) -> str:
    # The format keeps "__metadata__" for itself. No path begins with "~.", so a tensor of that name can take this one.
    return f"~.{name}" if name.endswith("__metadata__") and _RESERVED.fullmatch(name) else name


def read_header(read: Callable[[int, int], bytes], n_bytes: int) -> dict[str, Stored]:
    """What the container holds, by name, in file order.

    The dtype is that of the format: one it has no code for reads as uint8, and the manifest knows better.

    Args:
        read: Gives the bytes at an offset, so many of them, from the file; its errors pass through.
        n_bytes: The size of the file.

    Raises:
        CorruptionError: not a container, or not this one's size: names the tensor that doesn't fit.
    """
    prefix = read(0, _LENGTH_BYTES) if n_bytes > _LENGTH_BYTES else b""
    n_header_bytes = int.from_bytes(prefix, "little")
    if len(prefix) != _LENGTH_BYTES or n_header_bytes > min(n_bytes - _LENGTH_BYTES, MAX_HEADER_BYTES):
        message = f"a file of {n_bytes} bytes can't have a header of {n_header_bytes} bytes"
        raise _damaged(message)
    text = read(_LENGTH_BYTES, n_header_bytes)
    base = _LENGTH_BYTES + n_header_bytes
    stored: list[tuple[Stored, str]] = []
    for name, value in _parse(text, n_header_bytes).items():
        if name == "__metadata__":
            _check_metadata(value)
        else:
            name = name.removeprefix("~.") if _RESERVED.fullmatch(name) else name  # noqa: PLW2901
            stored.append((_stored(name, value, base), name))
    stored.sort(key=lambda item: (item[0].start, item[0].n_bytes))
    position = base
    for entry, name in stored:
        if entry.start != position:
            message = f"tensor {name!r} starts at byte {entry.start}, where the one before ends at {position}"
            raise _damaged(message, name)
        position += entry.n_bytes
    if position != n_bytes:
        message = f"the file has {n_bytes} bytes, its tensors end at {position}"
        raise _damaged(message)
    return {name: entry for entry, name in stored}


def _parse(text: bytes, n_header_bytes: int) -> dict[str, object]:
    if len(text) != n_header_bytes or text[:1] != b"{":
        message = "the header is cut short or isn't JSON"
        raise _damaged(message)
    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (RecursionError, ValueError) as error:
        message = f"the header isn't strict JSON ({type(error).__name__})"
        raise _damaged(message) from error
    return parsed  # type: ignore[no-any-return]  # it begins with a brace, so an object it is


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        twice = max(Counter(name for name, _ in pairs).items(), key=itemgetter(1))[0]
        message = f"the name {twice!r} stands twice in the header"
        raise _damaged(message, twice)
    return members


def _no_constant(token: str) -> object:
    raise ValueError(token)


def _check_metadata(value: object) -> None:
    if type(value) is not dict or not all(type(text) is str for text in value.values()):
        message = "the header's metadata are more than text"
        raise _damaged(message)


def _stored(name: str, value: object, base: int) -> Stored:
    if type(value) is not dict or value.keys() != {"dtype", "shape", "data_offsets"}:
        message = f"tensor {name!r} has no dtype, shape and data_offsets"
        raise _damaged(message, name)
    code, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    dtype = NAMES_BY_CODE.get(code) if type(code) is str else None
    if dtype is None or not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != _N_OFFSETS:
        message = f"tensor {name!r} has an unknown dtype, or a shape or offsets that aren't sizes"
        raise _damaged(message, name)
    start, end = offsets
    if _n_elements(shape) * ITEM_BYTES[dtype] != end - start:
        message = f"tensor {name!r}: dtype {code} and shape {shape} don't make {end - start} bytes"
        raise _damaged(message, name)
    return Stored(dtype, tuple(shape), base + start, end - start)


def _n_elements(shape: list[int]) -> int:
    n = 0 if 0 in shape else 1
    for size in shape:
        n *= size
        if n > 2**63:  # no file holds them, and hostile shapes would make the product grow without end
            break
    return n


def _are_sizes(value: object) -> bool:
    return type(value) is list and all(type(size) is int and 0 <= size < 2**63 for size in value)


def _damaged(what: str, name: str = "") -> CorruptionError:
    message = f"the container is damaged: {what}"
    return CorruptionError(message, operation="load", key=name)
