"""A run that was killed goes on, bit for bit, as if it had never stopped."""

from __future__ import annotations

import copy
import dataclasses
import logging
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW
from torch.optim import lr_scheduler as schedules

from ckptstore import CheckpointManager
from ckptstore.engine.capture import capture, check_names
from ckptstore.errors import ConfigError, FencedError, MismatchError, NotFoundError, UnsupportedError
from ckptstore.state import registry
from ckptstore.state.registry import register_type
from tests.unit.reader.training import Tied, Training, new_url
from tests.unit.state.same import assert_same

if TYPE_CHECKING:
    from collections.abc import Callable

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda p: AdamW(p, lr=1e-2, weight_decay=0.01),
    "AdamW amsgrad": lambda p: AdamW(p, lr=1e-2, amsgrad=True),
    "AdamW fused": lambda p: AdamW(p, lr=1e-2, fused=True),
    "AdamW foreach": lambda p: AdamW(p, lr=1e-2, foreach=True),
    "AdamW tensor lr": lambda p: AdamW(p, lr=torch.tensor(1e-2)),
    "SGD momentum": lambda p: SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "SGD": lambda p: SGD(p, lr=1e-2),
    "Adagrad": lambda p: Adagrad(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
    "Adadelta": torch.optim.Adadelta,
    "groups": lambda p: AdamW([{"params": [q], "lr": 1e-2 / (n + 1)} for n, q in enumerate(p)]),
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "Cosine": lambda o: schedules.CosineAnnealingLR(o, T_max=20),
    "OneCycle": lambda o: schedules.OneCycleLR(o, max_lr=0.02, total_steps=40),
    "Lambda": lambda o: schedules.LambdaLR(o, lambda step: 1 / (1 + step)),
    "Sequential": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, total_iters=3), schedules.ExponentialLR(o, 0.9)], milestones=[3]
    ),
    "Plateau": lambda o: schedules.ReduceLROnPlateau(o, patience=0, threshold=10.0),
}


