"""`megaprec keys [WORD ...]`: the keys of a run file with their defaults and meanings.

A WORD is the name of a table (`lr`), or a part of a key's name (`warmup`). On a terminal the text
is as wide as the terminal; in a pipe each key is one line, for grep.
"""

import argparse
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from shutil import get_terminal_size
from typing import Any

from megaprec.errors import UserError, closest
from tools.config.key_help import Key, KeyTable, key_tables, keys_of
from tools.console.json_output import add_json, print_result

MAX_WIDTH = 110  # columns of help that are read without losing the line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `keys`."""
    parser.description = __doc__
    parser.add_argument(
        "words",
        nargs="*",
        metavar="WORD",
        help="table, or part of a key's name (default: all keys)",
    )
    add_json(parser)
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run `megaprec keys`; return the exit code."""
    width = None
    if sys.stdout.isatty():
        terminal = get_terminal_size()
        width = min(MAX_WIDTH, terminal.columns)

    def show() -> None:
        print(describe_keys(args.words, width))

    return print_result(args, lambda: document(args.words), show)


def document(words: Sequence[str] = ()) -> dict[str, Any]:
    """Return the keys that `words` ask for, for programs: default and help by dotted key.

    default: as TOML; null if there is none, or if it is required or derived. Raises UserError as
        `describe_keys` does.
    """
    all_tables = list(key_tables())
    tables = _matching_tables(all_tables, words)
    fields_of_key = {key.name: _key_fields(key) for key in keys_of(tables)}
    return {"keys": fields_of_key}


def _key_fields(key: Key) -> dict[str, Any]:
    """Return default, help and whether a run file must have the key, for programs."""
    # words in place of a default, which are no value in TOML
    has_no_default = key.default in ("none", "required", "derived")
    default = None if has_no_default else key.default
    is_required = key.default == "required"
    return {"default": default, "required": is_required, "help": key.help}


def describe_keys(words: Sequence[str] = (), width: int | None = None) -> str:
    """Return the keys that `words` ask for, all without words, at most `width` columns wide; None:
    one line a key.

    Raises UserError for a word that no table and no key has in its name.
    """
    all_tables = list(key_tables())
    texts = list[str]()
    for table in _matching_tables(all_tables, words):
        lines = _table_lines(table, width)
        texts.append("\n".join(lines))
    return "\n\n".join(texts)


def _matching_tables(tables: list[KeyTable], words: Sequence[str]) -> list[KeyTable]:
    """Return the tables with those keys that a word asks for; all keys without words. Raises
    UserError with a line for each word that no key has."""
    if not words:
        return tables
    wanted = set[str]()
    problems = list[str]()
    for word in words:
        matching_keys = _matching_keys(tables, word)
        wanted |= matching_keys
        if not matching_keys:
            problems.append(_unknown_word(word, tables))
    if problems:
        raise UserError(*problems)
    reduced = list[KeyTable]()
    for table in tables:
        wanted_keys = tuple(key for key in table.keys if key.name in wanted)
        if wanted_keys:
            reduced.append(replace(table, keys=wanted_keys))
    return reduced


def _matching_keys(tables: Sequence[KeyTable], word: str) -> set[str]:
    """Return the dotted keys of the table `word` and those named so, or else the keys with `word`
    in their names.
    """
    word = word.strip("[]").lower()
    keys = [key.name for key in keys_of(tables)]
    table_names = [table.name for table in tables]
    if word in table_names:
        # "checkpoint" is a table, and a part of other keys' names
        return {key for key in keys if word in key.split(".", 1)}
    return {key for key in keys if word in key}


def _unknown_word(word: str, tables: Sequence[KeyTable]) -> str:
    """Return the line about a word that fits no key, with the key or table of the most similar
    name."""
    keys = [key.name for key in keys_of(tables)]
    # of keys with the same name the first counts
    suggestions = dict[str, str]()  # by what the word may be like: a key's name, or with its table
    for key in reversed(keys):
        _, _, name = key.partition(".")
        suggestions[name] = key
    suggestions |= {key: key for key in keys}
    # a table is stronger than a key of its name
    suggestions |= {table.name: table.name for table in tables}
    similar = closest(word.lower(), suggestions)
    hint = f"; did you mean {suggestions[similar]}?" if similar else ""
    return f'"{word}": no table and no key has this in its name{hint}'


def _table_lines(table: KeyTable, width: int | None) -> Iterator[str]:
    """Yield the lines of a table, at most `width` columns wide; None: one line a key."""
    # for grep: everything about a key in its line
    if width is None:
        yield f"[{table.name}]  {table.subject}"
        for key in table.keys:
            yield f"{key.name:34}{key.default:16}{key.help}"
        return
    wrap = partial(textwrap.wrap, width=width, break_on_hyphens=False)
    heading = f"[{table.name}]  {table.subject}"
    yield from wrap(heading, subsequent_indent="    ")
    for key in table.keys:
        assignment = f"{key.name} = {key.default}"
        yield from wrap(assignment, subsequent_indent="        ")
        yield from wrap(key.help, initial_indent="    ", subsequent_indent="    ")
