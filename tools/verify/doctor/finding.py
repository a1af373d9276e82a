"""The finding of one check: ok, wrong with what to mend, or not tried with the reason.

A verdict never stands for another. A check that could not be carried out is "not tried", whatever
its result would probably be. It counts in the exit code only if the machine needs the thing for
what was asked: a laptop without a GPU is well, but a layout that could not be tried is no layout
that works. The findings are shown as a table, or as one JSON document.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.markup import escape
from rich.table import Table

from tools.console.tables import print_table
from tools.console.units import counted
from tools.console.wrapped import say

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
    # one wrong thing outweighs whatever else is well
    if any(finding.verdict == WRONG for finding in findings):
        return WRONG
    if any(finding.verdict == NOT_TRIED and finding.needed for finding in findings):
        return NOT_TRIED
    return OK


COLOURS = {OK: "green", WRONG: "bold red", NOT_TRIED: "yellow"}


def document(findings: Sequence[Finding], seconds: float) -> dict[str, Any]:
    """Return the document of `--json`."""
    return {
        "verdict": verdict(findings),
        "seconds": round(seconds, 1),
        "checks": [_json_entry(finding) for finding in findings],
    }


def _json_entry(finding: Finding) -> dict[str, Any]:
    """Return a finding as it is written to a JSON file."""
    json_entry: dict[str, Any] = {
        "check": finding.check,
        "verdict": finding.verdict,
        "said": finding.message,
    }
    # Only where it means something: a reader need not know which fields are void.
    if finding.verdict == WRONG:
        json_entry["remedy"] = finding.remedy
    if finding.verdict == NOT_TRIED:
        json_entry["needed"] = finding.needed
    json_entry["facts"] = finding.facts
    return json_entry


def show(findings: Sequence[Finding], seconds: float) -> None:
    """Print the table, then a line for each wrong thing with the remedy, then the verdict."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("check", overflow="fold", no_wrap=True)
    table.add_column("verdict", overflow="fold", no_wrap=True)
    table.add_column("found", overflow="fold", no_wrap=False)
    for finding in findings:
        coloured = f"[{COLOURS[finding.verdict]}]{finding.verdict}[/]"
        table.add_row(finding.check, coloured, escape(finding.message))
    print_table(table)

    for finding in findings:
        if finding.verdict == WRONG:
            say(f"mend       {finding.check}: {finding.message}: {finding.remedy}")
    say(f"verdict    {in_words(findings)} ({seconds:.0f} s)")


def in_words(findings: Sequence[Finding]) -> str:
    """Return the verdict in a line."""
    verdict_counts = Counter(finding.verdict for finding in findings)
    if verdict_counts[WRONG]:
        verb = "is" if verdict_counts[WRONG] == 1 else "are"
        return f"{counted(verdict_counts[WRONG], 'thing')} {verb} wrong"

    if verdict(findings) == NOT_TRIED:
        missing: list[str] = []
        for finding in findings:
            if finding.verdict == NOT_TRIED and finding.needed:
                missing.append(finding.check)
        # each check once, in the order of the table
        names = ", ".join(dict.fromkeys(missing))
        return f"nothing is wrong, but {names} could not be tried"

    untried = f", {verdict_counts[NOT_TRIED]} not tried" if verdict_counts[NOT_TRIED] else ""
    return f"all is well: {counted(verdict_counts[OK], 'check')} ok{untried}"
