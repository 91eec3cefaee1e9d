"""Whatever single thing goes wrong while a run is claimed and committed to, what was told stays true.

Every fault that the store can have, at every call of a scenario: a claim and three commits, alone, taken over in the
middle, or beside a command. Then a fresh process goes on, and the invariants are asserted: what was told to be
committed is there and whole (I1, I2, I9), numbers and epochs are in order (I3 to I7, I21), no content of the hint
matters (I8), an outage never becomes an older head (I14), and the lineage is what the newest claim says (I15).
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import pytest

from ckptstore.errors import CkptStoreError, FencedError, OutcomeUnknownError
from ckptstore.run import changes
from ckptstore.run.operators import operate
from ckptstore.testing.faulty import Die, FaultPlan, FaultyStore, Killed, single_faults
from tests.unit.run.world import abandon, assert_sound, new_journal, new_session, new_store, save, steps, take, try_

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckptstore.run.session import Session
    from ckptstore.store import CheckpointStore


class Story:
    """What a training process was told: steps that are committed, and steps that may be."""

    def __init__(self) -> None:
        self.committed: list[int] = []
        self.unknown: list[int] = []
        self.killed = False
        self.session: Session | None = None

    def train(self, store: CheckpointStore, meanwhile: Callable[[int], None], last: int = 3) -> None:
        """Claim, and save steps 1 to *last*, trying each once more after an error; *meanwhile* follows each step."""
        session = self.session = new_session(store)
        try:
            self._claim(session)
            for step in range(1, last + 1):
                meanwhile(step)
                self._save(session, step)
        except Killed:
            self.killed = True
        abandon(session)

    def _claim(self, session: Session) -> None:
        for _ in range(4):
            if session.owns or try_(lambda: take(session)) is None:
                return

    def _save(self, session: Session, step: int) -> None:
        for _ in range(2):
            if not session.owns:
                return
            tip = session.tip()
            if tip is not None and tip.step == step:  # an unknown commit that turned out to be there
                self.committed.append(step)
                return
            try:
                row = save(session, step)
            except OutcomeUnknownError:
                self.unknown.append(step)
                try_(session.refresh)
            except FencedError:
                return
            except CkptStoreError:
                try_(session.refresh)
            else:
                assert row.step == step
                self.committed.append(step)
                return


def plans(scenario: Callable[[FaultyStore, CheckpointStore], object]) -> Iterator[FaultPlan]:
    """Yield every single fault at every call of *scenario*, which gets the faulty store and the one inside it."""
    inner = new_store()
    calm = FaultyStore(inner)
    scenario(calm, inner)
    yield from single_faults(calm.calls)


def names_of(plan: FaultPlan) -> str:
    return ", ".join(f"{verb} {call}: {fault}" for (verb, call), fault in plan.faults.items())


def go_on(store: CheckpointStore, release: Callable[[], object], *, late: str) -> None:
    """Go on as a fresh process does, with late requests arriving before, during or after it."""
    session = new_session(store)
    if late == "before":
        release()
    claimed = take(session)
    before = steps(claimed)
    if late == "after the claim":
        release()
    save(session, 100)
    if late == "at the end":
        release()
    assert steps(session.refresh()) == [*before, 100]
    abandon(session)


@pytest.mark.parametrize("late", ["before", "after the claim", "at the end"])
def test_any_single_fault_of_a_writer_alone_leaves_what_it_was_told_and_a_run_that_goes_on(late: str) -> None:
    met = 0
    for plan in plans(lambda store, inner: Story().train(store, lambda step: None)):
        inner = new_store()
        store = FaultyStore(inner, plan)
        story = Story()
        story.train(store, lambda step: None)
        met += len(store.met)
        go_on(inner, store.release, late=late)
        head = assert_sound(inner)
        line = steps(head)
        assert set(story.committed) <= set(line), names_of(plan)
        assert set(line) <= {*story.committed, *story.unknown, 100} or story.killed, names_of(plan)
        assert line[-1] == 100
        if not story.killed:
            assert story.committed == [1, 2, 3], names_of(plan)  # one fault, and each step was tried twice
    assert met > 150


def test_any_single_fault_of_a_writer_that_is_taken_over_never_lets_it_commit_above_the_winner() -> None:
    for at in (1, 2, 3):

        def scenario(store: FaultyStore, inner: CheckpointStore, at: int = at) -> tuple[Story, int]:
            story = Story()
            above = -1

            def meanwhile(step: int) -> None:
                nonlocal above
                if step == at:
                    winner = new_session(inner)
                    above = take(winner).seq
                    save(winner, 50)
                    abandon(winner)

            story.train(store, meanwhile)
            return story, above

        for plan in plans(scenario):
            inner = new_store()
            store = FaultyStore(inner, plan)
            story, above = scenario(store, inner)
            store.release()
            go_on(inner, store.release, late="before")
            head = assert_sound(inner)
            late = [row.step for row in head.state.live if row.seq > above and row.step < 50]
            session = story.session
            assert session is not None
            if 0 <= session.epoch < above:
                assert story.killed or session.fenced, names_of(plan)
                assert late == [], names_of(plan)
            kept = {row.step for row in head.state.live}
            assert set(story.committed) <= kept, names_of(plan)
            assert steps(head)[-1] == 100


def test_any_single_fault_beside_commands_loses_nothing_on_either_side() -> None:
    def scenario(store: FaultyStore, inner: CheckpointStore) -> tuple[Story, list[str]]:
        story, tags = Story(), []

        def meanwhile(step: int) -> None:
            if new_journal(inner).head().seq < 0:
                return
            live = new_journal(inner).head().state.live
            if live and operate(new_journal(inner), lambda head: changes.tag(live[0].seq, add=[f"t{step}"])):
                tags.append(f"t{step}")

        story.train(store, meanwhile)
        return story, tags

    for plan in plans(scenario):
        inner = new_store()
        store = FaultyStore(inner, plan)
        story, tags = scenario(store, inner)
        go_on(inner, store.release, late="before")
        head = assert_sound(inner)
        assert story.session is not None
        assert not story.session.fenced, names_of(plan)
        assert set(story.committed) <= set(steps(head)), names_of(plan)
        assert set(tags) <= {tag for row in head.state.live for tag in row.tags}, names_of(plan)


def test_any_single_fault_of_a_command_does_it_or_leaves_it_and_never_stops_the_writer() -> None:
    def prepared() -> tuple[CheckpointStore, Session]:
        inner = new_store()
        session = new_session(inner)
        take(session)
        save(session, 1)
        return inner, session

    def command(store: CheckpointStore) -> object:
        return operate(new_journal(store), lambda head: changes.tag(1, add=["x"]))

    inner, session = prepared()
    abandon(session)
    calm = FaultyStore(inner)
    command(calm)
    for plan in single_faults(calm.calls):
        inner, session = prepared()
        store = FaultyStore(inner, plan)
        done = False
        with suppress(Killed):
            done = try_(partial(command, store)) is None
        save(session, 2)
        store.release()
        save(session, 3)
        head = assert_sound(inner)
        assert steps(head) == [1, 2, 3], names_of(plan)
        assert head.state.live[0].tags in ((("x",),) if done else ((), ("x",))), names_of(plan)
        abandon(session)


@pytest.mark.parametrize("seed", range(60))
def test_sampled_pairs_of_faults_leave_what_was_told(seed: int) -> None:
    calm = FaultyStore(new_store())
    Story().train(calm, lambda step: None)
    inner = new_store()
    store = FaultyStore(inner, FaultPlan.sampled(seed, calm.calls, 2))
    story = Story()
    story.train(store, lambda step: None)
    go_on(inner, store.release, late="after the claim")
    line = steps(assert_sound(inner))
    assert set(story.committed) <= set(line)
    assert set(line) <= {*story.committed, *story.unknown, 100} or story.killed


def test_any_single_fault_while_a_fresh_process_recovers_changes_nothing_for_the_one_after_it() -> None:
    def start() -> CheckpointStore:
        inner = new_store()
        session = new_session(inner)
        take(session)
        save(session, 1)
        save(session, 2)
        inner.put(session.journal.layout.record(3), b"torn")
        abandon(session)
        return inner

    calm = FaultyStore(start())
    Story().train(calm, lambda step: None)

    for plan in single_faults(calm.calls):
        inner = start()
        store = FaultyStore(inner, plan)
        story = Story()
        story.train(store, lambda step: None, last=5)
        store.release()
        session = new_session(inner)
        head = take(session)
        assert steps(head)[:2] == [1, 2], names_of(plan)
        assert set(story.committed) <= set(steps(head)), names_of(plan)
        save(session, 100)
        abandon(session)


def test_a_killed_process_is_followed_at_once_by_another_at_every_call() -> None:
    """I14 and I15 for a chain of processes, each killed one call later than the one before."""
    inner = new_store()
    told: list[int] = []
    for call in range(40):
        store = FaultyStore(inner, FaultPlan({("publish", call % 4): Die(after=call % 2 == 0)}))
        session = new_session(store)
        try:
            head = take(session)
            assert set(told) <= set(steps(head))
            for step in range(call * 10, call * 10 + 4):
                row = save(session, step)
                told.append(row.step)
        except Killed:
            pass
        abandon(session)
    assert len(told) > 20
    assert set(told) <= set(steps(assert_sound(inner)))
