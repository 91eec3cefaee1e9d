"""Encoding a state and decoding it gives the same state, bit for bit."""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import decimal
import enum
import json
import math
import pathlib
import struct
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import CorruptionError, UnstorableError, UnsupportedError
from ckptstore.state.registry import register_type
from ckptstore.state.tensors import DTYPES
from ckptstore.state.tree import MAX_DEPTH, Encoder, decode, encode, entries
from tests.unit.state.same import assert_same, through_bytes

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")  # torch's own notices, once per process


@register_type
class Color(enum.Enum):
    RED = 1
    CRIMSON = 1  # noqa: PIE796  # an alias
    BLUE = "blue"


@register_type
class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@register_type
class Access(enum.Flag):
    READ = 1
    WRITE = 2


@register_type
@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    name: str
    sizes: list[int]
    weight: torch.Tensor | None = None
    derived: int = dataclasses.field(default=0, init=False)


@register_type
class Point(NamedTuple):
    x: Any
    y: Any


def nan(bits: str) -> float:
    return float(struct.unpack(">d", bytes.fromhex(bits))[0])


LEAVES = [
    None,
    True,
    False,
    0,
    1,
    -(2**53),
    2**53 + 1,
    -(10**50),
    0.0,
    -0.0,
    1e22,
    5e-324,
    math.inf,
    -math.inf,
    math.nan,
    nan("7ff8000000000001"),
    nan("7ff0000000000001"),
    nan("fff8000000000000"),
    complex(-0.0, math.inf),
    "",
    "~dict",
    "dict",
    "\ud800",
    "\ud83d\ude00",
    "😀\x00",
    b"",
    b"\x00\xff",
    bytearray(b"ab"),
    range(0, 2**70, 3),
    slice(None, 2**60, -1),
    dt.date(1, 1, 1),
    dt.datetime(2024, 10, 27, 2, 30, 0, 999999, fold=1),  # noqa: DTZ001
    dt.datetime(2024, 1, 1, tzinfo=dt.UTC),
    dt.datetime(2024, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=-5, seconds=1), "EST")),
    dt.time(23, 59, 59, 1, dt.timezone(dt.timedelta(minutes=90)), fold=1),
    dt.timedelta(days=-1, microseconds=1),
    dt.timezone(dt.timedelta(0), "Z"),
    dt.UTC,
    decimal.Decimal("1.10"),
    decimal.Decimal("-0E+999999"),
    decimal.Decimal("sNaN123"),
    decimal.Decimal("-Infinity"),
    uuid.UUID(int=2**127 + 1),
    pathlib.Path("a/../b"),
    pathlib.Path("/tmp/\udcff"),
    pathlib.PurePosixPath("."),
    pathlib.PureWindowsPath(r"C:\a\b"),
    torch.Size([2, 0, 2**40]),
    torch.Size([]),
    torch.bfloat16,
    torch.quint8,
    torch.device("cpu"),
    torch.device("cuda", 7),
    np.float32(math.nan),
    np.float64(-0.0),
    np.int8(-1),
    np.uint64(2**64 - 1),
    np.bool_(True),
    np.complex64(1j),
    np.float16(65504),
    np.str_("a\ud800"),
    np.bytes_(b"a\xff"),
    np.datetime64("2024-01-01T00:00:00.123456789"),
    np.datetime64("NaT"),
    np.timedelta64(3, ("s", 25)),
    Color.RED,
    Color.BLUE,
    Level.HIGH,
    Access.READ | Access.WRITE,
    Access(0),
]


@pytest.mark.parametrize("leaf", LEAVES, ids=[f"{type(leaf).__name__}-{n}" for n, leaf in enumerate(LEAVES)])
def test_every_leaf_comes_back_alone_in_a_list_and_where_it_can_as_a_key(leaf: Any) -> None:
    assert_same(through_bytes(leaf), leaf)
    assert_same(through_bytes([leaf, (leaf,)]), [leaf, (leaf,)])
    try:
        hash(leaf)
    except TypeError:
        return
    assert_same(through_bytes({leaf: 1, (leaf, "x"): 2}), {leaf: 1, (leaf, "x"): 2})
    assert_same(through_bytes({leaf}), {leaf})


def test_sizes_beyond_the_integers_of_json_come_back() -> None:
    wide = torch.sparse_coo_tensor(torch.tensor([[2**60]]), torch.ones(1), (2**61,), check_invariants=True)
    state = [deque([1], maxlen=2**63 - 1), np.empty((0, 2**54), np.uint8), wide]
    assert_same(through_bytes(state), state)


def test_an_integer_of_any_length_comes_back() -> None:
    assert through_bytes([10**5000, {-(10**5000): 1}]) == [10**5000, {-(10**5000): 1}]


