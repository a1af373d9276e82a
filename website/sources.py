"""The sources of the documentation site: the pages of docs/, those made of the code, and menus.

A page of docs/ is read on a Git host too, where a link to `../CONTRIBUTING.md` or to a test leads
to the file. In the site such a link leads to the page that the file has here (`PAGES`), or to the
copy of an example, or is the file's path and no link.
"""

import posixpath
import re
import shutil
from pathlib import Path

from tools.commands.table import GROUPS
from website.api import DOORS, api_page
from website.glossary import with_anchors, with_links, words_of
from website.reference import command_parsers, commands_page, keys_page, page_of_group

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "project/README.md",
    "CONTRIBUTING.md": "project/CONTRIBUTING.md",
    "CHANGELOG.md": "project/CHANGELOG.md",
    "CODE_OF_CONDUCT.md": "project/CODE_OF_CONDUCT.md",
    "SECURITY.md": "project/SECURITY.md",
    "tests/importing/public_scripts.md": "project/public_scripts.md",
}
"""Files of the repository outside docs/ that are pages -> their paths in the site."""
GLOSSARY = "docs/glossary.md"
INDEX = "docs/README.md"
# indexes of folders of pages, each with a menu of its own
FOLDERS = ("docs/design/README.md", "docs/proofs/README.md")
LOOK_UP = "To look up"
EXAMPLES = "examples"
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def write_sources(folder: Path) -> None:
    """Write all sources of the site into a new folder.

    Raises ValueError for a link to a file that the repository has not.
    """
    for source, path in sources().items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".md":
            target.write_text(_page(source, path), encoding="utf-8")
        else:
            shutil.copyfile(source, target)
    for path, text in made_pages().items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")


def sources() -> dict[Path, str]:
    """Return the files of the repository that are in the site, with their paths there."""
    files = [file for file in sorted((ROOT / "docs").rglob("*")) if file.is_file()]
    files += [file for file in sorted((ROOT / EXAMPLES).iterdir()) if file.is_file()]
    files += [ROOT / file for file in PAGES]
    placed = dict[Path, str]()
    for file in files:
        path = place_of(str(file.relative_to(ROOT)))
        assert path is not None
        placed[file] = path
    return placed


def made_pages() -> dict[str, str]:
    """Return the pages made of the code as Markdown, by their paths in the site."""
    pages = {"keys.md": keys_page()}
    parsers = command_parsers()
    for group in GROUPS:
        pages[page_of_group(group)] = commands_page(group, parsers)
    for door in DOORS:
        pages[f"api/{door}.md"] = api_page(door)
    return pages


def place_of(file: str) -> str | None:
    """Return the path in the site of a file of the repository, or None if it is not there."""
    if file == INDEX:
        return "index.md"
    if file in PAGES:
        return PAGES[file]
    folder, _, rest = file.partition("/")
    if folder == "docs":
        return rest
    return file if folder == EXAMPLES else None


def _page(source: Path, path: str) -> str:
    """Return a page of the repository as it is in the site."""
    file = str(source.relative_to(ROOT))
    text = with_links_of_the_site(source.read_text(encoding="utf-8"), file, path)
    if file == GLOSSARY:
        text = with_anchors(text)
    elif file.startswith("docs/") and file not in (INDEX, *FOLDERS, "docs/modules.md"):
        words = words_of((ROOT / GLOSSARY).read_text(encoding="utf-8"))
        text = with_links(
            text, words, posixpath.relpath("glossary.md", posixpath.dirname(path) or ".")
        )
    if file == INDEX:
        text += menus(source.read_text(encoding="utf-8"))
    if file in FOLDERS:
        # a menu within the menu: the pages of the folder are shown where its index is open
        folder = posixpath.dirname(file)
        text += _menu("", listed_pages(source.read_text(encoding="utf-8"), folder))
    return text


def with_links_of_the_site(markdown: str, file: str, path: str) -> str:
    """Return a page with its links as they are in the site.

    file: its path in the repository. path: its path in the site. Raises ValueError for a link to a
    file that the repository has not.
    """

    def replaced(found: re.Match[str]) -> str:
        target, mark, anchor = found["target"].partition("#")
        if not target or re.match(r"\w+:", target):
            return found[0]
        linked = posixpath.normpath(posixpath.join(posixpath.dirname(file), target))
        if not (ROOT / linked).exists():
            raise ValueError(f"{file} links to {found['target']}, which is not in the repository")
        place = place_of(linked)
        if place is None:
            return _without_link(found["text"], linked)
        link = posixpath.relpath(place, posixpath.dirname(path) or ".")
        return f"{found['picture']}[{found['text']}]({link}{mark}{anchor})"

    parts = FENCED.split(markdown)
    prose = [part if part.startswith("```") else LINK.sub(replaced, part) for part in parts]
    return "".join(prose)


def _without_link(text: str, file: str) -> str:
    """Return the words of a link to a file that is not in the site, with the file's path."""
    return f"`{file}`" if text.strip("`") == file else f"{text} (`{file}`)"


def menus(index: str) -> str:
    """Return the menus of the site: one for each table of pages in the index, in its order. The
    menu `LOOK_UP` has the pages made of the code too."""
    text = ""
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        pages = listed_pages(body, "docs")
        if title == LOOK_UP:
            pages = [*made_pages_in_order(), *pages]
        if pages:
            text += _menu(title, pages)
    return text


def listed_pages(text: str, folder: str) -> list[str]:
    """Return the pages that the rows of tables link to, as absolute paths in the site.

    folder: that of the page with the tables, in the repository.
    """
    linked = re.findall(r"^\| \[[^]]+\]\(([\w./-]+\.md)\)", text, re.MULTILINE)
    places = [place_of(posixpath.normpath(f"{folder}/{page}")) for page in linked]
    return [f"/{place}" for place in places if place]


def made_pages_in_order() -> list[str]:
    """Return the absolute paths of the pages made of the code, in the order of the menu."""
    commands = map(page_of_group, GROUPS)
    return ["/keys.md", *(f"/{page}" for page in commands), *(f"/api/{door}.md" for door in DOORS)]


def _menu(caption: str, pages: list[str]) -> str:
    captions = [f":caption: {caption}"] if caption else []
    lines = ["", "```{toctree}", ":hidden:", *captions, "", *pages, "```", ""]
    return "\n".join(lines)
