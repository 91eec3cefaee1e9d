"""What does a run hold, for those who only look?

A Run reads the journal's head anew at each question and publishes nothing. A Checkpoint is one row of it and what can
be done with it. Neither needs torch until tensors are asked for.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from ckptstore.errors import ConfigError, CorruptionError, NotFoundError
from ckptstore.reader.verify import VerifyReport, open_manifest, read_side, verify_checkpoint
from ckptstore.run.audit import audit_journal
from ckptstore.run.changes import RunState, lineage
from ckptstore.run.journal import Journal
from ckptstore.run.layout import MANIFEST_NAME, RUN_KEY, Layout
from ckptstore.run.manifest import MAX_MANIFEST_BYTES, decode_manifest, manifest_ref
from ckptstore.run.records import Row
from ckptstore.run.runfile import find_run
from ckptstore.seams import SYSTEM_CLOCK, SYSTEM_IDS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Self

    import torch

    from ckptstore.reader.source import Source
    from ckptstore.run.manifest import Manifest
    from ckptstore.store import CheckpointStore

__all__ = ["Checkpoint", "Run", "RunReport", "check_vacant"]

_LOG = logging.getLogger(__name__)
_SHOWN_NAMES = 50
Verify = Literal["full", "inline", "sizes"]


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a verification of a whole run found.

    Attributes:
        checkpoints: One report for each live checkpoint, ascending.
        journal: What is wrong with RUN.json and the journal, each a sentence.
    """

    checkpoints: tuple[VerifyReport, ...]
    journal: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.journal and all(report.ok for report in self.checkpoints)


class Checkpoint:
    """One committed checkpoint. Immutable; any thread."""

    def __init__(self, store: CheckpointStore, layout: Layout, row: Row, *, on_lineage: bool) -> None:
        self._store = store
        self._layout = layout
        self._row = row
        self.on_lineage = on_lineage

    @property
    def step(self) -> int:
        """The training step."""
        return self._row.step

    @property
    def seq(self) -> int:
        """The number of the commit: unique in the run."""
        return self._row.seq

    @property
    def n_bytes(self) -> int:
        """Bytes of payload."""
        return self._row.n_bytes

    @property
    def tags(self) -> tuple[str, ...]:
        """Words people gave it."""
        return self._row.tags

    @property
    def permanent(self) -> bool:
        """Whether a rolling policy may never drop it."""
        return self._row.permanent

    @property
    def damaged(self) -> bool:
        """Whether it was proven not loadable."""
        return self._row.damaged

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers stored with it; "nan" and infinities as floats."""
        return {name: float(value) if isinstance(value, str) else value for name, value in self._row.metrics.items()}

    @property
    def created(self) -> datetime:
        """When it was committed, by the writer's clock, in UTC."""
        return datetime.fromtimestamp(self._row.time, UTC)

    def __repr__(self) -> str:
        marks = [mark for mark, on in (("damaged", self.damaged), ("abandoned", not self.on_lineage)) if on]
        return f"<Checkpoint step {self.step}{''.join(f', {mark}' for mark in marks)} of {self._store.url}>"

    def manifest(self) -> Manifest:
        """Return the proven manifest; CorruptionError if it or a file's size is not as it was written."""
        return open_manifest(self._store, self._layout, self._row)

    def verify(self, *, deep: bool = True) -> VerifyReport:
        """Check manifest, presence and sizes, and with *deep* every byte. Damage is in the report, not raised."""
        return verify_checkpoint(self._store, self._layout, self._row, deep=deep)

    def load(
        self,
        *,
        only: str | Sequence[str] | None = None,
        skip: str | Sequence[str] | None = None,
        map_location: str | torch.device = "cpu",
        mmap: bool = False,
        verify: Verify = "full",
    ) -> dict[str, Any]:
        """Return the saved states as new objects: what each ``state_dict`` gave, and the plain values.

        Args:
            only: Names of states, paths in them like "model/encoder", wildcards like "model/*.bias": only these are
                read. A list or tuple is chosen as a whole.
            skip: The same: these are left out.
            map_location: Where the tensors go; what the checkpoint recorded does not matter.
            mmap: Tensors are read from the files when they are touched, on a local file system only. They stay readable
                when the checkpoint is deleted. With ``verify="sizes"`` nothing is read now, and nothing is proven.
            verify: "full" and "inline" prove every byte that is read; "sizes" does not.

        Raises:
            CorruptionError: damaged; nothing is returned.
            NotFoundError: *only* or *skip* names something the checkpoint does not hold.
            UnsupportedError: it holds a dtype or a class that is unknown here.
        """
        from ckptstore.reader.load import load_states

        _check_verify(verify)
        return load_states(
            self._source(),
            only=None if only is None else _names(only),
            skip=_names(skip or ()),
            map_location=map_location,
            mmap=mmap,
            verify=verify != "sizes",
        )

    def restore(
        self, *, strict: bool = True, verify: Verify = "full", strip_prefix: str | None = None, **state: Any
    ) -> dict[str, Any]:
        """Fill live objects with this checkpoint, all or nothing, publishing nothing: for evaluation.

        Args:
            strict: Names, keys, shapes and dtypes must agree.
            verify: "full": every byte is proven before a live object changes; "inline": while it is filled; "sizes":
                not.
            strip_prefix: A wrapper's key prefix to ignore, such as "module." or "_orig_mod.".
            state: The objects, by the names they were saved under.

        Returns:
            The plain values.

        Raises:
            MismatchError: the objects do not fit; they are unchanged.
            CorruptionError: damaged; they are unchanged (but see *verify*).
        """
        from ckptstore.reader.restore import prepare

        _check_verify(verify)
        return prepare(self._source(), state, strict=strict, strip_prefix=strip_prefix).load(verify=verify)

    def tensor(self, path: str) -> torch.Tensor:
        """Return one tensor, reading and proving just the parts that hold it.

        Args:
            path: State name and keys, joined by "/": "model/embedding.weight". A tied tensor has every name.
        """
        from ckptstore.reader.load import load_tensor

        return load_tensor(self._source(), path)

    def _source(self) -> Source:
        from ckptstore.reader.source import open_source

        return open_source(self._store, self._layout, self._row)


