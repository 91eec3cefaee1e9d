"""How does a checkpoint get into live objects, all of it or nothing?

First every object is checked against the checkpoint by names, shapes, dtypes and groups, reading no payload. Then the
bytes are proven. Only then do live objects change: first those that may refuse, undone from a copy of what they had;
last torch's own modules and optimizers, which were checked and are filled in place.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal

import torch

from ckptstore.errors import MismatchError
from ckptstore.reader.modules import ModuleTarget
from ckptstore.reader.optimizers import OptimizerTarget
from ckptstore.reader.targets import GeneratorTarget, PlainTarget, StatefulTarget, kind_of, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptstore.reader.source import Source
    from ckptstore.reader.targets import Target

__all__ = ["Prepared", "Verify", "prepare"]

Verify = Literal["full", "inline", "sizes"]
_LOG = logging.getLogger(__name__)


class Prepared:
    """Live objects that fit a checkpoint; ``load`` fills them."""

    def __init__(self, source: Source, targets: Mapping[str, Target], extra: Mapping[str, Any]) -> None:
        self._source = source
        self._targets = targets
        self._values = dict(extra)
        self._done: list[Target] = []
        self._tensors: dict[str, torch.Tensor] = {}

    def load(self, *, verify: Verify = "full") -> dict[str, Any]:
        """Fill the live objects and return the value of each plain state, by name.

        Args:
            verify: "full": every byte is proven before any live object changes. "inline": proven while live tensors
                are filled; on an error their content is undefined. "sizes": not proven.

        Raises:
            CorruptionError: damaged bytes; with "full" every live object is as it was.
            MismatchError: an object's own ``load_state_dict`` refused; what had changed was undone.
            UnavailableError: the store did not answer; as for damage.
        """
        fragile = {name: target for name, target in self._targets.items() if target.fragile}
        sturdy = {name: target for name, target in self._targets.items() if not target.fragile}
        direct = self._direct(in_place=verify != "full" or self._source.store.capabilities().local)
        try:
            if verify == "full" and direct:
                self._source.check(self._needed(self._targets))
            elif not direct:
                self._read(self._targets, {}, verify)  # all of it is in hand before anything changes
            self._read(fragile, {}, verify)
            self._apply(fragile)
            self._read(sturdy, direct, verify)
            self._apply(sturdy)
        except BaseException:
            self._undo()
            raise
        return self._values

    def _undo(self) -> None:
        for target in reversed(self._done):
            try:
                target.undo()
            except Exception:  # noqa: BLE001 - the others must be undone all the same
                _LOG.exception("%s: what it was before could not be restored", target.name)

    def _read(self, targets: Mapping[str, Target], direct: Mapping[str, torch.Tensor], verify: Verify) -> None:
        names = [name for name in self._needed(targets) if name not in self._tensors]
        found = {name: direct[name] for name in names if name in direct}
        found |= self._source.empty(name for name in names if name not in direct)
        self._source.plan(found).read(verify=verify != "sizes")
        self._tensors |= found

    def _apply(self, targets: Mapping[str, Target]) -> None:
        for name, target in targets.items():
            self._done.append(target)
            value = target.apply(self._tensors)
            if self._source.kind(name) == "plain":
                self._values[name] = value

    @staticmethod
    def _needed(targets: Mapping[str, Target]) -> dict[str, None]:
        return dict.fromkeys(name for target in targets.values() for name in target.names())

    def _direct(self, *, in_place: bool) -> dict[str, torch.Tensor]:
        """Return the live tensors to fill in place; of those that share memory only the first."""
        if not in_place:
            return {}
        found: dict[str, torch.Tensor] = {}
        taken: set[int] = set()
        for target in self._targets.values():
            for name, tensor in target.destinations().items():
                if name not in found and tensor.data_ptr() not in taken and tensor.numel():
                    found[name] = tensor
                    taken.add(tensor.data_ptr())
        return found


def prepare(
    source: Source, states: Mapping[str, Any], *, strict: bool = True, strip_prefix: str | None = None
) -> Prepared:
    """Check live objects against a checkpoint, reading no payload and changing nothing.

    Args:
        source: The checkpoint.
        states: Live objects and plain values by name, as they were passed to ``save``.
        strict: Names, keys and dtypes must agree; otherwise what fits is filled and the rest left as it is.
        strip_prefix: A wrapper's key prefix ("module.", "_orig_mod.") to ignore on both sides.

    Raises:
        MismatchError: lists what does not fit.
    """
    problems: list[str] = []
    targets: dict[str, Target] = {}
    extra: dict[str, Any] = {}
    for name, live in states.items():
        if name in source.states:
            targets[name] = target = _target_of(source, name, live, strict=strict, strip=strip_prefix)
            problems.extend(target.check())
        elif strict:
            problems.append(f"{name}: the checkpoint has no such state; it has {shown(source.states) or 'none'}")
        else:
            _LOG.warning("%s has no state %s; it is left as it is", source.what, name)
            if kind_of(live) == "plain":
                extra[name] = live
    if problems:
        message = f"{source.what} does not fit the objects passed; nothing was changed:\n  " + "\n  ".join(problems)
        raise MismatchError(message, operation="restore", key=source.key)
    for name in source.states:
        if name not in states and source.kind(name) == "plain" and not source.references(name):
            extra[name] = source.decode(name, {})
    return Prepared(source, targets, extra)


def _target_of(source: Source, name: str, live: Any, *, strict: bool, strip: str | None) -> Target:
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
