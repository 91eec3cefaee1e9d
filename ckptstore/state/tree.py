"""How does the state of a training run become JSON and tensors, and come back exactly?

The tree is JSON that says everything but the elements of tensors. What JSON says exactly stands for itself: None, bool,
text, small integers, finite floats, and lists. Everything else is an object with one key, its tag: ``{"dict": [key,
value, …]}``, ``{"tuple": […]}``, ``{"tensor": name}``, ``{"parameter+grad": name}``. Tensors stay where they are; the
tree refers to them by their path, and tensors that are tied share one name.

Exactly means: the same types, keys in the same order, every bit of every number. What can't come back exactly is
refused before anything is written. Containers that occur twice come back as two; only tensors and arrays are shared
again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptstore.errors import CorruptionError
from ckptstore.state import paths
from ckptstore.state._decoder import MAX_DEPTH, Decoder
from ckptstore.state._encoder import Encoder
from ckptstore.state._leaf_decoders import decode_key
from ckptstore.state._leaves import Json
from ckptstore.state.registry import register_type

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    import torch

__all__ = ["MAX_DEPTH", "Encoded", "Encoder", "Json", "decode", "encode", "entries", "register_type"]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A state taken apart.

    Attributes:
        tree: What ``json.dumps(tree, allow_nan=False)`` takes and any strict JSON reader gives back; at most
            ``MAX_DEPTH`` levels deep, with room for a few more around it.
        tensors: The dense tensors by name, in the order they were met. They are the live ones, not copies, on whatever
            device, not always contiguous: the elements of each, in C order, are what the name stands for. Of tied
            tensors only the first is here.
    """

    tree: Json
    tensors: dict[str, torch.Tensor]


def encode(value: object, keys: Iterable[Hashable] = ()) -> Encoded:
    """Take *value* apart; *keys* is where it stands, the first of them the state's name.

    Reads no element of a dense tensor and copies none, except lazy conjugates and negations and numpy arrays that are
    read-only or not contiguous. Nothing may change the state meanwhile.

    Raises:
        UnstorableError: something in it can't come back exactly; names the key path and the type, and what to do.
    """
    encoder = Encoder()
    tree = encoder.encode(value, paths.tensor_path(keys))
    return Encoded(tree, encoder.tensors)


def decode(tree: Json, tensors: Mapping[str, torch.Tensor]) -> object:
    """The value that ``encode`` took apart into *tree* and *tensors*.

    The tensors become part of the value, without a copy; each must have the dtype and shape it was saved with. A
    mapping that reads them on demand is asked once for each that *tree* refers to, and its errors pass through. Meta
    tensors will do, to see the form of the value before anything is read.

    Raises:
        CorruptionError: ``encode`` writes no such tree, or a tensor is missing.
        UnsupportedError: a class isn't registered here or has other fields, numpy is missing, or the tree holds a kind
            of value that only a newer version knows.
    """
    return Decoder(tensors).decode(tree)


def entries(tree: Json) -> dict[Hashable, Json]:
    """The keys of a tree that is a dict, each with its own tree, so that ``decode`` can be asked for some of them.

    Raises:
        CorruptionError: the tree is not that of a dict.
    """
    nodes = tree["dict"] if isinstance(tree, dict) and tree.keys() == {"dict"} else None
    if type(nodes) is not list or len(nodes) % 2:
        message = "the tree of the state is not that of a dict"
        raise CorruptionError(message, operation="load")
    return {decode_key(key): node for key, node in zip(nodes[::2], nodes[1::2], strict=True)}
