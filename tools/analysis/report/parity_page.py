"""The HTML page of a certificate of parity."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tools.analysis.report.page import Html, Text, document, folded, html, paragraph, table
from tools.verify.parity.certificate import NOT_TRIED, PROVEN, WRONG, Certificate
from tools.verify.parity.summary import (
    NUMBERS,
    conclusion,
    describe_difference,
    details_of,
    format_error,
    number_cells,
    untried_parts,
    verdict,
)

CSS_CLASSES = {PROVEN: "proven", WRONG: "wrong", NOT_TRIED: "untried"}


def page(certificate: Certificate) -> str:
    """Return the certificate as HTML."""
    configuration = certificate["configuration"]
    versions = ", ".join(f"{name} {value}" for name, value in certificate["versions"].items())
    digests = (
        f"Run sha256 {configuration['sha256']}, as compared {configuration['sha256_as_compared']}."
    )
    verdict_class = CSS_CLASSES[certificate["verdict"]]
    conclusion_text = html(conclusion(certificate))
    parts = [
        Html(f'<p class="verdict {verdict_class}">{conclusion_text}</p>'),
        paragraph(f"{configuration['model']}. {digests} {versions}."),
        *_section("Layouts", _layouts_table(certificate["layouts"])),
    ]
    for layout in certificate["layouts"]:
        if layout["verdict"] != PROVEN:
            parts += _layout_details(layout)
    # layouts that were not run have no quantities
    tried = [layout for layout in certificate["layouts"] if layout["quantities"]]
    parts += _section("Quantities", *map(_quantities_table, tried))
    changes = list[Sequence[Text]]()
    for key, (old, new) in certificate["changes"].items():
        changes.append((key, old, new))
    if changes:
        parts += _section("Made small", table(("key", "from", "to"), changes))
    untried = list(untried_parts(certificate))
    if untried:
        parts += _section("Not tried", table(("what", "why"), untried))
    if certificate["rounding"]:
        counts = certificate["rounding"].items()
        names = ", ".join(f"{name} ({count})" for name, count in counts)
        text = (
            "Elements whose gradient may be nothing but rounding: they need not be as near, and "
            f"are not counted as zeros: {names}."
        )
        parts.append(paragraph(text))
    return document(f"megaprec parity: {configuration['file']}", *parts)


def _section(title: str, *parts: Html) -> Iterator[Html]:
    yield Html(f"<h2>{html(title)}</h2>")
    yield from parts


def _layouts_table(layouts: Sequence[Mapping[str, Any]]) -> Html:
    rows: list[Sequence[Text]] = []
    for layout in layouts:
        cells = [cell.text for cell in number_cells(layout)]
        rows.append([layout["layout"], layout["precision"], *cells, verdict(layout)])
    head = ("layout", "precision", *NUMBERS.values(), "exact", "verdict")
    return table(head, rows, len(rows))


def _layout_details(layout: Mapping[str, Any]) -> Iterator[Html]:
    """Yield what is known of a layout that is not proven: where the first difference arises, and
    what differs."""
    title = html(f"{layout['layout']}, {layout['precision']}")
    yield Html(f'<h2 class="{CSS_CLASSES[layout["verdict"]]}">{title}</h2>')
    yield table(("", "detail"), list(details_of(layout)))
    # ranks that hang or fail leave no record of a step
    if layout.get("way"):
        yield paragraph(f"Step {layout['first']['step']}, from its first activation to its update:")
        yield _stations_list(layout["way"])
    rows = [(describe_difference(difference),) for difference in layout.get("differing", [])]
    if rows:
        yield table(("what differs",), rows)
    if layout.get("num_differing", 0) > len(rows):
        yield paragraph(f"{layout['num_differing']} in all.")


def _stations_list(stations: Sequence[Mapping[str, Any]]) -> Html:
    """Return a step as a row of its stations, with the first that differs marked."""
    items: list[str] = []
    has_difference = False
    for station in stations:
        css_class = CSS_CLASSES[station["verdict"]]
        # later stations differ because this one does
        if station["verdict"] == WRONG and not has_difference:
            css_class += " first"
            has_difference = True
        # the way leads back through the modules
        arrow = "← " if station["phase"] == "backward" else ""
        title = html(f"{station['phase']}, error {format_error(station['error'])}")
        item = f'<li class="{css_class}" title="{title}">{arrow}{html(station["name"])}</li>'
        items.append(item)
    return Html(f'<ol class="way">{"".join(items)}</ol>')


def _quantities_table(layout: Mapping[str, Any]) -> Html:
    """Return the quantities of a layout as a table that is folded up."""
    rows = [_quantity_row(name, quantity) for name, quantity in layout["quantities"].items()]
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
    summary = f"{layout['layout']}, {layout['precision']}: {layout['verdict']}"
    return folded(summary, table(head, rows))


def _quantity_row(name: str, quantity: Mapping[str, Any]) -> list[Text]:
    """Return the cells of a quantity, empty where it was not tried."""
    # not tried: there are no numbers
    if "compared" not in quantity:
        empty_cells = [""] * 6
        return [name, quantity["verdict"], *empty_cells, quantity["why"]]
    return [
        name,
        quantity["verdict"],
        quantity["compared"],
        quantity["failed"],
        format_error(quantity["error"]),
        format_error(quantity["bound"]),
        quantity["name"],
        quantity["step"],
        quantity.get("why", ""),
    ]
