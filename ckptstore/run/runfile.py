"""Which run lives at this address?

RUN.json says so; it is published once. If it is lost or damaged while exactly one journal is there, the first claim,
which repeats it, stands in. Absence is believed only when both RUN.json and the journal are absent: an outage raises.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

from ckptstore.errors import ConfigError, CorruptionError, NotFoundError
from ckptstore.run.layout import RUN_KEY, Layout, journal_of
from ckptstore.run.records import decode_record, refuse_newer
from ckptstore.run.strict_json import canonical, read_json, sign, unsign
from ckptstore.store import MAX_RECORD_BYTES, Conflict

if TYPE_CHECKING:
    from ckptstore.seams import Clock, IdSource
    from ckptstore.store import CheckpointStore

__all__ = ["FORMAT", "RunInfo", "create_run", "find_run", "restore_run_file"]

FORMAT = "ckptstore.run"
VERSION = 1
_LOG = logging.getLogger(__name__)


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of a run.

    Attributes:
        run_uid: 32 hexadecimal characters, minted when the run was created.
        file: The content of RUN.json.
        lost: RUN.json is absent or damaged and was read from the first claim instead.
    """

    run_uid: str
    file: dict[str, Any]
    lost: bool = False


def find_run(store: CheckpointStore) -> RunInfo | None:
    """Return the run at the root of *store*; None only if RUN.json and journal are proven absent.

    Raises:
        CorruptionError: RUN.json is damaged and no journal can stand in for it.
        ConfigError: RUN.json is lost and the journals of several runs are here.
        UnsupportedError: a newer version wrote it.
    """
    try:
        return _decode(store.get(RUN_KEY, max_bytes=MAX_RECORD_BYTES))
    except NotFoundError:
        reason, damaged = "is absent", False
    except CorruptionError as error:
        reason, damaged = f"is damaged ({error})", True
    # Every key, since nothing says that a listing comes in order; only a new or a damaged run is listed at all.
    folders = sorted({folder for info in store.list("journal/") if (folder := journal_of(info.key)) is not None})
    if len(folders) > 1:
        message = (
            f"{store.url}: RUN.json {reason} and there are the journals of several runs ({', '.join(folders)}): "
            "put RUN.json back, or move the journal that does not belong here away"
        )
        raise ConfigError(message, key=RUN_KEY)
    if not folders:
        if damaged:
            message = f"{store.url}: RUN.json {reason} and there is no journal: remove it to start a new run here"
            raise CorruptionError(message, key=RUN_KEY)
        return None
    found = _from_journal(store, folders[0])
    _LOG.warning("%s: RUN.json %s; using what the journal repeats of it", store.url, reason)
    return found


def create_run(store: CheckpointStore, *, clock: Clock, ids: IdSource) -> RunInfo:
    """Publish RUN.json and return the run; of several that try at once all get the same one."""
    write_id = ids.new_id()
    file = {
        "format": FORMAT,
        "version": VERSION,
        "requires": [],
        "run_uid": ids.new_id(),
        "created": clock.now(),
        "write_id": write_id,
    }
    body = sign(canonical(file))
    if store.capabilities().exclusive != "atomic":
        store.put(RUN_KEY, body)
        return _decode(body)
    outcome = store.publish(RUN_KEY, body, write_id=write_id)
    return _decode(outcome.record if isinstance(outcome, Conflict) else body)


def restore_run_file(store: CheckpointStore, run: RunInfo) -> RunInfo:
    """Write a lost RUN.json again, byte for byte as it was, and return the run as it then is."""
    store.put(RUN_KEY, sign(canonical(run.file)))
    return msgspec.structs.replace(run, lost=False)


def _decode(body: bytes) -> RunInfo:
    file = read_json(unsign(body, RUN_KEY), RUN_KEY)
    refuse_newer(file, FORMAT, VERSION, RUN_KEY)
    run_uid = file.get("run_uid")
    if not isinstance(run_uid, str) or len(run_uid) != 32 or not set(run_uid) <= set("0123456789abcdef"):  # noqa: PLR2004
        message = f"{RUN_KEY}: run_uid {run_uid!r:.80} is not 32 hexadecimal characters"
        raise CorruptionError(message, key=RUN_KEY)
    return RunInfo(run_uid=run_uid, file=file)


def _from_journal(store: CheckpointStore, folder: str) -> RunInfo:
    key = Layout(folder).record(0)
    try:
        first = decode_record(store.get(key, max_bytes=MAX_RECORD_BYTES), run_uid="", seq=0, what=key)
    except NotFoundError as error:
        message = f"{store.url}: RUN.json is lost and so is {key}, which repeats it: put one of them back"
        raise CorruptionError(message, key=key) from error
    if first.run is None or not first.run_uid.startswith(folder):
        message = f"{store.url}: RUN.json is lost and {key} does not repeat it"
        raise CorruptionError(message, key=key)
    found = _decode(sign(canonical(first.run)))
    return RunInfo(run_uid=found.run_uid, file=found.file, lost=True)
