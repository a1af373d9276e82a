"""HTML of a report. Every text from a run is escaped here, and nowhere else."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Html:
    """Text that is HTML already. All other text is escaped where it is put into a page."""

    text: str


Text = Html | str | int | float


def html(part: Text) -> str:
    """Return a part of a page as HTML."""
    return part.text if isinstance(part, Html) else escape(_cut(str(part)))


def paragraph(*parts: Text) -> Html:
    """Return a paragraph."""
    return Html(f"<p>{''.join(map(html, parts))}</p>")


def facts(rows: Sequence[tuple[str, Text]]) -> Html:
    """Return names with values."""
    lines = (f"<div><dt>{html(name)}</dt><dd>{html(value)}</dd></div>" for name, value in rows)
    return Html(f"<dl>{''.join(lines)}</dl>")


def table(head: Sequence[str], rows: Sequence[Sequence[Text]], most: int = 200) -> Html:
    """Return a table of at most `most` rows, the last ones. On a narrow screen each cell is a line
    with its heading."""
    top = "".join(f"<th>{html(name)}</th>" for name in head)
    lines = (
        "".join(
            f'<td data-head="{html(name)}">{html(cell)}</td>'
            for name, cell in zip(head, row, strict=True)
        )
        for row in rows[-most:]
    )
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    left_out = f"<p>{len(rows) - most:,} earlier ones are left out.</p>" if len(rows) > most else ""
    return Html(f'{left_out}<div class="scroll"><table><tr>{top}</tr>{body}</table></div>')


def folded(summary: str, *parts: Html) -> Html:
    """Return parts that are shown on demand."""
    return Html(f"<details><summary>{html(summary)}</summary>{''.join(map(html, parts))}</details>")


def _cut(text: str) -> str:
    return text if len(text) <= 4000 else f"{text[:4000]} ..."
