"""Classes are stored only if the program said so."""

from __future__ import annotations

import abc
import dataclasses
import enum
import json
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest

from ckptstore.errors import ConfigError, UnstorableError, UnsupportedError
from ckptstore.state.registry import class_of, name_of, register_type
from ckptstore.state.tree import decode, encode


def make_color() -> Any:
    class Color(enum.Enum):
        RED = 1

    return Color


def test_registering_gives_the_class_back_and_a_name_by_default() -> None:
    color = make_color()
    assert register_type(color) is color
    assert name_of(color) == f"{__name__}.make_color.<locals>.Color"
    assert class_of(name_of(color) or "", "enum") is color


def test_a_class_that_was_defined_anew_takes_the_place_of_the_old_one() -> None:
    old, new = register_type(make_color()), register_type(make_color())
    assert decode(encode(new.RED).tree, {}) is new.RED
    with pytest.raises(UnstorableError, match="register the class"):
        encode(old.RED)


def test_a_name_belongs_to_one_class() -> None:
    register_type(make_color(), "colour of cars")

    class Other(enum.Enum):
        A = 1

    with pytest.raises(ConfigError, match=r"the name 'colour of cars' belongs to .*Color; give another name"):
        register_type(Other, "colour of cars")


def test_a_class_under_a_new_name_is_still_read_under_its_old_one() -> None:
    @dataclasses.dataclass
    class Moved:
        x: int

    class Kind(enum.Enum):
        A = 1

    register_type(Moved, "old.Moved")
    register_type(Kind, "old.Kind")
    before = encode([Moved(3), Kind.A]).tree
    register_type(Moved, "new.Moved")
    register_type(Kind, "new.Kind")
    after = encode([Moved(3), Kind.A]).tree
    assert "new.Moved" in json.dumps(after)
    assert decode(before, {}) == decode(after, {}) == [Moved(3), Kind.A]


def test_a_name_is_bound_to_its_kind() -> None:
    register_type(make_color(), "kind test")
    with pytest.raises(UnsupportedError, match="the dataclass 'kind test', which isn't registered here"):
        decode({"dataclass": ["kind test"]}, {})


def test_what_is_more_than_its_parts_is_refused() -> None:
    @dataclasses.dataclass
    class Output(OrderedDict[str, int]):
        x: int = 1

    @dataclasses.dataclass
    class Abstract(abc.ABC):
        @abc.abstractmethod
        def act(self) -> None: ...

    for cls in (Output, Abstract):
        with pytest.raises(ConfigError, match="can't be rebuilt from its fields"):
            register_type(cls)
    for thing in (dict, object, 3, tuple):
        with pytest.raises(ConfigError, match="only enums, dataclasses and named tuples"):
            register_type(thing)  # type: ignore[type-var]


def test_a_subclass_of_a_registered_class_is_not_registered() -> None:
    class Pair(NamedTuple):
        a: int

    class Triple(Pair):
        pass

    register_type(Pair, "test pair")
    with pytest.raises(UnstorableError, match=r"a namedtuple \(.*Triple\)"):
        encode(Triple(1))
