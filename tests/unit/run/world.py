"""What the tests of the protocol share: clock and ids that repeat, writers, and a judge of what is stored."""

from __future__ import annotations

import hashlib
import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest

from ckptstore.errors import CkptStoreError, NotFoundError
from ckptstore.memory import MemoryStore
from ckptstore.run import changes
from ckptstore.run.audit import audit_journal
from ckptstore.run.journal import Damaged, Draft, Head, Journal
from ckptstore.run.manifest import (
    FileEntry,
    Manifest,
    encode_manifest,
    find_missing,
    manifest_ref,
    read_manifest,
    root_of,
)
from ckptstore.run.records import Row
from ckptstore.run.runfile import create_run, find_run
from ckptstore.run.session import Lost, Session

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptstore.run.records import Record
    from ckptstore.store import CheckpointStore

names = itertools.count()


class FakeClock:
    """Time that passes only in ``sleep``; *on_sleep* is what others do meanwhile."""

    def __init__(self) -> None:
        self.time = 1_000_000.0
        self.slept: list[float] = []
        self.on_sleep: Callable[[float], None] = lambda seconds: None

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds
        self.on_sleep(seconds)


class CountedIds:
    """Ids in a row; no two sources give the same."""

    _sources = itertools.count()

    def __init__(self) -> None:
        self._source = next(self._sources)
        self._ids = itertools.count()

    def new_id(self) -> str:
        return hashlib.sha256(f"{self._source}-{next(self._ids)}".encode()).hexdigest()[:32]


def new_store() -> MemoryStore:
    return MemoryStore(f"run-{next(names)}")


def new_journal(store: CheckpointStore) -> Journal:
    clock, ids = FakeClock(), CountedIds()
    return Journal(store, find_run(store) or create_run(store, clock=clock, ids=ids), clock=clock, ids=ids)


def new_session(store: CheckpointStore, *, job: str | None = None, clock: FakeClock | None = None) -> Session:
    return Session(store, job=job, clock=clock or FakeClock(), ids=CountedIds())


def abandon(*sessions: Session) -> None:
    """Let the thread of a session end as in a killed process: without a word."""
    for session in sessions:
        if session._pulse is not None:
            session._pulse.stop()


def take(session: Session, *, row: Row | str | None = "tip", **fields: Any) -> Head:
    """Claim the run whatever the policy says, going on from the lineage's tip."""
    while True:
        head = session.refresh()
        line = changes.lineage(head.state)
        source = (line[0] if line else None) if row == "tip" else row
        assert not isinstance(source, str)
        claimed = session.claim(head, resume_from=source, **{"branch": None, "reason": "a test", **fields})
        if not isinstance(claimed, Lost):
            return claimed


def content(step: int) -> bytes:
    return b"%d," % step * 100


def save(session: Session, step: int, **fields: Any) -> Row:
    """Write a whole checkpoint of one file, and commit it."""
    attempt = session.mint(step)
    body = content(step)
    session.store.put(attempt.prefix + "data.bin", body)
    part = hashlib.sha256(body).digest()
    entry = FileEntry(
        path="data.bin",
        size=len(body),
        rank=0,
        part_bytes=1 << 20,
        algorithm="sha256",
        parts=(part.hex(),),
        digest="sha256:" + hashlib.sha256(part).hexdigest(),
    )
    manifest = manifest_of(session.journal.run_uid, attempt.name, step, attempt.epoch, (entry,))
    encoded, n_bytes = encode_manifest(manifest, lambda name, body: entry)
    session.store.put(attempt.prefix + "MANIFEST.json", encoded)
    return session.commit(
        attempt,
        manifest=manifest_ref(encoded),
        n_bytes=n_bytes,
        **{"metrics": {}, "tags": (), "permanent": False, **fields},
    )


def manifest_of(
    run_uid: str, attempt: str, step: int, epoch: int | None, files: tuple[FileEntry, ...], **fields: Any
) -> Manifest:
    n_bytes = sum(file.size for file in files)
    base: dict[str, Any] = {"world_size": 1, "ranks": (0,), "tensors": {}, "tree": {"type": "none"}}
    return Manifest(
        run_uid=run_uid,
        attempt=attempt,
        step=step,
        epoch=epoch,
        files=files,
        n_bytes=n_bytes,
        root=root_of(files),
        **{**base, **fields},
    )


