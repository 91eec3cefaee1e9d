"""A container is a safetensors file in every reader's eyes, and ours believes nothing in it unchecked."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from ckptstore.errors import CkptStoreError, ConfigError, CorruptionError
from ckptstore.state import container
from ckptstore.state.container import ALIGNMENT, ContainerPlan, plan_containers, read_header
from ckptstore.state.dtypes import CODES, ITEM_BYTES
from ckptstore.state.tensors import DTYPES, TensorSpec, byte_view, memory, spec_of
from tests.unit.state.same import assert_same_tensor, images, reader

if TYPE_CHECKING:
    import random

DTYPES_AND_SHAPES = st.tuples(st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(0, 4), max_size=3).map(tuple))


def make_specs(parts: dict[str, tuple[str, tuple[int, ...]]]) -> list[TensorSpec]:
    return [
        TensorSpec(name, dtype, shape, math.prod(shape) * ITEM_BYTES[dtype]) for name, (dtype, shape) in parts.items()
    ]


def open_image(image: bytes | bytearray, tmp_path: Any) -> dict[str, torch.Tensor]:
    path = tmp_path / "x.safetensors"
    path.write_bytes(image)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_safetensors_sees_every_dtype_as_itself_or_as_its_bytes(dtype: str, tmp_path: Any) -> None:
    raw = torch.arange(6 * ITEM_BYTES[dtype], dtype=torch.uint8)
    tensor = (raw % 2 if dtype == "bool" else raw).view(DTYPES[dtype]).reshape(2, 3)
    tensors = {"t": tensor, "scalar": tensor[0, 0].clone(), "none": tensor[:0], "view": tensor.t()}
    ((image, _),) = images(tensors, [spec_of(name, tensor) for name, tensor in tensors.items()])
    found = open_image(image, tmp_path)
    for name, expected in tensors.items():
        if dtype in CODES:
            assert_same_tensor(found[name], expected)
        else:
            assert found[name].dtype is torch.uint8
            assert bytes(memory(found[name].contiguous())) == bytes(memory(byte_view(expected.contiguous())))


@settings(max_examples=200)
@given(
    st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), DTYPES_AND_SHAPES, max_size=8),
    st.integers(0, 300),
)
@example({"__metadata__": ("int8", (2,)), "~.__metadata__": ("int8", (3,)), "x__metadata__": ("int8", ())}, 100)
@example({"": ("float32", ())}, 0)
def test_a_plan_covers_its_files_without_gap_and_reads_back(parts: dict[str, Any], container_bytes: int) -> None:
    specs = make_specs(parts)
    plans = plan_containers(specs, container_bytes=container_bytes)
    assert plans == plan_containers(specs[::-1], container_bytes=container_bytes)
    assert sorted(entry.spec for plan in plans for entry in plan.entries) == sorted(specs)
    for plan in plans:
        check_layout(plan)
        n_data = plan.n_bytes - len(plan.header)
        assert n_data <= container_bytes or len([entry for entry in plan.entries if entry.n_bytes]) == 1
        image = plan.header + bytes(n_data)
        header = read_header(reader(image), len(image))
        assert list(header) == [entry.spec.name for entry in plan.entries]
        for entry in plan.entries:
            stored = header[entry.spec.name]
            assert (stored.start, stored.n_bytes) == (entry.start, entry.n_bytes)
            if entry.spec.dtype in CODES:
                assert (stored.dtype, stored.shape) == (entry.spec.dtype, entry.spec.shape)
            else:
                assert (stored.dtype, stored.shape) == ("uint8", (entry.n_bytes,))


def check_layout(plan: ContainerPlan) -> None:
    assert len(plan.header) % ALIGNMENT == 0
    assert int.from_bytes(plan.header[:8], "little") == len(plan.header) - 8
    order = [(-ITEM_BYTES[entry.spec.dtype], entry.spec.name) for entry in plan.entries]
    assert order == sorted(order)
    position = len(plan.header)
    for entry in plan.entries:
        assert entry.start == position
        assert entry.start % ITEM_BYTES[entry.spec.dtype] == 0
        position += entry.n_bytes
    assert position == plan.n_bytes


def test_no_tensors_make_no_container_and_two_of_one_name_are_refused() -> None:
    assert plan_containers([]) == ()
    with pytest.raises(ConfigError, match="same name"):
        plan_containers([TensorSpec("a", "int8", (1,), 1), TensorSpec("a", "int8", (2,), 2)])


def test_a_tensor_above_the_limit_gets_a_container_of_its_own() -> None:
    sizes = {"a": 40, "b": 40, "c": 500, "d": 60, "e": 40}
    specs = [TensorSpec(name, "int8", (size,), size) for name, size in sizes.items()]
    plans = plan_containers(specs, container_bytes=100)
    assert [[entry.spec.name for entry in plan.entries] for plan in plans] == [["a", "b"], ["c"], ["d", "e"]]


def test_containers_are_split_before_a_header_grows_past_what_readers_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "MAX_HEADER_BYTES", 3 * ALIGNMENT)
    specs = [TensorSpec(f"layer.{n}" + "x" * 100, "float32", (1,), 4) for n in range(300)]
    plans = plan_containers(specs)
    assert len(plans) > 3
    assert all(len(plan.header) <= 3 * ALIGNMENT for plan in plans)
    for plan in plans:
        check_layout(plan)
        json.loads(plan.header[8:])
    with pytest.raises(ConfigError, match="too long"):
        plan_containers([TensorSpec("x" * 4 * ALIGNMENT, "int8", (1,), 1)])


def test_a_container_past_4_gib_and_elements_past_2_to_the_31_are_laid_out_exactly() -> None:
    (plan,) = plan_containers(
        make_specs({"big": ("int8", (2**32 + 1,)), "long": ("float64", (2**31 + 3,))}), container_bytes=2**40
    )
    check_layout(plan)
    header = read_header(lambda start, n: plan.header[start : start + n], plan.n_bytes)
    assert header["big"] == ("int8", (2**32 + 1,), len(plan.header) + 8 * (2**31 + 3), 2**32 + 1)


SPECS = make_specs(
    {"model/w": ("float32", (2, 3)), "b": ("int8", (5,)), "none": ("int8", (0, 2)), "z": ("complex128", (1,))}
)
(PLAN,) = plan_containers(SPECS)
IMAGE = PLAN.header + bytes(PLAN.n_bytes - len(PLAN.header))


def read(image: bytes) -> dict[str, Any]:
    return dict(read_header(reader(image), len(image)))


def with_header(header: str | bytes, n_data: int = 0) -> bytes:
    text = header if isinstance(header, bytes) else header.encode()
    return len(text).to_bytes(8, "little") + text + bytes(n_data)


def entry(dtype: Any = "I8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    "header, n_data, names",
    [
        ("", 0, "header"),
        ("[]", 0, "JSON"),
        ("{", 0, "JSON"),
        (b"{\xff}", 0, "JSON"),
        (' {"a":1}', 0, "JSON"),
        ('{"a":NaN}', 0, "JSON"),
        ('{"a":' + "[" * 100_000, 0, "JSON"),
        ('{"a":1}', 0, "'a'"),
        ('{"__metadata__":{"a":1}}', 0, "metadata"),
        ('{"__metadata__":[]}', 0, "metadata"),
        (
            '{"a":{"dtype":"I8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"I8","shape":[4],"data_offsets":[4,8]}}',
            8,
            "'a'",
        ),
        ('{"a":{"dtype":"I8","dtype":"I8","shape":[4],"data_offsets":[0,4]}}', 4, "'dtype'"),
        ({"a": {**entry(), "more": 1}}, 4, "'a'"),
        ({"a": entry("F4")}, 4, "'a'"),
        ({"a": entry(["I8"])}, 4, "'a'"),
        ({"a": entry(shape=[-4])}, 4, "'a'"),
        ({"a": entry(shape=[4.0])}, 4, "'a'"),
        ({"a": entry(shape=[True], offsets=[0, 1])}, 1, "'a'"),
        ({"a": entry(shape=4)}, 4, "'a'"),
        ({"a": entry(shape=[2**62] * 100_000)}, 4, "'a'"),
        ({"a": entry(shape=[2**63])}, 4, "'a'"),
        ({"a": entry(offsets=[0, 4, 8])}, 4, "'a'"),
        ({"a": entry(offsets=[4, 0])}, 4, "'a'"),
        ({"a": entry(offsets=[0, 5])}, 5, "'a'"),
        ({"a": entry(), "b": entry()}, 4, "'b'|'a'"),
        ({"a": entry(), "b": entry(offsets=[5, 9])}, 9, "'b'"),
        ({"a": entry(offsets=[4, 8])}, 8, "'a'"),
        ({"a": entry()}, 5, "tensors end"),
        ({"a": entry()}, 3, "tensors end"),
        ({"a": entry(), "far": entry(shape=[0], offsets=[9, 9])}, 4, "'far'"),
    ],
)
def test_a_header_that_does_not_add_up_is_corruption_and_names_the_tensor(header: Any, n_data: int, names: str) -> None:
    text = json.dumps(header) if isinstance(header, dict) else header
    with pytest.raises(CorruptionError, match=names):
        read(with_header(text, n_data))


def test_a_length_beyond_the_file_or_beyond_the_bound_is_refused_before_it_is_read() -> None:
    asked = []
    for length in (2**63, 100_000_001, 10**9 - 7):
        image = length.to_bytes(8, "little")
        with pytest.raises(CorruptionError, match="header of"):
            read_header(lambda start, n, image=image: asked.append((start, n)) or image, 10**9)  # type: ignore[func-returns-value,misc]
    assert asked == [(0, 8)] * 3
    for image in (b"", b"1234567", b"\x00" * 8, IMAGE[:100], with_header("{}")[:9]):
        with pytest.raises(CorruptionError):
            read(image)


def test_a_file_of_another_writer_in_another_order_is_read_too() -> None:
    header = {"b": entry(offsets=[4, 8]), "a": entry(), "e": entry(shape=[0], offsets=[4, 4])}
    assert list(read(with_header(json.dumps(header), 8))) == ["a", "e", "b"]


@settings(max_examples=500)
@given(st.randoms(use_true_random=False), st.integers(1, 3))
def test_a_damaged_header_is_refused_or_still_adds_up(rng: random.Random, n: int) -> None:
    image = bytearray(IMAGE)
    used = len(PLAN.header.rstrip())
    for _ in range(n):
        image[rng.randrange(used)] ^= 1 << rng.randrange(8)
    if rng.random() < 0.2:
        del image[rng.randrange(len(image)) :]
    try:
        found = read(bytes(image))
    except CorruptionError:
        return
    position = 8 + int.from_bytes(image[:8], "little")
    for stored in found.values():
        assert stored.start == position
        assert math.prod(stored.shape) * ITEM_BYTES[stored.dtype] == stored.n_bytes
        position += stored.n_bytes
    assert position == len(image)


values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-1, 9),
        st.floats(),
        st.text(max_size=2),
        st.sampled_from(["I8", "F64", "U8"]),
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "a"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=500)
@given(
    st.dictionaries(st.sampled_from(["a", "b", "__metadata__", "~.__metadata__"]), values, max_size=3),
    st.integers(0, 9),
)
def test_any_json_for_a_header_is_refused_or_adds_up(header: dict[str, Any], n_data: int) -> None:
    try:
        read(with_header(json.dumps(header), n_data))
    except CkptStoreError as error:
        assert isinstance(error, CorruptionError)  # noqa: PT017  # any other exception fails the test as well
