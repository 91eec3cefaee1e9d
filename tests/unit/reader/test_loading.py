"""A checkpoint, or a piece of it, as new objects: what is chosen, where it goes, and what a forged one can't do."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from ckptstore import CheckpointManager, load, open_run
from ckptstore.errors import ConfigError, CorruptionError, NotFoundError, UnsupportedError
from ckptstore.memory import MemoryStore
from ckptstore.run.manifest import FileEntry, manifest_ref, root_of
from ckptstore.run.records import decode_record, encode_record
from ckptstore.testing.recording import RecordingStore
from tests.unit.reader.stored import keys, raw_of
from tests.unit.reader.training import Tied, new_url
from tests.unit.state.same import assert_same

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptstore import Checkpoint


def saved(**states: Any) -> Checkpoint:
    url = new_url()
    with CheckpointManager(url) as manager:
        manager.save(1, **states, wait=True)
    return open_run(url).at(step=1)


def sample() -> dict[str, Any]:
    return {
        "model": {
            "encoder": {"0": {"weight": torch.ones(2), "bias": torch.zeros(1)}, "1": {"weight": torch.full((2,), 2.0)}},
            "head/x": torch.arange(3),
            "list": [torch.ones(1), {"a": torch.zeros(2)}],
            "pair": (torch.ones(1), 5),
        },
        "nothing": None,
        "name": "text",
        "seed": 3,
        "array": np.arange(4.0),
    }


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Return the dict leaves of nested dicts by path."""
    if isinstance(value, dict):
        return {key: item for name, child in value.items() for key, item in leaves(child, f"{path}/{name}").items()}
    return {path[1:]: value}


CHOICES: dict[str, tuple[Any, Any, set[str]]] = {
    "one state": ("seed", None, {"seed"}),
    "none": ([], None, set()),
    "states that are None": ("nothing", None, {"nothing"}),
    "a path": ("model/encoder/~s0", None, {"model/encoder/0/weight", "model/encoder/0/bias"}),
    "two, one within the other": (
        ["model/encoder", "model/encoder/~s1"],
        None,
        {"model/encoder/0/weight", "model/encoder/0/bias", "model/encoder/1/weight"},
    ),
    "a wildcard": ("model/*/weight", None, {"model/encoder/0/weight", "model/encoder/1/weight"}),
    "a wildcard over states": ("n*", None, {"nothing", "name"}),
    "a list as a whole": ("model/list", None, {"model/list"}),
    "an escaped key": ("model/head~1x", None, {"model/head/x"}),
    "without a state": (None, "model", {"nothing", "name", "seed", "array"}),
    "without a path": (["model"], ["model/encoder", "model/list", "model/pair"], {"model/head/x"}),
    "without a wildcard": (
        ["model/encoder"],
        ["*/bias"],
        {"model/encoder/0/weight", "model/encoder/1/weight"},
    ),
}


@pytest.mark.parametrize("case", CHOICES)
def test_only_and_skip_choose_by_state_path_and_wildcard(case: str) -> None:
    only, skip, expected = CHOICES[case]
    states = sample()
    whole = leaves(states)
    found = leaves(saved(**states).load(only=only, skip=skip))
    found.pop("", None)
    assert found.keys() == expected
    for path, value in found.items():
        assert_same(value, whole[path])


def test_everything_comes_back_by_default_and_in_the_order_it_was_saved() -> None:
    states = sample()
    assert_same(saved(**states).load(), states)


def test_only_what_is_asked_for_is_read() -> None:
    url = new_url()
    with CheckpointManager(url, rng=False) as manager:
        manager.save(1, model=nn.Linear(3, 3), seed=1)
    store = RecordingStore(MemoryStore(url.removeprefix("memory://")))
    open_run(store).at(step=1).load(skip="model")
    assert not [key for verb, key in store.calls if verb == "read_into"]


@pytest.mark.parametrize("pattern", ["absent", "model/encoderx", "model/absent/*", "seed/deeper"])
def test_a_pattern_that_chooses_nothing_is_refused_with_what_there_is(pattern: str) -> None:
    checkpoint = saved(**sample())
    for arguments in ({"only": pattern}, {"skip": ["seed", pattern]}):
        with pytest.raises(NotFoundError, match=r"holds nothing at .*its states are model, nothing, name"):
            checkpoint.load(**arguments)


