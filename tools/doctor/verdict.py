"""The verdict as a table, and as one JSON document."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from tools.console.tables import print_table
from tools.console.units import counted
from tools.console.wrapped import say
from tools.doctor.finding import NOT_TRIED, OK, WRONG, Finding, verdict

COLOURS = {OK: "green", WRONG: "bold red", NOT_TRIED: "yellow"}


def document(findings: Sequence[Finding], seconds: float) -> dict[str, Any]:
    """Return the document of `--json`."""
    return {
        "verdict": verdict(findings),
        "seconds": round(seconds, 1),
        "checks": [_json_entry(finding) for finding in findings],
    }


def _json_entry(finding: Finding) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "check": finding.check,
        "verdict": finding.verdict,
        "said": finding.message,
    }
    # Only where it means something: a reader need not know which fields are void.
    if finding.verdict == WRONG:
        entry["remedy"] = finding.remedy
    if finding.verdict == NOT_TRIED:
        entry["needed"] = finding.needed
    entry["facts"] = finding.facts
    return entry


def show(findings: Sequence[Finding], seconds: float) -> None:
    """Print the table, then a line for each wrong thing with the remedy, then the verdict."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("check", overflow="fold", no_wrap=True)
    table.add_column("verdict", overflow="fold", no_wrap=True)
    table.add_column("found", overflow="fold", no_wrap=False)
    for finding in findings:
        coloured = f"[{COLOURS[finding.verdict]}]{finding.verdict}[/]"
        table.add_row(finding.check, coloured, _escape_markup(finding.message))
    print_table(table)

    for finding in findings:
        if finding.verdict == WRONG:
            say(f"mend       {finding.check}: {finding.message}: {finding.remedy}")
    say(f"verdict    {in_words(findings)} ({seconds:.0f} s)")


def in_words(findings: Sequence[Finding]) -> str:
    """Return the verdict in a line."""
    count = Counter(finding.verdict for finding in findings)
    if count[WRONG]:
        verb = "is" if count[WRONG] == 1 else "are"
        return f"{counted(count[WRONG], 'thing')} {verb} wrong"

    if verdict(findings) == NOT_TRIED:
        # dict.fromkeys: each check once, in the order of the table
        missing = dict.fromkeys(
            finding.check for finding in findings if finding.verdict == NOT_TRIED and finding.needed
        )
        return f"nothing is wrong, but {', '.join(missing)} could not be tried"

    not_tried = f", {count[NOT_TRIED]} not tried" if count[NOT_TRIED] else ""
    return f"all is well: {counted(count[OK], 'check')} ok{not_tried}"


def _escape_markup(text: str) -> str:
    """Return the text such that rich prints its brackets instead of reading a style in them."""
    return text.replace("[", r"\[")