class Run:
    """One run, read only. Each question reads the newest head, so a commit elsewhere is seen at once.

    Args:
        store: Where it is.
        owns_store: Whether ``close`` closes the store, too.
    """

    def __init__(self, store: CheckpointStore, *, owns_store: bool = False) -> None:
        self._store = store
        self._owns_store = owns_store
        self._journal: Journal | None = None
        self._detached: Checkpoint | None = None
        self._look()

    @property
    def url(self) -> str:
        """The run's address, without secrets."""
        return self._store.url

    @property
    def run_uid(self) -> str | None:
        """The run's identity; None while nothing was ever saved here."""
        return None if self._journal is None else self._journal.run_uid

    def checkpoints(self, *, all: bool = False) -> list[Checkpoint]:  # noqa: A002 - the public name
        """Return the checkpoints of the present lineage, ascending; with *all* those of abandoned branches too."""
        if self._detached is not None:
            return [self._detached]
        state = self._state()
        line = lineage(state)
        if not all:
            return [self._checkpoint(row, on_lineage=True) for row in reversed(line)]
        on_line = {row.seq for row in line}
        return [self._checkpoint(row, on_lineage=row.seq in on_line) for row in state.live]

    def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint of the lineage that is not marked damaged, or None if there is none."""
        return next((item for item in reversed(self.checkpoints()) if not item.damaged), None)

    def at(self, *, step: int | None = None, seq: int | None = None) -> Checkpoint:
        """Return the checkpoint with that step (of the lineage first, else a unique abandoned one) or that seq.

        Raises:
            NotFoundError: there is none, or several abandoned ones; the message lists what there is.
        """
        if (step is None) == (seq is None):
            message = "at() takes either step= or seq="
            raise ConfigError(message)
        found = [item for item in self.checkpoints(all=True) if (item.step == step if seq is None else item.seq == seq)]
        on_line = [item for item in found if item.on_lineage]
        if len(on_line or found) == 1:
            return (on_line or found)[0]
        wanted = f"step {step}" if seq is None else f"checkpoint number {seq}"
        if found:
            several = ", ".join(f"seq={item.seq}" for item in found)
            message = f"{self.url}: {wanted} is on several abandoned branches; choose one of {several}"
        else:
            held = ", ".join(str(item.step) for item in self.checkpoints()[-20:]) or "none"
            message = f"{self.url} has no {wanted}; newest steps here: {held}"
        raise NotFoundError(message, operation="at", key=self.url)

    def verify(self, *, deep: bool = True) -> RunReport:
        """Check RUN.json, every record of the journal and every live checkpoint; with *deep* every byte."""
        if self._detached is None:
            self._look()  # RUN.json may have been damaged since
        journal = () if self._journal is None else tuple(audit_journal(self._journal))
        try:
            checkpoints = self.checkpoints(all=True)
        except CorruptionError as error:  # no record is sound: nothing is known of any checkpoint
            return RunReport(checkpoints=(), journal=(*journal, str(error)))
        return RunReport(checkpoints=tuple(item.verify(deep=deep) for item in checkpoints), journal=journal)

    def close(self) -> None:
        """Close the store, unless it was opened by the caller."""
        if self._owns_store:
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Run {self.url}>"

    def _look(self) -> None:
        run = find_run(self._store)
        if run is not None:
            self._journal = Journal(self._store, run, clock=SYSTEM_CLOCK, ids=SYSTEM_IDS)
            return
        if self._journal is not None:
            return
        names = _top_names(self._store)
        if MANIFEST_NAME in names:
            self._detached = self._open_detached()
        elif names:
            raise _not_a_run(self._store, names)

    def _state(self) -> RunState:
        if self._journal is None:
            self._look()
        if self._journal is None:
            return RunState()
        head = self._journal.head()
        if head.record is None and head.damaged:
            message = (
                f"{self.url}: none of the {len(head.damaged)} newest journal records is sound "
                f"({head.damaged[-1].reason}); resume(fresh=True) starts anew beside what is left"
            )
            raise CorruptionError(message, operation="open", key=self.url)
        return head.state

    def _checkpoint(self, row: Row, *, on_lineage: bool) -> Checkpoint:
        assert self._journal is not None
        return Checkpoint(self._store, self._journal.layout, row, on_lineage=on_lineage)

    def _open_detached(self) -> Checkpoint:
        """Open a folder that holds a single attempt: its bytes can be checked, that it was committed can't."""
        body = self._store.get(MANIFEST_NAME, max_bytes=MAX_MANIFEST_BYTES)
        manifest = decode_manifest(body, MANIFEST_NAME, lambda file: read_side(self._store, file.path, file))
        _LOG.warning("%s is a detached checkpoint (step %d): no journal, commit unproven", self.url, manifest.step)
        row = Row(
            seq=0,
            epoch=manifest.epoch or 0,
            time=0.0,
            step=manifest.step,
            attempt=manifest.attempt,
            manifest=manifest_ref(body),
            n_bytes=manifest.n_bytes,
        )
        return Checkpoint(self._store, _DetachedLayout(manifest.run_uid), row, on_lineage=True)


