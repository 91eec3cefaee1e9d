"""How does a live object take a saved state, and how is that undone?

Objects whose loading does nothing but copy tensors (torch's own modules and optimizers) are checked beforehand and then
can't refuse: they are filled in place, last. All others run code of their own and may refuse, so they come first, and
what they had is kept until all is done.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from ckptstore.errors import MismatchError
from ckptstore.state import selection
from ckptstore.state.tensors import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ckptstore.reader.source import Kind, Source

__all__ = [
    "GeneratorTarget",
    "PlainTarget",
    "StatefulTarget",
    "Target",
    "contents_of",
    "fillable",
    "kind_of",
    "refill",
    "shown",
]

_SHOWN = 5


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
        raise NotImplementedError

    def undo(self) -> None:
        """Bring the object back to what it was before ``apply``, as far as its own code allows."""
        raise NotImplementedError

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


def _replace(live: dict[Any, Any] | list[Any], value: Any) -> None:
    live.clear()
    if isinstance(live, dict):
        live.update(value)
    else:
        live.extend(value)


def contents_of(items: Iterable[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the tensors among *items*, each with a copy of what it holds."""
    tensors = (item for item in items if isinstance(item, torch.Tensor))
    return [(tensor, tensor.detach().clone()) for tensor in tensors if not torch.nn.parameter.is_lazy(tensor)]


def refill(contents: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Put back what ``contents_of`` returned."""
    with torch.no_grad():
        for tensor, content in contents:
            tensor.copy_(content)
