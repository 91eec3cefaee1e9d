"""Search profiles of the protocol model from a shell: exit status 0 if nothing was found."""

from __future__ import annotations

import argparse
import sys

from ckptstore.testing.model import BUGS, CHECKED, PROFILES, Report, explore, must_fire


def _print(line: str = "") -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _show(report: Report) -> None:
    broken = f", with the rule broken: {BUGS[report.bug].says}" if report.bug else ""
    _print(f"profile      {report.profile.name}: {report.profile.says}{broken}")
    _print(f"states       {report.states:,} explored over {report.transitions:,} transitions")
    _print(f"exhausted    {'yes' if report.exhausted else 'no'}")
    _print(f"depth        {report.depth}")
    if report.found is None:
        _print(f"held         {' '.join(CHECKED)}")
        missing = must_fire(report.profile) - set(report.fired)
        _print(f"fired        {len(report.fired)} kinds of action" + (f"; never: {sorted(missing)}" if missing else ""))
    else:
        _print(f"violated     {report.found.text}")
        for number, line in enumerate(report.found.trace, 1):
            _print(f"  {number:2}  {line}")
    _print()


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; 1 if an invariant is violated, else 0."""
    parser = argparse.ArgumentParser(prog="python -m ckptstore.testing.model", description=__doc__)
    parser.add_argument("--profile", choices=sorted(PROFILES), action="append", help="default: all but the large ones")
    parser.add_argument("--limit", type=int, metavar="STATES", help="stop after so many states")
    parser.add_argument("--bug", choices=sorted(BUGS), help="break this rule; searches the profile that must find it")
    parser.add_argument("--list", action="store_true", help="list profiles, invariants and bugs")
    options = parser.parse_args(arguments)
    if options.list:
        for name, profile in PROFILES.items():
            _print(f"profile    {name}: {profile.says}{' (large)' if profile.large else ''}")
        for name, says in CHECKED.items():
            _print(f"invariant  {name}: {says}")
        for name, bug in BUGS.items():
            _print(f"bug        {name}: {bug.says} (profile {bug.profile})")
        return 0
    names = options.profile or [name for name, profile in PROFILES.items() if not profile.large]
    if options.bug and not options.profile:
        names = [BUGS[options.bug].profile]
    reports = []
    for name in names:
        reports.append(explore(PROFILES[name], bug=options.bug or "", limit=options.limit))
        _show(reports[-1])
    return 1 if any(report.found for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
