"""Loading into live objects changes all of them or none, and falls back only on what is proven damaged."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any, Literal

import pytest
import torch
from torch import nn

from ckptstore import CheckpointManager, open_run
from ckptstore.errors import CorruptionError, MismatchError, NotFoundError, UnavailableError
from ckptstore.memory import MemoryStore
from ckptstore.store import Capabilities
from ckptstore.testing.raw import RawDirectory
from tests.unit.reader.stored import Failing, bad_sector, flip, keys, raw_of
from tests.unit.reader.training import Training, new_url
from tests.unit.state.same import assert_same

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckptstore.testing.raw import RawView


class Remote(MemoryStore):
    """A store in memory that says it is far away, so that everything is staged before it is copied."""

    def capabilities(self) -> Capabilities:
        return Capabilities(exclusive="atomic", durable="ack", listing="strong", local=False)


@pytest.fixture(params=["memory", "file", "remote"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, RawView]:
    """Return an address or a store for a new run, and its bytes."""
    if request.param == "file":
        return tmp_path / "run", RawDirectory(tmp_path / "run")
    url = new_url()
    store = (Remote if request.param == "remote" else MemoryStore)(url.removeprefix("memory://"))
    return store, raw_of(url)


class Picky:
    """A stateful object that changes something, then refuses what it is not told to take."""

    def __init__(self, value: int, takes: tuple[int, ...] = ()) -> None:
        self.value = value
        self.takes = takes
        self.trace: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trace.append(state["value"])
        if state["value"] not in self.takes:
            message = f"I do not like {state['value']}"
            raise ValueError(message)
        self.value = state["value"]


def everything(seed: int) -> dict[str, Any]:
    """Return objects of all kinds in a state of their own."""
    torch.manual_seed(seed)
    training = Training()
    for _ in range(2):
        training.step()
    return {
        **training.states(),
        "picky": Picky(seed, (1, 2, 3, 4, 5, seed)),
        "hooked": nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
        "generator": torch.Generator().manual_seed(seed),
        "settings": {"seed": seed, "nested": [seed]},
        "items": [seed],
        "anchor": torch.full((3,), float(seed)),
        "number": seed,
    }


def content(states: dict[str, Any]) -> tuple[Any, ...]:
    """Return a copy of all that can change, the generators' and the addresses of tensors included."""
    found: dict[str, Any] = {"rng": torch.get_rng_state()}
    for name, item in states.items():
        if isinstance(item, torch.Generator):
            found[name] = item.get_state()
        elif isinstance(item, Picky):
            found[name] = item.value
        else:
            found[name] = item.state_dict() if hasattr(item, "state_dict") else item
    optimizer = states["optimizer"]
    addresses = [tensor.data_ptr() for state in optimizer.state.values() for tensor in state.values()]
    return copy.deepcopy(found), addresses, [id(group) for group in optimizer.param_groups]


def save_steps(where: Any, steps: tuple[int, ...] = (1, 2, 3)) -> None:
    with CheckpointManager(where) as manager:
        for step in steps:
            manager.save(step, **everything(step), wait=True)


