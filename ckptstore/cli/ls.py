"""Which checkpoints does a run hold, and which runs does a folder hold?

Reading a run publishes nothing. A folder of runs is whatever has no run itself and has runs one level below; each child
is found by one listing that skips all that lies inside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckptstore.cli._exits import PARTLY_DONE
from ckptstore.cli._output import clean, iec, json_number, numbers, print_json, print_table, when
from ckptstore.errors import CkptStoreError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime

    from ckptstore.checkpoint import Checkpoint, Run
    from ckptstore.store import CheckpointStore

__all__ = ["created", "ls", "marks", "print_checkpoints", "summary"]


@click.command()
@click.argument("url")
@click.option("show_all", "--all", is_flag=True, help="Also those of abandoned branches.")
@click.option("as_json", "--json", is_flag=True, help="Print JSON.")
@click.pass_context
def ls(ctx: click.Context, url: str, *, show_all: bool, as_json: bool) -> None:
    """List the checkpoints of the run at URL, or the runs in a folder.

    Shown is what the run would go on from: the present branch, oldest first.
    """
    from ckptstore.checkpoint import Run
    from ckptstore.opening import open_store

    with open_store(url) as store:
        try:
            run = Run(store)
        except NotFoundError:
            names = list(_runs_in(store))
            if not names:
                raise
            if not _list_runs(url, names, store.url, show_all=show_all, as_json=as_json):
                ctx.exit(PARTLY_DONE)
            return
        _list_checkpoints(run, show_all=show_all, as_json=as_json)


def summary(item: Checkpoint) -> dict[str, Any]:
    """Return what the journal says of a checkpoint, for JSON."""
    moment = created(item)
    return {
        "step": item.step,
        "seq": item.seq,
        "created": None if moment is None else moment.isoformat(timespec="milliseconds"),
        "n_bytes": item.n_bytes,
        "metrics": {name: json_number(value) for name, value in item.metrics.items()},
        "tags": list(item.tags),
        "permanent": item.permanent,
        "damaged": item.damaged,
        "on_lineage": item.on_lineage,
    }


def created(item: Checkpoint) -> datetime | None:
    """Return when it was committed; None for a detached one, of which no journal tells."""
    try:
        moment = item.created
    except (OSError, OverflowError, ValueError):  # a time far outside the calendar, written by no clock
        return None
    return moment if moment.timestamp() > 0 else None


def marks(item: Checkpoint) -> str:
    """Return what sets a checkpoint apart, in words."""
    found = (("damaged", item.damaged), ("permanent", item.permanent), ("abandoned", not item.on_lineage))
    return ", ".join(word for word, on in found if on)


def print_checkpoints(items: Sequence[Checkpoint]) -> None:
    """Print checkpoints as a table, without the columns that are empty in all of them."""
    rows = [
        [
            str(item.step),
            when(created(item)),
            iec(item.n_bytes),
            numbers(item.metrics),
            ", ".join(item.tags),
            marks(item),
        ]
        for item in items
    ]
    headers = ["step", "when", "size", "metrics", "tags", "marks"]
    kept = [index for index in range(len(headers)) if index < 3 or any(row[index] for row in rows)]  # noqa: PLR2004
    print_table(
        [headers[index] for index in kept],
        [[row[index] for index in kept] for row in rows],
        right=("step", "size"),
    )


def _list_checkpoints(run: Run, *, show_all: bool, as_json: bool) -> None:
    items = run.checkpoints(all=show_all)
    if as_json:
        print_json({"url": run.url, "run_uid": run.run_uid, "checkpoints": [summary(item) for item in items]})
        return
    if items:
        print_checkpoints(items)
        return
    hidden = 0 if show_all else len(run.checkpoints(all=True))
    more = f" on its present branch, but {hidden} on abandoned ones: see --all" if hidden else ""
    click.echo(f"{clean(run.url)} holds no checkpoint{more}", err=True)


def _list_runs(url: str, names: Sequence[str], folder: str, *, show_all: bool, as_json: bool) -> bool:
    """List the runs *names* in a folder; False if one of them can't be read, which does not hide the others."""
    found = [_describe_run(url, name, show_all=show_all) for name in names]
    if as_json:
        print_json({"url": folder, "runs": found})
    else:
        print_table(
            ["run", "newest step", "checkpoints", "size"],
            [
                [
                    run["name"],
                    _or_dash(run["newest_step"]),
                    _or_dash(run["n_checkpoints"]),
                    "-" if run["n_bytes"] is None else iec(run["n_bytes"]),
                ]
                for run in found
            ],
            right=("newest step", "checkpoints", "size"),
        )
    failed = [run for run in found if run["error"] is not None]
    for run in failed:
        click.echo(f"ckptstore: {clean(run['name'])}: {clean(run['error'])}", err=True)
    return not failed


def _describe_run(url: str, name: str, *, show_all: bool) -> dict[str, Any]:
    from ckptstore.api import open_run

    try:
        with open_run(_inside(url, name)) as run:
            items, newest = run.checkpoints(all=show_all), run.latest()
    except CkptStoreError as error:
        return {"name": name, "newest_step": None, "n_checkpoints": None, "n_bytes": None, "error": str(error)}
    return {
        "name": name,
        "newest_step": None if newest is None else newest.step,
        "n_checkpoints": len(items),
        "n_bytes": sum(item.n_bytes for item in items),
        "error": None,
    }


def _runs_in(store: CheckpointStore) -> Iterator[str]:
    """Yield the names of the runs one level below the root of *store*."""
    from ckptstore.run.layout import RUN_KEY

    after: str | None = None
    while (first := next(iter(store.list("", after=after)), None)) is not None:
        name, slash, _ = first.key.partition("/")
        if not slash:
            after = name
            continue
        after = f"{name}0"  # "0" is the character after "/": past everything in that folder
        try:
            store.stat(f"{name}/{RUN_KEY}")
        except NotFoundError:
            continue
        yield name


def _inside(url: str, name: str) -> str:
    """Return the address of *name* below *url*; options stay."""
    head, mark, query = url.partition("?") if "://" in url else (url, "", "")
    return f"{head.rstrip('/')}/{name}{mark}{query}"


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)
