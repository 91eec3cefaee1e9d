"""The exit code tells what to do next, and the message is one line that no stored text can dress up."""

from __future__ import annotations

import errno
import logging
import os

import click
import pytest
from click.testing import CliRunner

import ckptstore
from ckptstore import errors
from ckptstore.cli import main
from ckptstore.cli._exits import Commands


def outcome_of(error: BaseException) -> tuple[int, str, str]:
    """Run a command that raises *error*; return its exit code, stdout and stderr."""

    @click.group(cls=Commands)
    def group() -> None:
        pass

    @group.command()
    def fail() -> None:
        raise error

    done = CliRunner().invoke(group, ["fail"])
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.parametrize(
    "kind,code",
    [
        (errors.CkptStoreError, 1),
        (errors.UnsupportedError, 1),
        (errors.StorageFullError, 1),
        (errors.OutcomeUnknownError, 1),
        (errors.ConfigError, 2),
        (errors.MismatchError, 2),
        (errors.UnstorableError, 2),
        (errors.NotFoundError, 3),
        (errors.CorruptionError, 4),
        (errors.ConflictError, 5),
        (errors.FencedError, 5),
        (errors.AlreadyExistsError, 5),
        (errors.PermissionDeniedError, 6),
        (errors.UnavailableError, 8),
    ],
)
def test_each_error_of_the_library_has_its_exit_code_and_one_line_on_stderr(
    kind: type[errors.CkptStoreError], code: int
) -> None:
    assert outcome_of(kind("what happened")) == (code, "", "ckptstore: what happened\n")


def test_control_characters_of_a_stored_name_do_not_reach_the_terminal() -> None:
    _, _, stderr = outcome_of(errors.CorruptionError("the entry of \x1b[2J\x9b0m\nfile: fine \u202e is wrong"))
    assert stderr == "ckptstore: the entry of ?[2J?0m?file: fine ? is wrong\n"


def test_an_interrupted_command_ends_with_130() -> None:
    assert outcome_of(KeyboardInterrupt()) == (130, "", "ckptstore: interrupted\n")


def test_an_error_of_the_operating_system_is_one_line_too() -> None:
    code, _, stderr = outcome_of(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert (code, stderr.count("\n")) == (1, 1)
    assert "No space left on device" in stderr


def test_output_that_no_one_reads_any_more_ends_quietly() -> None:
    assert outcome_of(BrokenPipeError(errno.EPIPE, "Broken pipe"))[2] == ""


def test_wrong_usage_ends_with_2() -> None:
    assert CliRunner().invoke(main, ["ls"]).exit_code == 2
    assert CliRunner().invoke(main, ["no-such-command"]).exit_code == 2


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        CliRunner().invoke(_dividing(), ["divide"], catch_exceptions=False)


def _dividing() -> click.Group:
    @click.group(cls=Commands)
    def group() -> None:
        pass

    @group.command()
    def divide() -> None:
        raise ZeroDivisionError

    return group


def test_warnings_of_the_library_go_to_stderr_cleaned_and_only_while_a_command_runs() -> None:
    logger = logging.getLogger("ckptstore.run.journal")

    @click.group(cls=Commands)
    def group() -> None:
        pass

    @group.command()
    def warn() -> None:
        logger.warning("record %s is damaged", "\x1b[31m7")
        logger.info("not for everyone")

    before = list(logging.getLogger("ckptstore").handlers)
    done = CliRunner().invoke(group, ["warn"])
    assert done.stderr == "ckptstore: warning: record ?[31m7 is damaged\n"
    assert logging.getLogger("ckptstore").handlers == before


def test_the_version_is_the_packages() -> None:
    assert CliRunner().invoke(main, ["--version"]).stdout == f"ckptstore {ckptstore.__version__}\n"
