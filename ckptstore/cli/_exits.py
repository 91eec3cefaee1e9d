"""With which exit code, and with which words, does a command end?

One table maps the error tree, so that a script can tell "choose another checkpoint" from "try again". An error of the
library is one line without a traceback; an error that is none of the library's is a bug and keeps its traceback.
"""

from __future__ import annotations

import errno
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from ckptstore import errors
from ckptstore.cli._output import clean

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["INTERRUPTED", "PARTLY_DONE", "Commands", "exit_code_of"]

PARTLY_DONE = 7
INTERRUPTED = 130

_CODES: tuple[tuple[type[errors.CkptStoreError], int], ...] = (
    (errors.NotFoundError, 3),
    (errors.CorruptionError, 4),
    (errors.ConflictError, 5),
    (errors.PermissionDeniedError, 6),
    (errors.UnavailableError, 8),
    (errors.ConfigError, 2),
    (errors.CkptStoreError, 1),
)


def exit_code_of(error: errors.CkptStoreError) -> int:
    """Return the exit code that tells the caller of a command what *error* asks for."""
    return next(code for kind, code in _CODES if isinstance(error, kind))


class Commands(click.Group):
    """A group whose commands may raise the library's errors."""

    def invoke(self, ctx: click.Context) -> Any:
        with _warnings_on_stderr():
            try:
                return super().invoke(ctx)
            except errors.CkptStoreError as error:
                _say(str(error))
                ctx.exit(exit_code_of(error))
            except KeyboardInterrupt:
                _say("interrupted")
                ctx.exit(INTERRUPTED)
            except OSError as error:
                if error.errno == errno.EPIPE:  # the reader of our output went away: click ends quietly
                    raise
                _say(str(error))
                ctx.exit(1)


def _say(message: str) -> None:
    click.echo(f"ckptstore: {clean(message)}", err=True)


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"ckptstore: {record.levelname.lower()}: {clean(record.getMessage())}"


@contextmanager
def _warnings_on_stderr() -> Iterator[None]:
    """Show the library's warnings, which may quote stored text, like every other message."""
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine())
    handler.setLevel(logging.WARNING)
    logger = logging.getLogger("ckptstore")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