@pytest.mark.parametrize("pattern", ["model/list/0", "model/pair/1", "model/list/1/a"])
def test_a_path_into_a_list_is_refused_since_a_list_is_loaded_as_a_whole(pattern: str) -> None:
    with pytest.raises(NotFoundError, match="inside a list or another container that is loaded as a whole"):
        saved(**sample()).load(only=pattern)


def test_a_single_tensor_is_found_by_path_in_any_container() -> None:
    checkpoint = saved(**sample(), deep={1: [{"x": (torch.ones(2), torch.tensor(7.0))}]})
    assert checkpoint.tensor("model/encoder/~s1/weight").tolist() == [2.0, 2.0]
    assert checkpoint.tensor("model/list/1/a").tolist() == [0.0, 0.0]
    assert checkpoint.tensor("model/pair/0").tolist() == [1.0]
    assert checkpoint.tensor("deep/1/0/x/1").item() == 7.0
    for path in ("seed", "model", "array", "model/encoder"):
        with pytest.raises(NotFoundError, match="is no tensor"):
            checkpoint.tensor(path)
    for path in ("absent", "model/absent", "model/list/2", ""):
        with pytest.raises(NotFoundError, match="holds nothing at"):
            checkpoint.tensor(path)


def test_tied_tensors_have_every_name_and_are_one_again_when_loaded() -> None:
    model = Tied()
    checkpoint = saved(model=model, alias={"w": model.embedding.weight.detach()})
    for name in ("model/embedding.weight", "model/head.weight", "alias/w"):
        assert_same(checkpoint.tensor(name), model.embedding.weight.detach())
    found = checkpoint.load()
    assert found["model"]["head.weight"].data_ptr() == found["model"]["embedding.weight"].data_ptr()
    assert found["alias"]["w"].data_ptr() == found["model"]["embedding.weight"].data_ptr()
    assert sum(entry.shape == (11, 6) for entry in checkpoint.manifest().tensors.values()) == 1


def test_a_module_in_another_state_of_the_same_shape_is_no_alias() -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    found = saved(one=one, two=two).load()
    assert_same(found["one"]["weight"], one.weight.detach())
    assert_same(found["two"]["weight"], two.weight.detach())


def test_sparse_tensors_and_arrays_load_alone() -> None:
    sparse = torch.eye(3).to_sparse()
    checkpoint = saved(s=sparse, a={"n": np.eye(2)})
    assert torch.equal(checkpoint.tensor("s").to_dense(), torch.eye(3))
    assert_same(checkpoint.load(only="a/n"), {"a": {"n": np.eye(2)}})


def test_another_device_takes_the_tensors_and_not_arrays_or_generators() -> None:
    checkpoint = saved(model=nn.Linear(2, 2), array=np.arange(1 << 18), generator=torch.Generator())
    found = checkpoint.load(map_location="meta")
    assert {item.device.type for item in found["model"].values()} == {"meta"}
    assert_same(found["array"], np.arange(1 << 18))
    assert_same(found["generator"]["state"], torch.Generator().get_state())
    assert found["generator"]["state"].device.type == "cpu"
    assert checkpoint.load(map_location=torch.device("cpu"))["model"]["bias"].device.type == "cpu"
    with pytest.raises(ConfigError, match="map_location='toaster' is no device"):
        checkpoint.load(map_location="toaster")
    with pytest.raises(ConfigError, match="verify='yes'"):
        checkpoint.load(verify="yes")  # type: ignore[arg-type]


# ── forged checkpoints: every digest is right, and what they claim is not ────────────────────────────────────────────


def forged(edit: Callable[[dict[str, Any]], None]) -> Checkpoint:
    """Return a checkpoint whose manifest was edited, with its digest in the journal made to fit."""
    url = new_url()
    with CheckpointManager(url, rng=False) as manager:
        manager.save(1, model={"weight": torch.ones(4), "bias": torch.zeros(2)}, kind="x", wait=True)
    raw = raw_of(url)
    key = keys(raw, "manifest")[0]
    fields = json.loads(raw.read(key) or b"")
    edit(fields)
    fields["root"] = root_of([FileEntry(**{**file, "parts": tuple(file["parts"])}) for file in fields["files"]])
    body = json.dumps(fields).encode()
    raw.write(key, body)
    newest = keys(raw, "journal")[-1]
    record = decode_record(raw.read(newest) or b"", run_uid="", seq=int(newest[-15:-5]), what=newest)
    assert isinstance(record.live, tuple)
    row = msgspec.structs.replace(record.live[-1], manifest=manifest_ref(body))
    record = msgspec.structs.replace(record, live=(row,), change={"kind": "commit", "row": msgspec.to_builtins(row)})
    raw.write(newest, encode_record(record).raw)
    return open_run(url).at(step=1)


