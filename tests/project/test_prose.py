"""Docstrings and pages are plain sentences that stand alone.

A docstring that begins with "What", "Whether" or "Of" is half a sentence; its reader must find the
other half. The words of PRIVATE are never right here, because the field has a usual word for each.
`python -m tests.project.test_prose` counts the offences of all rooms and pages.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.project.modules_page import PACKAGES, ROOT

BEGINNINGS = (
    "What",
    "Whose",
    "Of",
    "Whether",
    "Who",
    "Whom",
    "Which",
    "How",
    "Why",
    "Where",
    "Those",
    "The same",
)
PRIVATE = {
    "amid": "during",
    "foretold": "predicted",
    "made again": "recomputed",
    "makes again": "recomputes",
    "by halves": "in part",
    "hangs? on": "depends on",
    "how manieth": "index",
    "is told from": "differs from",
    "tells? apart": "distinguishes",
    "told apart": "distinguished",
    "nobody": "no rank, no process, no one reader: name the subject",
    "of one's own": "its own",
    "the latter again": "name it",
    "(?:had|has|have) better": "should",
    "comes? to the same": "has the same result",
    "added up": "accumulated",
    "adds up in": "is accumulated in",
    "sums over dp": "gradient reduction",
    "takes? up": "loads, resumes",
    "taken up": "loaded, resumed",
    "wide weights?": "FP32 weights",
    "all the same": "anyway",
    "for nothing": "in vain: say what is lost",
}
"""A regular expression of words that are never right -> the usual words."""

LONGEST = 125  # characters of a line of prose
# lists of modules and of changes, one line each
WIDER = ("code.md", "modules.md", "CHANGELOG.md")
OUTSIDE = ("README.md", "CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in OUTSIDE)])


def rooms() -> list[str]:
    """Return the folders of the packages that hold modules."""
    files = (file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return sorted({str(file.parent.relative_to(ROOT)) for file in files})


def docstrings(file: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the docstring of a module and of each of its classes and functions."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield getattr(node, "name", "module"), text


def private_words(text: str) -> list[str]:
    """Return the private words in a text, each with the usual ones."""
    found = (
        (word, usual)
        for word, usual in PRIVATE.items()
        if re.search(rf"\b{word}\b", text, re.IGNORECASE)
    )
    return [f'"{word}": {usual}' for word, usual in found]


def begins_badly(text: str) -> bool:
    """Return True if the text begins with one of BEGINNINGS."""
    return re.match(rf"(?:{'|'.join(BEGINNINGS)})\b", text) is not None


def offences(room: str) -> list[str]:
    """Return a line for each docstring of a room with a bad beginning, and for each private
    word."""
    found = []
    for file in sorted((ROOT / room).glob("*.py")):
        for name, text in docstrings(file):
            place = f"{file.relative_to(ROOT)}: {name}"
            found += [f"{place} begins with {text.split()[0]}"] if begins_badly(text) else []
            found += [f"{place} has {problem}" for problem in private_words(text)]
    return found


def page_offences(page: Path) -> list[str]:
    """Return a line for each private word of a page of documentation, code blocks included."""
    lines = enumerate(page.read_text().splitlines(), 1)
    return [
        f"{page.name}:{number} has {problem}"
        for number, line in lines
        for problem in private_words(line)
    ]


@pytest.mark.parametrize("room", rooms())
def test_every_docstring_of_a_room_is_a_plain_sentence(room: str) -> None:
    assert offences(room) == []


def test_docstrings_name_modules_as_they_are_called_now() -> None:
    """A module "buckets" in a folder "megatron" may have been "megatron_buckets" before."""
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    earlier = {f"{file.parent.name}_{file.stem}" for file in files} - {file.stem for file in files}
    named = {
        (file.name, word) for file in files for word in re.findall(r"`(\w+)`", file.read_text())
    }
    assert {(file, word) for file, word in named if word in earlier} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_use_the_words_of_the_field(page: Path) -> None:
    assert page_offences(page) == []


def long_lines(text: str) -> list[int]:
    """Return the numbers of the lines of prose that are too long; tables and blocks of code may be
    wider."""
    found = []
    code = False
    for number, line in enumerate(text.splitlines(), 1):
        code ^= line.lstrip().startswith("```")
        if len(line) > LONGEST and not code and not line.startswith(("|", "    ", "Uses: ")):
            found.append(number)
    return found


def test_lines_of_prose_fit_a_screen() -> None:
    pages = [page for page in PAGES if page.name not in WIDER]
    assert {page.name: found for page in pages if (found := long_lines(page.read_text()))} == {}


def test_a_long_line_of_prose_is_found_and_one_of_a_table_is_not() -> None:
    long = "a word " * 20
    assert long_lines(f"short\n{long}\n| {long} |\n```sh\n{long}\n```\n{long}") == [2, 7]


def test_half_sentences_and_private_words_are_found() -> None:
    assert (
        begins_badly("Whether it is.")
        and begins_badly("The same again.")
        and not begins_badly("Often the case.")
    )
    assert private_words("Activations are\nMade again amid the step.") == [
        '"amid": during',
        '"made again": recomputed',
    ]
    assert not private_words("A plain sentence about the optimizer state.")


def main() -> None:
    """Print the number of offences of each room and page, worst first."""
    counts = {room: len(offences(room)) for room in rooms()} | {
        page.name: len(page_offences(page)) for page in PAGES
    }
    for name, count in sorted(counts.items(), key=lambda item: -item[1]):
        print(f"{count:5d}  {name}")


if __name__ == "__main__":
    main()
