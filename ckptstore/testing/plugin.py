"""What does pytest need to know about the conformance kit?

Three things. Its modules' asserts are rewritten, so that a failure shows both values. The marker ``promise`` says
which promise a test guards, and is kept with the result (``user_properties``), so that a report can give a verdict by
level. And a MUST can't be skipped: an absent capability is asserted to be refused, so a skipped or expected failure
of a MUST is a failure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["pytest_configure", "pytest_runtest_makereport"]

pytest.register_assert_rewrite(
    "ckptstore.testing.contract",
    "ckptstore.testing.contract_objects",
    "ckptstore.testing.contract_payload",
    "ckptstore.testing.contract_publish",
    "ckptstore.testing.publish",
    "ckptstore.testing.stateful",
    "ckptstore.testing.subject",
)


def pytest_configure(config: pytest.Config) -> None:
    """Declare the kit's marker."""
    config.addinivalue_line(
        "markers", "promise(level, clause): the promise of a store that this test guards; level is MUST, SHOULD or MAY"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep the promise with the result, and turn a skipped MUST into a failure."""
    report = yield
    promise = item.get_closest_marker("promise")
    if promise is None:
        return report
    level, clause = promise.args
    report.user_properties.append(("promise", f"{level}: {clause}"))
    if level == "MUST" and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"a MUST can't be skipped: {clause} (was: {report.longrepr})"
    return report
