"""What a save promises when nothing fails: its own copy, order, bounds, and being told the truth."""

from __future__ import annotations

import functools
import logging
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ckptstore
from ckptstore.engine import engine as engine_module
from ckptstore.errors import AlreadyExistsError, ConfigError, NotSavedError, UnavailableError
from ckptstore.events import Committed, SaveSkipped, StagingDone
from tests.unit.engine.gates import LIMIT_S, GatedStore, engine_of, in_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptstore.events import Event
    from ckptstore.manager import CheckpointManager

    Make = Callable[..., CheckpointManager]

pytestmark = pytest.mark.timeout(60)


def steps_of(store: GatedStore) -> list[int]:
    return [item.step for item in ckptstore.open_run(store).checkpoints()]


def loaded(store: GatedStore, step: int | None = None) -> dict[str, Any]:
    return ckptstore.load(store, step)


def test_save_returns_before_the_commit_and_later_changes_do_not_reach_the_checkpoint(
    store: GatedStore, manage: Make
) -> None:
    weight = torch.arange(1000.0)
    names = ["a"]
    with store.hold("write") as gate, manage() as manager:
        handle = manager.save(1, weight=weight, names=names)
        gate.wait_reached()
        assert handle.status == "writing"
        assert not handle.done()
        status = manager.status()
        assert (status.committed_step, status.pending_steps, status.failures) == (None, (1,), 0)
        assert status.bytes_at_risk >= 4000
        weight.fill_(-1)
        names.append("b")
        gate.open()
        assert handle.result(LIMIT_S).step == 1
        assert repr(handle) == "<SaveHandle step 1, committed>"
        manager.wait(LIMIT_S)
        status = manager.status()
        assert (status.committed_step, status.pending_steps, status.bytes_at_risk) == (1, (), 0)
        assert status.committed_age_s is not None
    found = loaded(store)
    assert torch.equal(found["weight"], torch.arange(1000.0))
    assert found["names"] == ["a"]


def test_nothing_exists_for_a_reader_before_the_commit_record_is_published(store: GatedStore, manage: Make) -> None:
    with manage() as manager:
        manager.save(1, wait=True, value=1)
        with store.hold("publish") as gate:
            handle = manager.save(2, value=2)
            gate.wait_reached()
            assert steps_of(store) == [1]
            assert not handle.done()
        handle.result(LIMIT_S)
        assert steps_of(store) == [1, 2]


def test_staged_and_committed_are_different_events_in_that_order(store: GatedStore, manage: Make) -> None:
    events: list[Event] = []
    with store.hold("publish", "0000000001.json") as gate, manage(observers=[events.append]) as manager:
        handle = manager.save(7, weight=torch.ones(10))
        gate.wait_reached()
        assert [type(event) for event in events] == [StagingDone]
        gate.open()
        handle.result(LIMIT_S)
        manager.wait(LIMIT_S)
    assert [type(event) for event in events] == [StagingDone, Committed]
    assert all(event.step == 7 for event in events)
    staged, committed = events
    assert isinstance(staged, StagingDone)
    assert isinstance(committed, Committed)
    assert staged.n_bytes >= 40
    assert committed.n_bytes > 0
    assert min(committed.staging_s, committed.write_s, committed.commit_s, staged.staging_s) >= 0
    assert committed.staging_s == staged.staging_s > 0


def test_an_observer_or_callback_that_raises_is_logged_and_fails_nothing(
    store: GatedStore, manage: Make, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: object) -> None:
        message = "an observer's own fault"
        raise ValueError(message)

    def leaving(_: object) -> None:
        raise SystemExit(7)

    with manage(observers=[broken]) as manager:
        for step in (1, 2):
            with store.hold("write") as gate:
                handle = manager.save(step, weight=torch.ones(3))
                gate.wait_reached()
                handle.add_done_callback(broken)
                handle.add_done_callback(leaving)
            handle.result(LIMIT_S)
    assert steps_of(store) == [1, 2]
    assert "an observer failed" in caplog.text
    assert "a callback for the save of step 1 failed" in caplog.text


