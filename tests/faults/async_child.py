"""How does a whole process end, with a save in flight, and what does it leave?

One process imports torch once and forks a child for each scenario; the child goes on to the end of the script like any
other, so its exit code, its output and what it leaves on disk are the real ones. A child that is held at a place says
so on a pipe, and the test decides what comes then.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ckptstore.testing.faulty import FaultyStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
LIMIT_S = 60.0


# ── the test's side ──────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Ended:
    """How a child ended: exit code (negative: the signal), and its output."""

    code: int
    out: str
    err: str


class Children:
    """The process that forks children, seen from the test."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from tests.faults.async_child import serve; serve()"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'backends'}", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # a second answer that waited in a buffer would be hidden from select below
        )

    def run(self, scenario: str, folder: Path, at: Callable[[str, int], None] | None = None, **options: Any) -> Ended:
        """Run *scenario* in *folder*; call *at* with each place the child says it has reached, and its pid."""
        assert self._process.stdin is not None
        order = {"scenario": scenario, "folder": str(folder), "options": options}
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        pid = int(self._answer()["pid"])
        while "code" not in (answer := self._answer()):
            if at is not None:
                at(answer["at"], pid)
        return Ended(answer["code"], *((folder / name).read_text() for name in ("out.txt", "err.txt")))

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], LIMIT_S)
        line = self._process.stdout.readline() if ready else b""
        assert line, "the child hangs, or the process that forks is gone"
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def children() -> Iterator[Children]:
    """The forking process, ended at the end of the block."""
    found = Children()
    try:
        yield found
    finally:
        found.close()


# ── the forking process and its children ─────────────────────────────────────────────────────────────────────────


