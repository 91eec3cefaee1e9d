"""Which errors can a caller meet, and what should it do next?

Errors are grouped by what the catcher does next, not by where they come from::

    CkptStoreError                       operation, key, retryable
    ├── UnavailableError                 wait, try again (retryable)
    ├── OutcomeUnknownError              the write may have happened: read back, and until then delete nothing
    ├── ConflictError                    read again, then decide
    │   ├── AlreadyExistsError           this name or step is taken
    │   └── FencedError                  a newer claim exists: stop writing
    ├── NotFoundError                    choose another checkpoint (also a LookupError)
    ├── CorruptionError                  choose another checkpoint, tell a person
    ├── ConfigError                      fix the call or the URL (also a ValueError)
    │   ├── UnstorableError              the state holds an object that can't be stored exactly
    │   └── MismatchError                the live objects do not fit the checkpoint
    ├── UnsupportedError                 this backend or version can't; the message names which and what
    ├── TornSnapshotError                save again: the state changed while it was copied, nothing was committed
    ├── NotSavedError                    the save was skipped or superseded: there is nothing to return
    ├── StorageFullError                 call a person: no space, quota
    └── PermissionDeniedError            call a person: rights, read-only file system

A driver's exception never escapes a backend: one table per backend maps it, ``raise … from error``; in doubt, not
retryable. Secrets never reach a message.
"""

from __future__ import annotations

__all__ = [
    "AlreadyExistsError",
    "CkptStoreError",
    "ConfigError",
    "ConflictError",
    "CorruptionError",
    "FencedError",
    "MismatchError",
    "NotFoundError",
    "NotSavedError",
    "OutcomeUnknownError",
    "PermissionDeniedError",
    "StorageFullError",
    "TornSnapshotError",
    "UnavailableError",
    "UnstorableError",
    "UnsupportedError",
]


class CkptStoreError(Exception):
    """The root of every error this library raises on purpose.

    Attributes:
        operation: What was tried, one word or verb ("publish", "read_into"); empty when no store verb was involved.
        key: The key or address it was tried on; empty when there is none.
        retryable: Whether the same call may succeed later without anyone changing anything.
    """

    retryable: bool = False

    def __init__(self, message: str, *, operation: str = "", key: str = "") -> None:
        super().__init__(message)
        self.operation = operation
        self.key = key


class UnavailableError(CkptStoreError):
    """The store did not answer as it should: a timeout, a reset, a stale handle. Nothing is proven; try again."""

    retryable = True


class OutcomeUnknownError(CkptStoreError):
    """A write may or may not have happened. Read back before deciding; until then delete nothing."""


class ConflictError(CkptStoreError):
    """Someone else was there first, or is still there. Read again, then decide."""


class AlreadyExistsError(ConflictError):
    """The key or the step exists; nothing was overwritten."""


class FencedError(ConflictError):
    """A newer claim owns the run. This writer must stop; what it had committed stays committed."""


class NotFoundError(CkptStoreError, LookupError):
    """Proven absent: there is no such key, step or run."""


class CorruptionError(CkptStoreError):
    """Stored bytes are not those that were written: digest, length or structure is wrong."""


class ConfigError(CkptStoreError, ValueError):
    """The call, the URL or an option is wrong. Nothing was written."""


class UnstorableError(ConfigError):
    """The state holds an object that can't be stored exactly; the message names its key path and type."""


class MismatchError(ConfigError):
    """The live objects do not fit the checkpoint (keys, shapes, dtypes, groups); they are unchanged."""


class UnsupportedError(CkptStoreError):
    """This backend, platform or version lacks the capability that the message names."""


class TornSnapshotError(CkptStoreError):
    """The state changed while it was being copied beside training. Nothing was committed; save again."""


class NotSavedError(CkptStoreError):
    """The save was skipped or superseded on purpose, so there is no checkpoint to return."""


class StorageFullError(CkptStoreError):
    """No space is left, or a quota or size limit was reached. Earlier checkpoints are untouched."""


class PermissionDeniedError(CkptStoreError):
    """The store refused access, or is read-only."""