def global_draws() -> tuple[float, float, float]:
    """Draw from each of the generators that a checkpoint restores."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002, TID251


def saved_and_resumed(make: Callable[[], Training], *, before: int = 5, after: int = 4) -> tuple[Training, Training]:
    """Train, save, train on; resume into fresh objects, train on; assert that both saw the same losses."""
    url = new_url()
    first = make()
    with CheckpointManager(url) as manager:
        assert manager.resume(**first.states()).fresh
        for _ in range(before):
            first.step()
        manager.save(before, **first.states(), wait=True)
        expected = first.content()
        losses = [first.step() for _ in range(after)]
        draws = global_draws()
    torch.manual_seed(99)
    random.seed(99)  # noqa: TID251 - the global generator is what is restored
    np.random.seed(99)  # noqa: NPY002
    second = make()
    manager = CheckpointManager(url)
    resumed = manager.resume(**second.states())
    assert resumed.step == before
    assert not resumed.fresh
    assert_same(second.content(), expected)
    assert [second.step() for _ in range(after)] == losses
    assert global_draws() == draws
    assert_same(second.content(), first.content())
    manager.close()
    return first, second


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_goes_on_bit_for_bit_with_every_optimizer(optimizer: str) -> None:
    saved_and_resumed(lambda: Training(OPTIMIZERS[optimizer]))


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_run_goes_on_bit_for_bit_with_every_scheduler(scheduler: str) -> None:
    optimizer = "SGD momentum" if scheduler == "OneCycle" else "AdamW"
    saved_and_resumed(lambda: Training(OPTIMIZERS[optimizer], SCHEDULERS[scheduler]))


def test_a_disabled_scaler_has_an_empty_state_and_that_comes_back() -> None:
    saved_and_resumed(lambda: Training(scaler=False))


def test_tied_weights_are_one_tensor_after_resume_too() -> None:
    _, second = saved_and_resumed(Training)
    assert second.model.head.weight is second.model.embedding.weight
    assert second.optimizer.param_groups[0]["params"][0] is second.model.embedding.weight


def test_the_state_of_a_capturable_optimizer_comes_back() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = AdamW([weight], capturable=True)
    optimizer.state[weight] = {
        "step": torch.tensor(7.0),
        "exp_avg": torch.arange(3.0),
        "exp_avg_sq": torch.arange(3.0) / 7,
    }
    url = new_url()
    with CheckpointManager(url) as manager:
        manager.save(1, optimizer=optimizer)
    other = nn.Parameter(torch.ones(3))
    fresh = AdamW([other], capturable=True)
    with CheckpointManager(url) as manager:
        manager.resume(optimizer=fresh)
    assert_same(fresh.state_dict(), optimizer.state_dict())


def test_float32_state_of_bfloat16_parameters_stays_float32() -> None:
    def make(p: Any) -> torch.optim.Optimizer:
        return AdamW(p, lr=1e-2)

    training = Training(make, dtype=torch.bfloat16, scaler=False)
    training.step()
    for state in training.optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = state[key].float() + 1e-9  # finer than bfloat16 can say
    url = new_url()
    with CheckpointManager(url) as manager:
        manager.save(1, **training.states())
    for trained in (False, True):  # an optimizer that has no state yet, and one whose state is bfloat16
        fresh = Training(make, dtype=torch.bfloat16, scaler=False)
        if trained:
            fresh.step()
        with CheckpointManager(url) as manager:
            manager.resume(**fresh.states())
        assert_same(fresh.content(), training.content())
        moments = next(iter(fresh.optimizer.state.values()))
        assert moments["exp_avg"].dtype == torch.float32


def test_nested_optimizer_state_keeps_its_dtype_too() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = SGD([weight], lr=0.1)
    optimizer.state[weight] = {
        "nested": {"list": [torch.full((3,), 1.0000001)]},
        "count": torch.tensor([3], dtype=torch.int64),
    }
    url = new_url()
    with CheckpointManager(url) as manager:
        manager.save(1, optimizer=optimizer)
    fresh = SGD([nn.Parameter(torch.ones(3, dtype=torch.bfloat16))], lr=0.1)
    with CheckpointManager(url) as manager:
        manager.resume(optimizer=fresh)
    assert_same(fresh.state_dict(), optimizer.state_dict())


def test_averaged_weights_are_an_entry_of_their_own_beside_the_model() -> None:
    url = new_url()
    training = Training()
    averaged = torch.optim.swa_utils.AveragedModel(training.model, use_buffers=True)
    for _ in range(3):
        training.step()
        averaged.update_parameters(training.model)
    with CheckpointManager(url) as manager:
        manager.save(3, **training.states(), ema=averaged)
    fresh = Training()
    ema = torch.optim.swa_utils.AveragedModel(fresh.model, use_buffers=True)
    with CheckpointManager(url) as manager:
        manager.resume(**fresh.states(), ema=ema)
    assert_same(fresh.content(), training.content())
    assert_same(ema.state_dict(), averaged.state_dict())
    assert not torch.equal(ema.state_dict()["module.embedding.weight"], fresh.model.embedding.weight)


class Loader:
    """A data loader that knows where it is."""

    def __init__(self) -> None:
        self.position = 0
        self.order = np.arange(5)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.order = state["position"], state["order"]


class Empty:
    """A stateful object without state."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_objects_of_ones_own_generators_and_plain_values_come_back() -> None:
    url = new_url()
    loader, generator = Loader(), torch.Generator().manual_seed(5)
    loader.position = 41
    loader.order = np.array([4, 2, 0, 1, 3])
    torch.rand(7, generator=generator)
    plain: dict[str, Any] = {
        "data_seed": 1234,
        "none": None,
        "name": "run ü",
        "history": [0.5, float("inf"), (1, 2)],
        "config": {"lr": 1e-3, 3: "three", "nested": {"flags": [True, None]}},
        "anchor": torch.arange(4.0),
        "empty_dict": {},
        "empty_list": [],
    }
    with CheckpointManager(url) as manager:
        fresh = manager.resume(loader=loader, generator=generator, **plain)
        assert fresh.fresh
        assert fresh.step == 0
        assert fresh.values == plain  # neither the loader nor the generator is a plain value
        manager.save(1, loader=loader, generator=generator, **plain)
    expected = torch.rand(5, generator=generator)

    other, drawn = Loader(), torch.Generator()
    live: dict[str, Any] = {
        "data_seed": 0,
        "none": 3,
        "name": "",
        "history": [9],
        "config": {"old": 1},
        "anchor": torch.zeros(4),
        "empty_dict": {"filled": 1},
        "empty_list": ["filled"],
    }
    with CheckpointManager(url) as manager:
        resumed = manager.resume(loader=other, generator=drawn, **live)
    assert_same(resumed.values, plain)
    assert other.position == 41
    assert other.order.tolist() == [4, 2, 0, 1, 3]
    assert torch.equal(torch.rand(5, generator=drawn), expected)
    for name in ("history", "config", "anchor", "empty_dict", "empty_list"):  # changed in place, too
        assert resumed.values[name] is live[name]
        assert_same(live[name], plain[name])