def test_callbacks_are_called_once_with_the_handle_before_or_after_the_end(store: GatedStore, manage: Make) -> None:
    told: list[tuple[str, str]] = []
    with manage() as manager:
        with store.hold("write") as gate:
            handle = manager.save(1, weight=torch.ones(3))
            gate.wait_reached()
            handle.add_done_callback(lambda it: told.append(("early", it.status)))
            assert not told
        manager.wait(LIMIT_S)
        handle.add_done_callback(lambda it: told.append(("late", it.status)))
    assert told == [("early", "committed"), ("late", "committed")]


def test_result_with_a_limit_says_that_the_save_goes_on(store: GatedStore, manage: Make) -> None:
    with store.hold("write"), manage() as manager:
        handle = manager.save(1, weight=torch.ones(3))
        with pytest.raises(UnavailableError, match=r"step 1 is not durable after 0\.01 s; the save goes on"):
            handle.result(0.01)
        with pytest.raises(UnavailableError, match="step 1 is not durable"):
            manager.wait(0.01)
        for gate in store._gates:
            gate.open()
        assert handle.result(LIMIT_S).step == 1


def test_saves_in_flight_commit_in_the_order_they_were_made(store: GatedStore, manage: Make) -> None:
    with manage(max_pending=3) as manager:
        with store.hold("write") as gate:
            handles = [manager.save(step, weight=torch.full((5,), float(step))) for step in (10, 20, 30)]
            gate.wait_reached()
            assert manager.status().pending_steps == (10, 20, 30)
        assert [handle.result(LIMIT_S).seq for handle in handles] == [1, 2, 3]
    assert steps_of(store) == [10, 20, 30]
    for step in (10, 20, 30):
        assert torch.equal(loaded(store, step)["weight"], torch.full((5,), float(step)))


def test_with_wait_no_more_than_max_pending_are_in_flight_and_a_long_wait_warns_once(
    store: GatedStore, manage: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "BUSY_WARNING_S", 0.01)
    warned = threading.Event()

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "on_busy" in record.getMessage():
                warned.set()

    handler = Told()
    logging.getLogger("ckptstore.engine.engine").addHandler(handler)
    try:
        with manage(max_pending=2) as manager:
            for step in (1, 11):
                with store.hold("write") as gate:
                    for more in (0, 1):
                        manager.save(step + more, weight=torch.ones(3))
                    third = in_thread(functools.partial(manager.save, step + 2, weight=torch.ones(3)))
                    if step == 1:
                        assert warned.wait(LIMIT_S)
                    gate.wait_reached()
                    assert len(manager.status().pending_steps) == 2
                third().result(LIMIT_S)
            manager.wait(LIMIT_S)
    finally:
        logging.getLogger("ckptstore.engine.engine").removeHandler(handler)
    assert steps_of(store) == [1, 2, 3, 11, 12, 13]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text for text in warnings if 'on_busy="skip"' in text and "step 3 waits for the save of step 1" in text]
    assert len(warnings) == 1


def test_with_skip_a_save_is_skipped_while_one_is_in_flight_and_says_so(store: GatedStore, manage: Make) -> None:
    events: list[Event] = []
    with manage(on_busy="skip", observers=[events.append]) as manager:
        with store.hold("write") as gate:
            manager.save(1, weight=torch.ones(3))
            gate.wait_reached()
            skipped = manager.save(2, weight=torch.ones(3))
        assert skipped.status == "skipped"
        assert skipped.done()
        with pytest.raises(NotSavedError, match="step 2 was skipped"):
            skipped.result(0)
        manager.wait(LIMIT_S)
        manager.save(3, weight=torch.ones(3))
    assert steps_of(store) == [1, 3]
    assert [event.step for event in events if isinstance(event, SaveSkipped)] == [2]


