"""How is a whole state walked once, fast, and refused before anything is written?

Every container writes its children through one table, by exact type; what isn't in the table takes the slow path, which
ends in a refusal with the key path. Paths grow as text on the way down, since a state of 100,000 tensors is walked at
each save. A tensor costs a handful of attribute reads: its address in memory finds its aliases, and only a tensor at an
address seen before is compared in full.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ckptstore.errors import UnstorableError
from ckptstore.state import _arrays, _sparse, paths, registry
from ckptstore.state._leaves import (
    ENCODERS,
    MAX_PLAIN_INT,
    NEVER_REFUSED,
    RefusedError,
    encode_key,
    encode_leaf,
    name_of_type,
)
from ckptstore.state._refusals import refusal
from ckptstore.state.tensors import DTYPE_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ckptstore.state._leaves import Json

Handler: TypeAlias = "Callable[[Any, str, int], Json]"

MAX_LEVEL = 50
"""The deepest JSON level at which a container's list may open. Keys and leaves in it add up to eight, so the tree stays
within 58, and the manifest around it within 64."""

FACTORIES: dict[Any, str | None] = {
    None: None,
    **{factory: factory.__name__ for factory in (bool, dict, float, int, list, set, str, tuple)},
}
"""What a defaultdict may call for a missing key, with its name in the tree."""


_IS_COMPLEX = {dtype: dtype.is_complex for dtype in DTYPE_NAMES}  # only these can be lazy conjugates

_KEYS: dict[str, tuple[str, Json]] = {}
"""Text keys with their path component and JSON: they repeat within a state ("exp_avg") and from save to save."""
_MAX_KEYS = 1 << 18


def _text_key(key: str) -> tuple[str, Json]:
    if len(_KEYS) >= _MAX_KEYS:
        _KEYS.clear()
    known = _KEYS[key] = paths.component(key), encode_key(key)
    return known


class Encoder:
    """One walk over one state, or over several that may share tensors, one after another. Not reusable after an error.

    Attributes:
        tensors: As in ``tree.Encoded``. It keeps alive all whose address was noted, so that no address is used twice.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._at: dict[int, str] = {}  # the name of the first tensor at an address
        self._lazy: dict[str, torch.Tensor] = {}  # what stood where a resolved tensor stands in self.tensors
        self._views: dict[tuple[object, ...], str] = {}  # others at such an address, by all that tells them apart
        self._made: dict[int, tuple[object, Json]] = {}  # by id: arrays, sparse and empty tensors; keeps them alive
        self._open: set[int] = set()  # ids of the containers around the current value
        self._handlers: dict[type, Handler] = {
            torch.Tensor: self._tensor,
            torch.nn.Parameter: self._parameter,
            dict: self._dict,
            OrderedDict: self._ordered_dict,
            list: self._items,
            tuple: self._tuple,
            defaultdict: self._defaultdict,
            Counter: self._counter,
            deque: self._deque,
            set: self._set,
            frozenset: self._set,
            SimpleNamespace: self._namespace,
            Namespace: self._namespace,
            **dict.fromkeys(ENCODERS, self._leaf),
        }
        for kind in NEVER_REFUSED:
            self._handlers[kind] = _without_path(ENCODERS[kind])

    def encode(self, value: object, path: str) -> Json:
        """The JSON of *value*, which stands at *path*."""
        return self._handlers.get(type(value), self._other)(value, path, 1)

    # Containers

    def _enter(self, container: object, path: str, level: int) -> None:
        if id(container) in self._open:
            what = f"a {type(container).__name__} that contains itself"
            raise _refused(path, RefusedError(what, "break the cycle"))
        if level > MAX_LEVEL:
            what = f"a {type(container).__name__} nested this deep (more than {MAX_LEVEL} levels in the manifest)"
            raise _refused(path, RefusedError(what, "flatten the state"))
        self._open.add(id(container))

    def _items(self, value: Iterable[object], path: str, level: int) -> list[Json]:
        self._enter(value, path, level)
        if NEVER_REFUSED.issuperset(map(type, value)):
            items = [ENCODERS[type(item)](item) for item in value]
        else:
            prefix = f"{path}/" if path else ""
            get, other = self._handlers.get, self._other
            items = [get(type(item), other)(item, f"{prefix}{index}", level + 1) for index, item in enumerate(value)]
        self._open.discard(id(value))
        return items

    def _pairs(self, value: Mapping[Any, object], path: str, level: int) -> list[Json]:
        """Keys and values in turn, since the members of a JSON object have no order."""
        self._enter(value, path, level)
        prefix = f"{path}/" if path else ""
        handlers, keys, other = self._handlers, _KEYS, self._other
        pairs: list[Json] = []
        for key, item in value.items():
            if type(key) is str:
                part, node = keys.get(key) or _text_key(key)
            elif type(key) is int and -MAX_PLAIN_INT <= key <= MAX_PLAIN_INT:
                part, node = str(key), key
            else:
                part, node = self._key(key, path)
            pairs.append(node)
            pairs.append(handlers.get(type(item), other)(item, prefix + part, level + 1))
        self._open.discard(id(value))
        return pairs

    def _key(self, key: object, path: str) -> tuple[str, Json]:
        try:
            return paths.component(key), encode_key(key)
        except RefusedError as refused:
            raise _refused(path, RefusedError(f"a dict with {refused.what} among its keys", refused.remedy)) from None

    def _dict(self, value: dict[Any, object], path: str, level: int) -> Json:
        return {"dict": self._pairs(value, path, level + 1)}

    def _ordered_dict(self, value: OrderedDict[Any, object], path: str, level: int) -> Json:
        attributes = vars(value)
        if not attributes:
            return {"OrderedDict": self._pairs(value, path, level + 1)}
        # Module.state_dict() hangs the versions of its modules on the dict, and load_state_dict reads them.
        if attributes.keys() != {"_metadata"}:
            raise _refused(path, _with_attributes(value))
        prefix = f"{path}/" if path else ""
        metadata = attributes["_metadata"]
        handler = self._handlers.get(type(metadata), self._other)
        node = handler(metadata, f"{prefix}~._metadata", level + 2)
        return {"state_dict": [node, *self._pairs(value, path, level + 1)]}

    def _tuple(self, value: tuple[object, ...], path: str, level: int) -> Json:
        return {"tuple": self._items(value, path, level + 1)}

    def _defaultdict(self, value: defaultdict[Any, object], path: str, level: int) -> Json:
        try:
            factory = FACTORIES[value.default_factory]
        except (KeyError, TypeError):
            what = f"a defaultdict whose factory is {refusal(value.default_factory).what}"
            remedy = f"use one of {', '.join(name for name in FACTORIES.values() if name)}, or convert it to a dict"
            raise _refused(path, RefusedError(what, remedy)) from None
        return {"defaultdict": [factory, *self._pairs(value, path, level + 1)]}

    def _counter(self, value: Counter[Any], path: str, level: int) -> Json:
        if vars(value):
            raise _refused(path, _with_attributes(value))
        return {"Counter": self._pairs(value, path, level + 1)}

    def _deque(self, value: deque[object], path: str, level: int) -> Json:
        return {"deque": [encode_leaf(value.maxlen), *self._items(value, path, level + 1)]}

    def _set(self, value: set[object] | frozenset[object], path: str, level: int) -> Json:
        return {type(value).__name__: self._items(value, path, level + 1)}

    def _namespace(self, value: SimpleNamespace | Namespace, path: str, level: int) -> Json:
        return {type(value).__name__: self._pairs(vars(value), path, level + 1)}

    # Leaves and the rest

    def _leaf(self, value: object, path: str, level: int) -> Json:  # noqa: ARG002  # one signature for all handlers
        try:
            return encode_leaf(value)
        except RefusedError as refused:
            raise _refused(path, refused) from None

    def _other(self, value: object, path: str, level: int) -> Json:
        name = registry.name_of(type(value))
        kind = registry.kind_of(type(value))
        if name is not None and kind == "namedtuple":
            return self._named_tuple(value, name, path, level)
        if name is not None and kind == "dataclass":
            return self._dataclass(value, name, path, level)
        if _arrays.is_array(value):
            return self._array(value, path, level)
        try:
            return encode_leaf(value)
        except RefusedError as refused:
            if kind == "enum" or _arrays.is_scalar(value):
                raise _refused(path, refused) from None
            raise _refused(path, refusal(value)) from None

    def _named_tuple(self, value: Any, name: str, path: str, level: int) -> Json:
        if getattr(value, "__dict__", None):
            raise _refused(path, _with_attributes(value))
        if len(value) != len(value._fields):
            what = f"a named tuple ({name_of_type(value)}) of {len(value)} items for {len(value._fields)} fields"
            raise _refused(path, RefusedError(what, "rebuild it with one item per field"))
        fields = dict(zip(value._fields, value, strict=True))
        return {"namedtuple": [name, *self._pairs(fields, path, level + 1)]}

    def _dataclass(self, value: Any, name: str, path: str, level: int) -> Json:
        names = [field.name for field in dataclasses.fields(value)]
        if not getattr(value, "__dict__", {}).keys() <= set(names):
            raise _refused(path, _with_attributes(value))
        self._enter(value, path, level)
        try:
            fields = {name: getattr(value, name) for name in names}
        except AttributeError as error:
            what = f"a dataclass ({name_of_type(value)}) whose field {error.name} was never set"
            raise _refused(path, RefusedError(what, "set every field")) from None
        pairs = self._pairs(fields, path, level + 1)
        self._open.discard(id(value))
        return {"dataclass": [name, *pairs]}

    # Tensors

    def _tensor(self, tensor: torch.Tensor, path: str, level: int) -> Json:
        if tensor.layout is not torch.strided:
            return self._sparse(tensor, path, level)
        return {"tensor+grad" if tensor.requires_grad else "tensor": self._name(tensor, path)}

    def _parameter(self, tensor: torch.Tensor, path: str, level: int) -> Json:
        if tensor.layout is not torch.strided:
            return self._sparse(tensor, path, level)
        return {"parameter+grad" if tensor.requires_grad else "parameter": self._name(tensor, path)}

    def _name(self, tensor: torch.Tensor, path: str) -> str:
        """The name of a dense tensor: that of the first one with the same elements in the same memory, or *path*."""
        is_complex = _IS_COMPLEX.get(tensor.dtype)
        if is_complex is None or tensor.is_nested:
            raise _refused(path, _unlike_memory(tensor))
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # wrapped by a function transform, or the memory was released
            raise _refused(path, _unlike_memory(tensor)) from None
        if not address:
            return self._name_without_memory(tensor, path)
        name = self._at.setdefault(address, path)
        if name is not path:
            name = self._name_of_view(tensor, name, path)
            if name is not path:
                return name
        if tensor.is_neg() or (is_complex and tensor.is_conj()):
            # The memory of a lazy negation or conjugate isn't what it shows.
            self._lazy[path] = tensor
            tensor = tensor.detach().resolve_conj().resolve_neg()
        self.tensors[path] = tensor
        return path

    def _name_of_view(self, tensor: torch.Tensor, first: str, path: str) -> str:
        """The name of a tensor at whose address the one named *first* begins too."""
        key = _view_key(tensor)
        if key == _view_key(self._lazy.get(first, self.tensors[first])):
            return first
        return self._views.setdefault(key, path)

    def _name_without_memory(self, tensor: torch.Tensor, path: str) -> str:
        if tensor.is_meta or tensor.numel() > 0 or max(tensor.shape) > MAX_PLAIN_INT:
            raise _refused(path, _unlike_memory(tensor))
        _, name = self._made.setdefault(id(tensor), (tensor, path))
        if name is path:
            self.tensors[path] = tensor
        return str(name)

    def _sparse(self, tensor: torch.Tensor, path: str, level: int) -> Json:  # noqa: ARG002
        made = self._made.get(id(tensor))
        if made is not None:
            return made[1]
        if tensor.layout not in _sparse.LAYOUT_NAMES:
            raise _refused(path, _unlike_memory(tensor))
        if tensor.is_meta:
            raise _refused(path, _unlike_memory(tensor))
        try:
            layout, parts = _sparse.take_apart(tensor)
        except RefusedError as refused:
            raise _refused(path, refused) from None
        node: Json = {
            "sparse": [
                layout,
                [encode_leaf(size) for size in tensor.shape],
                tensor.is_coalesced() if layout == "coo" else None,
                type(tensor) is torch.nn.Parameter,
                tensor.requires_grad,
                *(self._name(part, f"{path}~.{name}") for name, part in parts.items()),
            ]
        }
        self._made[id(tensor)] = tensor, node
        return node

    def _array(self, array: Any, path: str, level: int) -> Json:  # noqa: ARG002
        made = self._made.get(id(array))
        if made is not None:
            return made[1]
        try:
            dtype, shape, data = _arrays.as_bytes(array)
        except RefusedError as refused:
            raise _refused(path, refused) from None
        node: Json = {"ndarray": [dtype, shape, self._name(data, path)]}
        self._made[id(array)] = array, node
        return node


