"""Checks of the built site: where its links lead, and what its pages would fetch."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FETCHED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}
"""Elements whose file a browser fetches with the page -> the attribute that names it."""


@dataclass
class PageLinks(HTMLParser):
    """What one page links to and fetches, and the anchors that it has."""

    links: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep what an element names."""
        values = {name: value for name, value in attrs if value is not None}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if FETCHED.get(tag) in values:
            self.fetched.append(values[FETCHED[tag]])


def problems_of(site: Path) -> list[str]:
    """Return a line for each link and anchor of the site that leads nowhere, and for each file
    that a page would fetch from elsewhere."""
    pages = {page.resolve(): _links_of(page) for page in sorted(site.rglob("*.html"))}
    return [
        f"{page.relative_to(site.resolve())}: {problem}"
        for page, links in pages.items()
        for problem in _problems_of_page(page, links, pages)
    ]


def _links_of(page: Path) -> PageLinks:
    links = PageLinks()
    links.feed(page.read_text(encoding="utf-8"))
    return links


def _problems_of_page(page: Path, links: PageLinks, pages: dict[Path, PageLinks]) -> Iterator[str]:
    for target in links.fetched:
        if urlsplit(target).netloc:
            yield f"fetches {target} from elsewhere"
    for target in links.links + links.fetched:
        parts = urlsplit(target)
        if parts.scheme or parts.netloc:
            continue
        file = (page.parent / unquote(parts.path)).resolve() if parts.path else page
        if not file.is_file():
            yield f"links to {target}, which is not there"
            continue
        anchor = unquote(parts.fragment)
        if anchor and file in pages and anchor not in pages[file].anchors:
            yield f"links to {target}, an anchor that is not there"