simple = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(alphabet=st.characters(blacklist_categories=[]), max_size=5),
    st.binary(max_size=5),
    st.sampled_from(
        [leaf for leaf in LEAVES if type(leaf).__hash__ is not None and not isinstance(leaf, slice | decimal.Decimal)]
    ),
)
hashables = st.recursive(
    simple, lambda inner: st.tuples(inner, inner) | st.frozensets(simple, max_size=2), max_leaves=3
)
keys = st.one_of(simple, st.tuples(simple, st.tuples(simple)))


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    n_bytes = math.prod(shape) * dtype.itemsize
    data = bytearray(draw(st.binary(min_size=n_bytes, max_size=n_bytes)))
    if not n_bytes:
        return torch.empty(0, dtype=torch.uint8).view(dtype).reshape(shape)
    if dtype is torch.bool:
        data = bytearray(byte % 2 for byte in data)
    return torch.frombuffer(data, dtype=torch.uint8).clone().view(dtype).reshape(shape)


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    dtype = np.dtype(
        draw(st.sampled_from(["?", "i1", "<i4", ">u8", "f2", ">f8", "c16", "M8[us]", "m8", "U3", ">U2", "S2", "U0"]))
    )
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    data = draw(st.binary(min_size=math.prod(shape) * dtype.itemsize, max_size=math.prod(shape) * dtype.itemsize))
    if dtype.kind == "U" or not dtype.itemsize:
        return np.zeros(shape, dtype)
    return np.frombuffer(data, dtype).reshape(shape)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    items = st.lists(inner, max_size=3)
    dicts = st.dictionaries(keys, inner, max_size=3)
    return st.one_of(
        items,
        items.map(tuple),
        items.map(deque),
        items.map(lambda found: deque(found, maxlen=len(found) + 1)),
        dicts,
        dicts.map(OrderedDict),
        dicts.map(lambda found: defaultdict(list, found)),
        dicts.map(lambda found: defaultdict(None, found)),
        st.dictionaries(keys, st.integers(), max_size=3).map(Counter),
        st.sets(hashables, max_size=3),
        st.frozensets(hashables, max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=3).map(lambda found: types.SimpleNamespace(**found)),
        st.dictionaries(st.text(max_size=3), inner, max_size=3).map(lambda found: argparse.Namespace(**found)),
        st.builds(Point, inner, inner),
    )


states = st.recursive(
    st.one_of(simple, st.sampled_from(LEAVES), st.floats(), tensors(), arrays()),
    containers,
    max_leaves=12,
)


def depth(node: Any) -> int:
    assert node is None or type(node) in (bool, int, float, str, list, dict)
    if type(node) is int:
        assert abs(node) <= 2**53
    if isinstance(node, dict):
        assert len(node) == 1  # so the order of members can't matter
        return 1 + max(map(depth, node.values()))
    return 1 + max(map(depth, node), default=0) if isinstance(node, list) else 0


@settings(max_examples=300)
@given(states)
def test_any_state_comes_back_exactly_through_json_and_container_files(state: Any) -> None:
    assert_same(through_bytes(state), state)


@settings(max_examples=100)
@given(states)
def test_the_tree_is_strict_ascii_json_of_bounded_depth_without_large_integers(state: Any) -> None:
    tree = encode(state, ("state",)).tree

    assert depth(tree) <= MAX_DEPTH
    text = json.dumps(tree, allow_nan=False, sort_keys=True)
    assert text.isascii()
    assert json.loads(text) == tree
    text.encode().decode("utf-8")


def _is_storable(state: Any) -> bool:
    try:
        encode(state)
    except UnstorableError:
        return False
    return True


def test_deep_nesting_is_stored_up_to_a_bound_and_refused_beyond() -> None:
    def nested(levels: int, leaf: Any) -> Any:
        for _ in range(levels):
            leaf = {"a": leaf}
        return leaf

    key = ((((dt.time(1, tzinfo=dt.timezone(dt.timedelta(0), "\ud800")),),),),)
    accepted = [n for n in range(1, 40) if _is_storable(nested(n, {key: torch.ones(1, 1).to_sparse()}))]
    assert accepted == list(range(1, 25))
    deepest = nested(24, {key: torch.ones(1, 1).to_sparse()})
    assert_same(through_bytes(deepest), deepest)
    assert depth(encode(deepest).tree) == 58  # leaves six levels of 64 to the manifest around it
    with pytest.raises(UnstorableError, match=r"key path state/a/.*nested this deep"):
        encode(nested(40, 1), ("state",))


