"""The finding of one check: ok, wrong with what to mend, or not tried with the reason.

A verdict never stands for another. A check that could not be carried out is "not tried", whatever
its result would probably be. It counts in the exit code only if the machine needs the thing for
what was asked: a laptop without a GPU is well, but a layout that could not be tried is no layout
that works.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

OK = "ok"
WRONG = "wrong"
NOT_TRIED = "not tried"
CODES = {OK: 0, WRONG: 1, NOT_TRIED: 2}  # exit codes of the command


@dataclass(frozen=True)
class Finding:
    """One line of the verdict.

    check: what was looked at. message: what was seen, or why nothing was. remedy: what to do, if
    something is wrong. needed: a check that was not tried counts in the exit code. facts: numbers
    for `--json`.
    """

    check: str
    verdict: str
    message: str
    remedy: str = ""
    needed: bool = False
    facts: dict[str, Any] = field(default_factory=dict)


def ok(check: str, message: str, **facts: Any) -> Finding:
    """Return the finding that all is well."""
    return Finding(check, OK, message, facts=facts)


def wrong(check: str, message: str, remedy: str, **facts: Any) -> Finding:
    """Return the finding that something must be mended."""
    return Finding(check, WRONG, message, remedy, facts=facts)


def not_tried(check: str, reason: str, needed: bool = False) -> Finding:
    """Return the finding that a check was not carried out."""
    return Finding(check, NOT_TRIED, reason, needed=needed)


def verdict(findings: Sequence[Finding]) -> str:
    """Return the worst verdict: wrong, then not tried where that counts, otherwise ok."""
    if any(finding.verdict == WRONG for finding in findings):
        return WRONG
    if any(finding.verdict == NOT_TRIED and finding.needed for finding in findings):
        return NOT_TRIED
    return OK
