"""A certificate for people: tables for a terminal, and one HTML page without other files."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape as plain
from rich.table import Table

from tools.parity.certificate import NOT_TRIED, PROVEN, WRONG, Certificate

EQUAL_BITS = "equal bits"
CLASS = {PROVEN: "proven", WRONG: "wrong", NOT_TRIED: "untried"}

# shown as errors; all other quantities must be exact, and share a column
NUMBERS = {
    "loss": "loss",
    "gradient": "gradients",
    "gradient norm": "norm",
    "weights": "weights",
    "moments": "moments",
}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #24292f; max-width: 1100px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; padding: .3rem .8rem .3rem 0 }
th { border-bottom: 2px solid #d0d7de } td { border-bottom: 1px solid #eaeef2; vertical-align: top }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
code { font: 13px ui-monospace, monospace } .proven { color: #1a7f37 } .wrong { color: #cf222e }
.untried { color: #7d4e00 } ol.way { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: 3px }
ol.way li { font-size: 12px; padding: 1px 6px; border-radius: 4px; background: #dafbe1 }
ol.way li.wrong { background: #ffcecb; color: #24292f } ol.way li.untried { background: #fff1d6; color: #24292f }
ol.way li.first { outline: 2px solid #cf222e; font-weight: 600 }
.verdict { font-size: 1.25rem; font-weight: 600 } .scroll { overflow-x: auto }
"""


def show(made: Certificate, console: Console) -> None:
    """Print the layouts as a table, and the details of those that differ."""
    if made["changes"]:
        console.print(_changes(made))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("layout", "precision", *NUMBERS.values(), "exact", "verdict"):
        table.add_column(column, no_wrap=column != "exact")
    for one in made["layouts"]:
        color = {PROVEN: "green", WRONG: "red", NOT_TRIED: "yellow"}[one["verdict"]]
        cells = [f"[red]{cell}[/]" if bad else cell for cell, bad in _cells(one)]
        table.add_row(plain(one["layout"]), one["precision"], *cells, f"[{color}]{verdict(one)}[/]")
    console.print(table)
    for one in made["layouts"]:
        if one["verdict"] != PROVEN:
            console.print(f"[bold]{plain(one['layout'])}, {one['precision']}[/]")
            for word, text in _trouble(one):
                console.print(f"  {word:13}{plain(text)}", highlight=False, soft_wrap=True)
    for what, why in _aside(made):
        console.print(f"not tried: {plain(what)} ({plain(why)})", highlight=False, soft_wrap=True)
    console.print(conclusion(made), highlight=False, soft_wrap=True)


def verdict(one: Mapping[str, Any]) -> str:
    """Return the verdict on a layout, EQUAL_BITS if it is proven without any tolerance."""
    return EQUAL_BITS if one.get("equal_bits") else str(one["verdict"])


def _aside(made: Certificate) -> Iterator[tuple[str, str]]:
    """Yield (what, why) that was not tried: of the run, of one layout, or a quantity in every
    layout."""
    yield from ((what, why) for what, why in made["not_tried"])
    for one in made["layouts"]:
        if left_out := ", ".join(f"parallel.{key}" for key in one["left_out"]):
            yield (
                left_out,
                (
                    f"{one['layout']} in {one['precision']}: the sizes that were compared do not "
                    "allow it"
                ),
            )
    tried = [one for one in made["layouts"] if one["quantities"]]
    for precision in dict.fromkeys(one["precision"] for one in tried):
        alike = [one["quantities"] for one in tried if one["precision"] == precision]
        for quantity, first in alike[0].items():
            if all(some.get(quantity, {}).get("verdict") == NOT_TRIED for some in alike):
                yield f"{quantity} in {precision}", first["why"]


def conclusion(made: Certificate) -> str:
    """Return the result in a sentence."""
    layouts = made["layouts"]
    count = Counter(one["verdict"] for one in layouts)
    good = count[PROVEN]
    tried = count[PROVEN] + count[WRONG]
    rest = f"; {count[NOT_TRIED]} not tried" if count[NOT_TRIED] else ""
    equal = sum(bool(one.get("equal_bits")) for one in layouts)
    bits = f", {equal} of them in every bit" if equal else ""
    how = f"{made['tensors']} tensors, {made['steps']} steps, of which {made['applied']} applied"
    if not tried:
        return (
            f"NOTHING is proven: none of {len(layouts)} comparisons with one process could be "
            f"tried ({how})"
        )
    if good == tried:
        return (
            f"all {good} comparisons agree with one process{bits}: {how} and {made['clipped']} "
            f"clipped{rest}"
        )
    return f"{count[WRONG]} of {tried} comparisons do NOT agree with one process ({how}){rest}"


