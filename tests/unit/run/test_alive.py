"""When may a run be taken over: at once, after watching, or not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from ckptstore.errors import ConflictError, UnavailableError
from ckptstore.memory import MemoryStore
from ckptstore.run import changes
from ckptstore.run.alive import owner_of, permit
from ckptstore.run.identity import (
    WriterIdentity,
    describe,
    from_record,
    is_gone,
    job_from_environment,
    this_process,
)
from ckptstore.run.journal import Journal
from ckptstore.run.runfile import find_run
from ckptstore.testing.faulty import FailBefore, FaultPlan, FaultyStore
from tests.unit.run.world import (
    CountedIds,
    FakeClock,
    abandon,
    claim_change,
    forge,
    new_journal,
    new_session,
    new_store,
    push,
    save,
    take,
)

if TYPE_CHECKING:
    from ckptstore.run.alive import Takeover
    from ckptstore.store import CheckpointStore

ME = this_process(CountedIds(), job="slurm:7")
ELSEWHERE = msgspec.structs.replace(
    ME, id="aaaaaaaaaaaaaaaa", host="node17", boot_id="another boot", pid=4242, job="slurm:1"
)


class Scene:
    """A run that *owner* claimed, and someone who wants it."""

    def __init__(self, owner: WriterIdentity, sign: object = None) -> None:
        self.store = new_store()
        self.clock = FakeClock()
        self.uid = new_journal(self.store).run_uid
        self.key = self.journal().layout.alive(owner.id)
        push(self.journal(), claim_change())
        record = self.journal().layout.record(0)
        forge(self.store, record, lambda fields: fields.update(writer=msgspec.to_builtins(owner)))
        if sign is not None:
            self.sign(sign)

    def sign(self, value: object) -> None:
        self.store.put(self.key, value if isinstance(value, bytes) else json.dumps(value).encode())

    def lose_sign(self) -> None:
        self.store.delete([self.key])

    def journal(self, store: CheckpointStore | None = None) -> Journal:
        run = find_run(self.store)
        assert run is not None
        return Journal(store or self.store, run, clock=self.clock, ids=CountedIds())

    def ask(self, takeover: Takeover = "auto", me: WriterIdentity = ME) -> str:
        journal = self.journal()
        return permit(journal, journal.head(), me, takeover)


ALIVE = {"beat": 7, "closed": False}


def test_a_run_that_its_writer_closed_is_free_at_once_whoever_asks() -> None:
    for takeover in ("auto", True, False):
        scene = Scene(ELSEWHERE, {"beat": 9, "closed": True})
        assert scene.ask(takeover)
        assert scene.clock.slept == []
    assert "closed it" in Scene(ELSEWHERE, {"beat": 9, "closed": True}).ask()


def test_a_run_of_the_same_job_is_free_at_once() -> None:
    scene = Scene(ELSEWHERE, ALIVE)
    assert "same job" in scene.ask(me=msgspec.structs.replace(ME, job="slurm:1"))
    assert scene.clock.slept == []


def test_having_no_job_is_not_having_the_same_job() -> None:
    scene = Scene(msgspec.structs.replace(ELSEWHERE, job=None), ALIVE)
    assert "no sign of life for 15 s" in scene.ask(me=msgspec.structs.replace(ME, job=None))


def test_a_run_is_ours_if_we_claimed_it() -> None:
    scene = Scene(ME, ALIVE)
    for takeover in ("auto", True, False):
        assert scene.ask(takeover) == "the run is ours"


def test_an_unknown_host_without_a_changing_sign_of_life_is_watched_for_fifteen_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for sign in (None, ALIVE, b"", b"garbage\xff", b"[1]", b'{"beat":', b"x" * 5000, b"[" * 4000, {"closed": "yes"}):
        caplog.clear()
        scene = Scene(ELSEWHERE, sign)
        with caplog.at_level("INFO"):
            assert "process 4242 on node17, job slurm:1 gave no sign of life for 15 s" in scene.ask()
        assert sum(scene.clock.slept) == 15
        assert caplog.text.count("watching up to 15 s whether process 4242 on node17") == 1


@pytest.mark.parametrize("before", [None, ALIVE, b"garbage"])
@pytest.mark.parametrize("after_s", [1, 5, 14, 15])
def test_a_sign_of_life_that_moves_keeps_the_run_with_its_writer(before: object, after_s: int) -> None:
    scene = Scene(ELSEWHERE, before)

    def beat(_: float) -> None:
        if sum(scene.clock.slept) >= after_s:
            scene.sign({"beat": 8, "closed": False})

    scene.clock.on_sleep = beat
    with pytest.raises(ConflictError) as caught:
        scene.ask()
    for word in ("process 4242", "node17", "takeover=True", f"{after_s} s", scene.store.url):
        assert word in str(caught.value)
    assert sum(scene.clock.slept) == after_s


def test_a_writer_that_closes_while_it_is_watched_frees_the_run() -> None:
    scene = Scene(ELSEWHERE, ALIVE)
    scene.clock.on_sleep = lambda _: scene.sign({"beat": 8, "closed": True})
    assert "closed it" in scene.ask()
    assert sum(scene.clock.slept) == 1


def test_a_sign_of_life_that_disappears_is_none() -> None:
    scene = Scene(ELSEWHERE, ALIVE)
    scene.clock.on_sleep = lambda _: scene.lose_sign()
    assert "no sign of life" in scene.ask()


def test_takeover_true_takes_a_living_writer_s_run_at_once() -> None:
    scene = Scene(ELSEWHERE, ALIVE)
    assert "was asked for" in scene.ask(takeover=True)
    assert scene.clock.slept == []


@pytest.mark.parametrize("job", ["slurm:1", None])
def test_takeover_false_never_watches_and_takes_only_what_is_proven_free(job: str | None) -> None:
    scene = Scene(ELSEWHERE, ALIVE)
    with pytest.raises(ConflictError, match=r"process 4242 on node17.*takeover=False.*takeover=True"):
        scene.ask(takeover=False, me=msgspec.structs.replace(ME, job=job))
    assert scene.clock.slept == []


def test_an_outage_is_neither_life_nor_death() -> None:
    scene = Scene(ELSEWHERE, ALIVE)
    head = scene.journal().head()
    for call in range(3):
        faulty = FaultyStore(scene.store, FaultPlan({("get", call): FailBefore()}))
        with pytest.raises(UnavailableError):
            permit(scene.journal(faulty), head, ME, "auto")


def test_a_run_without_a_readable_owner_is_free() -> None:
    store = new_store()
    session = new_session(store)
    take(session)
    journal = session.journal
    for word in ("claim", "and its commits"):
        store.put(journal.layout.record(0), b"torn")
        if word == "claim":
            save(session, 1)
            owner = owner_of(journal, journal.head())  # only the owner commits
            assert owner is not None
            assert owner.id == session.me.id
        else:
            store.put(journal.layout.record(1), b"torn")
            assert permit(journal, journal.head(), ME, False) == "nothing names an owner"
    abandon(session)


def test_a_claim_that_is_missing_or_damaged_with_only_operators_after_it_names_no_owner() -> None:
    from ckptstore.run.operators import operate

    scene = Scene(ELSEWHERE, ALIVE)
    operate(scene.journal(), lambda head: changes.note("x"))
    key = scene.journal().layout.record(0)
    scene.store.put("LATEST", json.dumps({"run_uid": scene.uid, "seq": 1}).encode())
    scene.store.put(key, b"torn")
    assert owner_of(scene.journal(), scene.journal().head()) is None
    scene.store.delete([key])
    assert owner_of(scene.journal(), scene.journal().head()) is None


# ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────────


def child_identity(process: subprocess.Popen[bytes]) -> WriterIdentity:
    from ckptstore.run.identity import _start_time

    start = _start_time(process.pid)
    assert start is not None
    assert start > 0
    return msgspec.structs.replace(ME, id="bbbbbbbbbbbbbbbb", pid=process.pid, start_time=start, job=None)


@pytest.fixture
def child() -> Any:
    with subprocess.Popen([sys.executable, "-Sc", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_process_is_gone_once_it_has_exited_even_before_its_parent_has_waited_for_it(
    child: subprocess.Popen[bytes],
) -> None:
    identity = child_identity(child)
    scene = Scene(identity, ALIVE)
    assert not is_gone(identity, ME)
    with pytest.raises(ConflictError):
        scene.ask(takeover=False)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
    assert is_gone(identity, ME)
    assert "is gone" in scene.ask(takeover=False)
    child.wait()
    assert is_gone(identity, ME)
    assert "is gone" in scene.ask()
    assert scene.clock.slept == []


def test_a_process_that_only_inherited_the_number_is_another_one(child: subprocess.Popen[bytes]) -> None:
    identity = child_identity(child)
    assert identity.start_time is not None
    assert is_gone(msgspec.structs.replace(identity, start_time=identity.start_time - 1), ME)


@pytest.mark.parametrize(
    "fields",
    [
        {"boot_id": "another"},
        {"boot_id": None},
        {"pid_ns": "pid:[1]"},
        {"pid_ns": None},
        {"start_time": None},
        {"pid": None},
        {"pid": 0},
        {"pid": -1},
    ],
)
def test_what_can_t_be_seen_from_here_can_t_be_proven_gone(fields: dict[str, Any]) -> None:
    gone = msgspec.structs.replace(ME, pid=2**22 + 5, start_time=1)
    assert is_gone(gone, ME)
    assert not is_gone(msgspec.structs.replace(gone, **fields), ME)
    blind = msgspec.structs.replace(ME, boot_id=None, pid_ns=None)
    assert not is_gone(msgspec.structs.replace(gone, boot_id=None, pid_ns=None), blind)


def test_a_process_hidden_in_proc_but_there_for_a_signal_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptstore.run import identity

    monkeypatch.setattr(identity, "_text", lambda path: None)
    assert not is_gone(msgspec.structs.replace(ME, id="x"), ME)
    assert not is_gone(msgspec.structs.replace(ME, pid=1), ME)  # not ours, perhaps: no permission, but there
    assert is_gone(msgspec.structs.replace(ME, pid=2**22 + 5), ME)
    assert not is_gone(msgspec.structs.replace(ME, pid=2**70), ME)


def test_this_process_is_not_gone_and_two_writers_of_it_differ() -> None:
    first, second = this_process(CountedIds(), job=None), this_process(CountedIds(), job="j" * 500)
    assert not is_gone(first, second)
    assert first.id != second.id
    assert second.job == "j" * 200
    assert (first.pid, first.host is not None) == (os.getpid(), True)


@pytest.mark.parametrize(
    "environment, job",
    [
        ({}, None),
        ({"SLURM_JOB_ID": "17"}, "SLURM_JOB_ID:17"),
        ({"TORCHELASTIC_RUN_ID": "run-a"}, "TORCHELASTIC_RUN_ID:run-a"),
        ({"TORCHELASTIC_RUN_ID": "none"}, None),
        ({"TORCHELASTIC_RUN_ID": " "}, None),
        ({"SLURM_JOB_ID": "17", "TORCHELASTIC_RUN_ID": "none"}, "SLURM_JOB_ID:17"),
    ],
)
def test_the_scheduler_names_the_job_and_torchrun_s_default_is_no_name(
    environment: dict[str, str], job: str | None
) -> None:
    assert job_from_environment(environment) == job


def test_fields_of_a_writer_that_make_no_sense_are_dropped() -> None:
    assert from_record({"id": "x", "pid": "many"}) == WriterIdentity(id="x")
    assert from_record({"id": "x", "pid": 3, "new": 1}) == WriterIdentity(id="x", pid=3)
    assert describe(from_record({})) == "process None on None"
    scene = Scene(msgspec.structs.replace(ELSEWHERE, id="../../LATEST"), None)
    assert "no sign of life" in scene.ask()


# ── the sign of life ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_sign_of_life_beats_from_a_daemon_thread_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptstore.run import alive

    monkeypatch.setattr(alive, "BEAT_S", 0.001)
    beats = threading.Semaphore(0)

    class Counting(MemoryStore):
        def put(self, key: str, body: bytes) -> None:
            super().put(key, body)
            if key.startswith("alive/"):
                beats.release()

    store = Counting(new_store().url.removeprefix("memory://"))
    session = new_session(store)
    take(session)
    for _ in range(5):
        assert beats.acquire(timeout=60)
    pulse = session._pulse
    assert pulse is not None
    assert pulse._thread is not None
    assert pulse._thread.daemon
    session.close()
    assert not pulse._thread.is_alive()
    sign = json.loads(store.get(session.journal.layout.alive(session.me.id), max_bytes=4096))
    assert (sign["closed"], sign["writer"]["pid"], sign["beat"] >= 5) == (True, os.getpid(), True)


def test_a_sign_of_life_that_can_t_be_written_fails_nothing() -> None:
    class NoAlive(MemoryStore):
        def put(self, key: str, body: bytes) -> None:
            if key.startswith("alive/"):
                message = "cannot schedule new futures after interpreter shutdown"
                raise RuntimeError(message)
            super().put(key, body)

    session = new_session(NoAlive(new_store().url.removeprefix("memory://")))
    take(session)
    save(session, 1)
    session.close()


def test_a_process_that_ends_without_closing_is_proven_gone_and_ends_quietly() -> None:
    script = (
        "import sys; from ckptstore.run.session import Session; from ckptstore.memory import MemoryStore\n"
        "s = Session(MemoryStore('x')); s.claim(s.refresh(), resume_from=None, branch=None, reason='r')\n"
        "import msgspec; print(msgspec.json.encode(s.me).decode())"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stderr == b""
    assert is_gone(msgspec.json.decode(done.stdout, type=WriterIdentity), ME)
