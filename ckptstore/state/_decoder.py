"""How does a state come back from its tree, with nothing believed that was not checked?

Each tag has one decoder, which checks the form of its content before it uses it. The tree decides neither what is
imported (classes come from the registry), nor how deep the stack grows, nor how much memory is asked for. Ties come
back because one name under one tag is decoded once and shared.
"""

from __future__ import annotations

import dataclasses
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from ckptstore.errors import CorruptionError, UnsupportedError
from ckptstore.state import _arrays, _sparse, registry
from ckptstore.state._encoder import FACTORIES
from ckptstore.state._leaf_decoders import decode_key, decode_leaf, malformed, parse_int, parse_list, parse_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping

    from ckptstore.state._leaves import Json

MAX_DEPTH = 64
_FACTORIES: dict[object, Any] = {name: factory for factory, name in FACTORIES.items()}


class Decoder:
    """One walk over one tree."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._read: dict[str, torch.Tensor] = {}  # the mapping may read anew each time, and ties must be one object
        self._made: dict[tuple[object, ...], object] = {}  # by tag and content: what must be one object again
        self._decoders: dict[str, Callable[[Json, int], object]] = {
            "tensor": lambda node, _: self._tensor(node),
            "tensor+grad": lambda node, _: self._once("tensor+grad", node),
            "parameter": lambda node, _: self._once("parameter", node),
            "parameter+grad": lambda node, _: self._once("parameter+grad", node),
            "sparse": lambda node, _: self._sparse(node),
            "ndarray": lambda node, _: self._array(node),
            "dict": lambda node, level: self._fill({}, _list(node), level),
            "OrderedDict": lambda node, level: self._fill(OrderedDict(), _list(node), level),
            "Counter": lambda node, level: self._fill(Counter(), _list(node), level),
            "state_dict": self._state_dict,
            "defaultdict": self._defaultdict,
            "tuple": lambda node, level: tuple(self._items(_list(node), level)),
            "deque": self._deque,
            "set": lambda node, level: self._set(set, node, level),
            "frozenset": lambda node, level: self._set(frozenset, node, level),
            "SimpleNamespace": lambda node, level: self._namespace(SimpleNamespace(), node, level),
            "Namespace": lambda node, level: self._namespace(Namespace(), node, level),
            "dataclass": self._dataclass,
            "namedtuple": self._named_tuple,
        }

    def decode(self, node: Json, level: int = 1) -> object:
        """The value that was written as *node*, which stands at JSON level *level*."""
        kind = type(node)
        if kind is str or node is None or kind is bool:
            return node
        if (kind is dict or kind is list) and level > MAX_DEPTH:
            message = f"it is nested deeper than {MAX_DEPTH} levels"
            raise malformed(message)
        if type(node) is list:
            return self._items(node, level)
        if type(node) is dict and len(node) == 1:
            ((tag, content),) = node.items()
            decoder = self._decoders.get(tag)
            if decoder is not None:
                return decoder(content, level + 1)
        return decode_leaf(node)

    # Containers

    def _items(self, nodes: list[Json], level: int) -> list[object]:
        return [self.decode(node, level + 1) for node in nodes]

    def _fill(self, target: MutableMapping[Any, Any], pairs: list[Json], level: int) -> object:
        if len(pairs) % 2:
            message = "a key without a value"
            raise malformed(message)
        nodes = iter(pairs)
        for key in nodes:
            target[key if type(key) is str else decode_key(key)] = self.decode(next(nodes), level + 1)
        if 2 * len(target) != len(pairs):
            message = "a key that stands twice in one dict"
            raise malformed(message)
        return target

    def _state_dict(self, node: Json, level: int) -> object:
        metadata, pairs = _head(node)
        target: Any = OrderedDict()
        target._metadata = self.decode(metadata, level + 1)  # noqa: SLF001  # where Module.state_dict() keeps it
        return self._fill(target, pairs, level)

    def _defaultdict(self, node: Json, level: int) -> object:
        factory, pairs = _head(node)
        if (type(factory) is not str and factory is not None) or factory not in _FACTORIES:
            message = f"a defaultdict whose factory is {factory!r}"
            raise malformed(message)
        return self._fill(defaultdict(_FACTORIES[factory]), pairs, level)

    def _deque(self, node: Json, level: int) -> object:
        maxlen, nodes = _head(node)
        what = "a deque with an impossible maxlen"
        limit = None if maxlen is None else parse_int(maxlen, what)
        if limit is not None and not len(nodes) <= limit <= sys.maxsize:
            raise malformed(what)
        return deque(self._items(nodes, level), limit)

    def _set(self, kind: type[set[Any] | frozenset[Any]], node: Json, level: int) -> object:
        items = self._items(_list(node), level)
        try:
            value = kind(items)
        except TypeError as error:
            message = "a set of what can't be in one"
            raise malformed(message) from error
        if len(value) != len(items):
            message = "an item that stands twice in one set"
            raise malformed(message)
        return value

    def _namespace(self, target: SimpleNamespace | Namespace, node: Json, level: int) -> object:
        self._fill(vars(target), _list(node), level)
        return target

    def _fields(self, cls: type, names: tuple[str, ...], pairs: list[Json], level: int) -> dict[str, object]:
        fields: dict[str, object] = {}
        self._fill(fields, pairs, level)
        if tuple(fields) != names:
            message = (
                f"the checkpoint's {cls.__module__}.{cls.__qualname__} has the fields {', '.join(map(str, fields))}, "
                f"the class registered here has {', '.join(names)}; register a class with the saved fields"
            )
            raise UnsupportedError(message, operation="load")
        return fields

    def _dataclass(self, node: Json, level: int) -> object:
        name, pairs = _head(node)
        cls: Any = registry.class_of(parse_text(name, "a dataclass without a name"), "dataclass")
        fields = self._fields(cls, tuple(field.name for field in dataclasses.fields(cls)), pairs, level)
        value = object.__new__(cls)
        for key, item in fields.items():
            object.__setattr__(value, key, item)  # past __init__ and a frozen class's guard: the fields as they were
        return value

    def _named_tuple(self, node: Json, level: int) -> object:
        name, pairs = _head(node)
        cls: Any = registry.class_of(parse_text(name, "a named tuple without a name"), "namedtuple")
        return tuple.__new__(cls, self._fields(cls, cls._fields, pairs, level).values())

    # Tensors

    def _tensor(self, node: Json) -> torch.Tensor:
        if type(node) is not str:
            message = "a tensor without a name"
            raise malformed(message)
        tensor = self._read.get(node)
        if tensor is None:
            if node not in self._tensors:
                message = f"the state refers to the tensor {node!r}, which the checkpoint doesn't list"
                raise CorruptionError(message, operation="load", key=node)
            tensor = self._read[node] = self._tensors[node]
        return tensor

    def _once(self, tag: str, node: Json) -> object:
        value = self._made.get((tag, node)) if type(node) is str else None
        if value is None:
            tensor = self._tensor(node)
            value = self._made[tag, node] = _with_grad(tensor.detach(), tag, key=str(node))
        return value

    def _sparse(self, node: Json) -> object:
        what = "'sparse' with an impossible content"
        nodes = parse_list(node, what)
        layout = nodes[0] if nodes else None
        if type(layout) is not str or layout not in _sparse.PARTS or len(nodes) != 5 + len(_sparse.PARTS[layout]):
            raise malformed(what)
        _, shape_node, coalesced, is_parameter, requires_grad, *names = nodes
        shape = tuple(parse_int(n, what) for n in parse_list(shape_node, what))
        if type(is_parameter) is not bool or type(requires_grad) is not bool:
            raise malformed(what)
        if type(coalesced) is not (bool if layout == "coo" else type(None)):
            raise malformed(what)
        parts = {part: self._tensor(name) for part, name in zip(_sparse.PARTS[layout], names, strict=True)}
        content = (layout, shape, coalesced, is_parameter, requires_grad, *names)
        value = self._made.get(content)
        if value is None:
            tensor = _sparse_tensor(layout, parts, shape, coalesced=coalesced is True if layout == "coo" else None)
            tag = "parameter" if is_parameter else "tensor"
            plain = not is_parameter and not requires_grad
            value = tensor if plain else _with_grad(tensor, tag + ("+grad" if requires_grad else ""), key=str(names[0]))
            self._made[content] = value
        return value

    def _array(self, node: Json) -> object:
        dtype, shape, name = parse_list(node, "'ndarray' with an impossible content", 3)
        data = self._tensor(name)
        content = ("ndarray", dtype if type(dtype) is str else None, repr(shape), name)
        value = self._made.get(content)
        if value is None:
            value = self._made[content] = _arrays.from_bytes(dtype, shape, data)
        return value


def _list(node: Json) -> list[Json]:
    return parse_list(node, "a container that isn't a list")


def _head(node: Json) -> tuple[Json, list[Json]]:
    nodes = _list(node)
    if not nodes:
        message = "a container without its first item"
        raise malformed(message)
    return nodes[0], nodes[1:]


def _with_grad(tensor: torch.Tensor, tag: str, *, key: str) -> torch.Tensor:
    """*tensor* as the plain tensor or Parameter that *tag* names, over the same memory."""
    requires_grad = tag.endswith("+grad")
    if requires_grad and not (tensor.is_floating_point() or tensor.is_complex()):
        message = f"tensor {key}: the tree gives it a gradient, which dtype {tensor.dtype} can't have"
        raise CorruptionError(message, operation="load", key=key)
    if tag.startswith("parameter"):
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)


def _sparse_tensor(
    layout: str, parts: dict[str, torch.Tensor], shape: tuple[int, ...], *, coalesced: bool | None
) -> torch.Tensor:
    try:
        return _sparse.put_together(layout, parts, shape, coalesced=coalesced)
    except (RuntimeError, TypeError, ValueError) as error:
        message = f"the parts of a sparse {layout} tensor don't fit together: {str(error).partition(chr(10))[0]}"
        raise malformed(message) from error
