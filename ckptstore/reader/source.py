"""What does one checkpoint hold, before any of its payload is read?

A Source is a proven manifest and the place it came from. Its nesting can be decoded with stand-ins for the tensors, so
that live objects are checked against the checkpoint without reading a byte of payload.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import torch

from ckptstore.errors import CorruptionError, UnsupportedError
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

__all__ = ["Kind", "Source", "open_source"]

Kind = Literal["stateful", "plain", "generator"]
_KINDS = ("stateful", "plain", "generator")
_MAX_DIMS = 1024
_MAX_ELEMENTS = 1 << 62  # torch counts strides in 64 bits, even around no elements


class Source:
    """One checkpoint, proven down to its manifest. Immutable; any thread.

    Attributes:
        store: Where it is.
        prefix: Where its files are.
        manifest: Its manifest.
        key: The manifest's key, for errors.
        what: What to call it in messages.
        states: Kind and tree of each state, by name.

    Raises:
        CorruptionError: the manifest's list of states is none.
    """

    def __init__(self, store: CheckpointStore, prefix: str, manifest: Manifest, key: str) -> None:
        self.store = store
        self.prefix = prefix
        self.manifest = manifest
        self.key = key
        self.what = f"the checkpoint of step {manifest.step} ({store.url}, {key})"
        self.states: dict[str, Any] = manifest.tree.get("states", {})
        if not isinstance(self.states, dict) or not all(
            isinstance(item, dict) and item.get("kind") in _KINDS and "tree" in item for item in self.states.values()
        ):
            message = f"{self.what}: its list of states is malformed"
            raise CorruptionError(message, operation="load", key=key)

    def kind(self, name: str) -> Kind:
        """Return how state *name* was saved."""
        kind: Kind = self.states[name]["kind"]
        return kind

    def tree(self, name: str) -> Any:
        """Return the tree of state *name*."""
        return self.states[name]["tree"]

    def references(self, name: str) -> dict[str, str]:
        """Return the tensors that state *name* needs, each with its tag; a tied one may bear another state's name."""
        return selection.references(self.tree(name))

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
        return tree.decode(self.tree(name), tensors)

    def empty(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return new CPU tensors, not filled, for these names."""
        return {name: empty(self.spec(name)) for name in names}

    def read(self, names: Iterable[str], *, verify: bool) -> dict[str, torch.Tensor]:
        """Return new CPU tensors with the bytes of these names."""
        tensors = self.empty(names)
        self.plan(tensors).read(verify=verify)
        return tensors

    def mapped(self, names: Iterable[str], *, verify: bool) -> dict[str, torch.Tensor]:
        """Return CPU tensors that are read from the files when they are touched; with *verify* proven now.

        Each tensor has a storage of its own, so saving one saves no other. Changes stay private to this process.
        """
        names = list(names)
        if verify:
            self.check(names)
        files: dict[int, memoryview] = {}
        found = self.empty(name for name in names if not self.spec(name).n_bytes)
        for name in names:
            spec = self.spec(name)
            if not spec.n_bytes:
                continue
            (piece,) = self.manifest.tensors[name].pieces
            if piece.file not in files:
                files[piece.file] = self.store.map(self.prefix + self.manifest.files[piece.file].path)
            memory = torch.frombuffer(files[piece.file], dtype=torch.uint8, count=spec.n_bytes, offset=piece.start)
            found[name] = memory.view(DTYPES[spec.dtype]).view(spec.shape)
        return found

    def plan(self, tensors: Mapping[str, torch.Tensor]) -> PartPlan:
        """Return the plan that fills *tensors*, contiguous on the CPU, with the bytes of the tensors of that name."""
        targets = {name: memory(tensor) for name, tensor in tensors.items()}
        return PartPlan(self.store, self.prefix, self.manifest, targets)

    def check(self, names: Iterable[str]) -> None:
        """Prove every byte of these tensors without keeping one."""
        check_tensors(self.store, self.prefix, self.manifest, names)

    def spec(self, name: str) -> TensorSpec:
        """Return what tensor *name* is, after seeing that its bytes exist: before anything is allocated for it.

        Raises:
            CorruptionError: it is not listed, or the shape that the manifest claims is not backed by bytes.
            UnsupportedError: this torch lacks the dtype.
        """
        entry = self.manifest.tensors.get(name)
        if entry is None:
            message = f"{self.what}: its tree needs the tensor {name[:200]}, which it does not list"
            raise CorruptionError(message, operation="load", key=self.key)
        item_bytes = ITEM_BYTES.get(entry.dtype)
        # The number of dimensions is bounded first, so that no product of forged sizes grows without end.
        n_bytes = math.prod(entry.shape) * item_bytes if item_bytes and len(entry.shape) <= _MAX_DIMS else -1
        if n_bytes != sum(piece.n_bytes for piece in entry.pieces) or (
            n_bytes == 0 and math.prod(size for size in entry.shape if size) > _MAX_ELEMENTS
        ):
            message = (
                f"{self.what}: tensor {name[:200]} says dtype {entry.dtype[:40]} and shape {list(entry.shape[:16])}, "
                "which does not fit its bytes"
            )
            raise CorruptionError(message, operation="load", key=self.key)
        if entry.dtype not in DTYPES:
            message = f"{self.what}: tensor {name[:200]} has dtype {entry.dtype}, which torch {torch.__version__} lacks"
            raise UnsupportedError(message, operation="load", key=self.key)
        return TensorSpec(name, entry.dtype, entry.shape, n_bytes)


def open_source(store: CheckpointStore, layout: Layout, row: Row) -> Source:
    """Return the checkpoint that *row* names; CorruptionError if manifest or files are not as they were written."""
    manifest = open_manifest(store, layout, row)
    return Source(store, layout.attempt(row.attempt), manifest, layout.manifest(row.attempt))
