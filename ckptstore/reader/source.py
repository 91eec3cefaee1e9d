"""What does one checkpoint hold, before any of its payload is read?

A Source is a proven manifest and the place it came from. Its nesting can be decoded with stand-ins for the tensors, so
that live objects are checked against the checkpoint without reading a byte of payload.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from ckptstore.errors import CorruptionError
from ckptstore.reader.read import PartPlan, check_tensors
from ckptstore.reader.verify import open_manifest
from ckptstore.state import selection, tree
from ckptstore.state.dtypes import ITEM_BYTES
from ckptstore.state.tensors import DTYPES, TensorSpec, empty, memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ckptstore.run.layout import Layout
    from ckptstore.run.manifest import Manifest
    from ckptstore.run.records import Row
    from ckptstore.store import CheckpointStore

__all__ = ["Source", "open_source"]


class Source:
    """One checkpoint, proven down to its manifest. Immutable; any thread."""

    def __init__(self, store: CheckpointStore, prefix: str, manifest: Manifest, what: str) -> None:
        self.store = store
        self.prefix = prefix
        self.manifest = manifest
        self.what = what
        self.states: dict[str, Any] = manifest.tree.get("states", {})

    def kind(self, name: str) -> str:
        """Return how state *name* was saved: "stateful", "plain" or "generator"."""
        return str(self.states[name].get("kind"))

    def references(self, name: str) -> dict[str, str]:
        """Return the tensors that state *name* needs (a tied one may be stored under another state's name), with the
        tag of each."""
        return selection.references(self.states[name]["tree"])

    def rng_references(self) -> dict[str, str]:
        """Return the tensors that the saved random state needs."""
        return selection.references(self.manifest.tree.get("rng"))

    def stand_ins(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return a tensor without memory for each name."""
        return {
            name: torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device="meta")
            for name in names
            for spec in (self.spec(name),)
        }

    def decode(self, name: str, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Return the value of a state with *tensors* in the places of its references."""
        return tree.decode(self.states[name]["tree"], tensors)

    def empty(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return new CPU tensors, not filled, for these names."""
        return {name: empty(self.spec(name)) for name in names}

    def read(self, names: Iterable[str], *, verify: bool) -> dict[str, torch.Tensor]:
        """Return new CPU tensors with the bytes of these names."""
        tensors = self.empty(names)
        self.plan(tensors).read(verify=verify)
        return tensors

    def plan(self, tensors: Mapping[str, torch.Tensor]) -> PartPlan:
        """Return the plan that fills *tensors*, contiguous on the CPU, with the bytes of the tensors of that name."""
        targets = {name: memory(tensor) for name, tensor in tensors.items()}
        return PartPlan(self.store, self.prefix, self.manifest, targets)

    def check(self, names: Iterable[str]) -> None:
        """Prove every byte of these tensors without keeping one."""
        check_tensors(self.store, self.prefix, self.manifest, names)

    def spec(self, name: str) -> TensorSpec:
        """Return what tensor *name* is, after seeing that its bytes exist."""
        entry = self.manifest.tensors.get(name)
        if entry is None:
            message = f"{self.what}: its tree needs the tensor {name[:200]}, which it does not list"
            raise CorruptionError(message, key=self.what)
        n_bytes = math.prod(entry.shape) * ITEM_BYTES.get(entry.dtype, 0)
        # Before anything is allocated: the shape a manifest claims must be backed by bytes that exist.
        if entry.dtype not in ITEM_BYTES or n_bytes != sum(piece.n_bytes for piece in entry.pieces):
            message = (
                f"{self.what}: tensor {name[:200]} says dtype {entry.dtype[:40]} and shape {entry.shape[:16]}, "
                "which does not fit its bytes"
            )
            raise CorruptionError(message, key=self.what)
        return TensorSpec(name, entry.dtype, tuple(entry.shape), n_bytes)


def open_source(store: CheckpointStore, layout: Layout, row: Row) -> Source:
    """Return the checkpoint that *row* names; CorruptionError if manifest or files are not as they were written."""
    manifest = open_manifest(store, layout, row)
    return Source(store, layout.attempt(row.attempt), manifest, layout.manifest(row.attempt))
