"""How does each kind of live object take a saved state: what must fit, which of its tensors are filled in place, and how
is a refusal undone?
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from ckptstore.errors import CorruptionError, MismatchError
from ckptstore.state.tensors import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ckptstore.reader.source import Source

__all__ = ["GeneratorTarget", "ModuleTarget", "OptimizerTarget", "PlainTarget", "StatefulTarget", "Target"]

_SHOWN = 5
# State of torch's optimizers that has the parameter's shape; used only to find a mismatch early.
_PARAMETER_SHAPED = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "acc_delta", "sum", "ax"}
)


def shown(names: Iterable[str]) -> str:
    """Return a few names and how many more there are."""
    found = list(names)
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more


def fillable(tensor: torch.Tensor, like: torch.Tensor) -> bool:
    """Tell whether the bytes of *like*, a stand-in, may be written straight into *tensor*'s memory."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.dtype == like.dtype
        and tensor.shape == like.shape
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


class Target:
    """One live object and the saved state it shall get.

    Attributes:
        fragile: ``apply`` runs code that may refuse, so it must run before anything is filled in place.
    """

    fragile = True

    def __init__(self, source: Source, name: str, live: Any) -> None:
        self.source = source
        self.name = name
        self.live = live
        self._references = source.references(name)
        self._before: Any = None

    def check(self) -> list[str]:
        """Return what does not fit, each a sentence part; empty if all does."""
        return []

    def destinations(self) -> dict[str, torch.Tensor]:
        """Return live tensors to fill in place, by tensor name."""
        return {}

    def names(self) -> Iterable[str]:
        """Return the tensors whose bytes are needed."""
        return self._references

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Give the object its state, with *tensors* filled; return the value for ``Resumed.values``."""
        raise AssertionError

    def undo(self) -> None:
        """Bring the object back to what it was before ``apply``, as far as its own code allows."""


class _Outline:
    """The saved state with stand-ins for its tensors, to compare a live object with. Reads no payload."""

    def __init__(self, source: Source, name: str, references: Mapping[str, str]) -> None:
        self.stand_ins = source.stand_ins(references)
        self.name_of = {id(stand_in): item for item, stand_in in self.stand_ins.items()}
        self.value: Any = source.decode(name, self.stand_ins)


class StatefulTarget(Target):
    """An object of unknown code: its ``load_state_dict`` gets new tensors, and a refusal is undone from a copy."""

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._before = copy.deepcopy(self.live.state_dict())
        value = self.source.decode(self.name, tensors)
        try:
            self._load(value)
        except Exception as error:
            message = f"{self.name}: {type(self.live).__name__}.load_state_dict refused the saved state: {error}"
            raise MismatchError(message, operation="restore", key=self.name) from error

    def _load(self, value: Any) -> None:
        self.live.load_state_dict(value)

    def undo(self) -> None:
        if self._before is not None:
            self._load(self._before)


class ModuleTarget(StatefulTarget):
    """A module. With nothing but torch's own loading in it, its parameters and buffers are filled in place."""

    def __init__(self, source: Source, name: str, live: torch.nn.Module, *, strict: bool, strip: str | None) -> None:
        super().__init__(source, name, live)
        self._strict = strict
        self._strip = strip or ""
        self._own: dict[str, Any] = live.state_dict()
        self._pairs: dict[str, tuple[torch.Tensor, str]] = {}
        plain = all(tag == "tensor" for tag in self._references.values())
        self.fragile = not plain or not _loads_plainly(live) or not all(map(torch.is_tensor, self._own.values()))
        self._outline = _Outline(source, name, self._references) if plain else None

    def check(self) -> list[str]:
        if self._outline is None:
            return []
        if not isinstance(self._outline.value, dict):
            return [f"{self.name}: the checkpoint holds {type(self._outline.value).__name__}, not a module's state"]
        saved = {self._bare(key): value for key, value in self._outline.value.items()}
        own = {self._bare(key): value for key, value in self._own.items()}
        problems = []
        missing = [key for key in own if key not in saved]
        unexpected = [key for key in saved if key not in own]
        if self._strict and (missing or unexpected):
            if missing:
                problems.append(f"{self.name}: missing in the checkpoint: {shown(missing)}")
            if unexpected:
                problems.append(f"{self.name}: in the checkpoint but not in the module: {shown(unexpected)}")
            problems.extend(_prefix_hint(own, saved))
        for key, live in own.items():
            stored = saved.get(key)
            if not isinstance(live, torch.Tensor) or not isinstance(stored, torch.Tensor):
                continue
            if live.shape != stored.shape:
                problems.append(
                    f"{self.name}/{key}: shape {tuple(stored.shape)} in the checkpoint, {tuple(live.shape)} in the module"
                )
            elif self._strict and live.dtype != stored.dtype:
                problems.append(
                    f"{self.name}/{key}: dtype {stored.dtype} in the checkpoint, {live.dtype} in the module"
                )
            else:
                self._pairs[key] = (live, self._outline.name_of[id(stored)])
        return problems

    def names(self) -> Iterable[str]:
        return self._references if self.fragile else dict.fromkeys(name for _, name in self._pairs.values())

    def destinations(self) -> dict[str, torch.Tensor]:
        if self.fragile or self._outline is None:
            return {}
        stand_ins = self._outline.stand_ins
        return {name: live for live, name in self._pairs.values() if fillable(live, stand_ins[name])}

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if self.fragile:
            super().apply(tensors)
            return
        with torch.no_grad():
            for live, name in self._pairs.values():
                filled = tensors[name]
                if filled.data_ptr() != live.data_ptr() or filled.device != live.device:
                    live.copy_(filled)

    def _load(self, value: Any) -> None:
        own = {self._bare(key): key for key in self._own}
        self.live.load_state_dict(
            {own.get(self._bare(key), key): item for key, item in value.items()}, strict=self._strict
        )

    def _bare(self, key: str) -> str:
        return key.removeprefix(self._strip)


