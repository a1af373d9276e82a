"""A certificate of parity in words and tables, for a terminal."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.markup import escape as escape_markup
from rich.table import Table

from tools.verify.parity.certificate import NOT_TRIED, PROVEN, WRONG, Certificate

EQUAL_BITS = "equal bits"
COLOR = {PROVEN: "green", WRONG: "red", NOT_TRIED: "yellow"}  # in a terminal

# shown as errors; all other quantities must be exact, and share a column
NUMBERS = {
    "loss": "loss",
    "gradient": "gradients",
    "gradient norm": "norm",
    "weights": "weights",
    "moments": "moments",
}


def show(certificate: Certificate, console: Console) -> None:
    """Print the layouts as a table, and the details of those that differ."""
    if certificate["changes"]:
        console.print(_changes_table(certificate))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("layout", "precision", *NUMBERS.values(), "exact", "verdict"):
        # names of quantities, of which there may be many
        table.add_column(column, no_wrap=column != "exact")
    for layout_entry in certificate["layouts"]:
        color = COLOR[layout_entry["verdict"]]
        table_cells: list[str] = []
        for cell in number_cells(layout_entry):
            table_cells.append(f"[red]{cell.text}[/]" if cell.is_bad else cell.text)
        result = f"[{color}]{verdict(layout_entry)}[/]"
        table.add_row(
            escape_markup(layout_entry["layout"]), layout_entry["precision"], *table_cells, result
        )
    console.print(table)
    for layout_entry in certificate["layouts"]:
        if layout_entry["verdict"] != PROVEN:
            console.print(
                f"[bold]{escape_markup(layout_entry['layout'])}, {layout_entry['precision']}[/]"
            )
            for detail_label, sentence in details_of(layout_entry):
                console.print(
                    f"  {detail_label:13}{escape_markup(sentence)}", highlight=False, soft_wrap=True
                )
    if "oracle" in certificate:
        console.print(f"oracle: {escape_markup(certificate['oracle'])}", highlight=False)
    for part, reason in untried_parts(certificate):
        line = f"not tried: {escape_markup(part)} ({escape_markup(reason)})"
        console.print(line, highlight=False, soft_wrap=True)
    console.print(conclusion(certificate), highlight=False, soft_wrap=True)


def verdict(layout_entry: Mapping[str, Any]) -> str:
    """Return the verdict on a layout, EQUAL_BITS if it is proven without any tolerance."""
    return EQUAL_BITS if layout_entry.get("equal_bits") else str(layout_entry["verdict"])


def untried_parts(certificate: Certificate) -> Iterator[tuple[str, str]]:
    """Yield (part, reason) that was not tried: of the run, of one layout, or a quantity in every
    layout."""
    yield from ((part, reason) for part, reason in certificate["not_tried"])
    by_precision: dict[str, list[Mapping[str, Any]]] = {}
    # a run may lack one key in many layouts, as a key of tensor ranks in all that have one
    layouts_without: dict[tuple[str, str], list[str]] = {}
    for layout_entry in certificate["layouts"]:
        precision = layout_entry["precision"]
        for key in layout_entry["left_out"]:
            layouts_without.setdefault((key, precision), []).append(layout_entry["layout"])
        if layout_entry["quantities"]:
            by_precision.setdefault(precision, []).append(layout_entry["quantities"])
    for (key, precision), names in layouts_without.items():
        where = f"{'; '.join(names)} in {precision}"
        yield f"parallel.{key}", f"{where}: the sizes that were compared do not allow it"
    for precision, layouts in by_precision.items():
        for quantity, first in layouts[0].items():
            verdicts = {quantities.get(quantity, {}).get("verdict") for quantities in layouts}
            # tried in one layout is tried
            if verdicts == {NOT_TRIED}:
                yield f"{quantity} in {precision}", first["why"]


def conclusion(certificate: Certificate) -> str:
    """Return the result in a sentence."""
    layouts = certificate["layouts"]
    verdict_counts = Counter(layout_entry["verdict"] for layout_entry in layouts)
    tried = verdict_counts[PROVEN] + verdict_counts[WRONG]
    untried_text = f"; {verdict_counts[NOT_TRIED]} not tried" if verdict_counts[NOT_TRIED] else ""
    num_equal_bits = sum(bool(layout_entry.get("equal_bits")) for layout_entry in layouts)
    bits = f", {num_equal_bits} of them in every bit" if num_equal_bits else ""
    extent = (
        f"{certificate['tensors']} tensors, {certificate['steps']} steps, of which "
        f"{certificate['applied']} applied"
    )
    beside = "the oracle" if "oracle" in certificate else "one process"
    if not tried:
        return (
            f"NOTHING is proven: none of {len(layouts)} comparisons with {beside} could be "
            f"tried ({extent})"
        )
    if verdict_counts[PROVEN] == tried:
        return (
            f"all {tried} comparisons agree with {beside}{bits}: {extent} and "
            f"{certificate['clipped']} clipped{untried_text}"
        )
    wrong = verdict_counts[WRONG]
    return f"{wrong} of {tried} comparisons do NOT agree with {beside} ({extent}){untried_text}"


def _changes_table(certificate: Certificate) -> Table:
    table = Table("made small", "from", "to", box=box.SIMPLE_HEAD)
    for key, (old, new) in certificate["changes"].items():
        table.add_row(
            escape_markup(key), escape_markup(_shorten(old)), escape_markup(_shorten(new))
        )
    return table


def _shorten(sentence: str) -> str:
    return sentence if len(sentence) <= 60 else f"{sentence[:57]}..."


class _Cell(NamedTuple):
    """A cell of the table of layouts."""

    text: str
    is_bad: bool = False


def number_cells(layout_entry: Mapping[str, Any]) -> list[_Cell]:
    """Return the cells of each column between precision and verdict."""
    quantities = layout_entry["quantities"]
    table_cells: list[_Cell] = []
    for quantity_name in NUMBERS:
        quantity = quantities.get(quantity_name)
        if quantity is None:
            table_cells.append(_Cell(""))
        elif quantity["verdict"] == NOT_TRIED:
            table_cells.append(_Cell("not tried"))
        else:
            table_cells.append(_Cell(format_error(quantity["error"]), quantity["failed"] > 0))
    # these have no error to show: any difference is one too many
    exact_quantities = [
        quantity_name for quantity_name in quantities if quantity_name not in NUMBERS
    ]
    wrong_quantities = [
        quantity_name
        for quantity_name in exact_quantities
        if quantities[quantity_name]["verdict"] == WRONG
    ]
    if wrong_quantities:
        table_cells.append(_Cell(", ".join(wrong_quantities), is_bad=True))
    else:
        table_cells.append(_Cell("yes" if exact_quantities else ""))
    return table_cells


def format_error(error: float | str) -> str:
    """Return an error in one digit; one that is infinite is a word already."""
    if isinstance(error, str):
        return error
    if error == 0:
        return "0"
    return f"{error:.0e}"


def details_of(layout_entry: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (label, text) of a layout that is not proven."""
    if layout_entry["verdict"] == NOT_TRIED:
        yield "not tried", layout_entry["why"]
        return
    first = layout_entry["first"]
    # the places of ranks that hang have lines of their own
    place = "" if "ranks_at" in layout_entry else first["place"]
    yield "arises in", f"{first['phase']}: {place}".rstrip()
    if "note" in first and "quantity" not in first:
        yield "", first["note"]
    for position in layout_entry.get("ranks_at", ()):
        yield "", position
    # a hang or a failure has no difference
    for detail_label in ("first", "worst"):
        if "quantity" in layout_entry.get(detail_label, ()):
            yield detail_label, describe_difference(layout_entry[detail_label])
    yield "likely cause", layout_entry["likely_cause"]


def describe_difference(difference: Mapping[str, Any]) -> str:
    """Return a difference in words."""
    sentence = difference["quantity"]
    if difference["name"]:
        sentence += f" {difference['name']}"
    sentence += f", step {difference['step']}" if difference["step"] else ", before the first step"
    if difference["error"] != "inf":  # values that must be equal have no size of an error
        error = format_error(difference["error"])
        sentence += f": error {error}, bound {format_error(difference['bound'])}"
    if difference.get("ratio_looks_like"):
        sentence += f", ratio {difference['ratio_looks_like']}"
    if difference.get("ranks"):
        sentence += f", on rank {', '.join(map(str, difference['ranks']))}"
    if difference.get("note"):
        sentence += f"; {_shorten(difference['note'])}"
    return sentence
