"""Which classes of the user's own may be stored, and under what name?

A file names classes, and a name in a file must never decide what gets imported. So the program registers a class,
before it saves and before it loads; a name that no one registered is refused. Only classes whose instances are nothing
but their parts qualify: enums, dataclasses, named tuples.
"""

from __future__ import annotations

import dataclasses
import enum
import threading
from typing import Literal, TypeAlias, TypeVar

from ckptstore.errors import ConfigError, UnsupportedError

__all__ = ["Kind", "class_of", "kind_of", "name_of", "register_type"]

Kind: TypeAlias = Literal["enum", "dataclass", "namedtuple"]
_Class = TypeVar("_Class", bound=type)

_lock = threading.Lock()
_names: dict[type, str] = {}
_classes: dict[str, type] = {}


def register_type(cls: _Class, name: str | None = None) -> _Class:
    """Let instances of *cls* be stored and loaded, under *name*; returns *cls*, so it serves as a decorator.

    A dataclass comes back field by field, without ``__init__`` or ``__post_init__``, a named tuple item by item, an
    enum member by its name. Subclasses aren't included. Registering again is harmless: under another name, to write
    that one and read both; a class defined anew under the same module and name (a notebook cell run twice) takes the
    place of the old one. Any thread.

    Args:
        cls: An enum, a dataclass or a named tuple.
        name: What the file calls it; module and qualified name if not given. Give one that outlives a move of the code.

    Raises:
        ConfigError: the class is none of these, or the name belongs to another class.
    """
    if not isinstance(cls, type) or kind_of(cls) is None:
        message = (
            f"register_type: {cls!r} isn't a class that can be registered: only enums, dataclasses and named tuples are"
        )
        raise ConfigError(message, operation="register_type")
    if kind_of(cls) == "dataclass" and not _is_plain(cls):
        message = (
            f"register_type({_address(cls)}): a dataclass that is also a built-in type (dict, list, …), or abstract, "
            "can't be rebuilt from its fields; store a plain dict of what matters"
        )
        raise ConfigError(message, operation="register_type")
    name = _address(cls) if name is None else name
    with _lock:
        holder = _classes.get(name)
        if holder is not None and _address(holder) != _address(cls):
            message = (
                f"register_type({_address(cls)}): the name {name!r} belongs to {_address(holder)}; give another name"
            )
            raise ConfigError(message, operation="register_type")
        if holder is not None:
            _names.pop(holder, None)
        _names[cls] = name  # a class that had another name is written under this one, and read under both
        _classes[name] = cls
    return cls


def kind_of(cls: type) -> Kind | None:
    """How instances of *cls* would be stored if it were registered; None when they can't be."""
    if issubclass(cls, enum.Enum):
        return "enum"
    if dataclasses.is_dataclass(cls):
        return "dataclass"
    if issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple):
        return "namedtuple"
    return None


def name_of(cls: type) -> str | None:
    """The name *cls* is registered under, or None."""
    return _names.get(cls)


def class_of(name: str, kind: Kind) -> type:
    """The class registered under *name*.

    Raises:
        UnsupportedError: no class, or one of another kind, is registered under this name.
    """
    cls = _classes.get(name)
    if cls is None or kind_of(cls) != kind:
        message = (
            f"the checkpoint holds a value of the {kind} {name[:200]!r}, which isn't registered here; "
            f"call ckptstore.register_type(<the class>, {name[:200]!r}) before loading"
        )
        raise UnsupportedError(message, operation="load")
    return cls


def _address(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _is_plain(cls: type) -> bool:
    try:
        object.__new__(cls)
    except TypeError:
        return False
    return True
