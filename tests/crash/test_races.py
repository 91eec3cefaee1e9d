"""Two processes that fight for one run: always one owner, the other fenced, and every reported checkpoint whole."""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING, Any

import pytest

from ckptstore.checkpoint import Run
from ckptstore.errors import AlreadyExistsError, FencedError
from ckptstore.opening import open_store
from ckptstore.run.changes import lineage
from ckptstore.run.session import Lost, Session
from ckptstore.testing.byte_saver import save

if TYPE_CHECKING:
    from multiprocessing.synchronize import Barrier
    from pathlib import Path

ROUNDS = 100


def claim(session: Session) -> None:
    while True:
        head = session.refresh()
        line = lineage(head.state)
        row = line[0] if line else None
        if not isinstance(session.claim(head, resume_from=row, branch=None, reason="race"), Lost):
            return


def fight(root: str, number: int, barrier: Barrier, told: Any) -> None:
    """In each round: claim, save until fenced, wait for the other, and try once more."""
    for turn in range(ROUNDS):
        session = Session(open_store(root))
        committed = []
        barrier.wait(120)
        try:
            claim(session)
            for attempt in range(2):
                step = turn * 1000 + attempt * 10 + number
                try:
                    save(session, step)
                    committed.append(step)
                except AlreadyExistsError:
                    continue  # the other's step was higher; this one is not above it
        except FencedError:
            pass
        barrier.wait(120)
        try:
            save(session, turn * 1000 + 500 + number)
            committed.append(turn * 1000 + 500 + number)
            owner = True
        except FencedError:
            owner = False
        told.put((turn, number, owner, committed))
        barrier.wait(120)
        session.close()


@pytest.mark.timeout(600)
def test_two_writers_that_race_a_hundred_times_have_one_owner_each_time(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, told = context.Barrier(2), context.Queue()
    root = str(tmp_path / "run")
    writers = [context.Process(target=fight, args=(root, number, barrier, told)) for number in (1, 2)]
    for writer in writers:
        writer.start()
    reports = [told.get(timeout=300) for _ in range(2 * ROUNDS)]
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    owners = [sum(owner for turn, _, owner, _ in reports if turn == wanted) for wanted in range(ROUNDS)]
    assert owners == [1] * ROUNDS
    run = Run(open_store(root))
    listed = {item.step for item in run.checkpoints(all=True)}
    committed = {step for *_, steps in reports for step in steps}
    assert committed == listed
    assert run.verify().ok
    print(f"{ROUNDS} races, one owner each, {len(committed)} checkpoints committed, all whole")
