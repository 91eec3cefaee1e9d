"""Does a module fit a saved state, and how does it get it?

A module with nothing but torch's own loading in it is compared key by key, and its parameters and buffers are filled in
place. One with hooks, extra state or methods of its own loads by its own code, and what it had is kept meanwhile.
"""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any

import torch

from ckptstore.reader.targets import Target, contents_of, fillable, refill, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ckptstore.reader.source import Source

__all__ = ["ModuleTarget"]

_LOG = logging.getLogger(__name__)
_PREFIXES = ("module.", "_orig_mod.")
_LOADING = ("load_state_dict", "_load_from_state_dict")
_OTHER = ("state_dict", "_save_to_state_dict", "get_extra_state", "set_extra_state")


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
            or _has_own(live, _OTHER)
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
                    f"{self.name}/{key}: shape {tuple(stored.shape)} in the checkpoint, "
                    f"{tuple(live.shape)} in the module"
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
            contents_of((*self.live.parameters(), *self.live.buffers())),
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
            refill(contents)
            for part, extra_state in extra_states:
                part.set_extra_state(extra_state)

    def _bare(self, key: str) -> str:
        return key.removeprefix(self._strip)


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
