"""Live objects that do not fit a checkpoint are named shortly and exactly, unchanged, and nothing is claimed."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from ckptstore import CheckpointManager, open_run
from ckptstore.errors import MismatchError
from tests.unit.reader.stored import keys, raw_of
from tests.unit.reader.training import new_url
from tests.unit.state.same import assert_same

if TYPE_CHECKING:
    from collections.abc import Callable


def net(*, width: int = 3, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, width), nn.Linear(width, 2)).to(dtype)


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return stepped(AdamW(model.parameters(), **options))


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    items = list(model.parameters())
    groups: list[dict[str, Any]] = [{"params": items[:2]}, {"params": items[2:], "lr": 1.0}]
    return stepped(AdamW(groups))


def named(model: nn.Module, *names: str) -> torch.optim.Optimizer:
    return stepped(AdamW([(name, item) for name, item in zip(names, model.parameters(), strict=True)]))


class Stateful:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "missing keys": (
        lambda: nn.Linear(2, 2, bias=False),
        lambda: nn.Linear(2, 2),
        r"thing: missing in the checkpoint: bias$",
    ),
    "unexpected keys": (
        lambda: nn.Linear(2, 2),
        lambda: nn.Linear(2, 2, bias=False),
        r"thing: in the checkpoint but not in the module: bias$",
    ),
    "many keys": (
        lambda: nn.Sequential(*(nn.Linear(1, 1) for _ in range(9))),
        lambda: nn.Sequential(nn.Linear(1, 1)),
        r"not in the module: 1\.weight, 1\.bias, 2\.weight, 2\.bias, 3\.weight and 11 more$",
    ),
    "shapes": (
        net,
        lambda: net(width=4),
        r"(?s)thing/0\.weight: shape \(3, 2\) in the checkpoint, \(4, 2\) in the module.*thing/1\.weight: shape",
    ),
    "dtypes": (
        lambda: net(dtype=torch.bfloat16),
        net,
        r"thing/0\.weight: dtype torch\.bfloat16 in the checkpoint, torch\.float32 in the module",
    ),
    "buffers": (
        lambda: nn.BatchNorm1d(3),
        lambda: nn.BatchNorm1d(3, track_running_stats=False),
        r"not in the module: running_mean, running_var, num_batches_tracked$",
    ),
    "prefix in the checkpoint": (
        lambda: nn.DataParallel(net()),
        net,
        r'hint: every key of the checkpoint starts with "module\.": pass strip_prefix="module\."$',
    ),
    "prefix in the module": (
        net,
        lambda: nn.ModuleDict({"module": nn.ModuleDict({"_orig_mod": net()})}),
        r'hint: every key of the module starts with "module\._orig_mod\.": pass strip_prefix="module\._orig_mod\."$',
    ),
    "number of groups": (
        lambda: two_groups(net()),
        lambda: adam(net()),
        r"thing: 2 parameter groups in the checkpoint, 1 in the optimizer$",
    ),
    "size of a group": (
        lambda: adam(nn.Linear(2, 2)),
        lambda: adam(net()),
        r"group 0 has 2 parameters in the checkpoint, 4 in the optimizer \(\(3, 2\), \(3,\), \(2, 3\), \(2,\)\)$",
    ),
    "size of a group with names": (
        lambda: adam(nn.Linear(2, 2)),
        lambda: named(net(), "a", "b", "c", "d"),
        r"group 0 has 2 parameters in the checkpoint, 4 in the optimizer \(a, b, c, d\)$",
    ),
    "order of a group": (
        lambda: named(nn.Linear(2, 2), "weight", "bias"),
        lambda: named(nn.Linear(2, 2), "bias", "weight"),
        r"group 0 holds other parameters than the checkpoint's: weight → bias, bias → weight$",
    ),
    "state of another shape": (
        lambda: adam(net()),
        lambda: adam(net(width=4)),
        r"thing: exp_avg of parameter 0 has shape \(3, 2\) in the checkpoint, its parameter \(4, 2\) in the optimizer",
    ),
    "momentum for Adam": (
        lambda: stepped(SGD(net().parameters(), lr=0.1, momentum=0.9)),
        lambda: adam(net()),
        r"group 0 in the checkpoint has no betas, eps.*: it is not the state of AdamW",
    ),
    "Adam for momentum": (
        lambda: adam(net()),
        lambda: stepped(SGD(net().parameters(), lr=0.1, momentum=0.9)),
        r"group 0 in the checkpoint has no momentum, dampening.*: it is not the state of SGD",
    ),
    "a module's state for an optimizer": (net, lambda: adam(net()), "does not hold an optimizer's state"),
    "a plain value for an object": (lambda: 3, net, r"a plain state was saved, but a stateful one \(Sequential\)"),
    "an object for a plain value": (net, lambda: 3, r"a stateful state was saved, but a plain one \(int\)"),
    "a generator for an object": (torch.Generator, Stateful, "a generator state was saved, but a stateful one"),
    "a tensor of another shape": (
        lambda: torch.zeros(3),
        lambda: torch.zeros(4),
        r"thing: float32 \(3,\) in the checkpoint, torch.float32 \(4,\) was passed",
    ),
    "a dict for a tensor": (lambda: {"a": torch.zeros(3)}, lambda: torch.zeros(3), "no dense tensor in the checkpoint"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit_is_named_and_nothing_is_changed_or_claimed(case: str) -> None:
    save, live, message = CASES[case]
    url = new_url()
    with CheckpointManager(url) as manager:
        manager.save(1, fine=[1], thing=save())
    thing, fine = live(), [0]
    before = copy.deepcopy(thing.state_dict()) if hasattr(thing, "state_dict") else copy.deepcopy(thing)
    journal = keys(raw_of(url), "journal")
    generator = torch.get_rng_state()
    with CheckpointManager(url) as manager:
        with pytest.raises(MismatchError, match=message) as caught:
            manager.resume(fine=fine, thing=thing)
        with pytest.raises(MismatchError, match=message):
            open_run(url).at(step=1).restore(fine=fine, thing=thing)
        assert keys(raw_of(url), "journal") == journal
    assert "step 1" in str(caught.value) or "state was saved" in str(caught.value)
    assert fine == [0]
    assert_same(thing.state_dict() if hasattr(thing, "state_dict") else thing, before)
    assert torch.equal(torch.get_rng_state(), generator)


def test_all_that_does_not_fit_is_said_at_once() -> None:
    url = new_url()
    with CheckpointManager(url) as manager:
        manager.save(1, model=net(), optimizer=adam(net()))
    with pytest.raises(MismatchError) as caught, CheckpointManager(url) as manager:
        manager.resume(model=net(width=4), optimizer=two_groups(net()), absent=3)
    for part in (
        "model/0.weight",
        "optimizer: 1 parameter groups",
        "absent: the checkpoint has no such state; it has model, optimizer",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize("wrapped_at", ["save", "resume"])
@pytest.mark.parametrize("hooked", [False, True])
def test_a_wrappers_prefix_is_stripped_on_request_on_either_side(wrapped_at: str, hooked: bool) -> None:
    saved, live = net(), net()
    if hooked:
        live[0].register_load_state_dict_pre_hook(lambda *_: None)  # type: ignore[no-untyped-call]
    url = new_url()
    with CheckpointManager(url) as manager:
        manager.save(1, model=nn.DataParallel(saved) if wrapped_at == "save" else saved)
    with CheckpointManager(url) as manager:
        model = nn.DataParallel(live) if wrapped_at == "resume" else live
        manager.resume(model=model, strip_prefix="module.")
    assert_same(live.state_dict(), saved.state_dict())


def test_names_of_parameters_that_differ_by_the_prefix_are_the_same_when_it_is_stripped() -> None:
    model = nn.Linear(2, 2)
    url = new_url()
    with CheckpointManager(url) as manager:
        manager.save(1, optimizer=named(model, "module.weight", "module.bias"))
    with CheckpointManager(url) as manager:
        live = named(model, "weight", "bias")
        with pytest.raises(MismatchError, match=r"module\.weight → weight"):
            manager.resume(optimizer=live)
        manager.resume(optimizer=live, strip_prefix="module.")


def test_without_strictness_what_fits_is_filled_and_the_rest_is_left_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    saved = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False)).to(torch.float64)
    live = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    before = live.state_dict()
    bias = before["1.bias"].clone()
    url = new_url()
    with CheckpointManager(url) as manager:
        manager.save(1, model=saved)
    with CheckpointManager(url) as manager, caplog.at_level(logging.WARNING):
        resumed = manager.resume(model=live, new="value", other=net(), strict=False)
    assert torch.equal(before["0.weight"], saved.state_dict()["0.weight"].float())
    assert torch.equal(before["1.bias"], bias)
    assert resumed.values == {"new": "value"}
    for part in ("missing in the checkpoint: 1.bias", "not in the module: 0.bias", "has no state other"):
        assert part in caplog.text


def test_without_strictness_shapes_must_fit_all_the_same() -> None:
    url = new_url()
    with CheckpointManager(url) as manager:
        manager.save(1, model=net())
    with CheckpointManager(url) as manager, pytest.raises(MismatchError, match=r"model/0\.weight: shape"):
        manager.resume(model=net(width=5), strict=False)


def test_an_optimizer_of_an_older_torch_that_lacked_an_option_is_taken() -> None:
    optimizer = adam(net())
    url = new_url()
    with CheckpointManager(url) as manager:
        for key in ("fused", "differentiable", "capturable", "maximize"):
            del optimizer.param_groups[0][key]
        manager.save(1, optimizer=optimizer)
    live = adam(net())
    with CheckpointManager(url) as manager:
        manager.resume(optimizer=live)
    assert live.param_groups[0]["capturable"] is False