class OptimizerTarget(Target):
    """An optimizer: groups must match; state keeps the dtype it was saved with, on each parameter's device."""

    fragile = False

    def __init__(self, source: Source, name: str, live: torch.optim.Optimizer) -> None:
        super().__init__(source, name, live)
        self._outline = _Outline(source, name, self._references)
        self._parameters = [parameter for group in live.param_groups for parameter in group["params"]]

    def check(self) -> list[str]:
        saved = self._outline.value
        if not isinstance(saved, dict) or not {"state", "param_groups"} <= saved.keys():
            return [f"{self.name}: the checkpoint does not hold an optimizer's state"]
        own_groups, saved_groups = self.live.param_groups, saved["param_groups"]
        if len(own_groups) != len(saved_groups):
            return [
                f"{self.name}: {len(saved_groups)} parameter groups in the checkpoint, {len(own_groups)} in the optimizer"
            ]
        problems = []
        for index, (own, stored) in enumerate(zip(own_groups, saved_groups, strict=True)):
            if len(own["params"]) != len(stored["params"]):
                shapes = shown(str(tuple(parameter.shape)) for parameter in own["params"])
                problems.append(
                    f"{self.name}: group {index} has {len(stored['params'])} parameters in the checkpoint, "
                    f"{len(own['params'])} in the optimizer (shapes {shapes})"
                )
        if problems:
            return problems
        for _, parameter, state in self._each(saved):
            for key, value in state.items():
                if (
                    isinstance(value, torch.Tensor)
                    and key in _PARAMETER_SHAPED
                    and value.dim() > 0
                    and value.shape != parameter.shape
                ):
                    problems.append(
                        f"{self.name}: {key} has shape {tuple(value.shape)} in the checkpoint, its parameter "
                        f"{tuple(parameter.shape)} in the optimizer"
                    )
        return problems

    def destinations(self) -> dict[str, torch.Tensor]:
        found = {}
        for _, parameter, state in self._each(self._outline.value):
            held = self.live.state.get(parameter, {})
            for key, value in state.items():
                live = held.get(key)
                if isinstance(value, torch.Tensor) and isinstance(live, torch.Tensor) and fillable(live, value):
                    found[self._outline.name_of[id(value)]] = live
        return found

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> None:
        value = self.source.decode(self.name, tensors)
        held = self.live
        self._before = (held.state, held.param_groups)
        try:
            held.load_state_dict(value)
        except Exception as error:
            message = f"{self.name}: {type(held).__name__}.load_state_dict refused the saved state: {error}"
            raise MismatchError(message, operation="restore", key=self.name) from error
        # torch casts state to the parameter's dtype; fp32 state of a bf16 parameter must stay what was saved.
        for _, parameter, state in self._each(value):
            for key, stored in state.items():
                now = held.state[parameter].get(key)
                if isinstance(stored, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != stored.dtype:
                    held.state[parameter][key] = stored.to(now.device)

    def undo(self) -> None:
        if self._before is not None:
            self.live.__setstate__({"state": self._before[0], "param_groups": self._before[1]})

    def _each(self, saved: dict[str, Any]) -> Iterable[tuple[int, torch.Tensor, dict[str, Any]]]:
        """Yield number, live parameter and saved state of each parameter that has some, in group order."""
        order = [number for group in saved["param_groups"] for number in group["params"]]
        for number, parameter in zip(order, self._parameters, strict=True):
            state = saved["state"].get(number)
            if isinstance(state, dict):
                yield number, parameter, state


class GeneratorTarget(Target):
    """A torch.Generator."""

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> None:
        saved = self.source.decode(self.name, tensors)
        if saved["device"] != self.live.device.type:
            message = f"{self.name}: a generator of {saved['device']} was saved, one of {self.live.device.type} passed"
            raise MismatchError(message, operation="restore", key=self.name)
        self._before = self.live.get_state()
        self.live.set_state(saved["state"])

    def undo(self) -> None:
        if self._before is not None:
            self.live.set_state(self._before)


class PlainTarget(Target):
    """A plain value: returned, and a dict, list or tensor that was passed is also changed in place."""

    fragile = False

    def check(self) -> list[str]:
        if not isinstance(self.live, torch.Tensor):
            return []
        spec = self.source.spec(next(iter(self._references))) if len(self._references) == 1 else None
        if spec is None or spec.shape != tuple(self.live.shape) or DTYPES[spec.dtype] != self.live.dtype:
            saved = "no single tensor" if spec is None else f"{spec.dtype} {spec.shape}"
            return [f"{self.name}: {saved} in the checkpoint, {self.live.dtype} {tuple(self.live.shape)} was passed"]
        return []

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        value = self.source.decode(self.name, tensors)
        live = self.live
        if isinstance(live, torch.Tensor):
            with torch.no_grad():
                live.copy_(value)
            return live
        # The container's own methods, so that a dict keeps its identity for those who hold it.
        if type(live) is type(value) and isinstance(live, dict):
            self._before = dict(live)
            live.clear()
            live.update(value)
            return live
        if type(live) is type(value) and isinstance(live, list):
            self._before = list(live)
            live[:] = value
            return live
        return value

    def undo(self) -> None:
        if isinstance(self.live, dict) and self._before is not None:
            self.live.clear()
            self.live.update(self._before)
        elif isinstance(self.live, list) and self._before is not None:
            self.live[:] = self._before


def target_of(source: Source, name: str, live: Any, *, strict: bool, strip: str | None) -> Target:
    """Return how *live* takes state *name*; MismatchError if what was saved is of another kind."""
    kind = source.kind(name)
    if isinstance(live, torch.Generator):
        wanted, made = "generator", GeneratorTarget
    elif hasattr(live, "load_state_dict") and hasattr(live, "state_dict"):
        wanted, made = "stateful", StatefulTarget
    else:
        wanted, made = "plain", PlainTarget
    if kind != wanted:
        message = f"{name}: a {kind} state was saved, but a {wanted} object ({type(live).__name__}) was passed"
        raise MismatchError(message, operation="restore", key=name)
    try:
        if isinstance(live, torch.nn.Module):
            return ModuleTarget(source, name, live, strict=strict, strip=strip)
        if isinstance(live, torch.optim.Optimizer):
            return OptimizerTarget(source, name, live)
        return made(source, name, live)
    except (KeyError, TypeError, AttributeError) as error:
        message = f"{source.what}: state {name} is malformed: {error!r}"
        raise CorruptionError(message, key=source.what) from error


def _loads_plainly(module: torch.nn.Module) -> bool:
    """Tell whether loading this module does nothing but copy tensors: no hooks, no overridden loading."""
    for part in module.modules():
        for method in ("load_state_dict", "_load_from_state_dict", "state_dict", "set_extra_state"):
            # torch's own layers override loading only to read older formats of themselves.
            if not getattr(type(part), method).__module__.startswith("torch.nn."):
                return False
        if part._load_state_dict_pre_hooks or part._load_state_dict_post_hooks:
            return False
    return True


def _prefix_hint(own: Iterable[str], saved: Iterable[str]) -> list[str]:
    for prefix in ("module.", "_orig_mod."):
        for keys, where in ((list(own), "module"), (list(saved), "checkpoint")):
            if keys and all(key.startswith(prefix) for key in keys):
                return [f'hint: every key of the {where} starts with "{prefix}": pass strip_prefix="{prefix}"']
    return []
