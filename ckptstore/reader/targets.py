"""How does each kind of live object take a saved state: what must fit, which of its tensors are filled in place, and how
is a refusal undone?

Objects whose loading does nothing but copy tensors (torch's own modules and optimizers) are checked beforehand and then
can't refuse: they are filled in place, last. All others run code of their own and may refuse, so they come first, and
what they had is kept until all is done.
"""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

from ckptstore.errors import MismatchError
from ckptstore.state import selection
from ckptstore.state.tensors import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ckptstore.reader.source import Kind, Source

__all__ = [
    "GeneratorTarget",
    "ModuleTarget",
    "OptimizerTarget",
    "PlainTarget",
    "StatefulTarget",
    "Target",
    "kind_of",
    "shown",
    "target_of",
]

_LOG = logging.getLogger(__name__)
_SHOWN = 5
_PREFIXES = ("module.", "_orig_mod.")
_LOADING = ("load_state_dict", "_load_from_state_dict", "set_extra_state")
_SAVING = ("state_dict", "_save_to_state_dict", "get_extra_state")
# State of torch's optimizers that has the parameter's shape; used only to find a mismatch early.
_PARAMETER_SHAPED = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "acc_delta", "sum", "ax"}
)


def shown(names: Iterable[str]) -> str:
    """Return a few names and how many more there are."""
    found = list(names)
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more


