"""Which part of a state's tree is meant by a path or a pattern, and which tensors does a tree need?

A tree is walked as JSON, without decoding it, so a piece of a checkpoint can be chosen before anything is read.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ckptstore.state._leaf_decoders import decode_key
from ckptstore.state.paths import component

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckptstore.state._leaves import Json

__all__ = ["children", "choices", "find", "matches", "prune", "references", "tensor_name"]

_TENSOR_TAGS = ("tensor", "tensor+grad", "parameter", "parameter+grad")
# Where the keys and values of a container begin; the others are rebuilt from all of their parts or not at all.
_DICTS = {"dict": 0, "OrderedDict": 0, "Counter": 0, "state_dict": 1, "defaultdict": 1}
_PAIRS_FROM = {**_DICTS, "SimpleNamespace": 0, "Namespace": 0, "dataclass": 1, "namedtuple": 1}
_ITEMS_FROM = {"tuple": 0, "deque": 1}


def references(tree: Json) -> dict[str, str]:
    """Return the names of the tensors that *tree* needs, each with the tag it is met under first, in tree order."""
    found: dict[str, str] = {}
    level: list[Json] = [tree]
    while level:
        node = level.pop()
        if isinstance(node, list):
            level.extend(reversed(node))
        elif isinstance(node, dict):
            for tag, content in node.items():
                if tag in _TENSOR_TAGS and isinstance(content, str):
                    found.setdefault(content, tag)
                elif tag in {"sparse", "ndarray"} and isinstance(content, list):
                    for item in content[5:] if tag == "sparse" else content[2:]:
                        found.setdefault(str(item), tag)
                else:
                    level.append(content)
    return found


def children(node: Json) -> Iterator[tuple[str, Json]]:
    """Yield the path component and the tree of each child of a container; nothing for a leaf."""
    if isinstance(node, list):
        yield from ((str(index), child) for index, child in enumerate(node))
    elif isinstance(node, dict):
        for tag, content in node.items():
            if not isinstance(content, list):
                continue
            if tag in _ITEMS_FROM:
                yield from children(content[_ITEMS_FROM[tag] :])
            elif tag in _PAIRS_FROM:
                pairs = content[_PAIRS_FROM[tag] :]
                yield from (
                    (component(decode_key(key)), child) for key, child in zip(pairs[::2], pairs[1::2], strict=False)
                )


def choices(node: Json, path: str) -> Iterator[str]:
    """Yield the path of everything in *node*, which stands at *path*, that can be chosen alone, itself first."""
    yield path
    if isinstance(node, dict) and not _DICTS.keys().isdisjoint(node):
        for part, child in children(node):
            yield from choices(child, f"{path}/{part}")


def find(tree: Json, path: str) -> Json:
    """Return the tree at *path* below *tree*; KeyError if there is none."""
    for part in path.split("/") if path else ():
        tree = dict(children(tree))[part]
    return tree


def tensor_name(node: Json) -> str | None:
    """Return the name of the dense tensor that *node* is, or None if it is something else."""
    if isinstance(node, dict) and len(node) == 1:
        ((tag, content),) = node.items()
        if tag in _TENSOR_TAGS and isinstance(content, str):
            return content
    return None


def matches(path: str, patterns: Sequence[str]) -> bool:
    """Tell whether *path* is one of *patterns*, lies below one, or fits one as a wildcard ("model/encoder.*")."""
    return any(path == item or path.startswith(f"{item}/") or fnmatchcase(path, item) for item in patterns)


def prune(tree: Json, path: str, keep: Callable[[str], bool], drop: Callable[[str], bool]) -> list[Json]:
    """Return [*tree*], which stands at *path*, with what *keep* accepts and *drop* does not; [] if nothing is left.

    A dict loses the entries that are not wanted; a list or any other container is kept or dropped as a whole.
    """
    if drop(path):
        return []
    kept = keep(path)
    tag = next(iter(tree)) if isinstance(tree, dict) and len(tree) == 1 else ""
    if tag not in _DICTS or not isinstance(tree, dict) or not isinstance(content := tree[tag], list):
        return [tree] if kept else []
    start = _DICTS[tag]
    pairs: list[Json] = content[:start]
    for key, (part, child) in zip(content[start::2], children(tree), strict=False):
        for left in prune(child, f"{path}/{part}", (lambda _: True) if kept else keep, drop):
            pairs.extend((key, left))
    return [{tag: pairs}] if kept or len(pairs) > start else []