def serve() -> None:
    """Fork a child for each order on standard input. The child returns from here into the end of the script."""
    import torch

    import ckptstore_posix  # noqa: F401 - and the others too: once for all children

    torch.set_num_threads(1)
    answers = os.dup(1)
    while line := _line():
        order = json.loads(line)
        # The child says its own number first: what it says later must not overtake it.
        pid = os.fork()
        if pid == 0:
            _say(answers, pid=os.getpid())
            for fd, name in ((1, "out.txt"), (2, "err.txt")):
                os.dup2(os.open(Path(order["folder"]) / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), fd)
            logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
            child = Child(answers, Path(order["folder"]))
            globals()[order["scenario"]](child, **order["options"])
            return
        _say(answers, code=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _line() -> bytes:
    """Read one order, and no byte of the next: what is buffered here would be the child's too."""
    found = b""
    while not found.endswith(b"\n"):
        read = os.read(0, 1)
        if not read:
            return b""
        found += read
    return found


def _say(fd: int, **what: object) -> None:
    os.write(fd, json.dumps(what).encode() + b"\n")


@dataclass
class Child:
    """What a scenario is given."""

    answers: int
    folder: Path

    def at(self, place: str) -> None:
        """Say that the child is here."""
        _say(self.answers, at=place)

    def store(self, verb: str = "", key: str = "", *, error: str = "") -> HoldingStore:
        """A store on disk that holds, or fails, calls of *verb* on keys with *key* in them once it is armed."""
        from ckptstore_posix import PosixStore

        return HoldingStore(PosixStore.from_url(str(self.folder / "run")), self, verb, key, error)


class HoldingStore(FaultyStore):
    """Calls of one verb wait for ever, or until ``free``, or raise."""

    def __init__(self, store: Any, child: Child, verb: str, key: str, error: str) -> None:
        super().__init__(store)
        self._child = child
        self._verb = verb
        self._key = key
        self._error = error
        self.armed = False
        self.free = threading.Event()

    def meet(self, verb: str, key: str, act: Callable[[], T], torn: Callable[[int], object] | None = None) -> T:
        if self.armed and verb == self._verb and self._key in key:
            if self._error:
                from ckptstore.errors import StorageFullError

                raise StorageFullError(self._error)
            self._child.at(verb)
            self.free.wait()
        return super().meet(verb, key, act, torn)


def state_of(step: int) -> dict[str, Any]:
    """A state whose every number is its step."""
    import torch

    return {"weight": torch.full((1_000_000,), float(step)), "step_value": step}


def manager_on(store: Any, **options: Any) -> Any:
    from ckptstore.manager import CheckpointManager

    return CheckpointManager(store, **{"rng": False, **options})


def held(child: Child, **options: Any) -> tuple[HoldingStore, Any]:
    """A manager with step 1 durable and step 2 being written."""
    store = child.store("write")
    manager = manager_on(store, **options)
    manager.save(1, wait=True, **state_of(1))
    store.armed = True
    manager.save(2, **state_of(2))
    return store, manager


def free_at_exit(store: HoldingStore) -> None:
    """Let the storage answer only once the interpreter has begun to end."""
    import atexit

    atexit.register(store.free.set)


# ── scenarios: a normal end ──────────────────────────────────────────────────────────────────────────────────────


def script_ends(child: Child, staging: str = "copy") -> None:
    store, _ = held(child, staging=staging)
    free_at_exit(store)


def no_name_refers_to_it(child: Child) -> None:
    import gc

    def train() -> HoldingStore:
        return held(child)[0]

    store = train()
    gc.collect()
    free_at_exit(store)


def exits_3(child: Child) -> None:
    store, _ = held(child)
    free_at_exit(store)
    sys.exit(3)


def fails(child: Child) -> None:
    store, _ = held(child)
    free_at_exit(store)
    message = "a fault of the training script"
    raise RuntimeError(message)


def overlap_in_flight(child: Child) -> None:
    import atexit

    import torch

    from ckptstore.engine import staging

    go = threading.Event()
    stage = staging.Image.stage

    def later(self: staging.Image, *args: Any, **kwargs: Any) -> None:
        go.wait()
        stage(self, *args, **kwargs)

    model = torch.nn.Linear(100, 100)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    manager = manager_on(child.store(), staging="overlap")
    staging.Image.stage = later  # type: ignore[method-assign]
    manager.save(2, model=model, optimizer=optimizer)
    atexit.register(go.set)


def storage_is_full(child: Child, on_error: str = "raise") -> None:
    store = child.store("write", error="no space left on device")
    manager = manager_on(store, on_error=on_error)
    manager.save(1, wait=True, **state_of(1))
    store.armed = True
    manager.save(2, **state_of(2))


def storage_never_answers(child: Child) -> None:
    held(child, drain_timeout_s=0.2)


def storage_never_answers_in_a_block(child: Child) -> None:
    store = child.store("publish")
    with manager_on(store, drain_timeout_s=0.2) as manager:
        manager.save(1, wait=True, **state_of(1))
        store.armed = True
        manager.save(2, **state_of(2))


def interrupted_while_draining(child: Child) -> None:
    held(child)
    import atexit

    # Handlers run in reverse order: this one comes right before the drain, which the alarm interrupts.
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    atexit.register(signal.setitimer, signal.ITIMER_REAL, 0.3)


def forks(child: Child) -> None:
    store, manager = held(child, drain_timeout_s=30.0)
    pid = os.fork()
    if pid == 0:
        return  # to the end of the script, with a manager that is not this process's
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print("child ended with", code)
    store.free.set()
    manager.close()


def fork_saves_on_its_own(child: Child) -> None:
    store, manager = held(child)
    pid = os.fork()
    if pid == 0:
        own = manager_on(str(child.folder / "own"))
        own.save(7, **state_of(7))
        return  # drained at its end, as anyone's
    print("child ended with", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    store.free.set()
    manager.close()


# ── scenarios: signals ───────────────────────────────────────────────────────────────────────────────────────────


def preempted(child: Child) -> None:
    """A training loop that saves when the flag is set, while another save is in flight and would make it skip."""
    before: list[int] = []
    store = child.store("write")

    def earlier(number: int, _: object) -> None:
        before.append(number)
        threading.Timer(0.2, store.free.set).start()

    signal.signal(signal.SIGTERM, earlier)
    with manager_on(store, every=10, save_on=[signal.SIGTERM], on_busy="skip") as manager:
        manager.save(1, wait=True, **state_of(1))
        store.armed = True
        manager.save(10, **state_of(10))
        for step in range(11, 1_000_000_000):
            if step == 11:
                child.at("training")
            handle = manager.step(step, **state_of(step)) if step % 10 == 0 or manager.preempted else None
            if manager.preempted:
                print("saved" if handle is not None else "not saved")
                break
            threading.Event().wait(0.001)
    print("earlier handler called", before == [signal.SIGTERM])
    print("earlier handler restored", signal.getsignal(signal.SIGTERM) is earlier)
    print("last step", step)


def killed_by_a_signal(child: Child) -> None:
    held(child)
    threading.Event().wait()


# ── scenarios: killed in each phase ──────────────────────────────────────────────────────────────────────────────


def killed_in(child: Child, phase: str, staging: str) -> None:
    import torch

    from ckptstore.engine import staging as staging_module

    verb, key = {
        "staging": ("", ""),
        "creating": ("create", ""),
        "writing": ("write", ""),
        "finishing": ("finish", ""),
        "before manifest": ("put", "MANIFEST"),
        "before publish": ("publish", ""),
        "before hint": ("put", "LATEST"),
    }[phase]
    store = child.store(verb, key)
    manager = manager_on(store, staging=staging)
    model = torch.nn.Linear(1000, 1000)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)

    def save(step: int) -> Any:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(step)
        return manager.save(step, model=model, optimizer=optimizer)

    save(1).result()
    store.armed = True
    if phase == "staging":
        fill = staging_module.Image._fill

        def held_fill(self: staging_module.Image, number: int, *args: Any) -> None:
            fill(self, number, *args)
            if staging == "copy" or threading.current_thread() is not threading.main_thread():
                child.at("staging")
                threading.Event().wait()

        staging_module.Image._fill = held_fill  # type: ignore[method-assign, assignment]
    save(2)
    threading.Event().wait()