def _without_path(encode: Callable[[Any], Json]) -> Handler:
    return lambda value, path, level: encode(value)  # noqa: ARG005  # one signature for all handlers


def _view_key(tensor: torch.Tensor) -> tuple[object, ...]:
    """All that decides which elements a tensor shows, in which order."""
    return (
        tensor.data_ptr(),
        tensor.device,
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _unlike_memory(tensor: torch.Tensor) -> RefusedError:
    """The refusal of a tensor whose elements aren't plain numbers in memory."""
    if tensor.is_meta:
        return RefusedError("a meta tensor, which has no data,", "materialise it first (to_empty), or leave it out")
    if tensor.is_nested:
        return RefusedError("a nested tensor", "store the list of its tensors: tensor.unbind()")
    if tensor.layout is torch.strided and not tensor.numel():
        return RefusedError(f"an empty tensor of shape {list(tensor.shape)}", "give it a shape a file can hold")
    if tensor.dtype not in DTYPE_NAMES:
        remedy = (
            "dequantize() it, or store its int_repr() with scale and zero point"
            if tensor.is_quantized
            else "convert it"
        )
        return RefusedError(f"a tensor of dtype {tensor.dtype}", remedy)
    if tensor.layout is not torch.strided:
        return RefusedError(f"a tensor of layout {tensor.layout}", "convert it with to_dense()")
    return RefusedError("a tensor whose memory can't be reached (wrapped by a function transform?)", "store its result")


def _with_attributes(value: object) -> RefusedError:
    what = f"a {type(value).__name__} ({name_of_type(value)}) that carries other attributes"
    return RefusedError(what, "take them off, or store them beside it")


def _refused(path: str, refused: RefusedError) -> UnstorableError:
    where = f'state "{path.partition("/")[0]}": key path {path}: ' if path else "state: "
    message = f"{where}{refused.what} can't be stored; {refused.remedy}"
    return UnstorableError(message, operation="save", key=path)
