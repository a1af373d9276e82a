"""docs/proofs: a card for each proof, and their index, made of the records."""

from tests.proofs.proofs import PROOFS, Proof
from tests.proofs.record import ROOT, Printed, Record, read

PAGES = ROOT / "docs" / "proofs"
INDEX_HEAD = """\
# Proofs

A card for each promise: the commands that prove it, when and where they were run, and what they printed. Cards are made by
`make proofs` and never typed; `make proofs PROOFS_ARGS="layouts resume"` makes some of them anew. CI runs a short form of
each. *Not tried* stands where no run is recorded.

| promise | verdict | date |
|---|---|---|
"""
# proofs with pages of their own
OTHERS = """
Proven on pages of their own:

- [a published learning curve](../reproduced.md), followed to every digit in seven ways of running;
- [faults that all layouts share](../../CONTRIBUTING.md#faults-that-all-layouts-share), planted and found, and the other
  [campaigns](../../CONTRIBUTING.md#what-the-tests-prove);
- [speed beside other systems](../performance.md), with the commands that repeat it.
"""


def verdict(record: Record | None) -> str:
    """Return one of three words."""
    if record is None:
        return "not tried"
    return "proven" if record.proven else "wrong"


def index() -> str:
    """Return the page of all proofs."""
    rows = []
    for proof in PROOFS:
        record = read(proof.name)
        date = record.date if record else ""
        rows.append(f"| [{proof.title}]({proof.name}.md) | {verdict(record)} | {date} |\n")
    return INDEX_HEAD + "".join(rows) + OTHERS


def card(proof: Proof) -> str:
    """Return the page of a proof."""
    record = read(proof.name)
    lines = [f"# {proof.title}", "", proof.promise, "", "| | |", "|---|---|"]
    lines.append(f"| verdict | **{verdict(record)}** |")
    lines.append(f"| compared with | {proof.oracle} |")
    if record is not None:
        lines += [
            f"| date | {record.date} |",
            f"| commit | `{record.commit}` |",
            f"| machine | {record.machine} |",
            f"| versions | {record.versions} |",
            f"| time | {record.minutes:g} minutes |",
        ]
    lines += ["", "## To repeat it", "", "```console"]
    lines.append(f'make proofs PROOFS_ARGS="{proof.name}"')
    lines += ["```", "", "It runs, in a clone:", "", "```console", *proof.commands, "```", ""]
    for printed in record.seen if record else ():
        lines += _printed(printed)
    return "\n".join(lines).rstrip() + "\n"


def _printed(printed: Printed) -> list[str]:
    """Return the lines of what a command printed; none if it printed nothing and did not fail."""
    if not printed.lines and not printed.code:
        return []
    program = " ".join(printed.command.split()[:2])
    heading = f"## What `{program}` printed"
    return [heading, "", "```text", *printed.lines, "```", "", f"Exit code {printed.code}.", ""]


def write() -> None:
    """Write all pages."""
    PAGES.mkdir(exist_ok=True)
    (PAGES / "README.md").write_text(index(), encoding="utf-8")
    for proof in PROOFS:
        (PAGES / f"{proof.name}.md").write_text(card(proof), encoding="utf-8")