def push(journal: Journal, change: dict[str, Any], head: Head | None = None) -> Head:
    """Publish one change as a writer would, without a session; a claim gets its own epoch."""
    base = journal.head() if head is None else head
    epoch = None if change["kind"] == "claim" else base.state.epoch
    published = journal.append(
        base,
        lambda now: Draft(change=change, epoch=epoch),
        write_id=journal.ids.new_id(),
        writer={"id": "someone", "host": "h", "pid": 1},
        on_publish=lambda pending: None,
    )
    assert published is not None
    return published


def claim_change(resume_from: Row | None = None) -> dict[str, Any]:
    return changes.claim(resume_from=resume_from, branch=None, reason="a test", world_size=1)


def new_row(seq: int, epoch: int, step: int, parent: int | None, **fields: Any) -> Row:
    return Row(
        seq=seq,
        epoch=epoch,
        time=1.0,
        step=step,
        attempt=f"{step:012d}-e{epoch}-aaaaaaaaaaaa",
        manifest=manifest_ref(b"{}"),
        n_bytes=10,
        parent=parent,
        **fields,
    )


def push_commit(journal: Journal, step: int, head: Head | None = None, **fields: Any) -> Head:
    base = journal.head() if head is None else head
    line = changes.lineage(base.state)
    row = new_row(base.seq + 1, base.state.epoch, step, line[0].seq if line else None, **fields)
    return push(journal, changes.commit(row), base)


def records_of(store: CheckpointStore) -> list[Record | Damaged]:
    """Every record, read as a fresh process would."""
    journal = new_journal(store)
    found = []
    for seq in itertools.count():
        try:
            found.append(journal.read(seq))
        except NotFoundError:
            return found
    raise AssertionError


def assert_sound(store: CheckpointStore) -> Head:
    """Assert the invariants that hold of any store at rest, and return the head.

    I1 and I9: each live checkpoint is whole. I4: numbers are dense. I5: epochs. I7: no write id at two numbers. I8: the
    head is the same without the hint. I21: each record is its change applied to the one before.
    """
    journal = new_journal(store)
    head = journal.head()
    numbers = [info.key for info in store.list(journal.layout.journal_prefix)]
    assert numbers == [journal.layout.record(seq) for seq in range(head.seq + 1)]
    assert list(audit_journal(journal)) == []
    epoch, write_ids = -1, set()
    for seq, record in enumerate(records_of(store)):
        assert not isinstance(record, Damaged)
        epoch = seq if record.kind == "claim" else epoch
        assert record.epoch == epoch
        write_ids.add(record.write_id)
    assert len(write_ids) == head.seq + 1
    for row in head.state.live:
        manifest = read_manifest(store, journal.layout, row, lambda key, file: store.get(key, max_bytes=file.size))
        assert find_missing(store, journal.layout.attempt(row.attempt), manifest) is None
        key = journal.layout.attempt(row.attempt) + "data.bin"
        assert store.get(key, max_bytes=1 << 20) == content(row.step)
    without = MemoryStore(f"copy-{next(names)}")
    for info in store.list(""):
        if info.key != "LATEST":
            without.put(info.key, store.get(info.key, max_bytes=1 << 30))
    assert new_journal(without).head() == head
    return head


def steps(head: Head) -> list[int]:
    return [row.step for row in reversed(changes.lineage(head.state))]


def try_(act: Callable[[], object]) -> CkptStoreError | None:
    """Do it; return what it raised."""
    try:
        act()
    except CkptStoreError as error:
        return error
    return None


def forge(store: CheckpointStore, key: str, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change fields of a stored record and sign it again, as damage never could."""
    from ckptstore.run.strict_json import canonical, sign

    fields = json.loads(store.get(key, max_bytes=1 << 20).split(b"\n")[0])
    edit(fields)
    store.put(key, sign(canonical(fields)))


def numbered(*values: object) -> list[Any]:
    """Return parameters whose ids are their numbers, for values without a name."""
    return [pytest.param(value, id=str(number)) for number, value in enumerate(values)]
