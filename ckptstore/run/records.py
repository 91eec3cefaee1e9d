"""What does one record of the journal say, and when is a file not a record?

A record is one line of canonical JSON and a line with its digest. It repeats its own run and number, so a misplaced
copy is detected; it names its predecessor by write id and digest, so it proves that it was computed from exactly that
record; and it holds the whole live set, so opening a run reads one record, not a history.
"""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import Any

import msgspec

from ckptstore.errors import ConfigError, CorruptionError, UnsupportedError
from ckptstore.run.strict_json import MAX_INT, canonical, convert, read_json, sha256_hex, sign, unsign
from ckptstore.store import MAX_RECORD_BYTES

__all__ = [
    "FORMAT",
    "MAX_TARGETS",
    "VERSION",
    "BaseRef",
    "Based",
    "ManifestRef",
    "Prev",
    "Record",
    "Row",
    "RowSet",
    "check_words",
    "decode_record",
    "decode_rows",
    "encode_record",
    "room_for_sets",
    "row_from_json",
    "row_to_json",
]

FORMAT = "ckptstore.record"
VERSION = 1
KNOWN_FEATURES: frozenset[str] = frozenset()

MAX_ROW_BYTES = 2 * 1024
MAX_TAGS = 16
MAX_METRICS = 32
MAX_TARGETS = 256
NON_FINITE = frozenset({"nan", "inf", "-inf"})

_ATTEMPT = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}\Z", re.ASCII)
_BASE = re.compile(r"index/([0-9a-f]{8})/([0-9]{10,18})-[0-9a-z]{1,64}\.json\Z", re.ASCII)


class ManifestRef(msgspec.Struct, frozen=True, kw_only=True):
    """Which bytes a manifest must have."""

    size: int
    sha256: str


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One committed checkpoint, as the live set lists it.

    Attributes:
        seq: The number of the record that committed it: its identity.
        epoch: The claim it was committed under.
        time: The publisher's clock, Unix seconds; informational.
        step: The training step.
        attempt: The name of its folder.
        manifest: Size and digest of its manifest.
        n_bytes: Bytes of payload.
        metrics: Numbers; non-finite ones are the strings "nan", "inf", "-inf".
        tags: Words people gave it.
        permanent: Never dropped by a rolling policy.
        damaged: Proven not loadable; never counted by a keep rule.
        parent: The seq of the checkpoint it continued from, or None.
        extra: Fields this version does not know; they survive a rewrite.
    """

    seq: int
    epoch: int
    time: float
    step: int
    attempt: str
    manifest: ManifestRef
    n_bytes: int = msgspec.field(name="bytes")
    metrics: dict[str, float | int | str] = msgspec.field(default_factory=dict)
    tags: tuple[str, ...] = ()
    permanent: bool = False
    damaged: bool = False
    parent: int | None = None
    extra: dict[str, Any] = msgspec.field(default_factory=dict)


class BaseRef(msgspec.Struct, frozen=True, kw_only=True):
    """A set of rows kept in an object of its own, shared by many records."""

    key: str
    size: int
    sha256: str


class Based(msgspec.Struct, frozen=True, kw_only=True):
    """A set of rows as the difference from a base: rows added or changed, numbers dropped."""

    base: BaseRef
    add: tuple[Row, ...]
    drop: tuple[int, ...]


RowSet = tuple[Row, ...] | Based


class Prev(msgspec.Struct, frozen=True, kw_only=True):
    """The record this one was computed from; no write id if its bytes could not be read as a record."""

    write_id: str | None
    sha256: str


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One number of the journal. See PROTOCOL section 2 for each field; ``raw`` is the file as it is stored."""

    run_uid: str
    seq: int
    write_id: str
    prev: Prev | None
    epoch: int
    writer: dict[str, Any]
    time: float
    change: dict[str, Any]
    live: RowSet
    retired: RowSet
    resume_from: Row | None
    keep: str | None = None
    requires: tuple[str, ...] = ()
    run: dict[str, Any] | None = None
    extra: dict[str, Any] = msgspec.field(default_factory=dict)
    raw: bytes = b""

    @property
    def sha256(self) -> str:
        """The digest that the next record names."""
        return sha256_hex(self.raw)

    @property
    def kind(self) -> str:
        """What it did: claim, commit, retire, tag or note."""
        return str(self.change["kind"])


class _Wire(msgspec.Struct, kw_only=True):
    """The fields of a record file before its sets are read."""

    format: str
    version: int
    requires: list[str]
    run_uid: str
    seq: int
    write_id: str
    prev: Prev | None
    epoch: int
    writer: dict[str, Any]
    time: float
    change: dict[str, Any]
    live: list[Any] | dict[str, Any]
    retired: list[Any] | dict[str, Any]
    resume_from: dict[str, Any] | None
    keep: str | None
    run: dict[str, Any] | None = None