@pytest.mark.parametrize("saved,live", [({}, {"a": 1}), ({"a": 1}, {})])
def test_an_empty_state_replaces_a_full_one_and_the_reverse(saved: dict[str, Any], live: dict[str, Any]) -> None:
    url = new_url()
    with CheckpointManager(url) as manager:
        manager.save(1, thing=Empty(saved))
    thing = Empty(live)
    with CheckpointManager(url) as manager:
        manager.resume(thing=thing)
    assert thing.state == saved


def test_plain_values_come_back_though_they_were_not_asked_for() -> None:
    url = new_url()
    with CheckpointManager(url) as manager:
        manager.save(1, data_seed=3, other="x", model=nn.Linear(1, 1))
    with CheckpointManager(url) as manager:
        assert manager.resume().values == {"data_seed": 3, "other": "x"}


class Extra(nn.Module):
    """A module with state beside its tensors, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("passing", torch.zeros(1), persistent=False)
        self.seen: dict[str, Any] = {"tokens": 0}

    def get_extra_state(self) -> dict[str, Any]:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


class OldNames(nn.Module):
    """A module that reads what it was called before."""

    def __init__(self, key: str = "new") -> None:
        super().__init__()
        self.register_parameter(key, nn.Parameter(torch.rand(3)))
        self.register_load_state_dict_pre_hook(self._rename)  # type: ignore[no-untyped-call]

    def _rename(self, _module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if prefix + "old" in state and "new" in self._parameters:
            state[prefix + "new"] = state.pop(prefix + "old")


class Decides(nn.Linear):
    """A module with a load_state_dict of its own, without torch's further arguments."""

    def load_state_dict(self, state: Any) -> Any:  # type: ignore[override]
        self.loaded = True
        return super().load_state_dict({key: value + 1 for key, value in state.items()})


def resumed_into(saved: Any, live: Any) -> Any:
    url = new_url()
    with CheckpointManager(url) as manager:
        manager.save(1, model=saved)
    with CheckpointManager(url) as manager:
        manager.resume(model=live)
    return live


def test_a_module_with_extra_state_gets_it_back() -> None:
    saved = Extra()
    saved.seen = {"tokens": 12, "mean": torch.tensor(3.0)}
    live = resumed_into(saved, Extra())
    assert_same(live.state_dict(), saved.state_dict())


def test_a_module_whose_hooks_rename_old_keys_is_asked_and_not_judged() -> None:
    saved = OldNames("old")
    assert torch.equal(resumed_into(saved, OldNames()).new, saved.state_dict()["old"])


def test_a_module_with_its_own_loading_is_loaded_by_it() -> None:
    saved = Decides(2, 2)
    live = resumed_into(saved, Decides(2, 2))
    assert live.loaded
    assert torch.equal(live.weight, saved.weight + 1)


def test_a_module_whose_state_dict_gives_copies_is_filled_all_the_same() -> None:
    def copies(_: nn.Module, state: dict[str, Any], *__: Any) -> None:
        for key in list(state):
            state[key] = state[key].clone()

    saved, live = nn.Linear(2, 2), nn.Linear(2, 2)
    live._register_state_dict_hook(copies)  # type: ignore[no-untyped-call]
    assert_same(resumed_into(saved, live).weight.detach(), saved.weight.detach())


def test_a_lazy_module_is_materialised_by_loading() -> None:
    saved = nn.Linear(3, 2)
    live = resumed_into(saved, nn.LazyLinear(2))
    assert torch.equal(live.weight, saved.weight)


def test_a_parameter_that_is_not_contiguous_is_filled_in_place() -> None:
    saved = nn.Conv2d(3, 4, 2)
    live = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    weight = live.weight
    resumed_into(saved, live)
    assert live.weight is weight
    assert torch.equal(weight, saved.weight)
    assert weight.is_contiguous(memory_format=torch.channels_last)


def test_parameters_keep_their_identity_and_their_place_in_memory() -> None:
    saved, live = Tied(), Tied()
    before = [(id(item), item.data_ptr()) for item in live.parameters()]
    resumed_into(saved, live)
    assert [(id(item), item.data_ptr()) for item in live.parameters()] == before


def test_weights_tied_at_save_fill_a_module_that_does_not_tie_them() -> None:
    saved, live = Tied(), Tied()
    live.head.weight = nn.Parameter(torch.zeros(11, 6))
    resumed_into(saved, live)
    assert torch.equal(live.head.weight, saved.embedding.weight)
    assert live.head.weight is not live.embedding.weight