def kind_of(live: object) -> Kind:
    """Return how ``save`` stores this object."""
    if isinstance(live, torch.Generator):
        return "generator"
    has_both = callable(getattr(live, "state_dict", None)) and callable(getattr(live, "load_state_dict", None))
    return "stateful" if has_both and not isinstance(live, type) else "plain"


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

    Making one decodes the saved state with stand-ins for its tensors, so what can't be decoded here is known before
    anything is claimed, read or changed.

    Attributes:
        fragile: ``apply`` runs code that may refuse, so it must run before anything is filled in place.
    """

    fragile = True

    def __init__(self, source: Source, name: str, live: Any) -> None:
        self.source = source
        self.name = name
        self.live = live
        self._references = source.references(name)
        self._stand_ins = source.stand_ins(self._references)
        self._name_of = {id(stand_in): item for item, stand_in in self._stand_ins.items()}
        self._outline: Any = source.decode(name, self._stand_ins)
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
        raise AssertionError

    def refused(self, error: Exception) -> MismatchError:
        """Return the error for an object whose own code did not take the state."""
        message = f"{self.name}: {type(self.live).__name__} refused the saved state: {error}"
        return MismatchError(message, operation="restore", key=self.name)


class StatefulTarget(Target):
    """An object of unknown code: its ``load_state_dict`` gets new tensors, and a refusal is undone from a copy."""

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> None:
        value = self.source.decode(self.name, tensors)
        self._before = copy.deepcopy(self.live.state_dict())
        try:
            self.live.load_state_dict(value)
        except Exception as error:
            raise self.refused(error) from error

    def undo(self) -> None:
        if self._before is not None:
            self.live.load_state_dict(self._before)


class ModuleTarget(Target):
    """A module. With nothing but torch's own loading in it, its parameters and buffers are filled in place."""

    def __init__(self, source: Source, name: str, live: torch.nn.Module, *, strict: bool, strip: str | None) -> None:
        super().__init__(source, name, live)
        self._strict = strict
        self._strip = strip or ""
        self._own: dict[str, Any] = live.state_dict()
        self._pairs: dict[str, tuple[torch.Tensor, str]] = {}
        self._judges_itself = _has_own(live, _LOADING) or any(
            part._load_state_dict_pre_hooks or part._load_state_dict_post_hooks  # noqa: SLF001
            for part in live.modules()
        )
        self.fragile = (
            self._judges_itself
            or _has_own(live, _SAVING)
            or any(part._state_dict_hooks or part._state_dict_pre_hooks for part in live.modules())  # noqa: SLF001
            or not all(map(torch.is_tensor, self._own.values()))
            or not all(tag == "tensor" for tag in self._references.values())
        )

    def check(self) -> list[str]:
        if not isinstance(self._outline, dict):
            return [f"{self.name}: the checkpoint holds {type(self._outline).__name__}, not a module's state"]
        if self._judges_itself:  # its hooks may rename or reshape: what fits is for them to say
            return []
        saved = {self._bare(key): value for key, value in self._outline.items()}
        own = {self._bare(key): value for key, value in self._own.items()}
        problems = self._keys_that_differ(own, saved)
        for key, live in own.items():
            stored = saved.get(key)
            if (
                not isinstance(live, torch.Tensor)
                or not isinstance(stored, torch.Tensor)
                or torch.nn.parameter.is_lazy(live)
            ):
                continue
            if live.shape != stored.shape:
                problems.append(
                    f"{self.name}/{key}: shape {tuple(stored.shape)} in the checkpoint, {tuple(live.shape)} in the module"
                )
            elif self._strict and live.dtype != stored.dtype:
                problems.append(
                    f"{self.name}/{key}: dtype {stored.dtype} in the checkpoint, {live.dtype} in the module"
                )
            elif not self.fragile:
                self._pairs[key] = (live, self._name_of[id(stored)])
        return problems

    def _keys_that_differ(self, own: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
        missing = [key for key in own if key not in saved]
        unexpected = [key for key in saved if key not in own]
        problems = []
        if missing:
            problems.append(f"{self.name}: missing in the checkpoint: {shown(missing)}")
        if unexpected:
            problems.append(f"{self.name}: in the checkpoint but not in the module: {shown(unexpected)}")
        if not self._strict:
            for problem in problems:
                _LOG.warning("%s; not loaded", problem)
            return []
        return problems + (_prefix_hint(self._own, self._outline) if missing and unexpected else [])

    def names(self) -> Iterable[str]:
        return self._references if self.fragile else dict.fromkeys(name for _, name in self._pairs.values())

    def destinations(self) -> dict[str, torch.Tensor]:
        return {name: live for live, name in self._pairs.values() if fillable(live, self._stand_ins[name])}

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if self.fragile:
            self._apply_by_its_code(tensors)
            return
        with torch.no_grad():
            for live, name in self._pairs.values():
                filled = tensors[name]
                if filled.data_ptr() != live.data_ptr() or filled.device != live.device:
                    live.copy_(filled)

    def _apply_by_its_code(self, tensors: Mapping[str, torch.Tensor]) -> None:
        value = self.source.decode(self.name, tensors)
        if self._strip:
            own = {self._bare(key): key for key in self._own}
            value = {own.get(self._bare(key), key): item for key, item in value.items()}
        self._before = (
            _contents((*self.live.parameters(), *self.live.buffers())),
            [
                (part, copy.deepcopy(part.get_extra_state()))
                for part in self.live.modules()
                if type(part).get_extra_state is not torch.nn.Module.get_extra_state
            ],
        )
        try:
            # An overridden method need not have the argument.
            self.live.load_state_dict(value, **({} if self._strict else {"strict": False}))
        except Exception as error:
            raise self.refused(error) from error

    def undo(self) -> None:
        if self._before is not None:
            contents, extra_states = self._before
            _refill(contents)
            for part, extra_state in extra_states:
                part.set_extra_state(extra_state)

    def _bare(self, key: str) -> str:
        return key.removeprefix(self._strip)


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
            return [
                f"{self.name}: {len(saved_groups)} parameter groups in the checkpoint, "
                f"{len(own_groups)} in the optimizer"
            ]
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
            _contents(item for state in states.values() for item in state.values()) if self.fragile else [],
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
            _refill(contents)

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


class GeneratorTarget(Target):
    """A torch.Generator."""

    def check(self) -> list[str]:
        saved = self._outline
        if not isinstance(saved, dict) or saved.keys() != {"device", "state"}:
            return [f"{self.name}: the checkpoint does not hold a generator's state"]
        if saved["device"] != self.live.device.type:
            return [f"{self.name}: a generator of {saved['device']} was saved, one of {self.live.device.type} passed"]
        return []

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> None:
        saved = self.source.decode(self.name, tensors)
        self._before = self.live.get_state()
        try:
            self.live.set_state(saved["state"])
        except (RuntimeError, TypeError) as error:
            raise self.refused(error) from error

    def undo(self) -> None:
        if self._before is not None:
            self.live.set_state(self._before)


class PlainTarget(Target):
    """A plain value: returned, and a dict, list or tensor that was passed is also changed in place."""

    def check(self) -> list[str]:
        if not isinstance(self.live, torch.Tensor):
            return []
        name = selection.tensor_name(self.source.tree(self.name))
        spec = None if name is None else self.source.spec(name)
        if spec is None or spec.shape != tuple(self.live.shape) or DTYPES[spec.dtype] != self.live.dtype:
            saved = "no dense tensor" if spec is None else f"{spec.dtype} {spec.shape}"
            return [f"{self.name}: {saved} in the checkpoint, {self.live.dtype} {tuple(self.live.shape)} was passed"]
        return []

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        value = self.source.decode(self.name, tensors)
        live = self.live
        # Their own methods, so that they keep their identity for those who hold them.
        if isinstance(live, torch.Tensor):
            self._before = live.detach().clone()
            with torch.no_grad():
                live.copy_(value)
            return live
        if type(live) is type(value) and isinstance(live, dict | list):
            self._before = live.copy()
            _replace(live, value)
            return live
        return value

    def undo(self) -> None:
        if self._before is None:
            return
        if isinstance(self.live, torch.Tensor):
            with torch.no_grad():
                self.live.copy_(self._before)
        else:
            _replace(self.live, self._before)


def target_of(source: Source, name: str, live: Any, *, strict: bool, strip: str | None) -> Target:
    """Return how *live* takes state *name*; MismatchError if what was saved is of another kind."""
    kind, wanted = source.kind(name), kind_of(live)
    if kind != wanted:
        message = f"{name}: a {kind} state was saved, but a {wanted} one ({type(live).__name__}) was passed"
        raise MismatchError(message, operation="restore", key=name)
    if isinstance(live, torch.nn.Module):
        return ModuleTarget(source, name, live, strict=strict, strip=strip)
    if isinstance(live, torch.optim.Optimizer):
        return OptimizerTarget(source, name, live, strict=strict, strip=strip)
    made = {"generator": GeneratorTarget, "stateful": StatefulTarget, "plain": PlainTarget}[kind]
    return made(source, name, live)


def _replace(live: dict[Any, Any] | list[Any], value: Any) -> None:
    live.clear()
    if isinstance(live, dict):
        live.update(value)
    else:
        live.extend(value)


def _contents(items: Iterable[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the tensors among *items*, each with a copy of what it holds."""
    tensors = (item for item in items if isinstance(item, torch.Tensor))
    return [(tensor, tensor.detach().clone()) for tensor in tensors if not torch.nn.parameter.is_lazy(tensor)]


def _refill(contents: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for tensor, content in contents:
            tensor.copy_(content)


def _as_saved(now: Any, stored: Any) -> Any:
    """Return *now*, which torch cast to the parameter's dtype, in the dtype that was saved: fp32 state of bf16
    parameters must stay fp32."""
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


def _has_own(module: torch.nn.Module, methods: tuple[str, ...]) -> bool:
    """Tell whether any part of *module* has its own version of *methods*.

    torch's layers don't count: they override loading only to read older formats of themselves.
    """
    return any(
        name in vars(part) or not getattr(type(part), name).__module__.startswith("torch.nn.")
        for part in module.modules()
        for name in methods
    )


def _prefix_hint(own: Iterable[str], saved: Iterable[str]) -> list[str]:
    for keys, where in ((list(own), "module"), (list(saved), "checkpoint")):
        prefix = _wrapper_prefix(keys)
        if prefix:
            return [f'hint: every key of the {where} starts with "{prefix}": pass strip_prefix="{prefix}"']
    return []


def _wrapper_prefix(keys: list[str]) -> str:
    """Return what wrappers put before every key, all of them: a compiled data-parallel model has two."""
    for prefix in _PREFIXES:
        if keys and all(key.startswith(prefix) for key in keys):
            return prefix + _wrapper_prefix([key.removeprefix(prefix) for key in keys])
    return ""