class TestClasses:
    def test_a_dataclass_comes_back_field_by_field_without_running_its_init(self) -> None:
        value = Config("a", [1], torch.ones(2))
        object.__setattr__(value, "derived", 7)
        back = through_bytes({"config": value})["config"]
        assert (back.name, back.sizes, back.derived) == ("a", [1], 7)
        assert_same(back.weight, value.weight)

    def test_a_dataclass_of_a_file_with_other_fields_is_refused_by_name(self) -> None:
        tree = encode(Config("a", [1])).tree
        text = json.dumps(tree).replace('"sizes"', '"shapes"')
        with pytest.raises(UnsupportedError, match=r"Config has the fields name, shapes, weight, derived, the class"):
            decode(json.loads(text), {})

    def test_a_namedtuple_comes_back_as_its_class(self) -> None:
        assert_same(through_bytes(Point(1, [Point(torch.ones(1), 2)])), Point(1, [Point(torch.ones(1), 2)]))

    def test_an_unregistered_class_is_refused_and_the_message_says_how_to_register(self) -> None:
        class Mode(enum.Enum):
            A = 1

        @dataclasses.dataclass
        class Plain:
            x: int = 1

        pair = namedtuple("pair", "a b")  # noqa: PYI024
        for value, kind in ((Mode.A, "an enum"), (Plain(), "a dataclass"), (pair(1, 2), "a namedtuple")):
            with pytest.raises(
                UnstorableError, match=rf'state "s": key path s/0: {kind} \(.*register_type\([\w.<>]+\)'
            ):
                encode([value], ("s",))

    def test_a_class_of_a_file_that_is_not_registered_here_is_named_and_never_imported(self) -> None:
        for tag in ("enum", "dataclass", "namedtuple"):
            with pytest.raises(UnsupportedError, match=r"'os\.system', which isn't registered"):
                decode({tag: ["os.system", "x"]}, {})

    def test_attributes_beside_the_content_are_refused_not_lost(self) -> None:
        @register_type
        @dataclasses.dataclass
        class Loose:
            x: int

        loose = Loose(1)
        loose.extra = 2  # type: ignore[attr-defined]
        counter: Any = Counter("a")
        counter.note = 1
        ordered: Any = OrderedDict(a=1)
        ordered.note = 1
        unset = Loose(1)
        del unset.x
        for value in (loose, counter, ordered, unset):
            with pytest.raises(UnstorableError, match="key path s: "):
                encode(value, ("s",))


