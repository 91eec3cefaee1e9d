"""``ckptstore ls`` shows what a run would go on from, and which runs a folder holds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

import ckptstore
from ckptstore.cli import main

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def rows_of(done: Result) -> list[list[str]]:
    assert done.exit_code == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()[1:]]


def json_of(done: Result) -> dict[str, Any]:
    assert done.exit_code == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["schema_version"] == 1
    return found


def save(url: object, *steps: int, **options: Any) -> None:
    with ckptstore.CheckpointManager(str(url), rng=False) as manager:
        manager.resume()
        for step in steps:
            manager.save(step, wait=True, value=step, **options)


@pytest.fixture
def branched(tmp_path: Path) -> Path:
    """A run at steps 1, 2, 5, where an earlier branch went on from 2 to 3."""
    root = tmp_path / "branched"
    save(root, 1, 2, 3)
    with ckptstore.CheckpointManager(root, rng=False) as manager:
        manager.resume(step=2)
        manager.save(5, wait=True, value=5)
    return root


def test_the_present_branch_is_listed_oldest_first(branched: Path) -> None:
    assert [row[0] for row in rows_of(run("ls", branched))] == ["1", "2", "5"]


def test_all_adds_abandoned_checkpoints_and_marks_them(branched: Path) -> None:
    rows = rows_of(run("ls", branched, "--all"))
    assert [(row[0], row[-1] == "abandoned") for row in rows] == [
        ("1", False),
        ("2", False),
        ("3", True),
        ("5", False),
    ]


def test_metrics_tags_and_marks_are_shown_when_there_are_some(tmp_path: Path) -> None:
    save(tmp_path, 7, metrics={"val_loss": 0.25, "odd": float("nan")}, tags=["best", "first"], permanent=True)
    done = run("ls", tmp_path)
    assert done.stdout.splitlines()[0].split() == ["step", "when", "size", "metrics", "tags", "marks"]
    assert done.stdout.splitlines()[1].split("  ")[-3:] == ["odd nan, val_loss 0.25", "best, first", "permanent"]


def test_json_holds_what_the_table_shows(branched: Path) -> None:
    found = json_of(run("ls", branched, "--json", "--all"))
    assert found["url"] == branched.as_uri()
    assert [(item["step"], item["on_lineage"]) for item in found["checkpoints"]] == [
        (1, True),
        (2, True),
        (3, False),
        (5, True),
    ]
    assert found["checkpoints"][0].keys() == {
        *("step", "seq", "created", "n_bytes", "metrics", "tags", "permanent", "damaged", "on_lineage")
    }


def test_json_says_a_metric_that_is_no_number_in_words(tmp_path: Path) -> None:
    save(tmp_path, 1, metrics={"loss": float("nan"), "best": float("-inf")})
    assert json_of(run("ls", tmp_path, "--json"))["checkpoints"][0]["metrics"] == {"loss": "nan", "best": "-inf"}


def test_a_place_where_nothing_was_saved_is_an_empty_run(tmp_path: Path) -> None:
    done = run("ls", tmp_path / "new")
    assert (done.exit_code, done.stdout) == (0, "")
    assert "holds no checkpoint" in done.stderr
    assert json_of(run("ls", tmp_path / "new", "--json"))["checkpoints"] == []


def test_a_run_started_anew_points_at_what_it_left(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    with ckptstore.CheckpointManager(tmp_path, rng=False) as manager:
        manager.resume(fresh=True)
    assert "2 on abandoned ones" in run("ls", tmp_path).stderr


def test_a_folder_of_runs_is_listed_as_runs(tmp_path: Path, branched: Path) -> None:
    save(tmp_path / "b-side", 10)
    save(tmp_path / "b", 20, 30)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "RUN.txt").write_text("not a run")
    (tmp_path / "zz.txt").write_text("nor this")
    assert [row[:3] for row in rows_of(run("ls", tmp_path))] == [
        ["b-side", "10", "1"],
        ["b", "30", "2"],
        ["branched", "5", "3"],
    ]
    found = json_of(run("ls", f"{tmp_path.as_uri()}/", "--json", "--all"))["runs"]
    assert [(item["name"], item["n_checkpoints"]) for item in found] == [("b-side", 1), ("b", 2), ("branched", 4)]
    assert found[0]["n_bytes"] == sum(file.stat().st_size for file in (tmp_path / "b-side" / "data").rglob("*.saf*"))


def test_a_damaged_run_does_not_hide_the_others(tmp_path: Path) -> None:
    save(tmp_path / "good", 1)
    save(tmp_path / "torn", 1)
    for record in (tmp_path / "torn" / "journal").rglob("*.json"):
        record.write_bytes(record.read_bytes()[:-10])
    done = run("ls", tmp_path)
    assert done.exit_code == 7
    assert [line.split()[:2] for line in done.stdout.splitlines()[1:]] == [["good", "1"], ["torn", "-"]]
    assert "torn: " in done.stderr


def test_a_folder_with_neither_run_nor_runs_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "holiday.txt").write_text("sun")
    done = run("ls", tmp_path)
    assert (done.exit_code, done.stdout) == (3, "")
    assert "holiday.txt" in done.stderr


def test_an_unknown_scheme_is_wrong_usage() -> None:
    done = run("ls", "gopher://x/y")
    assert done.exit_code == 2
    assert "gopher" in done.stderr


def test_listing_publishes_nothing(branched: Path) -> None:
    def content() -> dict[str, bytes]:
        return {str(file): file.read_bytes() for file in branched.rglob("*") if file.is_file()}

    before = content()
    run("ls", branched)
    run("show", branched)
    assert content() == before


def test_stored_words_can_not_colour_the_terminal(tmp_path: Path) -> None:
    save(tmp_path, 1, tags=["\x1b[31mred"], metrics={"\x1b]0;title\x07": 1.0})
    for arguments in (("ls", tmp_path), ("show", tmp_path), ("ls", tmp_path, "--json"), ("show", tmp_path, "--json")):
        done = run(*arguments)
        assert done.exit_code == 0
        assert not {"\x1b", "\x07"} & set(done.stdout)
