"""Several writers and commands at once, in any order: always one owner, nothing torn, nothing lost."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ckptstore.errors import AlreadyExistsError, CkptStoreError, ConflictError, FencedError, OutcomeUnknownError
from ckptstore.run import changes
from ckptstore.run.operators import operate
from ckptstore.run.session import Lost
from ckptstore.testing.faulty import FaultyStore, Killed, possible_faults
from tests.unit.run.world import abandon, assert_sound, new_journal, new_session, new_store, save, steps, take

if TYPE_CHECKING:
    from ckptstore.run.session import Session


def test_two_writers_that_race_for_a_run_a_hundred_times_are_always_one_owner() -> None:
    """Each round both claim and save; whoever claimed last saves, the other is fenced, and every commit is whole."""
    store = new_store()
    step_of = iter(range(1, 10_000))
    lock = threading.Lock()
    committed: list[tuple[int, int]] = []

    def compete(session: Session, start: threading.Barrier) -> None:
        start.wait()
        try:
            take(session)
            for _ in range(3):
                with lock:
                    step = next(step_of)
                row = save(session, step)
                committed.append((row.seq, step))
        except (FencedError, AlreadyExistsError):
            pass

    for _ in range(100):
        writers = [new_session(store), new_session(store)]
        start = threading.Barrier(2)
        threads = [threading.Thread(target=compete, args=(writer, start)) for writer in writers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        epoch = new_journal(store).head().state.epoch
        owners = [writer for writer in writers if writer.epoch == epoch]
        assert len(owners) == 1
        for writer in writers:  # whoever does not know yet learns it at its next step
            try:
                row = save(writer, next(step_of))
                committed.append((row.seq, row.step))
                assert writer is owners[0]
            except FencedError:
                assert writer is not owners[0]
        abandon(*writers)
    head = assert_sound(store)
    assert sorted(committed) == [(row.seq, row.step) for row in head.state.live]
    assert len(committed) >= 100


def test_eight_processes_that_start_a_run_at_once_are_one_owner_and_seven_losers() -> None:
    store = new_store()
    sessions = [new_session(store) for _ in range(8)]
    results: list[Any] = []
    start = threading.Barrier(8)

    def begin(session: Session) -> None:
        head = session.refresh()
        start.wait()
        results.append(session.claim(head, resume_from=None, branch=None, reason="r"))

    threads = [threading.Thread(target=begin, args=(session,)) for session in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    abandon(*sessions)
    assert sum(isinstance(result, Lost) for result in results) == 7
    assert assert_sound(store).seq == 0


class Runs(RuleBasedStateMachine):
    """Two writers that may be replaced, each on a store that fails as drawn, and a command, one verb after another."""

    @initialize()
    def start(self) -> None:
        self.inner = new_store()
        self.faulty = [FaultyStore(self.inner), FaultyStore(self.inner)]
        self.sessions = [new_session(store) for store in self.faulty]
        self.step = 0
        self.told: dict[int, int] = {}  # step -> epoch under which it was told to be committed
        self.gone: set[int] = set()
        self.heads: list[int] = [-1]

    def _on(self, who: int, fault: int | None, verb: str) -> None:
        """Let the next call of *verb* by writer *who* meet a fault."""
        store = self.faulty[who]
        faults = possible_faults(verb)
        if fault is not None and not store.killed:
            store._faults[verb, store.calls.get(verb, 0)] = faults[fault % len(faults)]

    faults = st.none() | st.integers(0, 20)
    verbs = st.sampled_from(["publish", "publish", "publish", "put", "get", "stat"])

    @rule(who=st.integers(0, 1), fault=faults, verb=verbs, back=st.integers(0, 3))
    def claim(self, who: int, fault: int | None, verb: str, back: int) -> None:
        self._on(who, fault, verb)
        session = self.sessions[who]
        try:
            head = session.refresh()
            line = changes.lineage(head.state)
            row = line[back] if back < len(line) else None
            session.claim(head, resume_from=row, branch=None, reason="r")
        except (CkptStoreError, Killed):
            return

    @rule(who=st.integers(0, 1), fault=faults, verb=verbs)
    def save(self, who: int, fault: int | None, verb: str) -> None:
        self._on(who, fault, verb)
        self.step += 1
        session = self.sessions[who]
        try:
            row = save(session, self.step)
        except (OutcomeUnknownError, ConflictError, CkptStoreError, Killed):
            return
        assert row.epoch == session.epoch
        self.told[row.step] = row.seq

    @rule(who=st.integers(0, 1))
    def replace(self, who: int) -> None:
        """The process ends without a word, with its late requests still under way, and another starts."""
        abandon(self.sessions[who])
        self.faulty[who] = FaultyStore(self.inner)
        self.sessions[who] = new_session(self.faulty[who])

    @rule(who=st.integers(0, 1))
    def late_requests_arrive(self, who: int) -> None:
        self.faulty[who].release()

    @rule(pick=st.integers(0, 50), kind=st.sampled_from(["tag", "retire", "note"]))
    def command(self, pick: int, kind: str) -> None:
        def judge(head: Any) -> dict[str, Any] | None:
            live = head.state.live
            if kind == "note" or not live:
                return changes.note("x")
            row = live[pick % len(live)]
            if kind == "tag":
                return changes.tag(row.seq, add=["x"])
            self.gone.add(row.step)
            return changes.retire([row.seq], policy="p", reasons={str(row.seq): "asked for"})

        if new_journal(self.inner).head().seq >= 0:
            operate(new_journal(self.inner), judge)

    @rule()
    def hint_is_lost(self) -> None:
        self.inner.delete(["LATEST"])

    @invariant()
    def what_was_told_is_there_until_it_is_retired(self) -> None:
        if not hasattr(self, "inner"):
            return
        head = new_journal(self.inner).head()
        assert head.seq >= self.heads[-1]  # I6
        self.heads.append(head.seq)
        live = {row.step: row.seq for row in head.state.live}
        for step, seq in self.told.items():
            assert step in self.gone or live[step] == seq

    def teardown(self) -> None:
        if not hasattr(self, "inner"):
            return
        for store in self.faulty:
            store.release()
        last = new_session(self.inner)
        take(last)
        save(last, 10_000)
        assert steps(last.refresh())[-1] == 10_000
        abandon(last, *self.sessions)
        assert_sound(self.inner)


Runs.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
TestAnyOrderOfClaimsSavesCommandsAndFaults = Runs.TestCase
