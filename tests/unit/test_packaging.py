"""What a user installs holds the packages and nothing else, and the repo's top level stays as designed."""

from __future__ import annotations

import email
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import ckptstore

ROOT = Path(__file__).resolve().parents[2]
TOP_LEVEL = {
    *("ckptstore", "backends", "tests", "benchmarks", "docs", "examples", "scripts", "requirements", ".ci"),
    *("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "Makefile", ".gitignore", ".gitattributes"),
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    """The root of a wheel built from this tree."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return zipfile.Path(built)


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: zipfile.Path) -> None:
    packages = {path.parent.name for path in (ROOT / "backends").glob("*/__init__.py")} | {"ckptstore"}
    assert {path.name for path in wheel.iterdir()} == packages | {f"ckptstore-{ckptstore.__version__}.dist-info"}


def test_every_package_of_the_wheel_is_typed(wheel: zipfile.Path) -> None:
    packages = [path for path in wheel.iterdir() if not path.name.endswith(".dist-info")]
    assert [path.name for path in packages if not (path / "py.typed").exists()] == []


def test_every_module_is_in_the_wheel(wheel: zipfile.Path) -> None:
    modules = {path.relative_to(base) for base in (ROOT, ROOT / "backends") for path in base.glob("ckptstore*/**/*.py")}
    assert {str(path) for path in modules if not (wheel / str(path)).exists()} == set()


def test_the_wheel_names_its_licence_and_its_schemes(wheel: zipfile.Path) -> None:
    info = wheel / f"ckptstore-{ckptstore.__version__}.dist-info"
    metadata = email.message_from_string((info / "METADATA").read_text())
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "file = ckptstore_posix:PosixStore" in (info / "entry_points.txt").read_text()


def test_a_core_install_asks_for_no_torch(wheel: zipfile.Path) -> None:
    info = wheel / f"ckptstore-{ckptstore.__version__}.dist-info"
    metadata = email.message_from_string((info / "METADATA").read_text())
    needs = [need for need in metadata.get_all("Requires-Dist", []) if "extra ==" not in need]
    assert sorted(need.partition(">")[0] for need in needs) == ["click", "msgspec", "rich", "xxhash"]


def test_the_top_level_of_the_repo_holds_only_what_the_design_names() -> None:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert {file.partition("/")[0] for file in files} - TOP_LEVEL == set()
