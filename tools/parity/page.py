"""A certificate for people: tables for a terminal, and one HTML page without other files."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.markup import escape as plain
from rich.table import Table

from tools.parity.certificate import NOT_TRIED, PROVEN, WRONG, Certificate

EQUAL_BITS = "equal bits"
CLASS = {PROVEN: "proven", WRONG: "wrong", NOT_TRIED: "untried"}  # of CSS
COLOR = {PROVEN: "green", WRONG: "red", NOT_TRIED: "yellow"}  # in a terminal

# shown as errors; all other quantities must be exact, and share a column
NUMBERS = {
    "loss": "loss",
    "gradient": "gradients",
    "gradient norm": "norm",
    "weights": "weights",
    "moments": "moments",
}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #24292f; max-width: 1100px;
  margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100% }
td, th { text-align: left; padding: .3rem .8rem .3rem 0 }
th { border-bottom: 2px solid #d0d7de } td { border-bottom: 1px solid #eaeef2; vertical-align: top }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
code { font: 13px ui-monospace, monospace } .proven { color: #1a7f37 } .wrong { color: #cf222e }
.untried { color: #7d4e00 } ol.way { list-style: none;
  padding: 0; display: flex; flex-wrap: wrap; gap: 3px }
ol.way li { font-size: 12px; padding: 1px 6px; border-radius: 4px; background: #dafbe1 }
ol.way li.wrong { background: #ffcecb; color: #24292f }
ol.way li.untried { background: #fff1d6; color: #24292f }
ol.way li.first { outline: 2px solid #cf222e; font-weight: 600 }
.verdict { font-size: 1.25rem; font-weight: 600 } .scroll { overflow-x: auto }
"""


def show(certificate: Certificate, console: Console) -> None:
    """Print the layouts as a table, and the details of those that differ."""
    if certificate["changes"]:
        console.print(_changes_table(certificate))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("layout", "precision", *NUMBERS.values(), "exact", "verdict"):
        table.add_column(column, no_wrap=column != "exact")
    for entry in certificate["layouts"]:
        color = COLOR[entry["verdict"]]
        cells = [
            f"[red]{cell.text}[/]" if cell.is_bad else cell.text for cell in _number_cells(entry)
        ]
        result = f"[{color}]{verdict(entry)}[/]"
        table.add_row(plain(entry["layout"]), entry["precision"], *cells, result)
    console.print(table)
    for entry in certificate["layouts"]:
        if entry["verdict"] != PROVEN:
            console.print(f"[bold]{plain(entry['layout'])}, {entry['precision']}[/]")
            for label, text in _details(entry):
                console.print(f"  {label:13}{plain(text)}", highlight=False, soft_wrap=True)
    for part, reason in _not_tried(certificate):
        line = f"not tried: {plain(part)} ({plain(reason)})"
        console.print(line, highlight=False, soft_wrap=True)
    console.print(conclusion(certificate), highlight=False, soft_wrap=True)


def verdict(entry: Mapping[str, Any]) -> str:
    """Return the verdict on a layout, EQUAL_BITS if it is proven without any tolerance."""
    return EQUAL_BITS if entry.get("equal_bits") else str(entry["verdict"])


def _not_tried(certificate: Certificate) -> Iterator[tuple[str, str]]:
    """Yield (part, reason) that was not tried: of the run, of one layout, or a quantity in every
    layout."""
    yield from ((part, reason) for part, reason in certificate["not_tried"])
    by_precision: dict[str, list[Mapping[str, Any]]] = {}
    for entry in certificate["layouts"]:
        precision = entry["precision"]
        if entry["left_out"]:
            yield (
                ", ".join(f"parallel.{key}" for key in entry["left_out"]),
                f"{entry['layout']} in {precision}: the sizes that were compared do not allow it",
            )
        if entry["quantities"]:
            by_precision.setdefault(precision, []).append(entry["quantities"])
    for precision, layouts in by_precision.items():
        for quantity, first in layouts[0].items():
            verdicts = {quantities.get(quantity, {}).get("verdict") for quantities in layouts}
            if verdicts == {NOT_TRIED}:
                yield f"{quantity} in {precision}", first["why"]


