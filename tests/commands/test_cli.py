"""The command line as a whole: its version, and that every command and option of it is explained."""

import argparse
import platform
import re
from collections.abc import Iterator
from importlib.metadata import version

import pytest

from tools.cli import main, parser_of_all


def parsers(parser: argparse.ArgumentParser, name: str = "megaprec") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield the name and the parser of every command, and of commands within commands."""
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, inner in action.choices.items():
                yield from parsers(inner, f"{name} {word}")


def helps() -> dict[str, str]:
    """Return the help of every option, argument and command."""
    found: dict[str, str] = {}
    for name, parser in parsers(parser_of_all()):
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                told = {choice.dest: choice.help for choice in action._choices_actions}
                found |= {f"{name} {word}": told.get(word) or "" for word in action.choices}
            else:
                found[f"{name} {'/'.join(action.option_strings) or action.dest}"] = action.help or ""
    return {name: text for name, text in found.items() if text != argparse.SUPPRESS}


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    said = capsys.readouterr().out.strip()
    assert left.value.code == 0 and said.startswith("megaprec ")
    assert said.endswith(f"torch {version('torch')}, Python {platform.python_version()}")


def test_every_command_and_option_has_a_help_that_stands_alone() -> None:
    begins = re.compile(r"(what|whose|of|whether|who|those|the same|which|how|where|so|as) ", re.IGNORECASE)
    assert len(helps()) > 80
    assert {name: text for name, text in helps().items() if len(text.split()) < 2 or begins.match(text)} == {}
