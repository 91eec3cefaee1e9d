"""How does text from a store reach a terminal, a file or a program?

Names, tags and messages come from whoever wrote the checkpoint, so nothing unprintable in them reaches a terminal. A
table is drawn with rich only on a terminal; elsewhere it is plain columns; programs ask for JSON.
"""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Any, Literal

import click

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

__all__ = ["SCHEMA_VERSION", "clean", "iec", "json_number", "number", "numbers", "print_json", "print_table", "when"]

SCHEMA_VERSION = 1
_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_KIB = 1024


def clean(text: str) -> str:
    """Return *text* on one line, with "?" for everything a terminal might obey or hide."""
    return "".join(character if character.isprintable() else "?" for character in text)


def iec(n_bytes: int) -> str:
    """Return a size for people: ``512 B``, ``43.9 MiB``."""
    if n_bytes < _KIB:
        return f"{n_bytes} B"
    power = min((n_bytes.bit_length() - 1) // 10, len(_UNITS))
    if round(n_bytes / _KIB**power, 1) >= _KIB and power < len(_UNITS):  # 1023.96 KiB would read "1024.0 KiB"
        power += 1
    return f"{n_bytes / _KIB**power:.1f} {_UNITS[power - 1]}"


def when(moment: datetime | None) -> str:
    """Return a time for people, in the local time zone."""
    return "-" if moment is None else moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def number(value: float) -> str:
    """Return a metric for people."""
    return f"{value:.6g}"


def numbers(values: Mapping[str, float]) -> str:
    """Return metrics for people, on one line."""
    return ", ".join(f"{clean(name)} {number(value)}" for name, value in values.items())


def json_number(value: float) -> float | str:
    """Return a metric as JSON can say it: "nan", "inf" and "-inf" are text."""
    return value if math.isfinite(value) else str(value)


def print_json(fields: Mapping[str, Any]) -> None:
    """Print one JSON object, with the version of its schema, in ASCII: control characters are escaped."""
    click.echo(json.dumps({"schema_version": SCHEMA_VERSION, **fields}, indent=2, allow_nan=False))


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """Print rows of cleaned text under *headers*; the columns named in *right* are numbers."""
    rows = [[clean(cell) for cell in row] for row in rows]
    if _on_terminal():
        _print_rich(headers, rows, right)
        return
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    for row in (headers, *rows):
        cells = [
            cell.rjust(width) if header in right else cell.ljust(width)
            for header, cell, width in zip(headers, row, widths, strict=True)
        ]
        click.echo("  ".join(cells).rstrip())


def _on_terminal() -> bool:
    return sys.stdout.isatty()


def _print_rich(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for header in headers:  # only the last column gives way on a narrow terminal: names stay in one piece
        justify: Literal["left", "right"] = "right" if header in right else "left"
        table.add_column(header, justify=justify, overflow="fold", no_wrap=header != headers[-1])
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # Text: stored words are no markup
    Console(highlight=False).print(table)