def test_with_replace_the_newest_unbegun_save_gives_way_and_never_commits(store: GatedStore, manage: Make) -> None:
    events: list[Event] = []
    statuses: list[Any] = []
    with manage(on_busy="replace", max_pending=2, observers=[events.append]) as manager:
        with store.hold("write") as gate:
            first = manager.save(1, weight=torch.full((3,), 1.0))
            gate.wait_reached()
            second = manager.save(2, weight=torch.full((3,), 2.0))
            # A callback is the caller's code: it may ask the manager, and others may meanwhile.
            second.add_done_callback(lambda it: statuses.append((it.status, in_thread(manager.status)().pending_steps)))
            third = manager.save(3, weight=torch.full((3,), 3.0))
            fourth = manager.save(4, weight=torch.full((3,), 4.0))
            assert [item.status for item in (first, second, third, fourth)] == [
                "writing",
                "superseded",
                "superseded",
                "writing",
            ]
            assert len(engine_of(manager)._images) == 2
            with pytest.raises(NotSavedError, match="step 2 was superseded"):
                second.result(0)
        manager.wait(LIMIT_S)
        assert len(engine_of(manager)._images) == 2
    assert steps_of(store) == [1, 4]
    assert torch.equal(loaded(store, 1)["weight"], torch.full((3,), 1.0))
    assert torch.equal(loaded(store, 4)["weight"], torch.full((3,), 4.0))
    assert [event.step for event in events if isinstance(event, SaveSkipped)] == [2, 3]
    assert statuses == [("superseded", (1,))]
    assert not [key for key in store.stored() if "-e0-" in key and int(key.split("/")[2].split("-")[0]) in {2, 3}]


def test_a_step_not_above_a_save_in_flight_is_refused_or_skipped_before_any_work(
    store: GatedStore, manage: Make
) -> None:
    with manage(max_pending=3) as manager, store.hold("write") as gate:
        manager.save(10, weight=torch.ones(3))
        gate.wait_reached()
        for step in (10, 9):
            with pytest.raises(AlreadyExistsError, match=f"step {step} is not above 10"):
                manager.save(step, weight=torch.ones(3))
            assert manager.save(step, if_exists="skip", weight=torch.ones(3)).status == "skipped"
        manager.save(11, if_exists="skip", weight=torch.ones(3))
    assert steps_of(store) == [10, 11]


def test_save_and_status_do_not_wait_for_a_commit_that_is_being_published(store: GatedStore, manage: Make) -> None:
    with manage(max_pending=2) as manager:
        manager.save(1, wait=True, weight=torch.ones(3))
        with store.hold("publish") as gate:
            manager.save(2, weight=torch.ones(3))
            gate.wait_reached()
            assert in_thread(lambda: manager.save(3, weight=torch.ones(3)))().status == "writing"
            assert in_thread(manager.status)().committed_step == 1
    assert steps_of(store) == [1, 2, 3]


def test_a_synchronous_save_is_durable_when_it_returns(store: GatedStore, manage: Make) -> None:
    with manage() as manager:
        handle = manager.save(1, wait=True, weight=torch.ones(3))
        assert handle.status == "committed"
        assert steps_of(store) == [1]


def test_the_state_may_hold_no_tensor_at_all(store: GatedStore, manage: Make) -> None:
    with manage() as manager:
        manager.save(1, epoch=3, name="run")
    assert loaded(store) == {"epoch": 3, "name": "run"}


def test_a_step_is_saved_when_the_cadence_says_so_and_the_store_is_not_asked_before(
    store: GatedStore, manage: Make
) -> None:
    with manage(every=3) as manager:
        asked = len(store.calls)
        saved = [step for step in range(1, 8) if manager.step(step, value=step) is not None]
        assert asked == 0
        assert saved == [3, 6]
    assert steps_of(store) == [3, 6]


def test_stepping_without_resume_on_a_run_that_is_further_is_an_error_and_not_a_silent_skip(
    store: GatedStore, manage: Make
) -> None:
    with manage() as manager:
        manager.save(700, value=1)
    with manage(every=500) as manager:
        assert manager.step(499, value=2) is None
        with pytest.raises(AlreadyExistsError, match="this run is at 700, and step 500 was to be saved: call resume"):
            manager.step(500, value=2)


@pytest.mark.parametrize(
    "options, match",
    [
        ({"max_pending": 0}, "max_pending=0"),
        ({"max_pending": 1, "on_busy": "replace"}, "2 or more"),
        ({"memory_bytes": 1}, "at least 67108864"),
        ({"on_busy": "drop"}, "on_busy='drop'"),
        ({"drain_timeout_s": -1}, "drain_timeout_s=-1"),
        ({"drain_timeout_s": float("nan")}, "drain_timeout_s=nan"),
    ],
)
def test_options_that_mean_nothing_are_refused(manage: Make, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        manage(**options)


def test_a_closed_manager_refuses_to_go_on_and_closes_twice(manage: Make) -> None:
    manager = manage()
    manager.save(1, value=1)
    manager.close()
    manager.close()
    with pytest.raises(ConfigError, match="is closed"):
        manager.save(2, value=1)
