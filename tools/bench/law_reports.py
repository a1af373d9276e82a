"""A plugin of pytest that prints a line of JSON when a test begins and when it ends, so that what
is known is not lost with the process.

    {"begun": "tests/gpu/test_a.py::test_b"}
    {"test": "tests/gpu/test_a.py::test_b", "outcome": "failed: assert 1 == 2", "seconds": 3.2,
     "details": "..."}
"""

import json
from typing import Any

import pytest

DETAILS = 3000  # characters of a failure that are kept: its end


class LawReports:
    """Puts together what pytest reports of a test's setup, call and teardown."""

    def __init__(self) -> None:
        self._outcome = "passed"
        self._details = ""
        self._seconds = 0.0

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Say that a test begins."""
        self.__init__()
        _print({"begun": nodeid})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a part of a test; after the last one say how the test ended."""
        self._seconds += report.duration
        if report.outcome != "passed" and self._outcome == "passed":
            self._outcome = outcome_of(report)
            self._details = report.longreprtext[-DETAILS:] if report.failed else ""
        if report.when == "teardown":
            seconds = round(self._seconds, 1)
            record = {"test": report.nodeid, "outcome": self._outcome, "seconds": seconds}
            _print_outcome(record, self._details)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Say of a file that cannot be read what is wrong with it."""
        if report.outcome != "passed":
            record = {"test": report.nodeid, "outcome": outcome_of(report)}
            details = report.longreprtext[-DETAILS:] if report.failed else ""
            _print_outcome(record, details)


def outcome_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return how a part of a test ended, with the first line of the reason."""
    reason = report.longrepr
    if isinstance(reason, tuple):  # of a test that is skipped: file, line, reason
        text = str(reason[2])
    else:
        crash: Any = getattr(reason, "reprcrash", None)
        text = str(crash.message if crash is not None else reason)
    first_line = (text.splitlines() or [""])[0]
    return f"{report.outcome}: {first_line[:300]}"


def _print_outcome(record: dict[str, Any], details: str) -> None:
    """Print the record of a test or a file, with details of its failure if there are any."""
    if details:
        record = {**record, "details": details}
    _print(record)


def _print(record: dict[str, Any]) -> None:
    # pytest's own output may be in the middle of a line
    print(f"\n{json.dumps(record)}", flush=True)


def pytest_configure(config: pytest.Config) -> None:
    """Add the reports."""
    config.pluginmanager.register(LawReports())
