"""The documentation site has every page, key, command and export, and no link leads nowhere."""

import re
from pathlib import Path

import pytest

from megaprec.errors import sentences
from megaprec.front_door import exports_of
from tests.project.test_readme import ROOT
from tools.commands.table import COMMANDS
from tools.config.key_help import key_tables, keys_of
from website.api import DOORS
from website.built import problems_of
from website.glossary import with_anchors, with_links, words_of
from website.sources import listed_pages, made_pages, menus, sources, with_links_of_the_site


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return made_pages()


def test_every_key_of_a_run_file_is_on_the_page_of_keys_with_its_help(
    made: dict[str, str],
) -> None:
    keys = list(keys_of(key_tables()))
    page = made["keys.md"]
    assert len(keys) > 100
    assert [key.name for key in keys if f"| `{key.name}`{{#" not in page] == []
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert [row for row in rows if re.search(r"\|\s*\|$", row)] == []


def test_every_command_and_each_of_its_options_is_on_a_page(made: dict[str, str]) -> None:
    pages = "".join(text for path, text in made.items() if path.startswith("commands/"))
    sections = dict(re.findall(r"^## megaprec (\S+)\n(.*?)(?=^## |\Z)", pages, re.S | re.M))
    assert sections.keys() == COMMANDS.keys()
    for name, section in sections.items():
        usages = "".join(re.findall(r"```text\n(.*?)```", section, re.S))
        used = set(re.findall(r"(--[a-z][\w-]*)", usages))
        listed = set(re.findall(r"--[a-z][\w-]*", "".join(re.findall(r"^\| `.*$", section, re.M))))
        assert used <= listed, name
        assert all(f"megaprec {example}" in section for example in COMMANDS[name].examples)


def test_every_export_of_a_front_door_is_on_its_page_with_its_docstring(
    made: dict[str, str],
) -> None:
    for door in DOORS:
        file = ROOT.joinpath(*door.split("."), "__init__.py")
        page = made[f"api/{door}.md"]
        described = dict(
            re.findall(r"^`{6}\{py:\w+\} \S*\.(\w+)\b.*\n\n(\S.*)$", page, re.MULTILINE)
        )
        assert described.keys() == exports_of(file).keys()


def test_the_text_of_a_page_does_not_hang_on_where_objects_lie_in_memory(
    made: dict[str, str],
) -> None:
    assert re.findall(r"0x[0-9a-f]{6,}|<function|<object", "".join(made.values())) == []


def test_every_error_code_and_the_glossary_are_pages_of_the_site() -> None:
    placed = {path: source for source, path in sources().items()}
    errors = placed["errors.md"].read_text()
    assert "glossary.md" in placed
    codes = [f"{area}.{name}" for area, names in sentences().items() for name in names]
    assert [code for code in codes if f"`{code}`" not in errors] == []


def test_every_page_is_in_a_menu(made: dict[str, str]) -> None:
    index = (ROOT / "docs/README.md").read_text()
    listed = re.findall(r"^/(\S+\.md)$", menus(index), re.MULTILINE)
    for folder in ("docs/design", "docs/proofs"):
        inner = (ROOT / folder / "README.md").read_text()
        listed += [page[1:] for page in listed_pages(inner, folder)]
    pages = {path for path in [*sources().values(), *made] if path.endswith(".md")}
    assert sorted(listed) == sorted(pages - {"index.md"})


def test_a_link_leads_to_the_page_or_the_file_that_the_site_has_of_it() -> None:
    text = (
        "[tests](../CONTRIBUTING.md#what-the-tests-prove), [a law](../tests/conftest.py), "
        "[`tests/conftest.py`](../tests/conftest.py), [program](../examples/pretrain.py), "
        "[here](#there), ![picture](demo.png), [paper](https://arxiv.org/abs/1)\n"
    )
    fenced = "```text\n[a law](../tests/conftest.py)\n```\n"
    assert with_links_of_the_site(text + fenced, "docs/code.md", "code.md") == (
        "[tests](project/CONTRIBUTING.md#what-the-tests-prove), a law (`tests/conftest.py`), "
        "`tests/conftest.py`, [program](examples/pretrain.py), "
        "[here](#there), ![picture](demo.png), [paper](https://arxiv.org/abs/1)\n" + fenced
    )
    moved = with_links_of_the_site("[fp8](docs/fp8.md)", "CHANGELOG.md", "project/CHANGELOG.md")
    assert moved == "[fp8](../fp8.md)"


def test_a_link_to_a_file_that_the_repository_has_not_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"docs/code.md links to ../gone.py"):
        with_links_of_the_site("[gone](../gone.py)", "docs/code.md", "code.md")


def test_the_first_use_of_a_word_of_the_glossary_on_a_page_is_a_link_to_its_row() -> None:
    glossary = (ROOT / "docs/glossary.md").read_text()
    words = words_of(glossary)
    assert {"rank", "global batch", "logical tensor"} <= set(words)
    assert "field" not in words, "the column of another table"
    page = "# A rank\n\n    code of a rank\n\nThe `rank` of [a\nrank](a.md), `megaprec\nparity`: global batches, a global batch, two ranks, a rank.\n"
    assert with_links(page, words, "glossary.md") == (
        "# A rank\n\n    code of a rank\n\nThe `rank` of [a\nrank](a.md), `megaprec\nparity`: global batches, a "
        "[global batch](glossary.md#word-global-batch), two [ranks](glossary.md#word-rank), a rank.\n"
    )
    anchored = with_anchors(glossary)
    assert [word for word in words if f"| [{word}]{{#word-" not in anchored] == []


def test_a_built_page_with_a_dead_link_a_dead_anchor_or_something_from_elsewhere_is_named(
    tmp_path: Path,
) -> None:
    (tmp_path / "b.html").write_text('<h1 id="here">B</h1>')
    (tmp_path / "a.html").write_text(
        '<a href="b.html#here">good</a><a href="#top" id="top">good</a><a href="https://x.org">x</a>'
        '<a href="gone.html">1</a><a href="b.html#gone">2</a><img src="gone.png">'
        '<script src="https://cdn.example/x.js"></script>'
        '<link rel="stylesheet" href="//fonts.example/x.css">'
    )
    assert problems_of(tmp_path) == [
        "a.html: fetches https://cdn.example/x.js from elsewhere",
        "a.html: fetches //fonts.example/x.css from elsewhere",
        "a.html: links to gone.html, which is not there",
        "a.html: links to b.html#gone, an anchor that is not there",
        "a.html: links to gone.png, which is not there",
    ]
