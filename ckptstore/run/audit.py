"""Is the whole journal what its writers wrote?

Every record is read, its digest and its link to its predecessor are checked, and its sets are compared with its one
change applied to the predecessor's (I21): so nothing can have left the live set without a record that says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptstore.errors import CorruptionError, NotFoundError
from ckptstore.run.changes import apply
from ckptstore.run.journal import Damaged
from ckptstore.run.layout import RUN_KEY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptstore.run.changes import RunState
    from ckptstore.run.journal import Journal
    from ckptstore.run.records import Record

__all__ = ["audit_journal"]


def audit_journal(journal: Journal) -> Iterator[str]:
    """Yield what is wrong with RUN.json and the journal, each a sentence; nothing if all is sound."""
    if journal.run.lost:
        yield f"{RUN_KEY} is absent or damaged"
    head = journal.head()
    before: Record | None = None
    state: RunState | None = None
    for seq in range(head.seq + 1):
        key = journal.layout.record(seq)
        try:
            found = journal.read(seq)
        except NotFoundError:
            yield f"{key} is missing, though later records exist"
            before = state = None
            continue
        if isinstance(found, Damaged):
            yield f"{key} is damaged: {found.reason}"
            before = state = None
            continue
        if seq == 0 and found.run != journal.run.file:
            yield f"{key} does not repeat {RUN_KEY}"
        if before is not None and found.prev is not None and found.prev.sha256 != before.sha256:
            yield f"{key} was not computed from the record before it"
        for base in journal.lost_bases(found):
            yield f"{key}: the list of checkpoints {base} that it names is absent or damaged"
        try:
            now = journal.state_of(found)
            if state is not None and apply(state, found.change, seq, key) != now:
                yield f"{key}: its list of checkpoints is not its change applied to the record before"
        except CorruptionError as error:
            yield str(error)
            now = None
        before, state = found, now
