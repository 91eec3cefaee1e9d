"""Under which key does each thing of a run live?

The run's uid is part of every path, so a run that was deleted and made again under the same name shares nothing with
the writers of the old one. A number in a path is padded for people; code takes meaning from the parsed number only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = [
    "LATEST_KEY",
    "MANIFEST_NAME",
    "MIGRATED",
    "RUN_KEY",
    "Layout",
    "attempt_epoch",
    "attempt_name",
    "journal_of",
]

RUN_KEY = "RUN.json"
LATEST_KEY = "LATEST"
MANIFEST_NAME = "MANIFEST.json"
MIGRATED = -1

_ATTEMPT = re.compile(r"\d{1,20}-(?:e(\d{1,18})|m)-[0-9a-z]{12,64}\Z", re.ASCII)
_RECORD = re.compile(r"journal/([0-9a-f]{8})/\d{10,18}\.json\Z", re.ASCII)


def attempt_name(step: int, epoch: int, unique: str) -> str:
    """Return the folder name of one save attempt: step for people, epoch for garbage collection, unique characters."""
    return f"{step:012d}-e{epoch}-{unique}"


def attempt_epoch(name: str) -> int | None:
    """Return the epoch in an attempt's name, MIGRATED for a migrated one, None if it is not an attempt's name."""
    match = _ATTEMPT.match(name)
    if match is None:
        return None
    return MIGRATED if match[1] is None else int(match[1])


def journal_of(key: str) -> str | None:
    """Return the folder below ``journal/`` of a record's key, None for a foreign name."""
    match = _RECORD.match(key)
    return None if match is None else match[1]


@dataclass(frozen=True, slots=True)
class Layout:
    """The keys of one run."""

    run_uid: str

    @property
    def uid8(self) -> str:
        """The part of the uid that is in the paths."""
        return self.run_uid[:8]

    @property
    def journal_prefix(self) -> str:
        """Where the records are."""
        return f"journal/{self.uid8}/"

    @property
    def data_prefix(self) -> str:
        """Where the attempts are."""
        return f"data/{self.uid8}/"

    def record(self, seq: int) -> str:
        """The key of record *seq*."""
        return f"{self.journal_prefix}{seq:010d}.json"

    def attempt(self, name: str) -> str:
        """The prefix of one attempt, with its slash."""
        return f"{self.data_prefix}{name}/"

    def manifest(self, attempt: str) -> str:
        """The key of an attempt's manifest."""
        return self.attempt(attempt) + MANIFEST_NAME

    def index(self, seq: int, nonce: str) -> str:
        """The key of a set of rows that record *seq* introduces."""
        return f"index/{self.uid8}/{seq:010d}-{nonce}.json"

    def alive(self, writer_id: str) -> str:
        """The key of a writer's sign of life."""
        return f"alive/{self.uid8}/{writer_id}.json"
