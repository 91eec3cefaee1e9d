"""Staging memory is bounded and level, and a plan is kept as long as it is right, whatever the state looks like."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ckptstore
from ckptstore import manager as manager_module
from ckptstore.engine import engine as engine_module
from ckptstore.engine import saver, staging
from ckptstore.errors import StorageFullError
from tests.unit.engine.gates import LIMIT_S, GatedStore, engine_of, in_thread, same

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptstore.manager import CheckpointManager

    Make = Callable[..., CheckpointManager]

pytestmark = pytest.mark.timeout(60)
PART = 4096


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of one page, so that small tensors take many; and any bound of memory."""
    monkeypatch.setattr(staging, "PART_BYTES", PART)
    monkeypatch.setattr(saver, "PART_BYTES", PART)
    monkeypatch.setattr(manager_module, "MIN_MEMORY_BYTES", 1)


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For every image that was made: the staging bytes of all there were then."""
    made: list[int] = []
    alive: weakref.WeakSet[staging.Image] = weakref.WeakSet()

    class Counted(staging.Image):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            alive.add(self)
            made.append(sum(image.n_bytes for image in alive))

    monkeypatch.setattr(engine_module, "Image", Counted)
    return made


def check(store: GatedStore, step: int, state: dict[str, Any]) -> None:
    found = ckptstore.load(store, step)
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert same(found[name], tensor), name


def test_a_state_larger_than_the_memory_streams_through_it_exactly(
    store: GatedStore, manage: Make, small_parts: None, images: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    state: dict[str, Any] = {"a": torch.randn(30_000), "b": torch.randint(0, 99, (7001,), dtype=torch.uint8)}
    with manage(memory_bytes=6 * PART, max_pending=3) as manager:
        for step in (1, 2):
            manager.save(step, **state)
            check_state = {name: tensor.clone() for name, tensor in state.items()}
            state["a"].add_(1)
            manager.wait(LIMIT_S)
            check(store, step, check_state)
    assert images == [6 * PART]
    assert caplog.text.count("saves stream through it") == 1


def test_while_the_store_is_slow_streaming_waits_in_bounded_memory(
    store: GatedStore, manage: Make, small_parts: None, images: list[int]
) -> None:
    state: dict[str, Any] = {"a": torch.randn(30_000)}
    with manage(memory_bytes=5 * PART) as manager:
        with store.hold("write") as gate:
            saving = in_thread(lambda: manager.save(1, **state))
            gate.wait_reached()
            image = engine_of(manager)._images[0]
            with image._changed:
                full = image._changed.wait_for(lambda: -1 not in image._staged_in, 0.5)
            assert full or -1 not in image._staged_in
            assert manager.status().pending_steps == (1,)
        assert saving().result(LIMIT_S).step == 1
    check(store, 1, state)
    assert images == [5 * PART]


@pytest.mark.parametrize("on_error", ["raise", "log"])
def test_a_write_that_fails_in_the_middle_ends_the_streaming_and_is_told_by_the_next_call(
    store: GatedStore, manage: Make, small_parts: None, on_error: str
) -> None:
    state: dict[str, Any] = {"a": torch.randn(30_000)}
    with manage(memory_bytes=5 * PART, on_error=on_error) as manager:
        with store.hold("write") as gate:
            saving = in_thread(lambda: manager.save(1, **state))
            gate.wait_reached()
            store.fail("write", StorageFullError("no space left"))
        handle = saving()
        with pytest.raises(StorageFullError):
            handle.result(LIMIT_S)
        engine_of(manager).wait(LIMIT_S)
        if on_error == "raise":
            with pytest.raises(StorageFullError):
                manager.save(2, **state)
        assert not store.stored()
        manager.save(2, **state)
    check(store, 2, state)


@pytest.mark.parametrize("bound", [15, 21])
def test_all_images_together_stay_within_the_bound_when_the_form_of_the_state_changes(
    store: GatedStore, manage: Make, small_parts: None, images: list[int], bound: int
) -> None:
    first: dict[str, Any] = {"a": torch.randn(9 * 1024)}
    second: dict[str, Any] = {"a": torch.randn(9 * 1024 + 1)}
    with manage(memory_bytes=bound * PART, max_pending=2) as manager:
        with store.hold("write") as gate:
            manager.save(1, **first)
            gate.wait_reached()
            saving = in_thread(lambda: manager.save(2, **second))
            if bound == 21:  # both fit
                saving()
            gate.open()
            saving()
        manager.save(3, **second)
        manager.save(4, **second)
        manager.wait(LIMIT_S)
    assert max(images) <= bound * PART
    check(store, 1, first)
    check(store, 2, second)
    check(store, 3, second)


def test_with_too_little_memory_for_two_a_busy_save_is_skipped_and_does_not_wait(
    store: GatedStore, manage: Make, small_parts: None
) -> None:
    state: dict[str, Any] = {"a": torch.randn(9 * 1024)}
    with manage(memory_bytes=15 * PART, max_pending=2, on_busy="skip") as manager, store.hold("write") as gate:
        manager.save(1, **state)
        gate.wait_reached()
        assert in_thread(lambda: manager.save(2, **state))().status == "skipped"


def test_images_are_used_again_and_never_by_two_saves(store: GatedStore, manage: Make, images: list[int]) -> None:
    with manage(max_pending=2) as manager:
        for step in range(1, 21):
            manager.save(step, a=torch.full((1000,), float(step)))
    assert len(images) == 2
    for step in range(1, 21):
        check(store, step, {"a": torch.full((1000,), float(step))})


def test_a_plan_follows_the_state_through_every_change_of_form(
    store: GatedStore, manage: Make, small_parts: None
) -> None:
    base = torch.arange(24_000, dtype=torch.float32)
    forms: list[dict[str, Any]] = [
        {"a": base[:10]},
        {"a": base[:11]},
        {"a": base[:11], "b": base[:5000].to(torch.bfloat16)},
        {"b": base[:11], "a": base[:5000].to(torch.bfloat16)},
        {"a": base[:5000].to(torch.float16)},
        {"a": base.view(100, 240).t(), "b": base[::7]},
        {"a": base.view(240, 100)[:, 3:50], "b": torch.zeros(()), "c": torch.empty(0, 5)},
        {"a": torch.zeros((), dtype=torch.int64), "c": torch.empty(3, 0)},
        {"a": torch.tensor([True, False]), "b": torch.randn(9, dtype=torch.complex128)},
        {},
        {"a": base[:10]},
    ]
    with manage(max_pending=2) as manager:
        for step, state in enumerate(forms, start=1):
            manager.save(step, nothing=None, **state)
    for step, state in enumerate(forms, start=1):
        found = ckptstore.load(store, step)
        assert found.pop("nothing") is None
        assert found.keys() == state.keys()
        for name, tensor in state.items():
            assert same(found[name], tensor), (step, name)


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_tensor_over_several_parts_is_exact_at_every_offset(
    store: GatedStore, manage: Make, small_parts: None, contiguous: bool
) -> None:
    state: dict[str, Any] = {
        "first": torch.randn(333, dtype=torch.float64),
        "long": torch.randn(60, 300),
        "last": torch.randn(5),
    }
    if not contiguous:
        state["long"] = state["long"].t()
    with manage() as manager:
        manager.save(1, **state)
        manager.wait(LIMIT_S)
        state["long"].mul_(2)
        manager.save(2, **state)
    check(store, 2, state)


def test_tied_tensors_are_stored_once_and_a_small_view_stores_its_own_elements_only(
    store: GatedStore, manage: Make
) -> None:
    large = torch.randn(100_000)
    embedding = torch.nn.Embedding(50, 8)
    head = torch.nn.Linear(8, 50, bias=False)
    head.weight = embedding.weight
    with manage() as manager:
        one = manager.save(1, model=torch.nn.ModuleList([embedding, head]), view=large[5:10], wait=True).result(0)
    assert one.n_bytes < 50 * 8 * 4 + 3 * 4096
    found = ckptstore.load(store)
    assert same(found["view"], large[5:10])
    weights = list(found["model"].values())
    assert all(same(weight, embedding.weight.detach()) for weight in weights)


def test_optimizer_state_that_appears_after_the_first_step_is_saved_too(store: GatedStore, manage: Make) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with manage() as manager:
        manager.save(1, model=model, optimizer=optimizer)
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        manager.save(2, model=model, optimizer=optimizer)
    assert not ckptstore.load(store, 1)["optimizer"]["state"]
    found = ckptstore.load(store, 2)["optimizer"]["state"]
    for index, parameter in enumerate(model.parameters()):
        for name, tensor in optimizer.state[parameter].items():
            assert same(found[index][name], tensor), name


# ── errors on the training thread ────────────────────────────────────────────────────────────────────────────────


def test_a_staging_that_fails_is_raised_once_and_leaves_the_engine_usable(
    store: GatedStore, manage: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = torch._foreach_copy_
    errors: list[BaseException] = [RuntimeError("CUDA error: unspecified launch failure"), KeyboardInterrupt()]
    with manage() as manager:
        manager.save(1, a=torch.ones(10))
        for error in errors:

            def fail(*_: object, error: BaseException = error) -> None:
                raise error

            monkeypatch.setattr(torch, "_foreach_copy_", fail)
            with pytest.raises(type(error)):
                manager.save(2, a=torch.ones(10))
            monkeypatch.setattr(torch, "_foreach_copy_", copy)
            manager.wait(LIMIT_S)
            assert manager.status().pending_steps == ()
            assert manager.status().failures == 0, "its caller has seen it"
        manager.save(2, a=torch.ones(10) * 2)
    check(store, 2, {"a": torch.ones(10) * 2})
    assert len(store.stored()) == 4, "nothing is left of the failed ones"


def test_a_staging_that_fails_while_others_are_in_flight_leaves_them_alone(
    store: GatedStore, manage: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = torch._foreach_copy_

    def fail(*_: object) -> None:
        raise MemoryError

    with manage(max_pending=3) as manager, store.hold("write") as gate:
        manager.save(1, a=torch.ones(10))
        gate.wait_reached()
        monkeypatch.setattr(torch, "_foreach_copy_", fail)
        with pytest.raises(MemoryError):
            manager.save(2, a=torch.ones(10))
        monkeypatch.setattr(torch, "_foreach_copy_", copy)
        manager.save(3, a=torch.ones(10) * 3)
    check(store, 1, {"a": torch.ones(10)})
    check(store, 3, {"a": torch.ones(10) * 3})


def test_threads_stay_level_over_saves_and_end_with_the_manager(store: GatedStore, manage: Make) -> None:
    before = set(threading.enumerate())
    manager = manage()
    manager.save(1, wait=True, a=torch.ones(10))
    during = set(threading.enumerate())
    for step in range(2, 50):
        manager.save(step, a=torch.ones(10))
    manager.wait(LIMIT_S)
    assert set(threading.enumerate()) <= during
    manager.close()
    assert set(threading.enumerate()) <= before
