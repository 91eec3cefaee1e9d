"""Does a store do what the reference does, for sequences of verbs that no one thought of?

Hypothesis draws the sequences, each verb goes to the store and to a MemoryStore, and both have to answer alike. Keys
follow the contract: records and payload keys are never used twice, small objects are replaced and removed at will.
Each sequence has a prefix of its own, so that one store serves them all.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from ckptstore.errors import CkptStoreError
from ckptstore.memory import MemoryStore
from ckptstore.testing.subject import record_of, write_parts

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptstore.store import CheckpointStore
    from ckptstore.testing.subject import Subject

__all__ = ["drive_against_memory"]

_T = TypeVar("_T")

SMALL = ("LATEST", "data/a", "data/a-b", "data/ab", "data/a.b/c", "data/b/c/d", "pins/A")
RECORDS = ("journal/0", "journal/1", "journal/10")
PREFIXES = ("", "data", "data/", "data/a", "data/a.b/", "data/b", "journal/1", "pins/", "absent/")

_sequences = itertools.count()


def drive_against_memory(subject: Subject, *, sequences: int = 25, verbs: int = 25) -> None:
    """Assert that the store answers *sequences* sequences of up to *verbs* verbs as a MemoryStore does."""
    promised = subject.store.capabilities()
    exclusive = promised.exclusive == "atomic"
    ordered = promised.listing != "unordered"
    part_bytes = max(promised.part_bytes_min, 64)

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            number = next(_sequences)
            self.prefix = f"sequence-{number}"
            self.reference = MemoryStore(f"reference-of-sequence-{number}")
            self.payload: list[str] = []

        def alike(self, ask: Callable[[CheckpointStore], _T]) -> None:
            """Ask both stores, and compare answers or kinds of error."""
            answers = [_answer(ask, store) for store in (self.reference, subject.store)]
            assert answers[1] == answers[0]

        @rule(key=st.sampled_from(SMALL), body=st.binary(max_size=300))
        def put(self, key: str, body: bytes) -> None:
            self.alike(lambda store: store.put(f"{self.prefix}/{key}", body))

        if exclusive:

            @rule(key=st.sampled_from(RECORDS), write_id=st.sampled_from("abc"))
            def publish(self, key: str, write_id: str) -> None:
                record = record_of(write_id, key=key)
                self.alike(lambda store: store.publish(f"{self.prefix}/{key}", record, write_id=write_id))

        @rule(body=st.binary(max_size=300), finish=st.booleans(), backwards=st.booleans())
        def write(self, body: bytes, *, finish: bool, backwards: bool) -> None:
            key = f"{self.prefix}/data/payload-{len(self.payload)}"
            self.payload.append(key)
            offsets = sorted(range(0, len(body), part_bytes), reverse=backwards)

            def write(store: CheckpointStore) -> None:
                writer = store.create(key, len(body), part_bytes)
                write_parts(writer, body, part_bytes, offsets)
                if finish:
                    writer.finish()
                else:
                    writer.abort()

            self.alike(write)

        @rule(data=st.data())
        def delete(self, data: st.DataObject) -> None:
            small = [f"{self.prefix}/{key}" for key in SMALL]
            asked = data.draw(st.lists(st.sampled_from(small + self.payload), max_size=4))
            self.alike(lambda store: list(store.delete(asked)))

        @rule(data=st.data(), max_bytes=st.sampled_from((0, 100, 1000)))
        def read(self, data: st.DataObject, max_bytes: int) -> None:
            known = [f"{self.prefix}/{key}" for key in SMALL + RECORDS]
            key = data.draw(st.sampled_from([*known, *self.payload, f"{self.prefix}/data", f"{self.prefix}/absent/x"]))
            self.alike(lambda store: store.get(key, max_bytes=max_bytes))
            self.alike(lambda store: store.stat(key).n_bytes)

        @rule(data=st.data(), offset=st.integers(0, 300), n_bytes=st.integers(1, 300))
        def read_into(self, data: st.DataObject, offset: int, n_bytes: int) -> None:
            key = data.draw(st.sampled_from([*self.payload, f"{self.prefix}/data/a"]))

            def read(store: CheckpointStore) -> bytearray:
                buffer = bytearray(n_bytes)
                store.read_into(key, offset, buffer)
                return buffer

            self.alike(read)

        @rule(prefix=st.sampled_from(PREFIXES), after=st.sampled_from((None, *SMALL, "data", "zzz")))
        def list(self, prefix: str, after: str | None) -> None:
            start = None if after is None else f"{self.prefix}/{after}"

            def keys(store: CheckpointStore) -> tuple[tuple[str, int], ...]:
                found = [(info.key, info.n_bytes) for info in store.list(f"{self.prefix}/{prefix}", after=start)]
                return tuple(found if ordered else sorted(found))

            if promised.listing != "stale":
                self.alike(keys)

        def teardown(self) -> None:
            left = [info.key for info in self.reference.list("")]
            self.reference.delete(left)
            subject.store.delete(left)

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=sequences,
            stateful_step_count=verbs,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def _answer(ask: Callable[[CheckpointStore], _T], store: CheckpointStore) -> tuple[object, object]:
    try:
        return "answer", ask(store)
    except CkptStoreError as error:
        return type(error), error.key
