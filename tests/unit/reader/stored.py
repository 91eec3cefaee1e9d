"""Damage to what is stored, and stores that do not answer."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from ckptstore.errors import UnavailableError
from ckptstore.memory import MemoryStore
from ckptstore.testing.raw import RawMemory
from ckptstore.testing.recording import RecordingStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptstore.store import CheckpointStore, WritableBuffer
    from ckptstore.testing.raw import RawView


def raw_of(url: str) -> RawMemory:
    """Return the bytes behind a run in memory."""
    return RawMemory(url.removeprefix("memory://"))


def keys(raw: RawView, what: str, step: int | None = None) -> list[str]:
    """Return the keys that hold *what* ("manifest", "payload", "journal"), of one step's attempts if given."""
    tests: dict[str, Callable[[str], bool]] = {
        "manifest": lambda key: key.endswith("MANIFEST.json"),
        "payload": lambda key: key.endswith(".safetensors"),
        "journal": lambda key: key.startswith("journal/"),
    }
    part = "" if step is None else f"/{step:012d}-"
    return sorted(key for key in raw.keys() if tests[what](key) and part in key)  # noqa: SIM118 - a method of the view


def flip(raw: RawView, key: str, bit: int) -> None:
    """Invert one bit of an object; bits are counted from its first byte, or from its end if negative."""
    body = bytearray(raw.read(key) or b"")
    bit %= 8 * len(body)
    body[bit // 8] ^= 1 << (bit % 8)
    raw.write(key, bytes(body))


class Failing(RecordingStore):
    """A store whose reads of payload fail: with *error* as the cause, on keys that hold *part*."""

    def __init__(self, store: CheckpointStore, error: OSError | None, part: str) -> None:
        super().__init__(store)
        self.error = error
        self.part = part

    def read_into(self, key: str, offset: int, buffer: WritableBuffer) -> None:
        if self.part in key:
            message = f"{key} can't be read now"
            raise UnavailableError(message, operation="read_into", key=key) from self.error
        super().read_into(key, offset, buffer)


def bad_sector(url: str, part: str) -> Failing:
    """Return a store in which reading a payload whose key holds *part* gives EIO."""
    return Failing(MemoryStore(url.removeprefix("memory://")), OSError(errno.EIO, "Input/output error"), part)
