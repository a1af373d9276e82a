"""What contributors meet first is whole: forms of issues, the citation, and what is said of security."""

import argparse
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.project.test_readme import ROOT
from tools.cli import parser_of_all

FORMS = sorted(
    file for file in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if file.stem != "config"
)
KINDS = {"markdown", "textarea", "input", "dropdown", "checkboxes"}
"""Kinds of fields that a Git host shows in a form of issues."""


def form_of(file: Path) -> dict[str, Any]:
    return yaml.safe_load(file.read_text())


def test_there_is_a_form_for_each_kind_of_issue() -> None:
    assert [file.stem for file in FORMS] == ["bug", "feature", "model_family"]


@pytest.mark.parametrize("file", FORMS, ids=lambda file: file.stem)
def test_a_form_has_what_the_host_needs_to_show_it(file: Path) -> None:
    form = form_of(file)
    assert {"name", "description", "body"} <= form.keys()
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in form["body"]} <= KINDS
    ids = [field["id"] for field in fields]
    labels = [field["attributes"]["label"] for field in fields]
    assert len(set(ids)) == len(ids) and len(set(labels)) == len(labels)
    assert any(field.get("validations", {}).get("required") for field in fields)


def commands_and_options() -> dict[str, set[str]]:
    (commands,) = (
        action
        for action in parser_of_all()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return {
        name: {option for action in parser._actions for option in action.option_strings}
        for name, parser in commands.choices.items()
    }


def test_commands_that_contributors_are_asked_for_exist_with_their_options() -> None:
    known = commands_and_options()
    pages = [*FORMS, ROOT / ".github/pull_request_template.md"]
    asked = [
        words
        for page in pages
        for words in re.findall(r"`megaprec ([a-z][^`]*)`", page.read_text())
    ]
    assert "doctor --no-parity --json" in asked
    for words in asked:
        command, *rest = words.split()
        assert {word for word in rest if word.startswith("--")} <= known[command], words


def test_the_citation_has_the_version_and_the_license_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    setup = (ROOT / "setup.py").read_text()
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert f'version="{citation["version"]}"' in setup
    assert f'license="{citation["license"]}"' in setup
    assert f'name="{citation["title"]}"' in setup


def test_security_says_what_is_read_what_is_not_promised_and_how_to_report() -> None:
    page = (ROOT / "SECURITY.md").read_text()
    titles = re.findall(r"^## (.*)$", page, re.MULTILINE)
    assert titles == [
        "What is promised",
        "What is read from outside",
        "What is not promised",
        "How to report",
    ]


@pytest.mark.parametrize(
    "note",
    sorted(set((ROOT / "docs/design").glob("*.md")) - {ROOT / "docs/design/README.md"}),
    ids=lambda note: note.stem,
)
def test_a_note_on_a_decision_says_why_how_at_what_cost_and_what_was_left(note: Path) -> None:
    parts = re.findall(r"^\*\*([^*]+)\.\*\* \S", note.read_text(), re.MULTILINE)
    assert parts == ["Decision", "Why", "How it is held", "Cost", "Tried and left"]


@pytest.mark.parametrize(
    "note", sorted((ROOT / "docs/design").glob("*.md")), ids=lambda note: note.stem
)
def test_files_that_a_note_names_exist(note: Path) -> None:
    files = re.findall(
        r"`((?:megaprec|parallel|models|tools|tests)/[\w/]+(?:\.py)?)`", note.read_text()
    )
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_the_newest_section_of_the_changelog_is_unreleased_or_this_version_on_its_day() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    text = (ROOT / "CHANGELOG.md").read_text()
    newest = re.findall(r"^## (.*)$", text, re.MULTILINE)[0]
    released = f"{citation['version']} - {citation['date-released']}"
    assert newest in ("Unreleased", released)
