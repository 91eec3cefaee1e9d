"""Copying beside training gives what copying within save() gives, bit for bit, or refuses."""

from __future__ import annotations

import copy
import functools
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ckptstore
from ckptstore.engine import staging
from ckptstore.errors import TornSnapshotError
from tests.unit.engine.gates import LIMIT_S, GatedStore, engine_of, in_thread, same

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckptstore.manager import CheckpointManager

    Make = Callable[..., CheckpointManager]

pytestmark = pytest.mark.timeout(60)


class Copying:
    """A gate in front of every copy of a part."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.go = threading.Event()
        self.go.set()

    def hold(self) -> None:
        self.reached.clear()
        self.go.clear()


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copying]:
    gate = Copying()
    stage = staging.Image.stage

    def held(self: staging.Image, *args: Any, **kwargs: Any) -> None:
        gate.reached.set()
        assert gate.go.wait(LIMIT_S)
        stage(self, *args, **kwargs)

    monkeypatch.setattr(staging.Image, "stage", held)
    yield gate
    gate.go.set()


def model_of() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 6)
    )


def weight_of(model: torch.nn.Module, layer: int) -> torch.nn.Parameter:
    return model.get_parameter(f"{layer}.weight")


def forward_backward(model: torch.nn.Module, seed: int) -> None:
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
    (model(inputs) - inputs).square().mean().backward()


def assert_tree(found: Any, expected: Any, path: str = "") -> None:
    if isinstance(expected, torch.Tensor):
        assert same(found, expected.detach()), path
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for key, value in expected.items():
            assert_tree(found[key], value, f"{path}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), path
        for key, value in enumerate(expected):
            assert_tree(found[key], value, f"{path}/{key}")
    else:
        assert found == expected, path


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "adamw loop": lambda parameters: torch.optim.AdamW(parameters, foreach=False, amsgrad=True),
    "sgd fused": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "sgd foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
    "lr tensor": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.01), foreach=False),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_contents_are_those_at_the_save_for_every_optimizer(
    store: GatedStore, manage: Make, copying: Copying, kind: str
) -> None:
    model = model_of()
    optimizer = OPTIMIZERS[kind](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    expected = {}
    with manage(staging="overlap") as manager:
        for step in range(1, 5):
            objects: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
            expected[step] = copy.deepcopy({name: item.state_dict() for name, item in objects.items()})
            copying.hold()
            handle = manager.save(step, loss=torch.tensor(float(step)), **objects)
            assert handle.status == "staging"
            optimizer.zero_grad()
            forward_backward(model, step)  # BatchNorm's buffers change here
            forward_backward(model, step + 100)  # gradient accumulation
            stepping = in_thread(optimizer.step)
            assert copying.reached.wait(LIMIT_S)
            copying.go.set()
            stepping()
            scheduler.step()
            assert handle.result(LIMIT_S).step == step
    for step, state in expected.items():
        found = ckptstore.load(store, step)
        assert found.pop("loss") == step
        assert_tree(found, state)


def test_the_optimizers_step_waits_until_the_copy_is_complete(
    store: GatedStore, manage: Make, copying: Copying
) -> None:
    model = model_of()
    first = torch.optim.AdamW(model[0].parameters(), fused=True)
    second = torch.optim.SGD(model[3].parameters(), lr=0.1)
    with manage(staging="overlap") as manager:
        copying.hold()
        handle = manager.save(1, model=model, first=first, second=second)
        assert copying.reached.wait(LIMIT_S)
        forward_backward(model, 1)
        before = copy.deepcopy(list(model.parameters()))
        ended = threading.Event()

        def step_of(optimizer: torch.optim.Optimizer) -> None:
            optimizer.step()
            ended.set()

        stepping = [in_thread(functools.partial(step_of, optimizer)) for optimizer in (first, second)]
        assert not ended.wait(0.05)
        assert all(same(now.detach(), then.detach()) for now, then in zip(model.parameters(), before, strict=True))
        copying.go.set()
        for step in stepping:
            step()
        assert handle.stall_s >= 0.05
        handle.result(LIMIT_S)
        assert not same(weight_of(model, 0).detach(), before[0].detach())
    assert same(ckptstore.load(store)["model"]["0.weight"], before[0].detach())


def test_a_save_right_after_a_save_has_its_own_contents(store: GatedStore, manage: Make) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    expected = {}
    with manage(staging="overlap", max_pending=2) as manager:
        for step in range(1, 30):
            expected[step] = copy.deepcopy(model.state_dict())
            manager.save(step, model=model, optimizer=optimizer)
            if step % 3 == 0:
                optimizer.zero_grad()
                forward_backward(model, step)
                optimizer.step()
    for step, state in expected.items():
        assert_tree(ckptstore.load(store, step)["model"], state)


def edit_parameter(model: torch.nn.Sequential) -> None:
    with torch.no_grad():
        weight_of(model, 0).add_(1)


def edit_alias(model: torch.nn.Sequential) -> None:
    weight_of(model, 0).detach().view(-1)[3:5].fill_(0)


def free_storage(model: torch.nn.Sequential) -> None:
    weight_of(model, 0).untyped_storage().resize_(0)  # must be undone: even printing such a tensor reads freed memory


def load_over(model: torch.nn.Sequential) -> None:
    model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})


@pytest.mark.parametrize("edit", [edit_parameter, edit_alias, free_storage, load_over])
@pytest.mark.parametrize("told_by", ["handle", "save", "wait", "close"])
def test_an_edit_before_the_copy_is_complete_is_never_committed(
    store: GatedStore, manage: Make, copying: Copying, edit: Callable[[torch.nn.Sequential], None], told_by: str
) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    manager = manage(staging="overlap")
    manager.save(1, wait=True, model=model, optimizer=optimizer)
    copying.hold()
    handle = manager.save(2, model=model, optimizer=optimizer)
    n_bytes = weight_of(model, 0).untyped_storage().nbytes()
    edit(model)
    copying.go.set()
    engine_of(manager).wait(LIMIT_S)
    weight_of(model, 0).untyped_storage().resize_(n_bytes)
    match = r"step 2: model/.* changed in place between save\(\) and"
    if told_by == "handle":
        with pytest.raises(TornSnapshotError, match=match):
            handle.result(LIMIT_S)
    telling: dict[str, Callable[[], Any]] = {
        "save": lambda: manager.save(3, model=model, optimizer=optimizer),
        "close": manager.close,
    }
    with pytest.raises(TornSnapshotError, match=match) as raised:
        telling.get(told_by, manager.wait)()
    assert "step 2" in raised.value.__notes__[0]
    if told_by != "close":
        manager.save(3, model=model, optimizer=optimizer)
        manager.wait(LIMIT_S)
        assert_tree(ckptstore.load(store, 3)["model"], model.state_dict())
    assert 2 not in [item.step for item in ckptstore.open_run(store).checkpoints()]
    assert not [key for key in store.stored() if "/0000000002-" in key or "00002-e" in key]


def test_storage_freed_in_the_middle_of_the_copy_is_not_read(
    store: GatedStore, manage: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "PART_BYTES", 4096)
    monkeypatch.setattr("ckptstore.engine.saver.PART_BYTES", 4096)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fill = staging.Image._fill

    def freeing(self: staging.Image, number: int, *args: Any) -> None:
        fill(self, number, *args)
        if number == 2 and threading.current_thread() is not training:
            model.weight.untyped_storage().resize_(0)

    training = threading.current_thread()
    monkeypatch.setattr(staging.Image, "_fill", freeing)
    with manage(staging="overlap") as manager:
        handle = manager.save(1, model=model, optimizer=optimizer)
        engine_of(manager).wait(LIMIT_S)
        model.weight.untyped_storage().resize_(64 * 64 * 4)
        with pytest.raises(TornSnapshotError):
            handle.result(LIMIT_S)
        with pytest.raises(TornSnapshotError):
            manager.wait(LIMIT_S)


def test_an_edit_that_no_counter_sees_is_safe_once_staged_has_returned(
    store: GatedStore, manage: Make, copying: Copying
) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    expected = copy.deepcopy(model.state_dict())
    with manage(staging="overlap") as manager:
        copying.hold()
        with store.hold("write"):
            manager.save(1, model=model, optimizer=optimizer)
            waiting = in_thread(manager.staged)
            copying.go.set()
            waiting()
            weight_of(model, 0).data.mul_(5)
    assert_tree(ckptstore.load(store)["model"], expected)


def test_tensors_that_no_optimizer_owns_are_copied_before_save_returns(
    store: GatedStore, manage: Make, copying: Copying
) -> None:
    model = model_of()
    average = copy.deepcopy(model)
    weight_of(model, 3).requires_grad_(False)
    optimizer = torch.optim.AdamW([item for item in model.parameters() if item.requires_grad])
    raw = torch.arange(5.0)
    expected = copy.deepcopy({"model": model.state_dict(), "average": average.state_dict(), "raw": raw})
    with manage(staging="overlap") as manager:
        copying.hold()
        manager.save(1, model=model, average=average, raw=raw, optimizer=optimizer)
        with torch.no_grad():
            weight_of(model, 3).mul_(3)
            for parameter in average.parameters():
                parameter.mul_(3)
        raw.zero_()
        copying.go.set()
    found = ckptstore.load(store)
    found.pop("optimizer")
    assert_tree(found, expected)


def test_without_an_optimizer_the_state_is_copied_in_save_which_is_said_once(
    store: GatedStore, manage: Make, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    with manage(staging="overlap", max_pending=3) as manager:
        with store.hold("write"):
            for step in (1, 2):
                assert manager.save(step, model=model).status == "writing"
        manager.save(3, model=model, optimizer=optimizer)
        assert engine_of(manager)._copier is not None, "one save without an optimizer does not switch it off for good"
    assert caplog.text.count('staging="overlap" needs an optimizer') == 1


def test_an_error_in_the_eager_part_is_raised_and_lets_the_optimizer_go_on(
    store: GatedStore, manage: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())

    def fail(*_: object) -> None:
        raise MemoryError

    with manage(staging="overlap") as manager:
        with monkeypatch.context() as patched:
            patched.setattr(staging.Image, "copy_now", fail)
            with pytest.raises(MemoryError):
                manager.save(1, model=model, optimizer=optimizer)
        forward_backward(model, 1)
        in_thread(optimizer.step)()
        manager.save(2, wait=True, model=model, optimizer=optimizer)
    assert [item.step for item in ckptstore.open_run(store).checkpoints()] == [2]


@pytest.mark.filterwarnings("ignore:.*multi-threaded")
def test_a_child_forked_during_the_copy_can_train(store: GatedStore, manage: Make, copying: Copying) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    forward_backward(model, 1)
    with manage(staging="overlap") as manager:
        copying.hold()
        manager.save(1, model=model, optimizer=optimizer)
        assert copying.reached.wait(LIMIT_S)
        child = os.fork()
        if child == 0:
            optimizer.step()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        copying.go.set()


def test_closing_takes_the_hook_away_and_the_tensors_are_let_go(store: GatedStore, manage: Make) -> None:
    from torch.optim import optimizer as module

    before = len(module._global_optimizer_pre_hooks)
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    with manage(staging="overlap") as manager:
        for step in (1, 2, 3):
            manager.save(step, model=model, optimizer=optimizer)
        manager.wait(LIMIT_S)
        assert len(module._global_optimizer_pre_hooks) == before + 1
        later = engine_of(manager)._later
        assert later is not None
        assert not later.tensors
    assert len(module._global_optimizer_pre_hooks) == before


def test_training_with_a_save_at_every_step_resumes_exactly(store: GatedStore, manage: Make) -> None:
    def train(manager: CheckpointManager | None, first: int, last: int, objects: dict[str, Any]) -> list[float]:
        losses = []
        for step in range(first, last + 1):
            objects["optimizer"].zero_grad()
            inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
            loss = (objects["model"](inputs) - inputs).square().mean()
            loss.backward()
            objects["optimizer"].step()
            losses.append(loss.item())
            if manager is not None:
                manager.save(step, **objects)
        return losses

    def fresh() -> dict[str, Any]:
        model = model_of()
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), fused=True)}

    expected = train(None, 1, 12, fresh())
    with manage(staging="overlap", max_pending=2) as manager:
        assert train(manager, 1, 7, fresh()) == expected[:7]
    objects = fresh()
    with manage(staging="overlap") as manager:
        assert manager.resume(**objects).step == 7
        assert train(manager, 8, 12, objects) == expected[7:]
