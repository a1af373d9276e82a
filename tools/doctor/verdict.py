"""The verdict as a table, and as one JSON document."""

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
        "checks": [
            {
                "check": one.check,
                "verdict": one.verdict,
                "said": one.said,
                **({"remedy": one.remedy} if one.verdict == WRONG else {}),
                **({"needed": one.needed} if one.verdict == NOT_TRIED else {}),
                "facts": one.facts,
            }
            for one in findings
        ],
    }


def show(findings: Sequence[Finding], seconds: float) -> None:
    """Print the table, then a line for each wrong thing with the remedy, then the verdict."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("check", "verdict", "found"):
        table.add_column(name, overflow="fold", no_wrap=name != "found")
    for one in findings:
        table.add_row(one.check, f"[{COLOURS[one.verdict]}]{one.verdict}[/]", _escaped(one.said))
    print_table(table)
    for one in findings:
        if one.verdict == WRONG:
            say(f"mend       {one.check}: {one.said}: {one.remedy}")
    say(f"verdict    {in_words(findings)} ({seconds:.0f} s)")


def in_words(findings: Sequence[Finding]) -> str:
    """Return the verdict in a line."""
    count = {kind: sum(one.verdict == kind for one in findings) for kind in COLOURS}
    if count[WRONG]:
        return f"{count[WRONG]} thing{'s are' if count[WRONG] > 1 else ' is'} wrong"
    left = f", {count[NOT_TRIED]} not tried" if count[NOT_TRIED] else ""
    if verdict(findings) == NOT_TRIED:
        needed = ", ".join(
            dict.fromkeys(one.check for one in findings if one.verdict == NOT_TRIED and one.needed)
        )
        return f"nothing is wrong, but {needed} could not be tried"
    return f"all is well: {counted(count[OK], 'check')} ok{left}"


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")
