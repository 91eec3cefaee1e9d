"""Who is writing, and can a process be proven gone?

A process id alone proves nothing: it is reused, and means something else in another container or after a reboot. The
boot id, the pid namespace and the process's start time together name one process for ever.
"""

from __future__ import annotations

import os
import socket
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptstore.seams import IdSource

__all__ = ["WriterIdentity", "describe", "is_gone", "job_from_environment", "this_process"]


class WriterIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """One writer: a session of one process. What can't be learned on this platform is None."""

    id: str
    host: str | None = None
    boot_id: str | None = None
    pid_ns: str | None = None
    pid: int | None = None
    start_time: int | None = None
    job: str | None = None
    restart: int | None = None
    version: str | None = None


def this_process(ids: IdSource, *, job: str | None, restart: int | None = None) -> WriterIdentity:
    """Return a new writer of this process."""
    pid = os.getpid()
    return WriterIdentity(
        id=ids.new_id()[:16],
        host=socket.gethostname()[:100],
        boot_id=_text("/proc/sys/kernel/random/boot_id"),
        pid_ns=_link("/proc/self/ns/pid"),
        pid=pid,
        start_time=_start_time(pid),
        job=None if job is None else job[:200],
        restart=restart,
        version=version("ckptstore"),
    )


def job_from_environment(environment: Mapping[str, str]) -> str | None:
    """Return the scheduler's id of this job; torchrun's default run id "none" is no id."""
    for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        found = environment.get(name, "").strip()
        if found and found != "none":
            return f"{name}:{found}"
    return None


def is_gone(writer: WriterIdentity, me: WriterIdentity) -> bool:
    """Tell whether *writer* certainly no longer runs: same boot, same pid namespace, and no such process.

    False means "can't be proven from here", not "it lives".
    """
    known = (me.boot_id, me.pid_ns)
    if None in known or (writer.boot_id, writer.pid_ns) != known or writer.start_time is None:
        return False
    if writer.pid is None or writer.pid <= 0:  # 0 and below mean groups to kill(2)
        return False
    found = _start_time(writer.pid)
    return not _exists(writer.pid) if found is None else found != writer.start_time


def describe(writer: WriterIdentity) -> str:
    """Return who that is, for a message."""
    return f"process {writer.pid} on {writer.host}" + (f", job {writer.job}" if writer.job else "")


def from_record(fields: Mapping[str, Any]) -> WriterIdentity:
    """Return the writer that a record names; fields that make no sense are dropped, since they only inform."""
    try:
        return msgspec.convert(dict(fields), WriterIdentity)
    except msgspec.ValidationError:
        return WriterIdentity(id=str(fields.get("id")))


def _start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; -1 for a zombie, None if that can't be seen."""
    text = _text(f"/proc/{pid}/stat")
    if not text:
        return None
    # The command name may hold spaces and brackets; the numbers start after its last one.
    fields = text.rpartition(")")[2].split()
    return -1 if fields[0] in "ZX" else int(fields[19])


def _exists(pid: int) -> bool:
    """Tell whether there may be such a process: /proc can hide those of other users (hidepid), a signal sees them."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _link(path: str) -> str | None:
    try:
        return str(Path(path).readlink())
    except OSError:
        return None
