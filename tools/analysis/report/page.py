"""HTML of pages: one file without scripts, links or files of others, for wide and narrow, light and
dark screens.

Every text from a run is escaped here, and nowhere else.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

# No script runs and nothing is loaded, whatever a run has written into its records.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
STYLE = """
:root {
  color-scheme: light dark; --ink: #24292f; --faint: #57606a; --page: #ffffff; --line: #d0d7de;
  --main: #1f5fa8; --other0: #c96a00; --other1: #22874a; --other2: #8250c4; --other3: #7a5230;
  --red: #cf222e
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e6edf3; --faint: #9da7b1; --page: #0d1117; --line: #30363d;
    --main: #6cb0ff; --other0: #ffa64d; --other1: #56d38a; --other2: #bc9cff; --other3: #d2a679;
    --red: #ff7b72
  }
}
* { box-sizing: border-box }
body {
  font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 1100px; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere
}
h1 { font-size: 1.4rem; margin: .5rem 0 }
h2 {
  font-size: 1.1rem; margin: 2rem 0 .5rem; border-bottom: 1px solid var(--line);
  padding-bottom: .2rem
}
nav { font-size: 13px; color: var(--faint) }
nav a { color: var(--main); margin-right: .8rem; white-space: nowrap }
dl {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(200px, 1fr)); gap: .5rem 1.2rem;
  margin: .5rem 0
}
dt { font-size: 12px; color: var(--faint) }
dd { margin: 0; font-variant-numeric: tabular-nums; font-weight: 600 }
.scroll { overflow-x: auto }
pre { white-space: pre-wrap; margin: 0; font-size: 12px }
table { border-collapse: collapse; font-size: 13px; width: 100% }
td, th {
  text-align: left; vertical-align: top; padding: .3rem .9rem .3rem 0;
  border-bottom: 1px solid var(--line); overflow-wrap: break-word; max-width: 40rem
}
th { color: var(--faint); font-weight: 500 }
td { font-variant-numeric: tabular-nums }
.figures {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr));
  gap: 1rem
}
figure { margin: 0 }
figcaption { font-size: 13px }
svg { width: 100%; height: auto; display: block }
img.wide { min-width: 700px; width: 100%; background: #ffffff; border-radius: 4px }
.verdict { font-size: 1.2rem; font-weight: 600 }
.proven { color: var(--other1) } .wrong { color: var(--red) } .untried { color: var(--other0) }
ol.way { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: 3px }
ol.way li {
  font-size: 12px; padding: 1px 6px; border-radius: 4px; border: 1px solid currentColor
}
ol.way li.first { outline: 2px solid var(--red); font-weight: 600 }
details { margin: .8rem 0 }
summary { cursor: pointer; color: var(--main) }
@media (max-width: 640px) {
  dl { grid-template-columns: 1fr 1fr }
  table, tbody, tr, td { display: block }
  th { display: none }
  tr { border-bottom: 1px solid var(--line); padding: .4rem 0 }
  td { border: 0; padding: .05rem 0; max-width: none; overflow-wrap: anywhere }
  td::before { content: attr(data-head) ": "; color: var(--faint) }
  td:empty { display: none }
  figcaption b { display: block }
}
"""


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
    shown = "".join(map(_printable, _shorten(str(part))))
    return escape(shown)


def _printable(sign: str) -> str:
    """Return a sign; one that controls a terminal, or is half a sign, as an escape sequence."""
    is_shown = sign in "\n\t" or unicodedata.category(sign) not in ("Cc", "Cs")
    return sign if is_shown else sign.encode("unicode_escape").decode()


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
    # the newest rows are those that a reader looks for
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


def document(title: str, *parts: Html) -> str:
    """Return a page of these parts."""
    body = "\n".join(part.text for part in parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{html(title)}</title>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">'
        f"<style>{STYLE}</style></head>\n"
        f"<body><h1>{html(title)}</h1>\n{body}\n</body></html>\n"
    )