_ROW_FIELDS = frozenset({"bytes", *Row.__struct_fields__} - {"n_bytes", "extra"})
_WIRE_FIELDS = frozenset(_Wire.__struct_fields__)


def row_to_json(row: Row) -> dict[str, Any]:
    """Return the JSON form of a row; unknown fields it was read with are kept."""
    found: dict[str, Any] = msgspec.to_builtins(row)
    return {**found.pop("extra"), **found}


def row_from_json(value: object, what: str) -> Row:
    """Return the row in *value*; CorruptionError if it is not one."""
    if not isinstance(value, dict):
        message = f"{what}: a row is not an object"
        raise CorruptionError(message, key=what)
    known = {key: item for key, item in value.items() if key in _ROW_FIELDS}
    extra = {key: item for key, item in value.items() if key not in _ROW_FIELDS}
    row = convert({**known, "extra": extra}, Row, what)
    # The attempt becomes part of a path: a record from a foreign store must not lead out of the run.
    # Claim and parent came before it: anything else would be a cycle made by hand.
    parent = 0 if row.parent is None else row.parent
    sane = _ATTEMPT.match(row.attempt) and row.step >= 0 and row.n_bytes >= 0 and row.manifest.size >= 0
    if not sane or not 0 <= row.epoch < row.seq or not 0 <= parent < row.seq:
        message = f"{what}: row {row.seq} holds an impossible value"
        raise CorruptionError(message, key=what)
    excess = _excess(row.step, row.tags, row.metrics, row.extra)
    if excess is not None:
        message = f"{what}: {excess}"
        raise CorruptionError(message, key=what)
    return row


def check_row(row: Row) -> Row:
    """Return *row* if it is within the bounds that readers enforce; ConfigError names the bound."""
    check_words(row.step, row.tags, row.metrics, row.extra)
    return row


def check_words(
    step: int, tags: tuple[str, ...], metrics: dict[str, float | int | str], extra: dict[str, Any] | None = None
) -> None:
    """Refuse tags and metrics that readers would refuse; ConfigError names the bound."""
    excess = _excess(step, tags, metrics, extra or {})
    if excess is not None:
        raise ConfigError(excess)


def _excess(
    step: int, tags: tuple[str, ...], metrics: dict[str, float | int | str], extra: dict[str, Any]
) -> str | None:
    """Return how a row's words pass a bound, or None."""
    if len(tags) > MAX_TAGS or len(metrics) > MAX_METRICS:
        return (
            f"step {step}: {len(tags)} tags and {len(metrics)} metrics; "
            f"at most {MAX_TAGS} and {MAX_METRICS} fit a checkpoint"
        )
    for name, value in metrics.items():
        if value not in NON_FINITE if isinstance(value, str) else not (math.isfinite(value) and _is_exact(value)):
            return f"step {step}: metric {name[:80]!r} is {value!r:.80}, which JSON can't hold exactly"
    if not tags and not metrics and not extra:
        return None
    n_bytes = len(canonical({"metrics": metrics, "tags": tags, "extra": extra}))
    if n_bytes > MAX_ROW_BYTES:
        return f"step {step}: tags and metrics take {n_bytes} bytes; at most {MAX_ROW_BYTES} fit a checkpoint"
    return None


def _is_exact(value: float) -> bool:
    return isinstance(value, float) or abs(value) <= MAX_INT


def decode_rows(value: object, what: str) -> tuple[Row, ...]:
    """Return rows in ascending order of seq; CorruptionError if they are not strictly so."""
    if not isinstance(value, list):
        message = f"{what}: a set of rows is not a list"
        raise CorruptionError(message, key=what)
    rows = tuple(row_from_json(item, what) for item in value)
    if any(first.seq >= second.seq for first, second in pairwise(rows)):
        message = f"{what}: rows are not in order"
        raise CorruptionError(message, key=what)
    return rows


def encode_record(record: Record) -> Record:
    """Return *record* with its bytes.

    What no reader would accept must never get a number, since the journal would hold it for ever: so the bytes are read
    back here, by the reader's own rules.

    Raises:
        ConfigError: they pass 64 KiB, or some value could not be read back.
    """
    raw = _to_bytes(record)
    what = f"record {record.seq}"
    if len(raw) > MAX_RECORD_BYTES:
        message = f"{what} would take {len(raw)} bytes; at most {MAX_RECORD_BYTES} are allowed"
        raise ConfigError(message, operation="publish")
    try:
        return decode_record(raw, run_uid=record.run_uid, seq=record.seq, what=what)
    except CorruptionError as error:
        message = f"{error}: it would not be readable, so it is not written"
        raise ConfigError(message, operation="publish") from error


def room_for_sets(record: Record) -> int:
    """Return how many bytes of a record file are left for its two sets of rows."""
    return MAX_RECORD_BYTES - len(_to_bytes(msgspec.structs.replace(record, live=(), retired=())))