def truncate(raw: RawView, key: str) -> None:
    body = raw.read(key) or b""
    raw.write(key, body[: len(body) // 2])


def damage(raw: RawView, how: str, step: int) -> None:
    """Damage the checkpoint of a step."""
    part = "manifest" if "manifest" in how else "payload"
    for key in keys(raw, part, step):
        DAMAGE[how](raw, key)


DAMAGE: dict[str, Callable[[RawView, str], None]] = {
    "payload": lambda raw, key: flip(raw, key, -5),
    "header": lambda raw, key: flip(raw, key, 100),
    "manifest": lambda raw, key: flip(raw, key, 1000),
    "no payload": lambda raw, key: raw.delete(key),
    "no manifest": lambda raw, key: raw.delete(key),
    "truncated": truncate,
    "short manifest": truncate,
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_checkpoint_changes_nothing_and_the_next_older_is_resumed(
    run: tuple[Any, RawView], how: str, caplog: pytest.LogCaptureFixture
) -> None:
    where, raw = run
    save_steps(where)
    damage(raw, how, 3)
    live = everything(9)
    before = content(live)
    found = open_run(where)
    calls: list[Callable[[], object]] = [lambda: found.at(step=3).restore(**live), found.at(step=3).load]
    for call in calls:
        with pytest.raises(CorruptionError, match=keys(raw, "payload", 2)[0][:14]):
            call()
    assert_same(content(live), before)
    with CheckpointManager(where) as manager:
        journal = keys(raw, "journal")
        with pytest.raises(CorruptionError):
            manager.resume(fallback="never", **live)
        with pytest.raises(CorruptionError):
            manager.resume(step=3, **live)
        assert_same(content(live), before)
        if how not in {"payload", "header"}:  # those are found when the payload is read: after the claim
            assert keys(raw, "journal") == journal
        with caplog.at_level(logging.WARNING):
            resumed = manager.resume(**live)
    assert (resumed.step, resumed.lost_steps) == (2, 1)
    assert [(item.step, item.seq) for item in resumed.skipped] == [(3, found.at(step=3).seq)]
    assert "data/" in resumed.skipped[0].reason
    assert "step 3 is passed over" in caplog.text
    live["number"] = resumed.values["number"]
    assert_same(content(live)[0], content(everything(2))[0])
    assert {item.step: item.damaged for item in found.checkpoints(all=True)} == {1: False, 2: False, 3: True}
    assert [item.step for item in found.checkpoints()] == [1, 2]
    assert not found.verify().ok


@pytest.mark.parametrize("how", ["payload", "no manifest"])
def test_when_every_checkpoint_is_damaged_the_error_names_the_way_out_and_nothing_changes(
    run: tuple[Any, RawView], how: str
) -> None:
    where, raw = run
    save_steps(where, (1, 2))
    for step in (1, 2):
        damage(raw, how, step)
    live = everything(9)
    before = content(live)
    with CheckpointManager(where) as manager:
        with pytest.raises(CorruptionError, match=r"none of the 2 newest checkpoints is whole.*resume\(fresh=True\)"):
            manager.resume(**live)
        assert_same(content(live), before)
        assert manager.resume(fresh=True, **live).fresh
        assert_same(content(live), before)
        manager.save(1, **live, wait=True)
    assert open_run(where).latest().step == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("step", [3, None])
def test_an_object_that_refuses_leaves_every_other_as_it_was(run: tuple[Any, RawView], step: int | None) -> None:
    where, _ = run
    save_steps(where)
    live = everything(9)
    live["picky"].takes = (9,)
    before = content(live)
    with (
        CheckpointManager(where) as manager,
        pytest.raises(MismatchError, match=r"picky: Picky refused.*do not like 3"),
    ):
        manager.resume(step=step, **live)
    assert_same(content(live), before)
    assert live["picky"].trace == [3, 9]


def test_an_object_that_refuses_even_what_it_had_does_not_keep_the_others_from_being_undone(
    run: tuple[Any, RawView], caplog: pytest.LogCaptureFixture
) -> None:
    where, _ = run
    save_steps(where)
    live = everything(9)
    live["picky"].takes = ()
    before = content(live)
    with pytest.raises(MismatchError, match="do not like 3"):
        open_run(where).at(step=3).restore(**live)
    assert_same(content(live), before)
    assert "picky: what it was before could not be restored" in caplog.text


class HookedOptimizer(torch.optim.AdamW):
    """An optimizer that edits its state in place while loading, then refuses."""

    refuses = False

    def load_state_dict(self, state_dict: Any) -> None:
        for state in self.state.values():
            state["exp_avg"].zero_()
        self.param_groups[0]["lr"] = 99.0
        if self.refuses:
            message = "no"
            raise RuntimeError(message)
        super().load_state_dict(state_dict)


def test_an_optimizer_with_loading_of_its_own_is_undone_to_the_bit() -> None:
    url = new_url()
    with CheckpointManager(url) as manager:
        torch.manual_seed(1)
        saved = Training(HookedOptimizer)
        saved.step()
        manager.save(1, **saved.states())
    live = Training(HookedOptimizer)
    live.step()
    states = {**live.states(), "extra": 1}
    before = content(states)
    live.optimizer.refuses = True  # type: ignore[attr-defined]
    with CheckpointManager(url) as manager:
        with pytest.raises(MismatchError, match="optimizer: HookedOptimizer refused the saved state: no"):
            manager.resume(**live.states())
        assert_same(content(states), before)
        live.optimizer.refuses = False  # type: ignore[attr-defined]
        manager.resume(**live.states())
        assert_same(live.content(), saved.content())


def test_a_module_whose_hook_refuses_is_undone_to_the_bit() -> None:
    class Refuses(nn.Sequential):
        refuses = True

    def refuse(module: Any, _: Any) -> None:
        if module.refuses:
            message = "not today"
            raise RuntimeError(message)

    url = new_url()
    with CheckpointManager(url) as manager:
        manager.save(1, model=Refuses(nn.Linear(2, 2), nn.BatchNorm1d(2)), list=[1], anchor=torch.ones(2))
    live = Refuses(nn.Linear(2, 2), nn.BatchNorm1d(2))
    live.register_load_state_dict_post_hook(refuse)  # type: ignore[no-untyped-call]  # after tensors were copied
    items, anchor = [0], torch.zeros(2)
    before = copy.deepcopy(live.state_dict())
    with CheckpointManager(url) as manager:
        with pytest.raises(MismatchError, match="model: Refuses refused the saved state: not today"):
            manager.resume(list=items, anchor=anchor, model=live)
        assert_same(live.state_dict(), before)
        assert (items, anchor.tolist()) == ([0], [0.0, 0.0])
        live.refuses = False
        manager.resume(list=items, anchor=anchor, model=live)
        assert (items, anchor.tolist()) == ([1], [1.0, 1.0])


@pytest.mark.parametrize("verify", ["full", "inline"])
def test_inline_verification_finds_the_damage_too(run: tuple[Any, RawView], verify: Literal["full", "inline"]) -> None:
    where, raw = run
    save_steps(where)
    damage(raw, "payload", 3)
    live = everything(9)
    with pytest.raises(CorruptionError, match="tensors there: "):
        open_run(where).at(step=3).restore(verify=verify, **live)
    with CheckpointManager(where) as manager:
        assert manager.resume(verify=verify, **live).step == 2


def test_damage_in_the_last_part_leaves_what_the_first_parts_hold_unchanged(run: tuple[Any, RawView]) -> None:
    where, raw = run

    def objects(value: float) -> dict[str, Any]:
        layers = nn.ModuleList(nn.Linear(1, 3 << 20, bias=False) for _ in range(3))  # 12 MiB each, over 16 MiB parts
        for item in layers.parameters():
            nn.init.constant_(item, value)
        return {"layers": layers, "picky": Picky(int(value), (1, 9)), "list": [value]}

    with CheckpointManager(where, rng=False) as manager:
        manager.save(1, **objects(1.0), wait=True)
    flip(raw, keys(raw, "payload")[0], -5)
    live = objects(9.0)
    with pytest.raises(CorruptionError, match=r"tensors there: layers/2\.weight"):
        open_run(where).at(step=1).restore(**live)
    assert all(torch.equal(item, torch.full_like(item, 9.0)) for item in live["layers"].parameters())
    assert (live["picky"].value, live["picky"].trace, live["list"]) == (9, [], [9.0])


def test_sizes_alone_let_damaged_bytes_through_and_missing_ones_not(run: tuple[Any, RawView]) -> None:
    where, raw = run
    save_steps(where)
    damage(raw, "payload", 3)
    damage(raw, "truncated", 2)
    live = everything(9)
    found = open_run(where)
    found.at(step=3).restore(verify="sizes", **live)
    found.at(step=3).load(verify="sizes")
    with pytest.raises(CorruptionError, match=r"has [0-9]+ bytes instead of"):
        found.at(step=2).restore(verify="sizes", **live)


def test_a_store_that_does_not_answer_is_never_a_reason_to_fall_back() -> None:
    url = new_url()
    save_steps(url)
    live = everything(9)
    before = content(live)
    for error in (None, OSError(110, "timed out")):
        store = Failing(MemoryStore(url.removeprefix("memory://")), error, "/000000000003-")
        with CheckpointManager(store) as manager:
            with pytest.raises(UnavailableError, match="can't be read now"):
                manager.resume(**live)
            with pytest.raises(UnavailableError, match="can't be read now"):
                open_run(store).latest().load()  # type: ignore[union-attr]
    assert_same(content(live), before)
    assert not any(item.damaged for item in open_run(url).checkpoints(all=True))
    with CheckpointManager(url) as manager:
        assert manager.resume(**live).step == 3  # the answer is there again, and nothing was lost


def test_a_bad_sector_of_a_local_disk_is_passed_over_but_not_marked() -> None:
    url = new_url()
    save_steps(url)
    live = everything(9)
    store = bad_sector(url, "/000000000003-")
    with CheckpointManager(store) as manager:
        with pytest.raises(UnavailableError):
            manager.resume(fallback="never", **live)
        with pytest.raises(UnavailableError):
            manager.resume(step=3, **live)
        resumed = manager.resume(**live)
        assert (resumed.step, [item.step for item in resumed.skipped]) == (2, [3])
    assert not any(item.damaged for item in open_run(url).checkpoints(all=True))


def test_an_input_output_error_of_a_remote_store_is_unavailability() -> None:
    url = new_url()
    save_steps(url)
    store = bad_sector(url, "/000000000003-")
    store._store = Remote(url.removeprefix("memory://"))
    with CheckpointManager(store) as manager, pytest.raises(UnavailableError):
        manager.resume(**everything(9))


def test_a_checkpoint_marked_damaged_is_passed_over_again_and_training_goes_on_below_it() -> None:
    url = new_url()
    save_steps(url)
    damage(raw_of(url), "payload", 3)
    live = everything(9)
    with CheckpointManager(url) as manager:
        assert manager.resume(**live).lost_steps == 1
        manager.save(3, **everything(3), wait=True)  # a step of the abandoned branch is free again
    with CheckpointManager(url) as manager:
        resumed = manager.resume(**live)
        assert (resumed.step, resumed.skipped, resumed.lost_steps) == (3, (), 0)
    found = open_run(url)
    assert [(item.step, item.damaged, item.on_lineage) for item in found.checkpoints(all=True)] == [
        (1, False, True),
        (2, False, True),
        (3, True, False),
        (3, False, True),
    ]
    assert not found.at(step=3).damaged
    with pytest.raises(CorruptionError):
        found.at(seq=found.checkpoints(all=True)[2].seq).load()


def test_damage_found_after_the_claim_is_marked_even_when_nothing_older_is_left() -> None:
    url = new_url()
    save_steps(url, (1,))
    damage(raw_of(url), "payload", 1)
    with CheckpointManager(url) as manager, pytest.raises(CorruptionError, match="none of the 1 newest"):
        manager.resume(**everything(9))
    assert [item.damaged for item in open_run(url).checkpoints(all=True)] == [True]


def test_required_is_not_content_with_an_empty_lineage() -> None:
    url = new_url()
    with CheckpointManager(url) as manager:
        manager.resume(x=1)
        with pytest.raises(NotFoundError, match="holds no checkpoint to resume from"):
            manager.resume(x=1, required=True)