def conclusion(certificate: Certificate) -> str:
    """Return the result in a sentence."""
    layouts = certificate["layouts"]
    count = Counter(entry["verdict"] for entry in layouts)
    tried = count[PROVEN] + count[WRONG]
    rest = f"; {count[NOT_TRIED]} not tried" if count[NOT_TRIED] else ""
    equal = sum(bool(entry.get("equal_bits")) for entry in layouts)
    bits = f", {equal} of them in every bit" if equal else ""
    extent = (
        f"{certificate['tensors']} tensors, {certificate['steps']} steps, of which "
        f"{certificate['applied']} applied"
    )
    if not tried:
        return (
            f"NOTHING is proven: none of {len(layouts)} comparisons with one process could be "
            f"tried ({extent})"
        )
    if count[PROVEN] == tried:
        return (
            f"all {tried} comparisons agree with one process{bits}: {extent} and "
            f"{certificate['clipped']} clipped{rest}"
        )
    return f"{count[WRONG]} of {tried} comparisons do NOT agree with one process ({extent}){rest}"


def _changes_table(certificate: Certificate) -> Table:
    table = Table("made small", "from", "to", box=box.SIMPLE_HEAD)
    for key, (old, new) in certificate["changes"].items():
        table.add_row(plain(key), plain(_shorten(old)), plain(_shorten(new)))
    return table


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


class _Cell(NamedTuple):
    """A cell of the table of layouts."""

    text: str
    is_bad: bool = False


def _number_cells(entry: Mapping[str, Any]) -> list[_Cell]:
    """Return the cells of each column between precision and verdict."""
    quantities = entry["quantities"]
    cells: list[_Cell] = []
    for name in NUMBERS:
        quantity = quantities.get(name)
        if quantity is None:
            cells.append(_Cell(""))
        elif quantity["verdict"] == NOT_TRIED:
            cells.append(_Cell("not tried"))
        else:
            cells.append(_Cell(_number(quantity["error"]), quantity["failed"] > 0))
    exact = [name for name in quantities if name not in NUMBERS]
    wrong = [name for name in exact if quantities[name]["verdict"] == WRONG]
    if wrong:
        cells.append(_Cell(", ".join(wrong), is_bad=True))
    else:
        cells.append(_Cell("yes" if exact else ""))
    return cells


def _number(error: float | str) -> str:
    if isinstance(error, str):
        return error
    if error == 0:
        return "0"
    return f"{error:.0e}"


