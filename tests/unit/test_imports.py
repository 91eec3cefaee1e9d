"""Importing ckptstore costs nearly nothing, and every name it promises is there."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

import ckptstore
from ckptstore.store import CheckpointStore

HEAVY = ("torch", "numpy", "safetensors", "boto3", "botocore", "fsspec", "rich", "pytest", "ckptstore_posix")


def heavy_modules_after(code: str) -> list[str]:
    """Run *code* in a fresh interpreter and return which heavy modules it loaded."""
    report = f"import json, sys; print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded: list[str] = json.loads(done.stdout.splitlines()[-1])
    return loaded


def test_importing_ckptstore_loads_nothing_heavy() -> None:
    assert heavy_modules_after("import ckptstore") == []


def test_naming_an_error_or_opening_a_store_loads_no_torch() -> None:
    code = "import ckptstore; ckptstore.errors.NotFoundError; ckptstore.open_store('memory://imports')"
    assert heavy_modules_after(code) == []


def test_reading_a_run_loads_no_torch() -> None:
    assert "torch" not in heavy_modules_after(
        "import ckptstore; ckptstore.open_run, ckptstore.Run, ckptstore.Checkpoint"
    )


def test_asking_the_command_line_for_help_loads_nothing_heavy() -> None:
    code = "from ckptstore.cli import main; main(['--help'], standalone_mode=False)"
    assert heavy_modules_after(code) == []


@pytest.mark.parametrize("name", ckptstore.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(ckptstore, name) is not None
    assert name in dir(ckptstore)


def test_every_lazy_name_is_public() -> None:
    assert set(ckptstore._HOME_OF) <= set(ckptstore.__all__)


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'chekpoint'"):
        ckptstore.chekpoint  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_each_scheme_of_this_distribution_names_a_store(scheme: str) -> None:
    (found,) = entry_points(group="ckptstore.backends", name=scheme)
    assert issubclass(found.load(), CheckpointStore)
