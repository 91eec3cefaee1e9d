"""A process killed at any rename, fsync, write, mkdir, open or close, or told that one failed, loses nothing.

strace injects the signal or the error at the n-th call of a kind; what the folder holds afterwards is judged by a fresh
process. This says nothing about power cuts (see the tests on crashfs): the kernel keeps what was written.
"""

from __future__ import annotations

import collections
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from ckptstore.checkpoint import Run
from ckptstore.opening import open_store
from ckptstore.testing.byte_saver import body_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed; `make test` installs it"),
]

CALLS = ("fsync", "renameat", "renameat2", "pwrite64", "mkdirat", "unlinkat", "openat", "close")


@pytest.fixture(scope="module")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that holds step 1."""
    root = tmp_path_factory.mktemp("seed") / "run"
    assert save(root, 1) == ["committed 1"]
    return root


def save(root: Path, *steps: int, strace: tuple[str, ...] = ()) -> list[str]:
    """Run the saver, under strace with these options if any; return what it reported."""
    tracer = ["strace", "-f", "-qq", "-o", "/dev/null", *strace] if strace else []
    ran = subprocess.run(
        [*tracer, sys.executable, "-m", "ckptstore.testing.byte_saver", str(root), *map(str, steps)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return ran.stdout.splitlines()


def points(seeded: Path, scratch: Path) -> dict[str, range]:
    """Return which calls of each kind belong to the run's folder: from the first that names it to the last."""
    root = scratch / "counted"
    shutil.copytree(seeded, root)
    trace = scratch / "trace"
    options = ["strace", "-f", "-qq", "-o", str(trace), "-e", f"trace={','.join(CALLS)}"]
    subprocess.run(
        [*options, sys.executable, "-m", "ckptstore.testing.byte_saver", str(root), "2"],
        capture_output=True,
        timeout=120,
        check=True,
    )
    counts: collections.Counter[str] = collections.Counter()
    first: dict[str, int] = {}
    begun = False
    for line in trace.read_text().splitlines():
        begun = begun or str(root) in line
        match = re.match(r" *\d+ +(\w+)\(", line)
        if match:
            counts[match[1]] += 1
            if begun:
                first.setdefault(match[1], counts[match[1]])
    return {call: range(start, counts[call] + 1) for call, start in first.items()}


def judge(root: Path, told: list[str]) -> None:
    """Assert that what was reported is there, all that is listed is whole, and the next save works."""
    run = Run(open_store(root))
    steps = [item.step for item in run.checkpoints(all=True)]
    assert 1 in steps
    if "committed 2" in told:
        assert 2 in steps
    assert set(steps) <= {1, 2}
    assert run.verify().ok
    for path in root.glob("data/*/*/bytes"):
        step = int(path.parent.name.split("-")[0])
        if step in steps:
            assert path.read_bytes() == body_of(step)
    assert save(root, 5) == ["committed 5"]
    assert [item.step for item in Run(open_store(root)).checkpoints()] == [*steps, 5]


@pytest.mark.parametrize("call", CALLS)
def test_a_kill_at_any_system_call_loses_nothing(seeded: Path, tmp_path: Path, call: str) -> None:
    numbers = points(seeded, tmp_path).get(call, range(0))
    assert numbers, f"a save makes no {call}"
    step = max(1, len(numbers) // 12) if call in {"openat", "close"} else 1  # many, and each changes nothing by itself
    killed = 0
    for number in numbers[::step]:
        root = tmp_path / f"{call}-{number}"
        shutil.copytree(seeded, root)
        told = save(root, 2, strace=("-e", f"trace={call}", "-e", f"inject={call}:signal=KILL:when={number}"))
        killed += "committed 2" not in told
        judge(root, told)
        shutil.rmtree(root)
    print(f"{call}: {len(numbers[::step])} kill points, {killed} before the commit was reported")
    assert killed


@pytest.mark.parametrize(
    "call,error",
    [("fsync", "EIO"), ("pwrite64", "ENOSPC"), ("pwrite64", "EIO"), ("renameat2", "EIO"), ("mkdirat", "ENOSPC")],
)
def test_an_error_at_any_system_call_fails_loudly_and_loses_nothing(
    seeded: Path, tmp_path: Path, call: str, error: str
) -> None:
    failed = 0
    for number in points(seeded, tmp_path)[call]:
        root = tmp_path / f"{call}-{number}"
        shutil.copytree(seeded, root)
        told = save(root, 2, strace=("-e", f"trace={call}", "-e", f"inject={call}:error={error}:when={number}"))
        failed += any(line.startswith("failed") for line in told)
        judge(root, told)
        shutil.rmtree(root)
    print(f"{call} {error}: {failed} failures reported")
    assert failed