def _changes(made: Certificate) -> Table:
    table = Table("made small", "from", "to", box=box.SIMPLE_HEAD)
    for key, (one, other) in made["changes"].items():
        table.add_row(plain(key), plain(_short(one)), plain(_short(other)))
    return table


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _cells(one: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield (text, is it bad) of each column between precision and verdict."""
    quantities = one["quantities"]
    for quantity in NUMBERS:
        found = quantities.get(quantity)
        if found is None or found["verdict"] == NOT_TRIED:
            yield ("not tried" if found else ""), False
        else:
            yield _number(found["error"]), found["failed"] > 0
    exact = {q: found for q, found in quantities.items() if q not in NUMBERS}
    bad = [q for q, found in exact.items() if found["verdict"] == WRONG]
    yield (", ".join(bad) or ("yes" if exact else "")), bool(bad)


def _number(error: float | str) -> str:
    if isinstance(error, str):
        return error
    if error == 0:
        return "0"
    return f"{error:.0e}"


def _trouble(one: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if one["verdict"] == NOT_TRIED:
        yield "not tried", one["why"]
        return
    first = one["first"]
    yield (
        "arises in",
        " ".join(
            filter(None, (f"{first['phase']}:", first["place"] if "ranks_at" not in one else ""))
        ),
    )
    if "note" in first and "quantity" not in first:
        yield "", first["note"]
    yield from (("", where) for where in one.get("ranks_at", ()))
    for word in ("first", "worst"):
        if "quantity" in one.get(word, ()):
            yield word, told(one[word])
    yield "likely cause", one["likely_cause"]


def told(d: Mapping[str, Any]) -> str:
    """Return a difference in words."""
    what = " ".join(filter(None, (d["quantity"], d["name"])))
    when = f"step {d['step']}" if d["step"] else "before the first step"
    ratio = f", ratio {d['ratio_looks_like']}" if d.get("ratio_looks_like") else ""
    if d["error"] == "inf":
        size = ""
    else:
        size = f": error {_number(d['error'])}, bound {_number(d['bound'])}"
    note = f"; {_short(d['note'])}" if d.get("note") else ""
    seen = f", on rank {', '.join(map(str, d['ranks']))}" if d.get("ranks") else ""
    return f"{what}, {when}{size}{ratio}{seen}{note}"


def page(made: Certificate) -> str:
    """Return the certificate as HTML."""
    versions = ", ".join(f"{name} {value}" for name, value in made["versions"].items())
    configuration = made["configuration"]
    parts = [
        f"<h1>megaprec parity: {escape(configuration['file'])}</h1>",
        f'<p class="verdict {CLASS[made["verdict"]]}">{escape(conclusion(made))}</p>',
        f"<p>{escape(configuration['model'])}. Run <code>sha256 "
        f"{configuration['sha256']}</code>, as compared "
        f"<code>{configuration['sha256_as_compared']}</code>. {escape(versions)}.</p>",
        "<h2>Layouts</h2>",
        _layouts(made["layouts"]),
        *(_trouble_html(one) for one in made["layouts"] if one["verdict"] != PROVEN),
        "<h2>Quantities</h2>",
        *(_quantities(one) for one in made["layouts"] if one["quantities"]),
    ]
    if made["changes"]:
        rows = [(key, one, other) for key, (one, other) in made["changes"].items()]
        parts += ["<h2>Made small</h2>", _table(("key", "from", "to"), rows)]
    if aside := list(_aside(made)):
        parts += ["<h2>Not tried</h2>", _table(("what", "why"), aside)]
    if made["rounding"]:
        names = ", ".join(f"{name} ({count})" for name, count in made["rounding"].items())
        parts.append(
            "<p>Elements whose gradient may be nothing but rounding: they need not be as "
            "near, and are not counted as "
            f"zeros: {escape(names)}.</p>"
        )
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>megaprec '
        "parity</title>"
        f"<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _layouts(layouts: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (one["layout"], one["precision"], *(cell for cell, _ in _cells(one)), verdict(one))
        for one in layouts
    ]
    return _table(("layout", "precision", *NUMBERS.values(), "exact", "verdict"), rows)


def _trouble_html(one: Mapping[str, Any]) -> str:
    lines = "".join(
        f"<tr><td>{escape(word)}</td><td>{escape(text)}</td></tr>" for word, text in _trouble(one)
    )
    heading = (
        f"<h2 class='{CLASS[one['verdict']]}'>{escape(one['layout'])}, "
        f"{escape(one['precision'])}</h2>"
    )
    rows = [(told(d),) for d in one.get("differing", [])]
    if one.get("num_differing", 0) > len(rows):
        more = f"<p>{one['num_differing']} in all.</p>"
    else:
        more = ""
    return f"{heading}<table>{lines}</table>{_way(one)}{_table(('what differs',), rows) if rows else ''}{more}"


def _way(one: Mapping[str, Any]) -> str:
    """Return the step of the first difference as a row of its stations, with the first that differs
    marked."""
    way = one.get("way", [])
    shown = []
    first = next((n for n, stop in enumerate(way) if stop["verdict"] == WRONG), -1)
    for n, stop in enumerate(way):
        mark = f"{CLASS[stop['verdict']]}{' first' if n == first else ''}"
        back = "← " if stop["phase"] == "backward" else ""
        title = f"{stop['phase']}, error {_number(stop['error'])}"
        shown.append(
            f'<li class="{mark}" title="{escape(title)}">{back}{escape(stop["name"])}</li>'
        )
    if way:
        heading = f"<p>Step {one['first']['step']}, from its first activation to its update:</p>"
    else:
        heading = ""
    return f'{heading}<ol class="way">{"".join(shown)}</ol>' if way else ""


def _quantities(one: Mapping[str, Any]) -> str:
    rows = [
        (
            name,
            q["verdict"],
            str(q["compared"]),
            str(q["failed"]),
            _number(q["error"]),
            _number(q["bound"]),
            q["name"],
            str(q["step"]),
            q.get("why", ""),
        )
        if "compared" in q
        else (name, q["verdict"], *[""] * 6, q["why"])
        for name, q in one["quantities"].items()
    ]
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
    summary = f"{escape(one['layout'])}, {escape(one['precision'])}: {one['verdict']}"
    return f"<details><summary>{summary}</summary>{_table(head, rows)}</details>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    numeric = {n for n in range(len(head)) if rows and all(_is_number(row[n]) for row in rows)}
    marks = [' class="n"' if n in numeric else "" for n in range(len(head))]
    top = "".join(f"<th{mark}>{escape(name)}</th>" for mark, name in zip(marks, head, strict=True))
    lines = [
        "".join(f"<td{mark}>{escape(cell)}</td>" for mark, cell in zip(marks, row, strict=True))
        for row in rows
    ]
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><tr>{top}</tr>\n{body}</table></div>'


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
