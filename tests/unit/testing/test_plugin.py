"""A MUST of the kit can be failed or passed, not skipped."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable

pytest_plugins = ["pytester"]

CASES = """
import pytest
from ckptstore.testing.subject import must, should

@must("kept")
def test_kept(): pass

@must("skipped")
def test_skipped(): pytest.skip("not here")

@must("expected to fail")
@pytest.mark.xfail(reason="known")
def test_xfail(): assert False

@should("skipped too")
def test_should(): pytest.skip("not here")

def test_of_nobody(): pytest.skip("not here")
"""


def promises(reports: Iterable[pytest.TestReport]) -> dict[str, list[tuple[str, object]]]:
    return {report.nodeid.split("::")[-1]: report.user_properties for report in reports if report.when == "call"}


def test_a_skipped_must_is_a_failure_and_promises_are_kept_with_the_results(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(CASES)
    run = pytester.inline_run("-p", "ckptstore.testing.plugin", "-p", "no:cacheprovider")
    passed, skipped, failed = (
        [report for report in reports if isinstance(report, pytest.TestReport)] for reports in run.listoutcomes()
    )
    assert [report.nodeid.split("::")[-1] for report in passed] == ["test_kept"]
    assert [report.nodeid.split("::")[-1] for report in failed] == ["test_skipped", "test_xfail"]
    assert [report.nodeid.split("::")[-1] for report in skipped] == ["test_should", "test_of_nobody"]
    assert "a MUST can't be skipped" in str(failed[0].longrepr)
    found = promises([*passed, *skipped, *failed])
    assert found["test_kept"] == [("promise", "MUST: kept")]
    assert found["test_should"] == [("promise", "SHOULD: skipped too")]
    assert found["test_of_nobody"] == []
