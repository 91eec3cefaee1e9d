"""Which checkpoint is the newest, the one with a step, the one to go on from: by lineage, not by number."""

from __future__ import annotations

from typing import Any

import pytest

from ckptstore import CheckpointManager, open_run
from ckptstore.errors import AlreadyExistsError, ConfigError, CorruptionError, NotFoundError
from tests.unit.reader.stored import flip, keys, raw_of
from tests.unit.reader.training import new_url


def run_with(*steps: int) -> str:
    url = new_url()
    with CheckpointManager(url) as manager:
        for step in steps:
            manager.save(step, x=[step], wait=True)
    return url


def steps_of(url: str) -> list[int]:
    return [item.step for item in open_run(url).checkpoints()]


def x_of(url: str, **which: Any) -> int:
    value: int = open_run(url).at(**which).load()["x"][0]
    return value


def test_steps_are_compared_as_numbers_and_listed_in_order() -> None:
    url = run_with(2, 10, 9_999_999, 10_000_000_000_000)
    assert steps_of(url) == [2, 10, 9_999_999, 10_000_000_000_000]
    assert open_run(url).latest().step == 10_000_000_000_000  # type: ignore[union-attr]


def test_a_branch_at_a_step_leaves_the_newer_ones_and_their_numbers_behind() -> None:
    url = run_with(100, 200, 300)
    with CheckpointManager(url) as manager:
        resumed = manager.resume(step=200, x=[0])
        assert (resumed.step, resumed.values, resumed.lost_steps) == (200, {"x": [200]}, 0)
        assert steps_of(url) == [100, 200]  # at once, before anything is saved
        assert manager.latest().step == 200  # type: ignore[union-attr]
        manager.save(250, x=[250], wait=True)
        manager.save(300, x=[301], wait=True)
    found = open_run(url)
    assert [(item.step, item.on_lineage) for item in found.checkpoints(all=True)] == [
        (100, True), (200, True), (300, False), (250, True), (300, True),
    ]  # fmt: skip
    assert steps_of(url) == [100, 200, 250, 300]
    assert x_of(url, step=300) == 301  # the lineage first
    abandoned = next(item for item in found.checkpoints(all=True) if not item.on_lineage)
    assert x_of(url, seq=abandoned.seq) == 300
    assert "abandoned" in repr(abandoned)
    with CheckpointManager(url) as manager:
        assert manager.resume(x=[0]).values == {"x": [301]}


def test_an_abandoned_step_is_found_while_it_is_the_only_one_and_listed_when_it_is_not() -> None:
    url = run_with(100, 200)
    for value in (1, 2):
        with CheckpointManager(url) as manager:
            manager.resume(step=100, x=[0], branch_again=True)
            manager.save(150, x=[value], wait=True)
    with CheckpointManager(url) as manager:
        manager.resume(step=100, x=[0], branch_again=True)
    assert steps_of(url) == [100]
    assert x_of(url, step=200) == 200
    with pytest.raises(
        NotFoundError, match=r"step 150 is on several abandoned branches; choose one of seq=\d+, seq=\d+"
    ):
        open_run(url).at(step=150)
    with pytest.raises(NotFoundError, match="has no step 7; newest steps here: 100"):
        open_run(url).at(step=7)
    with pytest.raises(NotFoundError, match="has no checkpoint number 99"):
        open_run(url).at(seq=99)
    with pytest.raises(ConfigError, match="either step= or seq="):
        open_run(url).at()
    with CheckpointManager(url) as manager:
        with pytest.raises(NotFoundError, match="several abandoned branches"):
            manager.resume(step=150, x=[0])
        with pytest.raises(NotFoundError, match="no step 7"):
            manager.resume(step=7, x=[0])


def test_a_restarted_script_that_asks_for_its_branch_again_goes_on_along_it() -> None:
    url = run_with(100, 200)
    expected = 100
    for new in (110, 120, 130):
        with CheckpointManager(url) as manager:
            assert manager.resume(step=100, x=[0]).step == expected
            manager.save(new, x=[new], wait=True)
        expected = new
    with CheckpointManager(url) as manager:
        assert manager.resume(x=[0]).step == 130  # without the step it is the same branch
    with CheckpointManager(url) as manager:
        assert manager.resume(step=100, x=[0]).step == 130  # and still is
        assert manager.resume(step=100, x=[0], branch_again=True).step == 100
    assert steps_of(url) == [100]
    with CheckpointManager(url) as manager:
        assert manager.resume(step=200, x=[0]).step == 200  # another branch
        assert steps_of(url) == [100, 200]


def test_a_restart_before_the_branchs_first_save_starts_at_its_root() -> None:
    url = run_with(100, 200)
    for _ in range(2):
        with CheckpointManager(url) as manager:
            assert manager.resume(step=100, x=[0]).step == 100