def tensor_of(fields: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = fields["tensors"]["model/weight"]
    return found


def set_shape(shape: list[int]) -> Callable[[dict[str, Any]], None]:
    return lambda fields: tensor_of(fields).update(shape=shape)


def set_piece(**edits: int) -> Callable[[dict[str, Any]], None]:
    return lambda fields: tensor_of(fields)["pieces"][0].update(edits)


def set_path(path: str) -> Callable[[dict[str, Any]], None]:
    return lambda fields: fields["files"][0].update(path=path)


FORGED: dict[str, tuple[Callable[[dict[str, Any]], None], type[Exception]]] = {
    "a huge shape": (set_shape([2**40, 2**40]), CorruptionError),
    "a shape whose product overflows": (set_shape([2**53] * 60), CorruptionError),
    "very many dimensions": (set_shape([2**53] * 5000), CorruptionError),
    "huge strides around nothing": (
        lambda fields: tensor_of(fields).update(shape=[0, 2**53, 2**53], pieces=[]),
        CorruptionError,
    ),
    "a negative shape": (set_shape([-4]), CorruptionError),
    "another shape": (set_shape([3]), CorruptionError),
    "another dtype": (lambda fields: tensor_of(fields).update(dtype="float64"), CorruptionError),
    "no dtype": (lambda fields: tensor_of(fields).update(dtype="__class__"), CorruptionError),
    "bytes outside the file": (set_piece(start=2**40), CorruptionError),
    "bytes before the file": (set_piece(start=-16), CorruptionError),
    "another file": (set_piece(file=1), CorruptionError),
    "a longer piece": (set_piece(n_bytes=2**40), CorruptionError),
    "an absolute path": (set_path("/etc/passwd"), CorruptionError),
    "a path that leads out": (set_path("../../../RUN.json"), CorruptionError),
    "a hidden path": (set_path(".hidden"), CorruptionError),
    "a missing tensor": (lambda fields: fields["tensors"].pop("model/weight"), CorruptionError),
    "an unknown kind": (lambda fields: fields["tree"]["states"]["model"].update(kind="pickle"), CorruptionError),
    "a state without a tree": (lambda fields: fields["tree"]["states"]["model"].pop("tree"), CorruptionError),
    "states that are a list": (lambda fields: fields["tree"].update(states=[]), CorruptionError),
    "a huge file": (lambda fields: fields["files"][0].update(size=2**50), CorruptionError),
    "no part size": (lambda fields: fields["files"][0].update(part_bytes=0), CorruptionError),
    "a newer format": (lambda fields: fields.update(version=99), UnsupportedError),
    "an unknown need": (lambda fields: fields.update(requires=["teleport"]), UnsupportedError),
    "another run's": (lambda fields: fields.update(run_uid="0" * 32), CorruptionError),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_manifest_is_refused_before_anything_is_allocated(case: str) -> None:
    edit, error = FORGED[case]
    checkpoint = forged(edit)
    live = {"weight": torch.zeros(4), "bias": torch.ones(2)}
    for read in (
        checkpoint.load,
        lambda: checkpoint.tensor("model/weight"),
        lambda: checkpoint.restore(model=live),
    ):
        with pytest.raises(error):
            read()
    assert live["weight"].tolist() == [0.0] * 4


def test_the_forgery_itself_is_sound() -> None:
    assert forged(lambda _: None).load(only="kind") == {"kind": "x"}


def test_load_by_address_takes_the_newest_or_the_step_that_was_named() -> None:
    url = new_url()
    with CheckpointManager(url) as manager:
        manager.save(1, x=1)
        manager.save(2, x=2)
    assert load(url) == {"x": 2}
    assert load(url, 1) == load(url, step=1) == {"x": 1}
    assert load(url, only="x") == {"x": 2}
    with pytest.raises(NotFoundError):
        load(url, 3)
    with pytest.raises(NotFoundError, match="holds no checkpoint"):
        load(new_url())
