"""Does an optimizer fit a saved state, and how does it get it, every entry in the dtype that was saved?

Groups and shapes are compared beforehand. torch casts what it loads to the dtype of the parameter, which would round
the fp32 state of bf16 parameters, so such entries are put back afterwards as they were saved.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

from ckptstore.reader.targets import Target, contents_of, fillable, refill, shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ckptstore.reader.source import Source

__all__ = ["OptimizerTarget"]

# State of torch's optimizers that has the parameter's shape; used only to find a mismatch early.
_PARAMETER_SHAPED = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "acc_delta", "sum", "ax"}
)


class OptimizerTarget(Target):
    """An optimizer: groups must match; state keeps the dtype it was saved with, on each parameter's device."""

    def __init__(
        self, source: Source, name: str, live: torch.optim.Optimizer, *, strict: bool, strip: str | None
    ) -> None:
        super().__init__(source, name, live)
        self._strict = strict
        self._strip = strip or ""
        self._parameters = [parameter for group in live.param_groups for parameter in group["params"]]
        self.fragile = (
            type(live).load_state_dict is not torch.optim.Optimizer.load_state_dict
            or not type(live).__setstate__.__module__.startswith("torch.optim.")
            or bool(live._optimizer_load_state_dict_pre_hooks)  # noqa: SLF001
            or bool(live._optimizer_load_state_dict_post_hooks)  # noqa: SLF001
        )

    def check(self) -> list[str]:
        saved = self._outline
        if not _is_optimizer_state(saved):
            return [f"{self.name}: the checkpoint does not hold an optimizer's state"]
        own_groups, saved_groups = self.live.param_groups, saved["param_groups"]
        if len(own_groups) != len(saved_groups):
            counts = f"{len(saved_groups)} parameter groups in the checkpoint, {len(own_groups)} in the optimizer"
            return [f"{self.name}: {counts}"]
        problems = [
            problem
            for index, (own, stored) in enumerate(zip(own_groups, saved_groups, strict=True))
            for problem in self._group_that_differs(index, own, stored)
        ]
        return problems or [
            f"{self.name}: {key} of {label} has shape {tuple(value.shape)} in the checkpoint, its parameter "
            f"{tuple(parameter.shape)} in the optimizer"
            for label, parameter, state in self._each(saved)
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
            and key in _PARAMETER_SHAPED
            and value.dim() > 0
            and value.shape != parameter.shape
        ]

    def _group_that_differs(self, index: int, own: dict[str, Any], stored: dict[str, Any]) -> Iterator[str]:
        names, saved_names = ([self._bare(name) for name in group.get("param_names", ())] for group in (own, stored))
        if len(own["params"]) != len(stored["params"]):
            held = shown(names or (str(tuple(parameter.shape)) for parameter in own["params"]))
            yield (
                f"{self.name}: group {index} has {len(stored['params'])} parameters in the checkpoint, "
                f"{len(own['params'])} in the optimizer ({held})"
            )
        elif self._strict and names and saved_names and names != saved_names:
            differ = [f"{old} → {new}" for old, new in zip(saved_names, names, strict=False) if old != new]
            yield f"{self.name}: group {index} holds other parameters than the checkpoint's: {shown(differ)}"
        if self.fragile:
            return
        # torch's __setstate__ fills in what a newer torch added to the optimizer; for one of another class it can't.
        trial = copy.copy(self.live)
        trial.__setstate__({"state": defaultdict(dict), "param_groups": [{**stored, "params": own["params"]}]})
        missing = [key for key in self.live.defaults if key in own and key not in trial.param_groups[0]]
        if missing:
            yield (
                f"{self.name}: group {index} in the checkpoint has no {shown(missing)}: it is not the state of "
                f"{type(self.live).__name__}"
            )

    def destinations(self) -> dict[str, torch.Tensor]:
        if self.fragile:
            return {}
        found = {}
        for _, parameter, state in self._each(self._outline):
            held = self.live.state.get(parameter, {})
            for key, value in state.items():
                live, name = held.get(key), self._name_of.get(id(value))
                if name is not None and isinstance(live, torch.Tensor) and fillable(live, value):
                    found[name] = live
        return found

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> None:
        value = self.source.decode(self.name, tensors)
        live = self.live
        states = {key: dict(state) for key, state in live.state.items() if isinstance(state, dict)}
        self._before = (
            (live.state, states),
            (live.param_groups, [dict(group) for group in live.param_groups]),
            contents_of(item for state in states.values() for item in state.values()) if self.fragile else [],
        )
        try:
            live.load_state_dict(value)
        except Exception as error:
            raise self.refused(error) from error
        for _, parameter, state in self._each(value):
            live.state[parameter] = _as_saved(live.state[parameter], state)

    def undo(self) -> None:
        if self._before is not None:
            (self.live.state, states), (self.live.param_groups, groups), contents = self._before
            self.live.state.update(states)
            for group, before in zip(self.live.param_groups, groups, strict=True):
                group.clear()
                group.update(before)
            refill(contents)

    def _each(self, saved: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
        """Yield name or number, live parameter and saved state of each parameter that has some, in group order."""
        order = [number for group in saved["param_groups"] for number in group["params"]]
        labels = [name for group in self.live.param_groups for name in group.get("param_names", ())]
        for index, (number, parameter) in enumerate(zip(order, self._parameters, strict=True)):
            state = saved["state"].get(number)
            if isinstance(state, dict):
                yield labels[index] if len(labels) == len(order) else f"parameter {index}", parameter, state

    def _bare(self, key: str) -> str:
        return key.removeprefix(self._strip)


def _as_saved(now: Any, stored: Any) -> Any:
    """Return *now*, which torch cast to the parameter's dtype, in the dtype that was saved."""
    if isinstance(stored, torch.Tensor) and isinstance(now, torch.Tensor):
        return now if now.dtype == stored.dtype else stored.to(now.device)
    if isinstance(stored, dict) and isinstance(now, dict):
        return {key: _as_saved(value, stored.get(key)) for key, value in now.items()}
    if type(stored) is list and type(now) is list and len(stored) == len(now):
        return [_as_saved(*pair) for pair in zip(now, stored, strict=True)]
    return now


def _is_optimizer_state(saved: Any) -> bool:
    return (
        isinstance(saved, dict)
        and isinstance(saved.get("state"), dict)
        and isinstance(saved.get("param_groups"), list)
        and all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in saved["param_groups"])
    )
