"""What fails in the background is never lost, never told twice as a surprise, and spoils nothing that comes after."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ckptstore
from ckptstore.errors import (
    AlreadyExistsError,
    CkptStoreError,
    FencedError,
    OutcomeUnknownError,
    StorageFullError,
    UnavailableError,
)
from ckptstore.events import SaveFailed
from ckptstore.run import session as session_module
from tests.unit.engine.gates import LIMIT_S, GatedStore, engine_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptstore.events import Event
    from ckptstore.manager import CheckpointManager

    Make = Callable[..., CheckpointManager]

pytestmark = pytest.mark.timeout(60)
WEIGHT = torch.arange(4000.0)
VERBS = [("create", ""), ("write", ""), ("finish", ""), ("put", "MANIFEST"), ("publish", "0000000002.json")]


def steps_of(store: GatedStore) -> list[int]:
    return [item.step for item in ckptstore.open_run(store).checkpoints()]


def attempts_of(store: GatedStore) -> set[int]:
    """The steps that anything is stored for."""
    return {int(key.split("/")[2].split("-")[0]) for key in store.stored()}


def full() -> StorageFullError:
    return StorageFullError("no space left on device", operation="write", key="data")


def failed_save(store: GatedStore, manager: CheckpointManager, verb: str, key: str) -> StorageFullError:
    """Save step 1, and step 2 which fails at *verb*; return when it has."""
    manager.save(1, wait=True, weight=WEIGHT)
    error = full()
    store.fail(verb, error, key)
    handle = manager.save(2, weight=WEIGHT)
    engine_of(manager).wait(LIMIT_S)
    assert handle.status == "failed"
    return error


@pytest.mark.parametrize("verb, key", VERBS)
def test_the_next_save_raises_what_failed_and_the_one_after_works(
    store: GatedStore, manage: Make, verb: str, key: str
) -> None:
    with manage() as manager:
        error = failed_save(store, manager, verb, key)
        assert manager.status().failures == 1
        with pytest.raises(StorageFullError) as raised:
            manager.save(3, weight=WEIGHT)
        assert raised.value is error
        assert "the save of step 2" in raised.value.__notes__[0]
        assert manager.status().failures == 0
        assert attempts_of(store) == {1}, "what a failed save wrote is removed, and the refused save wrote nothing"
        manager.save(3, weight=WEIGHT)
    assert steps_of(store) == [1, 3]
    assert torch.equal(ckptstore.load(store)["weight"], WEIGHT)


@pytest.mark.parametrize("verb, key", VERBS)
def test_wait_raises_what_failed_once(store: GatedStore, manage: Make, verb: str, key: str) -> None:
    with manage() as manager:
        failed_save(store, manager, verb, key)
        with pytest.raises(StorageFullError) as raised:
            manager.wait(LIMIT_S)
        assert "step 2" in raised.value.__notes__[0]
        manager.wait(LIMIT_S)
    assert steps_of(store) == [1]


@pytest.mark.parametrize("verb, key", VERBS)
def test_close_raises_what_failed(store: GatedStore, manage: Make, verb: str, key: str) -> None:
    manager = manage()
    failed_save(store, manager, verb, key)
    with pytest.raises(StorageFullError) as raised:
        manager.close()
    assert "step 2" in raised.value.__notes__[0]
    manager.close()
    with manage() as again:
        again.save(3, weight=WEIGHT)
    assert steps_of(store) == [1, 3]


def test_a_handles_result_raises_it_each_time_and_takes_it_from_no_one_else(store: GatedStore, manage: Make) -> None:
    with manage() as manager:
        store.fail("write", full())
        handle = manager.save(2, weight=WEIGHT)
        for _ in range(2):
            with pytest.raises(StorageFullError, match="no space left") as raised:
                handle.result(LIMIT_S)
            assert len(raised.value.__notes__) == 1
        with pytest.raises(StorageFullError):
            manager.wait(LIMIT_S)


@pytest.mark.parametrize("on_error", ["raise", "log"])
def test_a_synchronous_save_raises_at_once_and_only_once(store: GatedStore, manage: Make, on_error: str) -> None:
    with manage(on_error=on_error) as manager:
        store.fail("write", full())
        with pytest.raises(StorageFullError) as raised:
            manager.save(1, wait=True, weight=WEIGHT)
        assert "step 1" in raised.value.__notes__[0]
        manager.wait(LIMIT_S)
        manager.save(2, weight=WEIGHT)
    assert steps_of(store) == [2]


def test_of_several_failures_each_call_raises_one_and_close_the_rest(store: GatedStore, manage: Make) -> None:
    manager = manage(max_pending=4)
    with store.hold("create") as gate:
        for step in (1, 2, 3, 4):
            store.fail("write", StorageFullError(f"no space for {step}"))
        for step in (1, 2, 3, 4):
            manager.save(step, weight=WEIGHT)
        gate.wait_reached()
    with pytest.raises(StorageFullError, match="no space for 1"):
        manager.wait(LIMIT_S)
    assert manager.status().failures == 3
    with pytest.raises(StorageFullError, match="no space for 2"):
        manager.save(5, weight=WEIGHT)
    with pytest.raises(StorageFullError, match="no space for 3") as raised:
        manager.close()
    assert "step 3" in raised.value.__notes__[0]
    assert "no space for 4" in raised.value.__notes__[1]
    assert "step 4" in raised.value.__notes__[1]


def test_a_save_that_waited_for_one_that_failed_raises_that_and_is_not_begun(store: GatedStore, manage: Make) -> None:
    with manage() as manager:
        store.fail("write", full())
        with store.hold("write") as gate:
            manager.save(1, weight=WEIGHT)
            gate.wait_reached()
            gate.open()
            with pytest.raises(StorageFullError):
                manager.save(2, weight=WEIGHT)
        assert manager.status().pending_steps == ()
        manager.save(2, weight=WEIGHT)
    assert steps_of(store) == [2]


def test_on_error_log_counts_and_logs_and_training_goes_on(
    store: GatedStore, manage: Make, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[Event] = []
    with manage(on_error="log", observers=[events.append]) as manager:
        for step in (1, 2):
            store.fail("finish", full())
            manager.save(step, weight=WEIGHT)
        manager.save(3, weight=WEIGHT)
        manager.wait(LIMIT_S)
        assert manager.status().failures == 2
        assert not engine_of(manager)._failures, "a storage that fails for days must not fill the memory with errors"
    assert steps_of(store) == [3]
    assert [event.step for event in events if isinstance(event, SaveFailed)] == [1, 2]
    assert "the save of step 1 failed: no space left" in caplog.text


def save_and_leave(manager: CheckpointManager, error: BaseException) -> None:
    with manager:
        manager.save(1, weight=WEIGHT)
        raise error


def test_an_error_on_its_way_out_of_the_block_is_never_masked(
    store: GatedStore, manage: Make, caplog: pytest.LogCaptureFixture
) -> None:
    store.fail("write", full())
    with pytest.raises(ZeroDivisionError):
        save_and_leave(manage(), ZeroDivisionError())
    assert "no space left" in caplog.text
    store.fail("write", full())
    with pytest.raises(SystemExit):
        save_and_leave(manage(), SystemExit(3))


def test_an_exit_that_claims_success_does_not_hide_a_failure(store: GatedStore, manage: Make) -> None:
    store.fail("write", full())
    with pytest.raises(StorageFullError):
        save_and_leave(manage(), SystemExit(0))


# ── the commit itself ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("happened", [True, False], ids=["it happened", "it did not"])
def test_after_an_unknown_outcome_nothing_is_removed_and_the_next_save_settles_it(
    store: GatedStore, manage: Make, happened: bool
) -> None:
    with manage() as manager:
        manager.save(1, wait=True, weight=WEIGHT)
        store.fail("publish", OutcomeUnknownError("no answer"), after=happened)
        handle = manager.save(2, weight=WEIGHT + 1)
        with pytest.raises(OutcomeUnknownError):
            handle.result(LIMIT_S)
        engine_of(manager).wait(LIMIT_S)
        assert attempts_of(store) == {1, 2}
        with pytest.raises(OutcomeUnknownError):
            manager.save(3, weight=WEIGHT + 2)
        manager.save(3, weight=WEIGHT + 2)
    assert steps_of(store) == [1, 2, 3], "settling publishes the very record whose outcome was unknown"
    assert torch.equal(ckptstore.load(store, 2)["weight"], WEIGHT + 1)
    assert torch.equal(ckptstore.load(store, 3)["weight"], WEIGHT + 2)


def test_the_same_step_again_after_an_unknown_outcome_is_refused_before_any_work(
    store: GatedStore, manage: Make
) -> None:
    with manage() as manager:
        manager.save(1, wait=True, weight=WEIGHT)
        store.fail("publish", OutcomeUnknownError("no answer"), after=True)
        with pytest.raises(OutcomeUnknownError):
            manager.save(2, wait=True, weight=WEIGHT)
        creates = store.calls["create"]
        with pytest.raises(AlreadyExistsError, match="step 2 is not above 2"):
            manager.save(2, weight=WEIGHT)
        assert store.calls["create"] == creates
        assert manager.save(2, if_exists="skip", weight=WEIGHT).status == "skipped"
        asked = store.calls
        manager.save(2, if_exists="skip", weight=WEIGHT)
        assert store.calls == asked, "what is settled is not asked again"


def test_an_unknown_outcome_that_stays_unknown_is_raised_before_more_is_written(
    store: GatedStore, manage: Make
) -> None:
    with manage() as manager:
        manager.save(1, wait=True, weight=WEIGHT)
        store.fail("publish", OutcomeUnknownError("no answer"))
        with pytest.raises(OutcomeUnknownError):
            manager.save(2, wait=True, weight=WEIGHT)
        store.fail("publish", OutcomeUnknownError("still no answer"))
        with pytest.raises(OutcomeUnknownError, match="still no answer"):
            manager.save(3, weight=WEIGHT)
        assert attempts_of(store) == {1, 2}
        manager.save(3, weight=WEIGHT)
    assert steps_of(store) == [1, 2, 3]


def test_a_fenced_writer_stops_for_good_and_keeps_what_it_had_committed(store: GatedStore, manage: Make) -> None:
    manager = manage()
    manager.save(1, wait=True, weight=WEIGHT)
    with manage(takeover=True) as other:
        other.save(5, weight=WEIGHT)
        other.wait(LIMIT_S)
        handle = manager.save(2, weight=WEIGHT)
        with pytest.raises(FencedError):
            handle.result(LIMIT_S)
        engine_of(manager).wait(LIMIT_S)
        with pytest.raises(FencedError) as raised:
            manager.save(3, weight=WEIGHT)
        assert "step 2" in raised.value.__notes__[0]
        for step in (3, 6):
            with pytest.raises(FencedError, match=f"another writer took this run over, so step {step} can't be saved"):
                manager.save(step, weight=WEIGHT)
        manager.close()
        other.save(6, weight=WEIGHT)
    assert steps_of(store) == [1, 5, 6]
    assert attempts_of(store) == {1, 5, 6}


def test_what_a_failed_save_left_behind_is_counted_and_logged(
    store: GatedStore, manage: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with manage(on_error="log") as manager:
        store.fail("put", full(), "MANIFEST")
        store.fail("delete", UnavailableError("no answer"))
        manager.save(1, weight=WEIGHT)
        manager.wait(LIMIT_S)
        assert manager.status().uncleaned == 2
    assert "of the failed save of step 1 could not be removed: no answer" in caplog.text


# ── close and forks ──────────────────────────────────────────────────────────────────────────────────────────────


def test_close_gives_up_at_its_limit_names_the_steps_and_leaves_the_run_to_the_writing_thread(
    store: GatedStore, manage: Make
) -> None:
    manager = manage(drain_timeout_s=0.05, max_pending=2)
    store.fail("write", full())
    manager.save(1, weight=WEIGHT)
    engine_of(manager).wait(LIMIT_S)
    with store.hold("write") as gate:
        with pytest.raises(StorageFullError):
            manager.wait()
        manager.save(2, weight=WEIGHT)
        gate.wait_reached()
        with pytest.raises(
            UnavailableError, match=r"step 2 is not durable after 0\.05 s: the storage has not answered"
        ):
            manager.close()
        assert store.url in session_module._shared, "a writer that still writes has not closed the run"
        assert not list(store.list("alive/"))[1:]
    engine_of(manager).wait(LIMIT_S)
    session_module.release(manager._session)
    assert steps_of(store) == [2]


def test_close_tells_of_earlier_failures_when_it_gives_up(store: GatedStore, manage: Make) -> None:
    manager = manage(drain_timeout_s=0.05, max_pending=2)
    store.fail("create", full())
    with store.hold("create", "/000000000001-") as first, store.hold("write", "/000000000002-") as gate:
        manager.save(1, weight=WEIGHT)
        manager.save(2, weight=WEIGHT)
        first.open()
        gate.wait_reached()
        with pytest.raises(UnavailableError, match="step 2 is not durable") as raised:
            manager.close()
        assert "no space left" in raised.value.__notes__[0]
        assert "step 1" in raised.value.__notes__[0]
    engine_of(manager).wait(LIMIT_S)
    session_module.release(manager._session)


@pytest.mark.filterwarnings("ignore:.*multi-threaded")
def test_a_forked_child_is_refused_even_while_the_engine_is_locked(store: GatedStore, manage: Make) -> None:
    manager = manage()
    with store.hold("write") as gate:
        handle = manager.save(1, weight=WEIGHT)
        gate.wait_reached()
        engine_of(manager)._changed.acquire()  # as a thread of ours may hold it at the moment of the fork
        child = os.fork()
        if child == 0:
            code = 1
            try:
                calls: list[Callable[[], Any]] = [
                    lambda: manager.save(2, weight=WEIGHT),
                    manager.wait,
                    manager.staged,
                    manager.status,
                    lambda: manager.step(2, weight=WEIGHT),
                ]
                refused = 0
                for call in calls:
                    try:
                        call()
                    except CkptStoreError as error:
                        refused += "forked child" in str(error)
                manager.close()
                code = 0 if refused == len(calls) and manager.drain_for_exit() else 2
            finally:
                os._exit(code)
        engine_of(manager)._changed.release()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        gate.open()
        handle.result(LIMIT_S)
    manager.close()
    assert steps_of(store) == [1]


def test_manager_and_handle_refuse_pickling(manage: Make) -> None:
    import pickle

    with manage() as manager:
        handle = manager.save(1, weight=WEIGHT)
        for item in (manager, handle):
            with pytest.raises(TypeError, match="can't be pickled"):
                pickle.dumps(item)


def test_the_publisher_outlives_an_observer_that_leaves(
    store: GatedStore, manage: Make, caplog: pytest.LogCaptureFixture
) -> None:
    def leave(event: Event) -> None:
        if isinstance(event, SaveFailed):
            raise SystemExit(1)

    with manage(observers=[leave], on_error="log") as manager:
        store.fail("write", full())
        manager.save(1, weight=WEIGHT)
        manager.save(2, weight=WEIGHT)
    assert steps_of(store) == [2]
    assert "telling how the save of step 1 ended failed" in caplog.text
    assert logging.ERROR in {record.levelno for record in caplog.records}
