"""The pages of the documentation site that are made of the code: the keys of a run file from its
settings, the commands from their parsers."""

import argparse
import inspect
import re
from collections.abc import Iterator

from tools.cli import parser_of_all
from tools.commands.table import COMMANDS
from tools.config.key_help import Key, KeyTable, key_tables

WIDTH = 90  # columns of a usage
KEYS_HEAD = """\
# Keys of a run file

Every key of a run file, by table, with its default and its meaning. `megaprec keys` prints the same
in a terminal, and `megaprec keys WORD` those with a word in their name. In a command line a key is
written with its table, as in `megaprec train run.toml train.steps=2000`.
"""


def keys_page() -> str:
    """Return the page of all keys, a table for each table of a run file."""
    return "\n".join([KEYS_HEAD, *map(_key_table, key_tables())])


def _key_table(table: KeyTable) -> str:
    lines = [f"## [{table.name}]", "", table.subject, ""]
    lines += ["| key | default | meaning |", "|---|---|---|"]
    lines += map(_key_row, table.keys)
    return "\n".join(lines) + "\n"


def _key_row(key: Key) -> str:
    default = key.default
    # these are words about the default, all else is TOML
    if default not in ("none", "required", "derived"):
        default = _code(default)
    anchor = key.name.replace(".", "-").replace("_", "-")
    return f"| `{key.name}`{{#{anchor}}} | {default} | {_cell(key.help)} |"


def command_parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command by its name."""
    (commands,) = _subcommands(parser_of_all())
    return dict(commands.choices)


def page_of_group(group: str) -> str:
    """Return the path of the page of a group of commands in the site."""
    return f"commands/{group.replace(' ', '-')}.md"


def commands_page(group: str, parsers: dict[str, argparse.ArgumentParser]) -> str:
    """Return the page of a group of commands."""
    text = [f"# Commands: {group}\n"]
    for name, command in COMMANDS.items():
        if command.group != group:
            continue
        text.append(f"## megaprec {name}\n")
        text.append(f"{command.help[0].upper()}{command.help[1:]}.\n")
        text.append(_described(parsers[name], "###"))
        examples = "\n".join(f"megaprec {example}" for example in command.examples)
        text.append(f"Example:\n\n```console\n{examples}\n```\n")
    return "\n".join(text)


def _described(parser: argparse.ArgumentParser, heading: str) -> str:
    """Return the description, usage and arguments of a command, and of the commands within it."""
    text = list[str]()
    # a description has Markdown's marks for code, and no other
    text.append(inspect.cleandoc(parser.description or "") + "\n")
    text.append(f"```text\n{_usage(parser)}\n```\n")
    rows = [row for action in parser._actions for row in _argument_row(parser, action)]
    if rows:
        text += ["| argument | meaning |\n|---|---|", *rows, ""]
    for commands in _subcommands(parser):
        for name, inner in commands.choices.items():
            text.append(f"{heading} {inner.prog}\n")
            text.append(_described(inner, heading + "#"))
            assert name in inner.prog
    return "\n".join(text)


def _usage(parser: argparse.ArgumentParser) -> str:
    """Return the usage of a command, as wide on any terminal."""
    formatter = argparse.HelpFormatter(parser.prog, width=WIDTH)
    formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups)
    beginning = "usage: "
    usage = formatter.format_help().strip().removeprefix(beginning)
    return usage.replace("\n" + " " * len(beginning), "\n")


def _argument_row(parser: argparse.ArgumentParser, action: argparse.Action) -> Iterator[str]:
    """Yield the row of an argument; none for help, and for one that help leaves out."""
    shown_elsewhere = isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
    if shown_elsewhere or action.help == argparse.SUPPRESS:
        return
    formatter = parser._get_formatter()
    names = formatter._format_action_invocation(action)
    yield f"| {_code(names)} | {_cell(formatter._expand_help(action) if action.help else '')} |"


def _subcommands(parser: argparse.ArgumentParser) -> list[argparse._SubParsersAction]:
    return [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]


def _code(text: str) -> str:
    """Return a text as code in a cell of a table."""
    return f"`{text}`".replace("|", "\\|")


def _cell(text: str) -> str:
    """Return a text as a cell of a table: in one line, and nothing in it is taken for HTML."""
    line = " ".join(text.split())
    parts = re.split(r"(`[^`]*`)", line)
    escaped = [part if part.startswith("`") else _escaped(part) for part in parts]
    return "".join(escaped).replace("|", "\\|")


def _escaped(text: str) -> str:
    """Return plain text as Markdown that shows it."""
    return re.sub(r"([\\*_<\[\]])", r"\\\1", text)
