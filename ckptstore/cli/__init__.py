"""What can be done with checkpoints from a terminal?

Data goes to stdout, everything else to stderr, and the exit code says what to do next. Asking for help loads click and
these few modules: torch, rich and the rest of ckptstore come in only when a command that needs them runs.
"""

from __future__ import annotations

import click

import ckptstore
from ckptstore.cli._exits import Commands
from ckptstore.cli.demo import demo
from ckptstore.cli.ls import ls
from ckptstore.cli.show import show

__all__ = ["main"]


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(ckptstore.__version__, message="%(prog)s %(version)s", prog_name="ckptstore")
def main() -> None:
    """Look at, and prove, checkpoints of PyTorch training runs.

    A run is a path or a URL; one of its checkpoints is URL@STEP.

    Exit codes: 0 fine, 1 something else failed, 2 wrong usage, 3 not found, 4 damage, 5 another writer owns the run,
    6 no permission, 7 partly done, 8 the store is not available (safe to try again), 130 interrupted.
    """


main.add_command(ls)
main.add_command(show)
main.add_command(demo)
