"""A process with a save in flight ends well: drained, within a limit, with the exit code it should have."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING

import pytest

import ckptstore
from ckptstore.endings import Signals
from ckptstore.errors import ConfigError
from tests.faults.async_child import Children, children

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import FrameType

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def processes() -> Iterator[Children]:
    with children() as found:
        yield found


def steps_in(folder: Path) -> list[int]:
    """The steps of the run, each of them proven whole and its own."""
    run = ckptstore.open_run(folder)
    assert run.verify().ok
    for item in run.checkpoints():
        found = item.load()
        if "weight" in found:
            assert bool((found["weight"] == item.step).all())
    return [item.step for item in run.checkpoints()]


# ── the end of a script ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "scenario, code, says",
    [
        ("script_ends", 0, ""),
        ("no_name_refers_to_it", 0, ""),
        ("exits_3", 3, ""),
        ("fails", 1, "RuntimeError: a fault of the training script"),
    ],
)
def test_a_save_in_flight_is_drained_and_the_exit_code_kept(
    tmp_path: Path, processes: Children, scenario: str, code: int, says: str
) -> None:
    ended = processes.run(scenario, tmp_path)
    assert ended.code == code, ended.err
    assert steps_in(tmp_path / "run") == [1, 2]
    assert says in ended.err
    if not says:
        assert ended.err == "", "nothing alarming is printed"


def test_a_state_that_is_not_even_copied_when_the_script_ends_is_saved(tmp_path: Path, processes: Children) -> None:
    ended = processes.run("overlap_in_flight", tmp_path)
    assert (ended.code, ended.err) == (0, "")
    assert steps_in(tmp_path / "run") == [2]


def test_a_failure_that_nobody_has_seen_becomes_exit_code_1(tmp_path: Path, processes: Children) -> None:
    ended = processes.run("storage_is_full", tmp_path)
    assert ended.code == 1
    assert "CRITICAL" in ended.err
    assert "no space left on device; this is the failure of the save of step 2" in ended.err
    assert steps_in(tmp_path / "run") == [1]


def test_a_failure_that_is_only_to_be_logged_leaves_the_exit_code_alone(tmp_path: Path, processes: Children) -> None:
    ended = processes.run("storage_is_full", tmp_path, on_error="log")
    assert ended.code == 0
    assert "the save of step 2 failed: no space left on device" in ended.err
    assert steps_in(tmp_path / "run") == [1]


@pytest.mark.parametrize("scenario", ["storage_never_answers", "storage_never_answers_in_a_block"])
def test_a_storage_that_never_answers_can_not_hold_the_process_and_the_step_is_named(
    tmp_path: Path, processes: Children, scenario: str
) -> None:
    ended = processes.run(scenario, tmp_path)
    assert ended.code == 1
    assert "step 2 is not durable after 0.2 s: the storage has not answered" in ended.err
    assert steps_in(tmp_path / "run") == [1]


def test_an_interrupt_ends_the_drain_and_names_the_step(tmp_path: Path, processes: Children) -> None:
    ended = processes.run("interrupted_while_draining", tmp_path)
    assert ended.code == 1
    assert "KeyboardInterrupt (not durable: step 2)" in ended.err
    assert steps_in(tmp_path / "run") == [1]


def test_a_forked_child_ends_without_draining_and_without_hurting_the_save(tmp_path: Path, processes: Children) -> None:
    ended = processes.run("forks", tmp_path)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == "child ended with 0\n"
    assert steps_in(tmp_path / "run") == [1, 2]


def test_a_forked_childs_own_manager_is_drained_at_its_end(tmp_path: Path, processes: Children) -> None:
    ended = processes.run("fork_saves_on_its_own", tmp_path)
    assert ended.code == 0, ended.err
    assert ended.out == "child ended with 0\n"
    assert steps_in(tmp_path / "own") == [7]
    assert steps_in(tmp_path / "run") == [1, 2]


# ── signals ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_sigterm_sets_the_flag_and_the_next_step_saves_even_where_a_busy_save_is_skipped(
    tmp_path: Path, processes: Children
) -> None:
    def terminate(place: str, pid: int) -> None:
        if place == "training":
            os.kill(pid, signal.SIGTERM)

    ended = processes.run("preempted", tmp_path, terminate)
    assert ended.code == 0, ended.err
    assert "saved\nearlier handler called True\nearlier handler restored True\n" in ended.out
    last = int(ended.out.split()[-1])
    assert steps_in(tmp_path / "run") == [1, 10, last]


def test_sigterm_that_no_one_listens_for_leaves_only_whole_checkpoints(tmp_path: Path, processes: Children) -> None:
    ended = processes.run("killed_by_a_signal", tmp_path, lambda _, pid: os.kill(pid, signal.SIGTERM))
    assert ended.code == -signal.SIGTERM
    assert steps_in(tmp_path / "run") == [1]
    with ckptstore.CheckpointManager(tmp_path / "run", rng=False) as manager:
        assert manager.resume(weight=0, step_value=0).step == 1
        manager.save(3, weight=0)
    assert [item.step for item in ckptstore.open_run(tmp_path / "run").checkpoints()] == [1, 3]


@pytest.fixture
def calls() -> Iterator[list[int]]:
    """The signals that the handler below ours got; it is put in place for SIGUSR1 and SIGUSR2."""
    got: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        got.append(number)

    before = {number: signal.signal(number, handler) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    yield got
    for number, earlier in before.items():
        signal.signal(number, earlier)


def test_one_of_several_signals_sets_the_flag_once_named_or_twice(calls: list[int]) -> None:
    signals = Signals([signal.SIGUSR1, signal.SIGUSR2, signal.SIGUSR1])
    assert not signals.received
    signal.raise_signal(signal.SIGUSR1)
    assert signals.received
    assert calls == [signal.SIGUSR1]
    signals.restore()
    signal.raise_signal(signal.SIGUSR2)
    assert calls == [signal.SIGUSR1, signal.SIGUSR2]


@pytest.mark.parametrize("first_to_end", [0, 1])
def test_two_managers_may_end_in_any_order_and_the_handler_before_both_comes_back(
    calls: list[int], first_to_end: int
) -> None:
    earlier = signal.getsignal(signal.SIGUSR1)
    both = [Signals([signal.SIGUSR1]), Signals([signal.SIGUSR1])]
    both[first_to_end].restore()
    signal.raise_signal(signal.SIGUSR1)
    assert not both[first_to_end].received
    assert both[1 - first_to_end].received
    assert calls == [signal.SIGUSR1]
    both[1 - first_to_end].restore()
    signal.raise_signal(signal.SIGUSR1)
    assert calls == [signal.SIGUSR1] * 2
    if first_to_end == 1:
        assert signal.getsignal(signal.SIGUSR1) is earlier


def test_closed_on_another_thread_the_handler_passes_on_and_does_nothing_else(calls: list[int]) -> None:
    signals = Signals([signal.SIGUSR1])
    thread = threading.Thread(target=signals.restore)
    thread.start()
    thread.join()
    signal.raise_signal(signal.SIGUSR1)
    assert not signals.received
    assert calls == [signal.SIGUSR1]


@pytest.mark.filterwarnings("ignore:.*multi-threaded")
def test_closed_on_another_thread_the_default_action_is_done() -> None:
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signals = Signals([signal.SIGTERM])
        thread = threading.Thread(target=signals.restore)
        thread.start()
        thread.join()
        signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def _on_thread(act: Callable[[], object]) -> BaseException | None:
    found: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except ConfigError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0] if found else None


def test_what_can_not_be_listened_for_is_refused_and_nothing_is_left_installed(calls: list[int]) -> None:
    earlier = signal.getsignal(signal.SIGUSR1)
    for bad in (signal.SIGKILL, 9999, "SIGTERM"):
        with pytest.raises(ConfigError, match="can't be listened for"):
            Signals([signal.SIGUSR1, bad])  # type: ignore[list-item]
        assert signal.getsignal(signal.SIGUSR1) is earlier
    error = _on_thread(lambda: Signals([signal.SIGUSR1]))
    assert "main thread" in str(error)
    with pytest.raises(ConfigError, match="can't be listened for"):
        ckptstore.CheckpointManager("memory://refused", save_on=[signal.SIGKILL])
