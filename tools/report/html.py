"""HTML of a report. Every text from a run is escaped here, and nowhere else."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Html:
    """Text that is HTML already. All other text is escaped where it is put into a page."""

    text: str


Text = Html | str | int | float
LONGEST = 4000  # characters of a text that a page shows


def html(part: Text) -> str:
    """Return a part of a page as HTML."""
    if isinstance(part, Html):
        return part.text
    return escape(_shorten(str(part)))


def paragraph(*parts: Text) -> Html:
    """Return a paragraph."""
    return Html(f"<p>{''.join(map(html, parts))}</p>")


def facts(rows: Sequence[tuple[str, Text]]) -> Html:
    """Return names with values."""
    items = list[str]()
    for name, value in rows:
        items.append(f"<div><dt>{html(name)}</dt><dd>{html(value)}</dd></div>")
    return Html(f"<dl>{''.join(items)}</dl>")


def table(head: Sequence[str], rows: Sequence[Sequence[Text]], max_rows: int = 200) -> Html:
    """Return a table of at most `max_rows` rows, the last ones.

    On a narrow screen each cell is a line with its heading.
    """
    head_cells = "".join(f"<th>{html(name)}</th>" for name in head)
    body = "".join(_table_row(head, row) for row in rows[-max_rows:])
    left_out = ""
    if len(rows) > max_rows:
        left_out = f"<p>{len(rows) - max_rows:,} earlier ones are left out.</p>"
    return Html(f'{left_out}<div class="scroll"><table><tr>{head_cells}</tr>{body}</table></div>')


def _table_row(head: Sequence[str], row: Sequence[Text]) -> str:
    cells = [
        f'<td data-head="{html(name)}">{html(cell)}</td>'
        for name, cell in zip(head, row, strict=True)
    ]
    return f"<tr>{''.join(cells)}</tr>"


def folded(summary: str, *parts: Html) -> Html:
    """Return parts that are shown on demand."""
    content = "".join(part.text for part in parts)
    return Html(f"<details><summary>{html(summary)}</summary>{content}</details>")


def _shorten(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."
