"""Gates, each of which may find a fault that is planted in this process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from _pytest.reports import TestReport

from megaprec.errors import UserError
from tests.golden.command_run import command_run
from tests.golden.runs import plain_run
from tests.golden.stream import read_text
from tests.golden.test_golden import PROSE, SMALL, require_same_curve
from tests.parity.campaign import forked
from tests.parity.oracle_runs import TRAIN, words_of
from tests.shared_faults.fault import Fault
from tools import cli
from tools.commands import parity
from tools.config.run_file import load_run

KILLED = "killed"
SURVIVED = "survived"
NOT_APPLICABLE = "not applicable"
LAYOUT = "pp=2"


@dataclass(frozen=True)
class Verdict:
    """What a gate says. by: what has found the fault, or why the gate does not apply."""

    verdict: str
    by: str = ""


class FirstFailure:
    """A plugin of pytest that keeps the first test that fails, and its reason."""

    test = ""
    reason = ""
    tried = 0

    def pytest_runtest_logreport(self, report: TestReport) -> None:
        self.tried += report.when == "call"
        if report.failed and not self.test:
            self.test = report.nodeid
            self.reason = report.longreprtext


def by_tests(arguments: Sequence[str]) -> Verdict:
    """The verdict of pytest, which stops at the first test that fails."""
    found = FirstFailure()
    # what the process has imported by now cannot be rewritten
    options = ["-x", "-q", "--assert=plain", "-p", "no:cacheprovider"]
    pytest.main([*options, *arguments], plugins=[found])
    if found.test:
        return Verdict(KILLED, found.test)
    if not found.tried:
        return Verdict(NOT_APPLICABLE, f"pytest tried none of {' '.join(arguments)}")
    return Verdict(SURVIVED, f"{found.tried} tests")


def fast_tests(fault: Fault, folder: Path) -> Verdict:
    """The fast tests of the files that are there for it."""
    return by_tests(fault.tests)


def golden(fault: Fault, folder: Path) -> Verdict:
    """The engine in one process beside a plain loop, and then `megaprec train`, resumed once."""
    of_engine = by_tests(["tests/golden/test_golden.py", "-k", "plain_loop and process"])
    if of_engine.verdict == KILLED:
        return of_engine
    path = folder / "text.txt"
    path.write_text(PROSE * 20)
    text = read_text(path)
    plain = plain_run(SMALL, text)
    try:
        ours = command_run(SMALL, text, folder, stop=7, start=start_here)
        require_same_curve(ours, plain)
    except AssertionError:
        return Verdict(KILLED, "megaprec train, resumed after 7 steps")
    return Verdict(SURVIVED)


def start_here(words: Sequence[str], output: Path) -> None:
    """Run the command in this process, which has the fault."""
    if code := cli.main(list(words)):
        raise AssertionError(f"exit code {code}")


def closed_forms(fault: Fault, folder: Path) -> Verdict:
    """Numbers of mathematics, in one process."""
    # the cheapest first
    subjects = ("update", "layers", "epochs", "other_losses", "closed_forms")
    files = [f"tests/closed_forms/test_{each}.py" for each in subjects]
    return by_tests([*files, "-k", "not pp"])


def parity_of_layouts(fault: Fault, folder: Path) -> Verdict:
    """A layout beside one process; both have the fault."""
    launcher = replace(parity.LOCAL_LAUNCHER, together=forked)
    return _certified(fault, folder, "", [LAYOUT], launcher)


def oracle(fault: Fault, folder: Path) -> Verdict:
    """One process beside transformers."""
    return _certified(fault, folder, "transformers", ["tp=1"], parity.LOCAL_LAUNCHER)


def plain_oracle(fault: Fault, folder: Path) -> Verdict:
    """One process beside the plain decoder."""
    return _certified(fault, folder, "plain", ["tp=1"], parity.LOCAL_LAUNCHER)


def _certified(
    fault: Fault, folder: Path, oracle_name: str, layouts: list[str], launcher: parity.Launcher
) -> Verdict:
    options = parity.Options(
        file="run.toml",
        layouts=layouts,
        oracle=oracle_name or None,
        precision="float64",
        steps=3,
        full=False,
    )
    try:
        config = load_run(None, [*words_of(fault.family), *TRAIN, *fault.words])
        certificate = parity.certify(config, options, folder, lambda text: None, launcher)
    except UserError as error:
        return Verdict(NOT_APPLICABLE, str(error).splitlines()[0])
    entries = certificate["layouts"]
    for entry in entries:
        if entry["verdict"] == "wrong":
            first: dict[str, Any] = entry.get("first") or {}
            return Verdict(KILLED, f"{first.get('phase', '')}: {first.get('name', '')}")
    if {entry["verdict"] for entry in entries} != {"proven"}:
        return Verdict(NOT_APPLICABLE, "not tried")
    left_out = [part for part, _ in certificate["not_tried"]]
    keys = [word.partition("=")[0] for word in fault.words]
    missing = [key for key in keys if key in left_out]
    if missing:
        return Verdict(NOT_APPLICABLE, f"left out: {missing[0]}")
    return Verdict(SURVIVED)


Gate = Callable[[Fault, Path], Verdict]
GATES: dict[str, Gate] = {
    "fast tests": fast_tests,
    "golden": golden,
    "oracle": oracle,
    "plain oracle": plain_oracle,
    "closed forms": closed_forms,
    "parity": parity_of_layouts,
}