def _to_bytes(record: Record) -> bytes:
    wire = {
        **record.extra,
        "format": FORMAT,
        "version": VERSION,
        "requires": list(record.requires),
        "run_uid": record.run_uid,
        "seq": record.seq,
        "write_id": record.write_id,
        "prev": msgspec.to_builtins(record.prev),
        "epoch": record.epoch,
        "writer": record.writer,
        "time": record.time,
        "change": record.change,
        "live": _set_to_json(record.live),
        "retired": _set_to_json(record.retired),
        "resume_from": None if record.resume_from is None else row_to_json(record.resume_from),
        "keep": record.keep,
    }
    if record.run is not None:
        wire["run"] = record.run
    try:
        return sign(canonical(wire))
    except (TypeError, ValueError, RecursionError) as error:
        message = f"record {record.seq} holds what JSON can't hold: {error}"
        raise ConfigError(message, operation="publish") from error


def decode_record(raw: bytes, *, run_uid: str, seq: int, what: str) -> Record:
    """Read one record file strictly.

    Args:
        raw: The file.
        run_uid: The run it was found in; empty accepts any (RUN.json is lost).
        seq: The number it was found under.
        what: Its key, for messages.

    Raises:
        CorruptionError: torn, damaged, or a record of another place.
        UnsupportedError: written by a newer version, or it needs a feature unknown here.
    """
    found = read_json(unsign(raw, what), what)
    refuse_newer(found, FORMAT, VERSION, what)
    wire = convert({key: item for key, item in found.items() if key in _WIRE_FIELDS}, _Wire, what)
    if (run_uid and wire.run_uid != run_uid) or wire.seq != seq or not 0 <= wire.epoch <= seq:
        message = f"{what} holds record {wire.seq} of run {wire.run_uid[:40]}: it is a copy from another place"
        raise CorruptionError(message, key=what)
    kind = wire.change.get("kind")
    if not isinstance(kind, str) or (wire.prev is None) != (seq == 0) or (kind == "claim") != (wire.epoch == seq):
        message = f"{what} is not valid: its change {kind!r:.40} contradicts epoch {wire.epoch} or its predecessor"
        raise CorruptionError(message, key=what)
    return Record(
        run_uid=wire.run_uid,
        seq=wire.seq,
        write_id=wire.write_id,
        prev=wire.prev,
        epoch=wire.epoch,
        writer=wire.writer,
        time=wire.time,
        change=wire.change,
        live=_set_from_json(wire.live, wire, what),
        retired=_set_from_json(wire.retired, wire, what),
        resume_from=None if wire.resume_from is None else row_from_json(wire.resume_from, what),
        keep=wire.keep,
        requires=tuple(wire.requires),
        run=wire.run,
        extra={key: item for key, item in found.items() if key not in _WIRE_FIELDS},
        raw=raw,
    )


def refuse_newer(found: dict[str, Any], name: str, version: int, what: str) -> None:
    """Refuse a file that this version can't understand; it is not damaged, so no fallback may happen."""
    if found.get("format") != name:
        message = f"{what} is not a {name} file"
        raise CorruptionError(message, key=what)
    wanted = found.get("version")
    requires = found.get("requires", [])
    wants = requires if isinstance(requires, list) else [requires]
    unknown = [item for item in wants if not (isinstance(item, str) and item in KNOWN_FEATURES)]
    if unknown or not isinstance(wanted, int) or wanted > version:
        message = (
            f"{what} was written by a newer ckptstore (format {wanted!r}, needs {unknown}); "
            f"this one reads up to format {version}: upgrade ckptstore to open this run"
        )
        raise UnsupportedError(message, key=what)


def _set_to_json(rows: RowSet) -> object:
    if isinstance(rows, Based):
        return {
            "base": msgspec.to_builtins(rows.base),
            "add": [row_to_json(row) for row in rows.add],
            "drop": list(rows.drop),
        }
    return [row_to_json(row) for row in rows]


def _set_from_json(value: list[Any] | dict[str, Any], wire: _Wire, what: str) -> RowSet:
    if isinstance(value, list):
        rows = decode_rows(value, what)
        if rows and rows[-1].seq > wire.seq:
            message = f"{what} lists checkpoint {rows[-1].seq}, which is newer than itself"
            raise CorruptionError(message, key=what)
        return rows
    base = convert(value.get("base"), BaseRef, what)
    match = _BASE.match(base.key)
    if match is None or match[1] != wire.run_uid[:8] or int(match[2]) > wire.seq or base.size < 0:
        message = f"{what}: {base.key[:200]!r} can't be the base of a set of rows"
        raise CorruptionError(message, key=what)
    return Based(
        base=base,
        add=decode_rows(value.get("add"), what),
        drop=convert(value.get("drop"), tuple[int, ...], what),
    )
