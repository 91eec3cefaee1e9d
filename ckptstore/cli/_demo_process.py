"""How does the demo follow a training process, and how does it end it?

A process tells what happens through a pipe of its own, and every wait for it has a limit. It ends with the block that
started it, by SIGKILL if it still runs.
"""

from __future__ import annotations

import multiprocessing
import signal
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from typing import TYPE_CHECKING, TypeAlias, assert_never

import click

from ckptstore.errors import CkptStoreError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerContext
    from types import TracebackType
    from typing import Self

__all__ = ["Failed", "Finished", "Job", "Message", "Saving", "Started", "Trained", "Training", "start_server"]

_SILENCE_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a process shall train: the run, the last step, a save every so many steps, the step whose save is held."""

    url: str
    steps: int
    every: int
    hold_step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """Training begins, after the checkpoint of *step*; 0 if there was none."""

    step: int
    n_parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A step was trained."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """So much of the payload of the save to hold is written, and no more will be: kill me now."""

    written: int
    n_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Training ended; *digest* is over every bit of parameters, optimizer state and learning rate."""

    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Training stopped at an error of the library."""

    reason: str


Message: TypeAlias = Started | Trained | Saving | Finished | Failed


class Training:
    """One training process, and what it has told so far.

    Attributes:
        first: The step it went on from.
        n_parameters: Size of its model.
        losses: By step.
        saving: How far the save to hold has come; None until then.
        digest: Of the final state; None until the end.
    """

    def __init__(self, context: ForkServerContext, job: Job) -> None:
        self.first = 0
        self.n_parameters = 0
        self.losses: dict[int, float] = {}
        self.saving: Saving | None = None
        self.digest: str | None = None
        self._told, tells = context.Pipe(duplex=False)
        # A daemon: it is killed rather than left behind, whatever ends this process.
        self._process = context.Process(target=_run, args=(job, tells), daemon=True)
        self._process.start()
        tells.close()  # the child's end is the only one left, so its death is the end of the pipe

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process.pid is not None
        return self._process.pid

    def follow(self) -> None:
        """Take in what it tells, until it is held in a save or has finished."""
        while self.saving is None and self.digest is None:
            if not self._told.poll(_SILENCE_S):
                message = f"training process {self.pid} has said nothing for {_SILENCE_S:.0f} s"
                raise click.ClickException(message)
            try:
                self._take(self._told.recv())
            except EOFError as error:
                self._process.join(_SILENCE_S)
                message = f"training process {self.pid} ended early, with exit code {self._process.exitcode}"
                raise click.ClickException(message) from error

    def kill(self) -> None:
        """Send SIGKILL, and see that it died of that."""
        self._process.kill()
        self._process.join(_SILENCE_S)
        if self._process.exitcode != -signal.SIGKILL:
            message = f"training process {self.pid} did not die of SIGKILL: exit code {self._process.exitcode}"
            raise click.ClickException(message)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join(_SILENCE_S)
        self._told.close()

    def _take(self, message: Message) -> None:
        match message:
            case Started():
                self.first, self.n_parameters = message.step, message.n_parameters
            case Trained():
                self.losses[message.step] = message.loss
            case Saving():
                self.saving = message
            case Finished():
                self.digest = message.digest
            case Failed():
                reason = f"training process {self.pid}: {message.reason}"
                raise click.ClickException(reason)
            case _:
                assert_never(message)


def start_server() -> ForkServerContext:
    """Start the server that imports torch and forks training processes from then on."""
    context = multiprocessing.get_context("forkserver")
    # torch._dynamo is what the first optimizer of a process imports, for seconds.
    context.set_forkserver_preload(["ckptstore.cli.demo_training", "torch._dynamo"])
    # Ctrl-C is for the demo, which ends the processes: the server and they inherit that it does not concern them.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)
    return context


def _run(job: Job, tells: Connection[Message, Message]) -> None:
    from ckptstore.cli.demo_training import train

    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():  # interrupted while torch was still being imported
        return
    with suppress(BrokenPipeError):  # the demo is gone, and no one listens any more
        try:
            train(job, tells.send)
        except CkptStoreError as error:
            tells.send(Failed(reason=str(error)))