def test_a_step_that_was_named_is_loaded_exactly_or_not_at_all() -> None:
    url = run_with(1, 2, 3)
    raw = raw_of(url)
    raw.write("LATEST", b'{"run_uid":"x","seq":1}\n')
    assert x_of(url, step=1) == 1
    flip(raw, keys(raw, "manifest", 2)[0], 999)
    with pytest.raises(CorruptionError):
        x_of(url, step=2)
    with CheckpointManager(url) as manager, pytest.raises(CorruptionError):
        manager.resume(step=2, x=[0])


def test_a_fresh_start_on_a_run_leaves_what_is_there_and_begins_at_any_step() -> None:
    url = run_with(100, 200)
    for _ in range(2):  # anew on each call
        with CheckpointManager(url) as manager:
            resumed = manager.resume(x=[7], fresh=True)
            assert (resumed.step, resumed.fresh, resumed.values) == (0, True, {"x": [7]})
            assert manager.latest() is None
            assert steps_of(url) == []
            manager.save(0, x=[0], wait=True)
            manager.save(100, x=[101], wait=True)
    assert [item.step for item in open_run(url).checkpoints(all=True)] == [100, 200, 0, 100, 0, 100]
    assert x_of(url, step=100) == 101
    assert x_of(url, step=200) == 200
    with CheckpointManager(url) as manager:
        with pytest.raises(ConfigError, match="either step= or fresh=True"):
            manager.resume(fresh=True, step=3)
        assert manager.resume(x=[0]).step == 100


def test_forgetting_to_resume_harms_nothing_and_says_what_to_do() -> None:
    url = run_with(600, 700)
    raw = raw_of(url)
    before = {key: raw.read(key) for key in raw.keys()}  # noqa: SIM118 - a method of the view
    with CheckpointManager(url) as manager:
        with pytest.raises(AlreadyExistsError) as caught:
            manager.save(1, x=[1])
        for part in (url, "this run is at 700", "call resume()", "resume(fresh=True)", "a new URL"):
            assert part in str(caught.value)
        assert manager.save(1, x=[1], if_exists="skip").status == "skipped"
        assert {key: raw.read(key) for key in raw.keys()} == before  # noqa: SIM118
        manager.save(800, x=[800], wait=True)
        with pytest.raises(AlreadyExistsError, match="step 800 is not above 800, the newest of this lineage"):
            manager.save(800, x=[1])
    assert steps_of(url) == [600, 700, 800]


def test_latest_is_what_is_durable_whoever_wrote_it() -> None:
    url = new_url()
    with CheckpointManager(url) as manager:
        assert manager.latest() is None
        watching = open_run(url)
        assert watching.latest() is None
        assert watching.run_uid is None
        manager.save(1, x=1, wait=True)
        assert watching.latest().step == 1  # type: ignore[union-attr]
        assert watching.run_uid is not None
        manager.save(2, x=1, wait=True)
        assert watching.latest().step == manager.latest().step == 2


def test_two_managers_of_one_process_share_the_run_and_neither_fences_the_other() -> None:
    url = new_url()
    with CheckpointManager(url) as one, CheckpointManager(url) as other:
        one.save(1, x=1, wait=True)
        other.save(2, x=1, wait=True)
        one.save(3, x=1, wait=True)
        with pytest.raises(AlreadyExistsError):
            other.save(3, x=1)
    with CheckpointManager(url) as one:
        one.save(4, x=1, wait=True)
    assert steps_of(url) == [1, 2, 3, 4]


@pytest.mark.parametrize("torn", [b"", b'{"format":"ckptstore.record","ver', b"\0" * 500])
def test_a_run_whose_newest_record_is_torn_opens_resumes_and_saves(torn: bytes) -> None:
    url = run_with(1, 2)
    raw = raw_of(url)
    raw.write(keys(raw, "journal")[-1], torn)
    assert steps_of(url) == [1]
    with CheckpointManager(url) as manager:
        assert manager.resume(x=[0]).step == 1
        manager.save(2, x=[22], wait=True)
    assert steps_of(url) == [1, 2]
    assert x_of(url, step=2) == 22
    assert not open_run(url).verify().ok  # the torn one is still reported


def test_a_journal_without_a_sound_commit_is_damage_and_no_fresh_start() -> None:
    url = run_with(1)
    raw = raw_of(url)
    for key in keys(raw, "journal"):
        raw.write(key, b"torn")
    with pytest.raises(CorruptionError, match=r"resume\(fresh=True\)"):
        open_run(url).latest()
    report = open_run(url).verify()
    assert not report.ok
    assert report.checkpoints == ()
    with CheckpointManager(url) as manager:
        with pytest.raises(CorruptionError, match=r"resume\(fresh=True\)"):
            manager.resume(x=[0])
        assert manager.resume(x=[0], fresh=True).fresh
        manager.save(1, x=[2], wait=True)
    assert x_of(url, step=1) == 2
