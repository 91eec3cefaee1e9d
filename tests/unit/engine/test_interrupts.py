"""An interrupt on the training thread, wherever it comes in a save, leaves a working engine and right checkpoints.

A trace function raises KeyboardInterrupt at one place after another, and only where the interpreter itself may: when a
function begins, when a call has returned, and when a loop goes round.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ckptstore
from ckptstore.engine import saver, staging
from tests.unit.engine.gates import LIMIT_S, GatedStore, engine_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType
    from typing import Self

    from ckptstore.manager import CheckpointManager

    Make = Callable[..., CheckpointManager]

pytestmark = pytest.mark.timeout(120)
ROOT = Path(ckptstore.__file__).parent
WATCHED = {str(ROOT / "engine" / name) for name in ("engine.py", "overlap.py", "saver.py", "staging.py", "workers.py")}
WATCHED |= {str(ROOT / "handles.py"), str(ROOT / "manager.py")}
SKIPPED = {"_claim", "_running", "check_names"}  # before anything is in flight, and many lines


LOCKING = {"__enter__", "__exit__"}  # a Condition's own, where it is not the bare lock that is taken


@functools.cache
def operations(code: CodeType) -> dict[int, str]:
    return {instruction.offset: instruction.opname for instruction in dis.get_instructions(code)}


@functools.cache
def handler(code: CodeType, offset: int) -> int | None:
    """Where an exception at *offset* goes."""
    for entry in dis._parse_exception_table(code):  # type: ignore[attr-defined]
        if entry.start <= offset < entry.end:
            return int(entry.target)
    return None


class InterruptAt:
    """Within the block, raises KeyboardInterrupt at the *number*-th place of this thread that is watched."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.where = ""

    def __enter__(self) -> Self:
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        caller = "" if frame.f_back is None else frame.f_back.f_code.co_filename
        waiting = code.co_filename == threading.__file__ and caller in WATCHED and code.co_name in {"join", *LOCKING}
        if (code.co_filename in WATCHED and code.co_name not in SKIPPED) or waiting:
            frame.f_trace_opcodes = True
            return self._Frame(self)
        return None

    class _Frame:
        """The tracer of one call, which knows what it did last."""

        def __init__(self, owner: InterruptAt) -> None:
            self._owner = owner
            self._last = ""
            self._at = 0

        def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
            if event == "opcode":
                code, at = frame.f_code, frame.f_lasti
                now = operations(code).get(at, "")
                # It belongs to the call, so where the call was the last thing in a block, this is not the place for it.
                called = self._last.startswith("CALL") and handler(code, at) == handler(code, self._at)
                if called or now in {"RESUME", "JUMP_BACKWARD"}:
                    self._owner.place(frame)
                if now not in {"CACHE", "PRECALL"}:
                    self._last, self._at = now, at
            return self

    def place(self, frame: FrameType) -> None:
        """Raise if it is the one."""
        self.left -= 1
        if self.left < 0 and not self.where:
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
            raise KeyboardInterrupt


def state_of(step: int, mode: str) -> dict[str, Any]:
    if mode != "overlap":
        return {"a": torch.full((12_000,), float(step)), "b": torch.full((9,), step)}
    model = torch.nn.Linear(100, 100)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), momentum=0.9), "b": torch.full((9,), step)}


def check_from(first: int, store: GatedStore, mode: str) -> list[int]:
    """Every checkpoint holds its own step's values and nothing else; return the steps."""
    items = [item for item in ckptstore.open_run(store).checkpoints() if item.step >= first]
    for item in items:
        found, step = item.load(), item.step
        tensors = [found["b"], *(found["model"].values() if mode == "overlap" else [found["a"]])]
        assert all(bool((tensor == step).all()) for tensor in tensors), step
    return [item.step for item in items]


@pytest.mark.parametrize("mode", ["copy", "wait", "overlap", "replace"])
def test_an_interrupt_anywhere_in_a_save(
    store: GatedStore, manage: Make, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(staging, "PART_BYTES", 4096)
    monkeypatch.setattr(saver, "PART_BYTES", 4096)
    options: dict[str, dict[str, Any]] = {
        "overlap": {"staging": "overlap"},
        "replace": {"on_busy": "replace", "max_pending": 2},
    }
    manager = manage(**options.get(mode, {}))
    manager.save(1, **state_of(1, mode))
    handles = []
    step = checked = 1
    for number in range(10_000):
        manager.wait(LIMIT_S)
        assert len(engine_of(manager)._images) <= manager._max_pending
        interrupt = InterruptAt(number)
        with store.hold("write") as gate:
            if mode == "replace":  # there is one being written, and one to give way
                for _ in range(2):
                    step += 1
                    handles.append(manager.save(step, **state_of(step, mode)))
                    gate.wait_reached()
            else:
                gate.open()
            step += 1
            state = state_of(step, mode)
            try:
                with interrupt:
                    handles.append(manager.save(step, wait=mode == "wait", **state))
            except KeyboardInterrupt:
                pass
            gate.open()
            step += 1
            handles.append(manager.save(step, **state_of(step, mode)))
        assert handles[-1].result(LIMIT_S).step == step, interrupt.where
        assert manager.status().failures == 0, interrupt.where
        if number % 10 == 0:
            assert step in check_from(checked, store, mode)
            checked = step
        if not interrupt.where:
            break
    else:
        pytest.fail("a save has no end")
    assert number > 100
    manager.close()
    assert all(handle.done() for handle in handles)
    check_from(checked, store, mode)


def test_an_interrupt_anywhere_in_a_first_save(manage: Make) -> None:
    for number in range(10_000):
        store = GatedStore()
        manager = manage(store=store)
        interrupt = InterruptAt(number)
        try:
            with interrupt:
                manager.save(1, **state_of(1, "copy"))
        except KeyboardInterrupt:
            pass
        handle = manager.save(2, **state_of(2, "copy"))
        assert handle.result(LIMIT_S).step == 2, interrupt.where
        manager.close()
        assert 2 in check_from(0, store, "copy")
        if not interrupt.where:
            return
    pytest.fail("a save has no end")


@pytest.mark.parametrize("call", ["wait", "close", "save"])
def test_an_interrupt_of_a_call_that_would_raise_a_failure_does_not_lose_it(
    store: GatedStore, manage: Make, call: str
) -> None:
    class FullError(Exception):
        pass

    for number in range(1000):
        manager = manage()
        store.fail("write", FullError())
        manager.save(1, a=torch.ones(3))
        engine_of(manager).wait(LIMIT_S)
        interrupt = InterruptAt(number)
        told = False
        calls: dict[str, Callable[[], object]] = {
            "wait": manager.wait,
            "close": manager.close,
            "save": functools.partial(manager.save, 2, a=1),
        }
        try:
            with interrupt:
                calls[call]()
        except FullError:
            told = True
        except KeyboardInterrupt as error:
            told = isinstance(error.__context__, FullError)  # it is in the traceback that a person reads
        if not told and call != "close":
            with pytest.raises(FullError):
                manager.wait(LIMIT_S)
        with contextlib.suppress(FullError):  # being told twice is better than never
            manager.close()
        if not interrupt.where:
            return
    pytest.fail("a call has no end")
