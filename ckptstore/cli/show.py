"""What is in one checkpoint?

All of it is in the manifest, whose bytes the journal proves; the payload is not read, and torch is not needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from ckptstore.cli._output import clean, iec, numbers, print_json, print_table, when
from ckptstore.cli._target import find_checkpoint, parse_target
from ckptstore.cli._values import as_json, as_text
from ckptstore.cli.ls import created, marks, summary

if TYPE_CHECKING:
    from ckptstore.checkpoint import Checkpoint
    from ckptstore.run.manifest import Manifest, TensorEntry

__all__ = ["show"]

_LARGEST = 8


@click.command()
@click.argument("target", metavar="URL[@STEP]")
@click.option("all_tensors", "--tensors", is_flag=True, help="List every tensor, not only the largest.")
@click.option("print_as_json", "--json", is_flag=True, help="Print JSON, with every tensor.")
def show(target: str, *, all_tensors: bool, print_as_json: bool) -> None:
    """Show one checkpoint: by default the newest of the run at URL.

    Reads the manifest only, so it is quick however large the checkpoint is. An address that itself ends in "@" and
    digits is written with a "/" behind it.
    """
    from ckptstore.api import open_run

    url, step = parse_target(target)
    with open_run(url) as run:
        item = find_checkpoint(run, step)
        manifest = item.manifest()
        if print_as_json:
            print_json({"url": run.url, **_as_json(item, manifest)})
        else:
            _print(run.url, item, manifest, all_tensors=all_tensors)


@dataclass(slots=True)
class _State:
    """One state: what a name of the save call stood for."""

    kind: str
    tree: Any
    tensors: dict[str, TensorEntry] = field(default_factory=dict)

    @property
    def n_bytes(self) -> int:
        return sum(_n_bytes(entry) for entry in self.tensors.values())

    @property
    def dtypes(self) -> list[str]:
        return sorted({entry.dtype for entry in self.tensors.values()})


def _states(manifest: Manifest) -> dict[str, _State]:
    """Return the states by name, in the order of the save call, each with the tensors stored under it.

    A tensor tied to one of another state is stored, and counted, there.
    """
    stored = manifest.tree.get("states")
    found = {
        name: _State(kind=str(state.get("kind")), tree=state.get("tree"))
        for name, state in (stored.items() if isinstance(stored, dict) else ())
        if isinstance(state, dict)
    }
    if manifest.tree.get("rng") is not None:
        found["rng"] = _State(kind="random generators", tree=None)
    for path, entry in manifest.tensors.items():
        name = _state_of(path)
        found.setdefault(name, _State(kind="unknown", tree=None)).tensors[path] = entry
    return found


def _state_of(path: str) -> str:
    from ckptstore.errors import CorruptionError
    from ckptstore.state.paths import parse_path

    first = path.partition("/")[0].partition("~.")[0]  # "~." begins the parts of a sparse tensor
    try:
        return str(parse_path(first)[0])
    except (CorruptionError, IndexError):
        return first


def _as_json(item: Checkpoint, manifest: Manifest) -> dict[str, Any]:
    states = _states(manifest)
    return {
        **summary(item),
        "run_uid": manifest.run_uid,
        "world_size": manifest.world_size,
        "states": [
            {
                "name": name,
                "kind": state.kind,
                "n_tensors": len(state.tensors),
                "n_bytes": state.n_bytes,
                "dtypes": state.dtypes,
                **({} if state.tensors or state.tree is None else {"value": as_json(state.tree)}),
            }
            for name, state in states.items()
        ],
        "tensors": [
            {"name": name, "dtype": entry.dtype, "shape": list(entry.shape), "n_bytes": _n_bytes(entry)}
            for name, entry in manifest.tensors.items()
        ],
        "metadata": manifest.user,
        "environment": manifest.env,
        "timings": manifest.timings,
        "origin": manifest.origin,
        "files": [{"path": file.path, "n_bytes": file.size, "digest": file.digest} for file in manifest.files],
    }


def _print(url: str, item: Checkpoint, manifest: Manifest, *, all_tensors: bool) -> None:
    click.echo(f"step {item.step} of {clean(url)}")
    env = [f"{name} {value}" for name, value in manifest.env.items()]
    facts = {
        "committed": f"{when(created(item))} (number {item.seq} of the journal)",
        "size": f"{iec(item.n_bytes)} in {len(manifest.files)} file{'' if len(manifest.files) == 1 else 's'}",
        "metrics": numbers(item.metrics),
        "tags": ", ".join(item.tags),
        "marks": marks(item),
        "written by": ", ".join(env) + (f", {manifest.world_size} ranks" if manifest.world_size > 1 else ""),
        "metadata": "" if manifest.user is None else as_text(_plain(manifest.user)),
    }
    for name, text in facts.items():
        if text:
            click.echo(f"  {name:<10}  {clean(text)}")
    states = _states(manifest)
    _section("states")
    print_table(
        ["name", "kind", "tensors", "size", "holds"],
        [
            [name, state.kind, str(len(state.tensors)), iec(state.n_bytes), _holds(state)]
            for name, state in states.items()
        ],
        right=("tensors", "size"),
    )
    tensors = sorted(manifest.tensors.items(), key=lambda pair: _n_bytes(pair[1]), reverse=True)
    shown = tensors if all_tensors else tensors[:_LARGEST]
    more = "" if len(shown) == len(tensors) else f", the largest {len(shown)} of {len(tensors)} (--tensors shows all)"
    if shown:
        _section(f"tensors{more}")
        print_table(
            ["name", "dtype", "shape", "size"],
            [
                [name, entry.dtype, "×".join(map(str, entry.shape)) or "scalar", iec(_n_bytes(entry))]
                for name, entry in shown
            ],
            right=("size",),
        )
    _section("files")
    print_table(
        ["path", "size", "digest"],
        [[file.path, iec(file.size), file.digest] for file in manifest.files],
        right=("size",),
    )


def _section(title: str) -> None:
    click.echo(f"\n{title}")


def _holds(state: _State) -> str:
    if state.tensors or state.tree is None:
        return ", ".join(state.dtypes)
    return as_text(state.tree)


def _plain(value: Any) -> Any:
    """Return JSON in the tree's own form, in which an object is a tagged list of pairs."""
    if isinstance(value, dict):
        return {"dict": [part for key, item in value.items() for part in (key, _plain(item))]}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _n_bytes(entry: TensorEntry) -> int:
    return sum(piece.n_bytes for piece in entry.pieces)
