"""The one-liners, and opening whatever may stand at an address without changing it."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import ckptstore
from ckptstore.errors import AlreadyExistsError, ConfigError, CorruptionError, NotFoundError, UnsupportedError
from ckptstore.memory import MemoryStore
from ckptstore.run.strict_json import canonical, sign, unsign
from ckptstore.testing.raw import RawDirectory
from ckptstore.testing.recording import RecordingStore
from tests.unit.reader.stored import flip, keys
from tests.unit.reader.training import new_url
from tests.unit.state.same import assert_same

if TYPE_CHECKING:
    from pathlib import Path


class Closing(MemoryStore):
    """A store that knows whether it was closed."""

    closed = False

    def close(self) -> None:
        self.closed = True


def test_saving_loading_and_restoring_in_one_line(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    first = ckptstore.save(tmp_path / "run", 1, model=model, epoch=3)
    assert (first.step, first.on_lineage, repr(first)) == (1, True, f"<Checkpoint step 1 of file://{tmp_path}/run>")
    ckptstore.save(str(tmp_path / "run"), 2, model=model, epoch=4, metrics={"loss": 0.5}, tags=["a"])
    assert ckptstore.load(tmp_path / "run")["epoch"] == 4
    assert ckptstore.load(tmp_path / "run", step=1, only="epoch") == {"epoch": 3}
    live = nn.Linear(2, 2)
    assert ckptstore.restore(tmp_path / "run", model=live)["epoch"] == 4
    assert_same(live.state_dict(), model.state_dict())
    assert ckptstore.restore(tmp_path / "run", 1, model=live, strict=False) == {"epoch": 3}
    newest = ckptstore.open_run(tmp_path / "run").latest()
    assert newest is not None
    assert (newest.metrics, newest.tags) == ({"loss": 0.5}, ("a",))
    with pytest.raises(AlreadyExistsError):
        ckptstore.save(tmp_path / "run", 2, model=model)
    with pytest.raises(NotFoundError):
        ckptstore.restore(tmp_path / "run", 7, model=live)


def test_saving_in_one_line_draws_no_random_state_and_restoring_sets_none() -> None:
    url = new_url()
    torch.manual_seed(1)
    ckptstore.save(url, 1, x=1)
    torch.manual_seed(2)
    expected = torch.rand(1)
    torch.manual_seed(2)
    ckptstore.restore(url, x=0)
    assert torch.equal(torch.rand(1), expected)


def test_a_store_that_was_passed_stays_open_and_one_that_was_opened_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Closing(new_url().removeprefix("memory://"))
    ckptstore.save(store, 1, x=1)
    ckptstore.load(store)
    ckptstore.restore(store, x=0)
    with ckptstore.open_run(store) as run:
        run.latest()
    assert not store.closed
    monkeypatch.setattr("ckptstore.api.open_store", lambda *_, **__: store)
    ckptstore.load(store.url)
    assert store.closed
    store.closed = False
    with ckptstore.open_run(store.url):
        assert not store.closed
    assert store.closed


def test_looking_at_a_run_publishes_and_changes_nothing() -> None:
    url = new_url()
    ckptstore.save(url, 1, x=torch.ones(3))
    store = RecordingStore(MemoryStore(url.removeprefix("memory://")))
    run = ckptstore.open_run(store)
    run.checkpoints(all=True)
    checkpoint = run.at(step=1)
    checkpoint.load()
    checkpoint.tensor("x")
    checkpoint.restore(x=torch.zeros(3))
    run.verify()
    assert {verb for verb, _ in store.calls} <= {"get", "stat", "list", "read_into"}


def test_reading_and_verifying_a_run_needs_no_torch(tmp_path: Path) -> None:
    ckptstore.save(tmp_path / "run", 1, x=torch.ones(3), y=2)
    code = (
        "import sys, ckptstore; run = ckptstore.open_run(sys.argv[1]); found = run.latest()\n"
        "assert found.verify().ok and run.verify().ok and found.manifest().tensors and found.metrics == {}\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("made", [False, True])
def test_an_address_where_nothing_is_opens_as_an_empty_run(tmp_path: Path, *, made: bool) -> None:
    if made:
        (tmp_path / "run").mkdir()
    run = ckptstore.open_run(tmp_path / "run")
    assert (run.latest(), run.checkpoints(), run.checkpoints(all=True), run.run_uid) == (None, [], [], None)
    assert run.verify().ok
    with pytest.raises(NotFoundError, match="newest steps here: none"):
        run.at(step=1)
    assert (tmp_path / "run").exists() is made


def test_a_folder_that_is_not_a_run_is_refused_with_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(NotFoundError, match=r"is not a run: it has no RUN\.json and no journal, but holds notes\.txt"):
        ckptstore.open_run(tmp_path)
    with pytest.raises(NotFoundError, match="is not a run"):
        ckptstore.load(tmp_path)


def test_a_folder_of_runs_is_refused_and_the_runs_are_named_whatever_their_size(tmp_path: Path) -> None:
    for name in ("b", "a", "a-2", "a0"):
        ckptstore.save(tmp_path / name, 1, x=1)
    for number in range(300):
        (tmp_path / "a" / "data" / f"x{number}").write_text("")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "odd name!").mkdir()
    (tmp_path / "odd name!" / "file").write_text("")
    with pytest.raises(NotFoundError, match=r"is a folder of runs, not a run; name one of them: a-2, a, a0, b$"):
        ckptstore.open_run(tmp_path)


def test_a_single_checkpoint_copied_elsewhere_opens_as_detached(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(2, 2)
    ckptstore.save(tmp_path / "run", 7, model=model, seed=3)
    (attempt,) = (tmp_path / "run" / "data").glob("*/*")
    shutil.copytree(attempt, tmp_path / "copy")
    with caplog.at_level(logging.WARNING):
        run = ckptstore.open_run(tmp_path / "copy")
    assert "no journal, commit unproven" in caplog.text
    (checkpoint,) = run.checkpoints()
    assert checkpoint.step == 7
    assert run.latest() is checkpoint
    assert run.at(step=7) is checkpoint
    assert run.verify().ok
    assert ckptstore.load(tmp_path / "copy", only="seed") == {"seed": 3}
    live = nn.Linear(2, 2)
    ckptstore.restore(tmp_path / "copy", model=live)
    assert_same(live.state_dict(), model.state_dict())
    raw = RawDirectory(tmp_path / "copy")
    flip(raw, keys(raw, "payload")[0], -9)
    with pytest.raises(CorruptionError, match="model/"):
        ckptstore.load(tmp_path / "copy")
    assert not run.verify().ok
    (tmp_path / "copy" / "MANIFEST.json").write_text("{")
    with pytest.raises(CorruptionError, match=r"MANIFEST\.json"):
        ckptstore.open_run(tmp_path / "copy")


def test_no_run_is_begun_in_a_folder_of_runs_or_in_a_copied_checkpoint(tmp_path: Path) -> None:
    ckptstore.save(tmp_path / "run", 1, x=1)
    (attempt,) = (tmp_path / "run" / "data").glob("*/*")
    for place, what in ((tmp_path, r"a folder of runs \(run\)"), (attempt, "a single checkpoint")):
        before = sorted(place.iterdir())
        with (
            ckptstore.CheckpointManager(place) as manager,
            pytest.raises(ConfigError, match=f"is {what}: a new run needs an address of its own"),
        ):
            manager.resume(x=1)
        assert sorted(place.iterdir()) == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.yaml").write_text("mine")
    with ckptstore.CheckpointManager(tmp_path / "other") as manager:  # files of the user's beside it are fine
        manager.resume(x=1)
        manager.save(1, x=1)
    assert ckptstore.load(tmp_path / "other") == {"x": 1}


@pytest.mark.parametrize("change", [{"version": 2}, {"requires": ["teleport"]}])
def test_a_run_of_a_newer_format_is_refused_by_readers_and_writers_and_left_alone(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    ckptstore.save(tmp_path, 1, x=1)
    raw = RawDirectory(tmp_path)
    fields = json.loads(unsign(raw.read("RUN.json") or b"", "RUN.json"))
    raw.write("RUN.json", sign(canonical({**fields, **change})))
    before = {key: raw.read(key) for key in raw.keys()}  # noqa: SIM118 - a method of the view
    with pytest.raises(UnsupportedError, match="newer ckptstore"):
        ckptstore.open_run(tmp_path)
    with ckptstore.CheckpointManager(tmp_path) as manager:
        for call in (lambda: manager.resume(x=1), lambda: manager.save(2, x=1)):
            with pytest.raises(UnsupportedError, match="upgrade ckptstore"):
                call()
    assert {key: raw.read(key) for key in raw.keys()} == before  # noqa: SIM118


def test_a_record_of_a_newer_format_stops_readers_and_writers_instead_of_being_taken_for_damage(tmp_path: Path) -> None:
    ckptstore.save(tmp_path, 1, x=1)
    raw = RawDirectory(tmp_path)
    newest = keys(raw, "journal")[-1]
    fields = json.loads(unsign(raw.read(newest) or b"", newest))
    raw.write(newest, sign(canonical({**fields, "version": 2})))
    with pytest.raises(UnsupportedError, match="newer ckptstore"):
        ckptstore.open_run(tmp_path).latest()
    with ckptstore.CheckpointManager(tmp_path) as manager, pytest.raises(UnsupportedError):
        manager.resume(x=1)


def test_a_lost_run_file_is_read_from_the_journal_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ckptstore.save(tmp_path, 1, x=1)
    run = ckptstore.open_run(tmp_path)
    (tmp_path / "RUN.json").unlink()
    assert ckptstore.load(tmp_path) == {"x": 1}
    assert "RUN.json is absent" in caplog.text
    assert "RUN.json" in run.verify().journal[0]


def test_hints_pins_and_signs_of_life_decide_nothing(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        ckptstore.save(tmp_path, step, x=step)
    for content in (None, b"", b"{}", b'{"run_uid": 3, "seq": "x"}', b"\xff" * 600, b"[1]"):
        raw = RawDirectory(tmp_path)
        raw.delete("LATEST")
        for key in [key for key in raw.keys() if key.startswith("alive/")]:  # noqa: SIM118
            raw.delete(key)
        if content is not None:
            raw.write("LATEST", content)
        assert ckptstore.load(tmp_path) == {"x": 3}
        assert [item.step for item in ckptstore.open_run(tmp_path).checkpoints()] == [1, 2, 3]


def test_a_wrong_way_to_ask_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        ckptstore.save(tmp_path, -1, x=1)
    with pytest.raises(ConfigError, match="reserved"):
        ckptstore.save(tmp_path, 1, strict=1)
    assert list(tmp_path.iterdir()) == []
