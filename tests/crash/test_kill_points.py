"""SIGKILL at any storage verb loses nothing that was reported committed and lists nothing unfinished."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(600)
def test_a_kill_at_any_storage_verb_loses_nothing_and_wedges_nothing(tmp_path: Path) -> None:
    script = Path(__file__).parent / "kill_points.py"
    ran = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=600, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["wrong"] == []
    assert found["kills"] >= 50, found
    print(f"{found['kills']} kill points, 0 lost, 0 unfinished listed, 0 wedged restarts")