def _details(entry: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (label, text) of a layout that is not proven."""
    if entry["verdict"] == NOT_TRIED:
        yield "not tried", entry["why"]
        return
    first = entry["first"]
    # the places of ranks that hang have lines of their own
    place = "" if "ranks_at" in entry else first["place"]
    yield "arises in", f"{first['phase']}: {place}".rstrip()
    if "note" in first and "quantity" not in first:
        yield "", first["note"]
    for position in entry.get("ranks_at", ()):
        yield "", position
    for label in ("first", "worst"):
        if "quantity" in entry.get(label, ()):
            yield label, told(entry[label])
    yield "likely cause", entry["likely_cause"]


def told(difference: Mapping[str, Any]) -> str:
    """Return a difference in words."""
    name = f" {difference['name']}" if difference["name"] else ""
    step = f"step {difference['step']}" if difference["step"] else "before the first step"
    ratio = (
        f", ratio {difference['ratio_looks_like']}" if difference.get("ratio_looks_like") else ""
    )
    if difference["error"] == "inf":
        size = ""
    else:
        size = f": error {_number(difference['error'])}, bound {_number(difference['bound'])}"
    note = f"; {_shorten(difference['note'])}" if difference.get("note") else ""
    ranks = (
        f", on rank {', '.join(map(str, difference['ranks']))}" if difference.get("ranks") else ""
    )
    return f"{difference['quantity']}{name}, {step}{size}{ratio}{ranks}{note}"


def page(certificate: Certificate) -> str:
    """Return the certificate as HTML."""
    versions = ", ".join(f"{name} {value}" for name, value in certificate["versions"].items())
    configuration = certificate["configuration"]
    css_class = CLASS[certificate["verdict"]]
    parts = [
        f"<h1>megaprec parity: {escape(configuration['file'])}</h1>",
        f'<p class="verdict {css_class}">{escape(conclusion(certificate))}</p>',
        f"<p>{escape(configuration['model'])}. Run <code>sha256 "
        f"{configuration['sha256']}</code>, as compared "
        f"<code>{configuration['sha256_as_compared']}</code>. {escape(versions)}.</p>",
        "<h2>Layouts</h2>",
        _layouts_html(certificate["layouts"]),
    ]
    for entry in certificate["layouts"]:
        if entry["verdict"] != PROVEN:
            parts.append(_details_html(entry))
    parts.append("<h2>Quantities</h2>")
    for entry in certificate["layouts"]:
        if entry["quantities"]:
            parts.append(_quantities_html(entry))
    if certificate["changes"]:
        changes = [(key, old, new) for key, (old, new) in certificate["changes"].items()]
        parts += ["<h2>Made small</h2>", _table(("key", "from", "to"), changes)]
    not_tried = list(_not_tried(certificate))
    if not_tried:
        parts += ["<h2>Not tried</h2>", _table(("what", "why"), not_tried)]
    if certificate["rounding"]:
        counts = certificate["rounding"].items()
        names = ", ".join(f"{name} ({count})" for name, count in counts)
        parts.append(
            "<p>Elements whose gradient may be nothing but rounding: they need not be as near, and "
            f"are not counted as zeros: {escape(names)}.</p>"
        )
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>megaprec '
        "parity</title>"
        f"<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _layouts_html(layouts: Sequence[Mapping[str, Any]]) -> str:
    rows: list[Sequence[str]] = []
    for entry in layouts:
        cells = [cell.text for cell in _number_cells(entry)]
        rows.append([entry["layout"], entry["precision"], *cells, verdict(entry)])
    return _table(("layout", "precision", *NUMBERS.values(), "exact", "verdict"), rows)


def _details_html(entry: Mapping[str, Any]) -> str:
    lines = "".join(
        f"<tr><td>{escape(label)}</td><td>{escape(text)}</td></tr>"
        for label, text in _details(entry)
    )
    heading = (
        f"<h2 class='{CLASS[entry['verdict']]}'>{escape(entry['layout'])}, "
        f"{escape(entry['precision'])}</h2>"
    )
    rows = [(told(difference),) for difference in entry.get("differing", [])]
    listed = _table(("what differs",), rows) if rows else ""
    if entry.get("num_differing", 0) > len(rows):
        listed += f"<p>{entry['num_differing']} in all.</p>"
    return f"{heading}<table>{lines}</table>{_stations_html(entry)}{listed}"


def _stations_html(entry: Mapping[str, Any]) -> str:
    """Return the step of the first difference as a row of its stations, with the first that differs
    marked; empty if there are none."""
    stations = entry.get("way", [])
    if not stations:
        return ""
    items: list[str] = []
    found_first = False
    for station in stations:
        css_class = CLASS[station["verdict"]]
        if station["verdict"] == WRONG and not found_first:
            css_class += " first"
            found_first = True
        arrow = "← " if station["phase"] == "backward" else ""
        title = escape(f"{station['phase']}, error {_number(station['error'])}")
        name = escape(station["name"])
        items.append(f'<li class="{css_class}" title="{title}">{arrow}{name}</li>')
    step = entry["first"]["step"]
    heading = f"<p>Step {step}, from its first activation to its update:</p>"
    return f'{heading}<ol class="way">{"".join(items)}</ol>'


def _quantities_html(entry: Mapping[str, Any]) -> str:
    rows = [_quantity_row(name, quantity) for name, quantity in entry["quantities"].items()]
    head = (
        "quantity",
        "verdict",
        "compared",
        "failed",
        "worst error",
        "bound",
        "at",
        "step",
        "why not tried",
    )
    summary = f"{escape(entry['layout'])}, {escape(entry['precision'])}: {entry['verdict']}"
    return f"<details><summary>{summary}</summary>{_table(head, rows)}</details>"


def _quantity_row(name: str, quantity: Mapping[str, Any]) -> list[str]:
    if "compared" not in quantity:
        return [name, quantity["verdict"], *[""] * 6, quantity["why"]]
    return [
        name,
        quantity["verdict"],
        str(quantity["compared"]),
        str(quantity["failed"]),
        _number(quantity["error"]),
        _number(quantity["bound"]),
        quantity["name"],
        str(quantity["step"]),
        quantity.get("why", ""),
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as HTML; columns of numbers are aligned to the right."""
    attributes: list[str] = []
    for column in range(len(head)):
        is_numeric = rows and all(_is_number(row[column]) for row in rows)
        attributes.append(' class="n"' if is_numeric else "")
    body = "\n".join(_table_row("td", attributes, row) for row in rows)
    top = _table_row("th", attributes, head)
    return f'<div class="scroll"><table>{top}\n{body}</table></div>'


def _table_row(tag: str, attributes: Sequence[str], cells: Sequence[str]) -> str:
    columns = zip(attributes, cells, strict=True)
    inner = "".join(f"<{tag}{attribute}>{escape(cell)}</{tag}>" for attribute, cell in columns)
    return f"<tr>{inner}</tr>"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