class _DetachedLayout(Layout):
    """A run's layout for a folder that is one attempt."""

    def attempt(self, name: str) -> str:  # noqa: ARG002 - the attempt is the folder itself
        return ""


def _top_names(store: CheckpointStore) -> list[str]:
    """Return the names at the root of *store*, at most a few, without listing what is in folders."""
    names: list[str] = []
    after: str | None = None
    while len(names) < _SHOWN_NAMES:
        first = next(iter(store.list("", after=after)), None)
        if first is None:
            break
        name, slash, _ = first.key.partition("/")
        names.append(name)
        after = f"{name}0" if slash else name  # "0" is the character after "/": past everything in that folder
    return names


def check_vacant(store: CheckpointStore) -> None:
    """Refuse to begin a run where other runs or a copied checkpoint are; other files are no one's business.

    Raises:
        ConfigError: this address is a folder of runs, or a single checkpoint.
    """
    names = _top_names(store)
    if MANIFEST_NAME in names or any(_holds(store, f"{name}/{RUN_KEY}") for name in names):
        what = "a single checkpoint" if MANIFEST_NAME in names else f"a folder of runs ({', '.join(names)[:300]})"
        message = f"{store.url} is {what}: a new run needs an address of its own, such as {store.url}/new"
        raise ConfigError(message, operation="claim", key=store.url)


def _not_a_run(store: CheckpointStore, names: list[str]) -> NotFoundError:
    runs = [name for name in names if _holds(store, f"{name}/{RUN_KEY}")]
    if runs:
        message = f"{store.url} is a folder of runs, not a run; name one of them: {', '.join(runs)}"
    else:
        message = f"{store.url} is not a run: it has no RUN.json and no journal, but holds {names[0]}"
    return NotFoundError(message, operation="open", key=store.url)


def _holds(store: CheckpointStore, key: str) -> bool:
    try:
        store.stat(key)
    except (NotFoundError, ConfigError):  # ConfigError: a foreign name that is no key
        return False
    return True


def _names(value: str | Sequence[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _check_verify(verify: str) -> None:
    if verify not in ("full", "inline", "sizes"):
        message = f'verify={verify!r:.80}: use "full", "inline" or "sizes"'
        raise ConfigError(message)
