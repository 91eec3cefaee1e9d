"""People read sizes and tables, programs read JSON, and terminals are told nothing that a store holds."""

from __future__ import annotations

import io
import json
import sys
from datetime import UTC, datetime

import pytest

from ckptstore.cli import _output
from ckptstore.cli._output import clean, iec, json_number, print_json, print_table, when


@pytest.mark.parametrize(
    "n_bytes,text",
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (620_612_268, "591.9 MiB"),
        (5 * 1024**4, "5.0 TiB"),
        (1024**7, "1024.0 EiB"),
    ],
)
def test_a_size_has_one_digit_behind_the_point_and_its_iec_unit(n_bytes: int, text: str) -> None:
    assert iec(n_bytes) == text


@pytest.mark.parametrize(
    "character", ["\x00", "\x07", "\x1b", "\x7f", "\x9b", "\n", "\r", "\t", "\u2028", "\u202e", "\ud800"]
)
def test_no_character_that_a_terminal_obeys_or_hides_is_left(character: str) -> None:
    assert clean(f"a{character}b") == "a?b"


def test_letters_of_all_scripts_are_left_alone() -> None:
    assert clean("Größe × 損失 🙂") == "Größe × 損失 🙂"


def test_a_time_is_shown_to_the_second_and_a_missing_one_as_a_dash() -> None:
    moment = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
    assert datetime.fromisoformat(when(moment)).astimezone(UTC) == moment
    assert when(None) == "-"


def test_json_has_a_schema_version_and_says_numbers_that_are_none_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"metrics": [json_number(value) for value in (1.5, float("nan"), float("inf"), float("-inf"))]})
    assert json.loads(capsys.readouterr().out) == {"schema_version": 1, "metrics": [1.5, "nan", "inf", "-inf"]}


def test_a_table_in_a_pipe_is_plain_columns(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["step", "tags"], [["5", "first"], ["1000", "a\x1b[31mb"]], right=["step"])
    assert capsys.readouterr().out == "step  tags\n   5  first\n1000  a?[31mb\n"
    assert "rich" not in vars(_output)


def test_a_table_on_a_terminal_takes_stored_words_for_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "60")
    print_table(["name", "holds"], [["[bold]model[/bold]", "word " * 30]])
    shown = terminal.getvalue()
    assert "[bold]model[/bold]" in shown
    assert shown.count("word") == 30