class TestTensors:
    def test_tied_tensors_are_stored_once_and_are_one_object_again(self) -> None:
        weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
        plain = torch.ones(3)
        state = {"a": weight, "b": [weight, plain], "c": plain.view(3), "d": weight.detach(), "e": plain.clone()}
        encoded = encode(state)
        assert list(encoded.tensors) == ["a", "b/1", "e"]
        back = through_bytes(state)
        assert back["a"] is back["b"][0]
        assert back["b"][1] is back["c"]
        assert back["d"].data_ptr() == back["a"].data_ptr()
        assert not back["d"].requires_grad
        back["a"].data.fill_(5)
        assert back["d"].eq(5).all()

    def test_tensors_at_one_address_that_differ_in_size_stride_or_dtype_are_not_tied(self) -> None:
        base = torch.arange(4.0).reshape(2, 2)
        state = {
            "base": base,
            "row": base[0],
            "transposed": base.t(),
            "bits": base.view(torch.int32),
            "neg": torch._neg_view(base),
            "again": base.t(),
            "flat": base.view(4),
            "also_flat": base.reshape(4),
        }
        encoded = encode(state)
        assert list(encoded.tensors) == ["base", "row", "transposed", "bits", "neg", "flat"]
        back = through_bytes(state)
        for name, tensor in state.items():
            assert_same(tensor, back[name])
        assert back["again"] is back["transposed"]

    def test_lazily_conjugated_and_negated_tensors_come_back_as_what_they_show(self) -> None:
        base = torch.tensor([1 + 2j, -3 - 4j])
        state = {"conj": base.conj(), "base": base, "neg": base.conj().imag, "conj_again": base.conj()}
        assert state["neg"].is_neg()
        back = through_bytes(state)
        for name, tensor in state.items():
            assert back[name].tolist() == tensor.tolist()
        assert back["conj"] is back["conj_again"]
        assert not back["conj"].is_conj()

    def test_empty_tensors_are_tied_only_if_they_are_one_object(self) -> None:
        one, other = torch.empty(0, 3), torch.empty(0, 3)
        back = through_bytes([one, other, one, torch.ones(4)[2:2]])
        assert back[0] is back[2]
        assert back[0] is not back[1]
        assert_same(back, [one, other, one, torch.empty(0)])

    def test_parameters_stay_parameters_and_gradient_flags_stay(self) -> None:
        weight = torch.ones(2)
        state = [
            torch.nn.Parameter(torch.ones(2)),
            torch.nn.Parameter(torch.ones(2), requires_grad=False),
            torch.ones(2, requires_grad=True),
            weight,
            torch.nn.Parameter(torch.ones(1, dtype=torch.int8), requires_grad=False),
            torch.ones(2, requires_grad=True) * 2,
            torch.nn.Buffer(torch.ones(1)),
        ]
        back = through_bytes(state)
        assert_same(back, state)
        assert all(tensor.is_leaf for tensor in back)

    def test_live_tensors_are_referenced_not_copied(self) -> None:
        weight, array = torch.ones(3), np.ones(3)
        encoded = encode({"w": weight, "a": array})
        assert encoded.tensors["w"] is weight
        array[0] = 7
        assert encoded.tensors["a"].view(torch.float64)[0] == 7

    def test_a_state_dict_keeps_the_versions_of_its_modules(self) -> None:
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2))
        state = model.state_dict()
        back = through_bytes(state)
        assert_same(back, state)
        assert back._metadata["0"] == {"version": 2}

    def test_names_begin_with_the_keys_given(self) -> None:
        assert list(encode({"w": torch.ones(1), 0: {"0": torch.ones(1)}}, ("model", 3)).tensors) == [
            "model/3/w",
            "model/3/0/~s0",
        ]
        assert list(encode(torch.ones(1)).tensors) == [""]

    def test_the_whole_training_state_of_a_model_comes_back(self) -> None:
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        assert_same(through_bytes(state), state)

    def test_states_encoded_one_after_another_share_their_tensors(self) -> None:
        weight = torch.nn.Parameter(torch.ones(2))
        array = np.ones(3)[::2]
        encoder = Encoder()
        trees = [encoder.encode({"w": weight.detach(), "a": array}, name) for name in ("model", "ema")]
        assert list(encoder.tensors) == ["model/w", "model/a"]
        back: list[Any] = [decode(tree, encoder.tensors) for tree in trees]
        assert back[0]["w"] is back[1]["w"]

    def test_a_mapping_that_reads_on_demand_is_asked_once_and_its_errors_pass(self) -> None:
        weight = torch.ones(1)
        tree = encode([weight, weight]).tree
        asked = []

        class Reading(dict[str, torch.Tensor]):
            def __getitem__(self, name: str) -> torch.Tensor:
                asked.append(name)
                return super().__getitem__(name).clone()

        back: Any = decode(tree, Reading({"0": weight}))
        assert back[0] is back[1]
        assert asked == ["0"]
        with pytest.raises(CorruptionError, match="'0', which the checkpoint doesn't list"):
            decode(tree, {})

    def test_meta_tensors_show_the_form_of_a_state_before_anything_is_read(self) -> None:
        state = {
            "w": torch.nn.Parameter(torch.ones(2)),
            "a": np.ones((2, 3)),
            "s": torch.eye(2).to_sparse_csr(),
            "c": torch.eye(2).to_sparse(),
        }
        encoded = encode(state)
        meta = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in encoded.tensors.items()}
        form: Any = decode(encoded.tree, meta)
        assert form["w"].is_meta
        assert form["a"].shape == (2, 3)
        assert form["s"].layout is torch.sparse_csr
        assert form["c"].shape == (2, 2)


class TestArrays:
    def test_arrays_that_share_memory_are_one_array_again(self) -> None:
        array = np.arange(6).reshape(2, 3)
        odd = array[:, ::2]
        back = through_bytes([array, array, odd, odd, array.view(np.uint64)])
        assert back[0] is back[1]
        assert back[2] is back[3]
        assert_same(back, [array, array, odd, odd, array.view(np.uint64)])

    def test_a_restored_array_can_be_written_to(self) -> None:
        back = through_bytes(np.arange(3))
        back[0] = 5
        assert back.tolist() == [5, 1, 2]

    def test_a_read_only_or_fortran_array_keeps_its_elements(self) -> None:
        array = np.asfortranarray(np.arange(6.0).reshape(2, 3))
        array.flags.writeable = False
        assert_same(through_bytes(array), array)


def test_entries_give_each_state_its_own_tree() -> None:
    weight = torch.ones(1)
    encoded = encode({"model": {"w": weight}, "step": 3})
    found = entries(encoded.tree)
    assert list(found) == ["model", "step"]
    assert_same(decode(found["model"], encoded.tensors), {"w": weight})
    trees: list[Any] = [None, [], {"list": []}, {"dict": [1]}, {"dict": None}]
    for tree in trees:
        with pytest.raises(CorruptionError):
            entries(tree)
