"""The page of a report: one HTML file without scripts, links or files of others, for wide and
narrow, light and dark screens.
"""

from html import escape

from tools.report.html import html
from tools.report.run import Run
from tools.report.sections import SECTIONS

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
STYLE = """
:root {
  color-scheme: light dark; --ink: #24292f; --faint: #57606a; --page: #ffffff; --line: #d0d7de;
  --soft: #f3f5f7; --main: #1f5fa8; --other0: #c96a00; --other1: #22874a; --other2: #8250c4;
  --other3: #7a5230; --red: #cf222e
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e6edf3; --faint: #9da7b1; --page: #0d1117; --line: #30363d; --soft: #161b22;
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
.key { white-space: nowrap; margin-left: .7rem; font-size: 12px; color: var(--faint) }
.key i {
  display: inline-block; width: 14px; height: 3px; margin-right: 4px; vertical-align: middle;
  background: var(--main)
}
.key i.raw { opacity: .35 }
.key i.skip { background: var(--red) }
.key i.resumed { background: var(--faint) }
.key i.other0 { background: var(--other0) }
.key i.other1 { background: var(--other1) }
.key i.other2 { background: var(--other2) }
.key i.other3 { background: var(--other3) }
svg { width: 100%; height: auto; display: block }
svg text { font: 12px system-ui, sans-serif; fill: var(--faint) }
svg path { fill: none; stroke: var(--main); stroke-width: 1.7; stroke-linejoin: round }
svg .raw { opacity: .3; stroke-width: 1 }
svg .grid { stroke: var(--line); stroke-width: .7 }
svg .axis { stroke: var(--faint); stroke-width: 1 }
svg .skip { stroke: var(--red); stroke-width: 1.5 }
svg .resumed { stroke: var(--faint); stroke-dasharray: 2 3; stroke-width: 1 }
svg .other0 { stroke: var(--other0) }
svg .other1 { stroke: var(--other1) }
svg .other2 { stroke: var(--other2) }
svg .other3 { stroke: var(--other3) }
img.wide { min-width: 700px; width: 100%; background: #ffffff; border-radius: 4px }
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
  .key { margin-left: 0; margin-right: .7rem }
  figcaption b { display: block }
}
"""


def page(run: Run) -> str:
    """Return the page of a run."""
    # Numbered by what is there, so that the anchors have no gaps.
    links = list[str]()
    sections = list[str]()
    for title, make_section in SECTIONS:
        content = make_section(run)
        if content is None:
            continue
        anchor = f"s{len(sections)}"
        links.append(f'<a href="#{anchor}">{html(title)}</a>')
        heading = f"<h2>{html(title)}</h2>"
        sections.append(f'<section id="{anchor}">{heading}\n{content.text}</section>')
    name = html(run.name)
    body = "\n".join(sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{name}</title>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">'
        f"<style>{STYLE}</style></head>\n"
        f"<body><h1>{name}</h1><nav>{''.join(links)}</nav>\n{body}\n</body></html>\n"
    )
