"""``ckptstore show`` tells what is in a checkpoint from its manifest, without torch and without its payload."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import pytest
import torch
from click.testing import CliRunner

import ckptstore
from ckptstore.cli import main
from ckptstore.cli._target import parse_target

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result


def show(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["show", *map(str, arguments)])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A run with a model, its optimizer, and plain values, at steps 3 and 8."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 5, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    root = tmp_path / "run@home"
    with ckptstore.CheckpointManager(root) as manager:
        manager.resume(model=model, optimizer=optimizer)
        for step in (3, 8):
            manager.save(
                step,
                wait=True,
                model=model,
                optimizer=optimizer,
                config={"lr": 0.5, "betas": (0.9, 0.999), "name": "x\x1b[31m", 3: float("inf")},
                seed=1234,
                table=torch.arange(7, dtype=torch.int16),
                metrics={"loss": 0.125},
                tags=["good"],
                metadata={"commit": "abc123"},
            )
    return root


def test_the_newest_checkpoint_is_shown(saved: Path) -> None:
    done = show(saved)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("step 8 of file://")
    for text in ("loss 0.125", "good", "torch " + torch.__version__, "abc123", "1234", "'betas': (0.9, 0.999)"):
        assert text in done.stdout
    assert "\x1b" not in done.stdout


def test_a_step_is_chosen_behind_the_last_at_sign(saved: Path) -> None:
    assert show(f"{saved}@3").stdout.startswith("step 3 of ")
    missing = show(f"{saved}@4")
    assert (missing.exit_code, missing.stdout) == (3, "")
    assert "newest steps here: 3, 8" in missing.stderr


@pytest.mark.parametrize(
    "text,expected",
    [
        ("runs/a", ("runs/a", None)),
        ("runs/a@12", ("runs/a", 12)),
        ("me@host/a@0", ("me@host/a", 0)),
        ("a@1@2", ("a@1", 2)),
        ("a@1/", ("a@1/", None)),
        ("a@", ("a@", None)),
        ("a@-1", ("a@-1", None)),
        ("a@1x", ("a@1x", None)),
        ("a@٣", ("a@٣", None)),
        ("@5", ("@5", None)),
        ("s3://b/r?x=a@b@7", ("s3://b/r?x=a@b", 7)),
    ],
)
def test_only_digits_behind_the_last_at_sign_are_a_step(text: str, expected: tuple[str, int | None]) -> None:
    assert parse_target(text) == expected


def test_states_are_shown_with_the_tensors_and_bytes_that_they_hold(saved: Path) -> None:
    found = json.loads(show(saved, "--json").stdout)
    states = {state["name"]: state for state in found["states"]}
    assert list(states) == ["model", "optimizer", "config", "seed", "table", "rng"]
    assert (states["model"]["n_tensors"], states["model"]["n_bytes"]) == (3, 4 * (20 * 30 + 30 + 30 * 5))
    assert states["model"]["dtypes"] == ["float32"]
    assert (states["table"]["n_bytes"], states["table"]["dtypes"]) == (14, ["int16"])
    assert states["seed"]["value"] == 1234
    assert {"name": "model/0.weight", "dtype": "float32", "shape": [30, 20], "n_bytes": 2400} in found["tensors"]
    assert found["metadata"] == {"commit": "abc123"}
    assert found["n_bytes"] == sum(file["n_bytes"] for file in found["files"])


def test_only_the_largest_tensors_are_listed_unless_all_are_asked_for(tmp_path: Path) -> None:
    save_many(tmp_path)
    few, every = show(tmp_path).stdout, show(tmp_path, "--tensors").stdout
    assert "w/19" in few
    assert "w/0 " not in few
    assert all(f"w/{index} " in every for index in range(20))


def save_many(root: Path) -> None:
    ckptstore.save(root, 1, w={str(index) + "x": torch.zeros(1) for index in range(3)})
    ckptstore.save(root, 2, w=[torch.zeros(index + 1) for index in range(20)])


def test_a_state_name_with_a_slash_keeps_its_tensors(tmp_path: Path) -> None:
    state: dict[str, Any] = {"a/b": torch.zeros(4), "ü": {"x": torch.zeros(2).to_sparse()}}
    ckptstore.save(tmp_path, 1, **state)
    states = json.loads(show(tmp_path, "--json").stdout)["states"]
    assert [(item["name"], item["n_tensors"] > 0) for item in states] == [("a/b", True), ("ü", True)]


def test_values_that_json_can_not_say_are_told_in_words(tmp_path: Path) -> None:
    value = OrderedDict(a=(1, None, True), b={1: 2}, c=float("-inf"), d=1 << 80, e=b"\x00\x01", f={"x"}, g=[])
    ckptstore.save(tmp_path, 1, value=value)
    (state,) = json.loads(show(tmp_path, "--json").stdout)["states"]
    assert state["value"] == {
        "a": [1, None, True],
        "b": "{1: 2}",
        "c": "-inf",
        "d": hex(1 << 80),
        "e": 'bytes("AAE=")',
        "f": ["x"],
        "g": [],
    }


def test_a_long_value_is_cut(tmp_path: Path) -> None:
    ckptstore.save(tmp_path, 1, value=list(range(10_000)))
    assert max(map(len, show(tmp_path).stdout.splitlines())) < 250


def test_a_damaged_payload_is_not_read_and_a_missing_file_is_damage(saved: Path) -> None:
    newest = max(saved.glob("data/*/*/*.safetensors"))
    body = bytearray(newest.read_bytes())
    body[-1] ^= 1
    newest.write_bytes(body)
    assert show(saved).exit_code == 0
    newest.unlink()
    done = show(saved)
    assert (done.exit_code, done.stdout) == (4, "")
    assert newest.name in done.stderr


def test_an_empty_run_has_nothing_to_show(tmp_path: Path) -> None:
    done = show(tmp_path / "new")
    assert done.exit_code == 3
    assert "holds no checkpoint" in done.stderr


def test_looking_at_a_run_loads_neither_torch_nor_numpy_nor_rich(saved: Path) -> None:
    code = (
        "import sys\n"
        "from ckptstore.cli import main\n"
        "for arguments in (['ls', sys.argv[1]], ['show', sys.argv[1]], ['show', sys.argv[1], '--json']):\n"
        "    main(arguments, standalone_mode=False)\n"
        "print([name for name in ('torch', 'numpy', 'rich') if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(saved)], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"