def test_a_run_whose_writer_never_closed_goes_on_and_the_old_writer_is_fenced() -> None:
    url = new_url()
    first, second = Training(), Training()
    killed = CheckpointManager(url)
    killed.resume(**first.states())
    first.step()
    killed.save(1, **first.states(), wait=True)
    expected = first.content()
    with CheckpointManager(url, takeover=True) as manager:
        assert manager.resume(**second.states()).step == 1
        assert_same(second.content(), expected)
        with pytest.raises(FencedError):
            killed.save(2, **first.states(), wait=True)
        manager.save(2, **second.states(), wait=True)
    killed.close()


def test_numbers_drawn_while_loading_do_not_disturb_those_that_training_goes_on_with() -> None:
    class Draws(Loader):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict({**state, "order": np.random.permutation(5)})  # noqa: NPY002
            torch.rand(3)

    url = new_url()
    with CheckpointManager(url) as manager:
        manager.save(1, loader=Draws(), wait=True)
        expected = global_draws()
    with CheckpointManager(url) as manager:
        manager.resume(loader=Draws())
    assert global_draws() == expected


def test_without_the_generators_the_numbers_go_on_as_they_were() -> None:
    url = new_url()
    with CheckpointManager(url, rng=False) as manager:
        manager.save(1, x=1)
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    with CheckpointManager(url) as manager:
        manager.resume()
    assert torch.equal(torch.rand(3), expected)


def test_generator_states_that_do_not_fit_here_are_not_taken_for_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    url = new_url()
    with CheckpointManager(url) as manager:
        manager.save(1, x=1)
        manager.save(2, x=2)
        before = torch.get_rng_state()
        size = before.numel()
        monkeypatch.setattr(torch, "get_rng_state", lambda: torch.zeros(size - 8, dtype=torch.uint8))
        manager.save(3, x=[3])
        monkeypatch.undo()
    live = [0]
    with CheckpointManager(url) as manager:
        with pytest.raises(UnsupportedError, match="rng=False"):
            manager.resume(x=live)
        assert not manager.latest().damaged  # type: ignore[union-attr]
    assert live == [0]
    assert torch.equal(torch.get_rng_state(), before)
    with CheckpointManager(url, rng=False) as manager:
        assert manager.resume(x=live).step == 3
    assert live == [3]


def test_what_was_saved_and_not_passed_to_resume_is_named(caplog: pytest.LogCaptureFixture) -> None:
    url = new_url()
    training = Training()
    with CheckpointManager(url) as manager:
        manager.save(1, **training.states())
    with CheckpointManager(url) as manager, caplog.at_level(logging.WARNING):
        manager.resume(model=training.model)
    assert "also holds optimizer, scheduler, scaler" in caplog.text


def test_finding_nothing_is_said_with_the_address_and_raises_if_asked_to(caplog: pytest.LogCaptureFixture) -> None:
    url = new_url()
    with CheckpointManager(url) as manager, caplog.at_level(logging.INFO):
        with pytest.raises(NotFoundError, match=url):
            manager.resume(x=1, required=True)
        assert manager.resume(x=1).fresh
    assert url in caplog.text


@pytest.mark.parametrize("name", ["step", "strict", "metrics", "url", "wait"])
def test_reserved_words_are_no_names_of_states(name: str) -> None:
    for call in (lambda: check_names({name: 1}), lambda: capture({name: 1}, with_rng=False)):
        with pytest.raises(ConfigError, match=f"{name} can't be the name of a state"):
            call()


def test_a_class_that_is_not_registered_here_is_known_before_anything_is_claimed_or_changed() -> None:
    @dataclasses.dataclass
    class Setting:
        value: int

    register_type(Setting, "tests.Setting")
    url = new_url()
    model = nn.Linear(2, 2)
    with CheckpointManager(url) as manager:
        manager.save(1, setting=Setting(3), model=model)
    held = registry._classes.pop("tests.Setting")
    live = nn.Linear(2, 2)
    before = copy.deepcopy(live.state_dict())
    with CheckpointManager(url) as manager:
        with pytest.raises(UnsupportedError, match="register_type"):
            manager.resume(setting=None, model=live)
        assert manager._session.refresh().seq == 1  # the claim and the commit of the first
        assert_same(live.state_dict(), before)
        registry._classes["tests.Setting"] = held
        assert manager.resume(setting=None, model=live).values["setting"] == Setting(3)


def test_a_mismatch_between_two_kinds_of_state_says_both() -> None:
    url = new_url()
    with CheckpointManager(url) as manager:
        manager.save(1, thing={"a": 1})
    with (
        CheckpointManager(url) as manager,
        pytest.raises(MismatchError, match="a plain state was saved, but a stateful"),
    ):
        manager.resume(thing=nn.Linear(1, 1))
