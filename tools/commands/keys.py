"""`megaprec keys [WORD ...]`: the keys of a run file with their defaults and meanings.

A WORD is the name of a table (`lr`), or a part of a key's name (`warmup`). On a terminal the text
is as wide as the terminal; in a pipe each key is one line, for grep.
"""

import argparse
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from shutil import get_terminal_size
from typing import Any

from megaprec.errors import UserError, closest
from tools.config.key_help import Key, KeyTable, key_tables
from tools.console.tables import add_json, put

WIDEST = 110  # columns of help that are read without losing the line


def add_parser(subparsers: Any) -> None:
    """Add `keys` to the commands."""
    parser = subparsers.add_parser(
        "keys", help="list the keys of a run file with their defaults", description=__doc__
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="WORD",
        help="table, or part of a key's name (default: all keys)",
    )
    add_json(parser)
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run `megaprec keys`."""
    width = min(WIDEST, get_terminal_size().columns) if sys.stdout.isatty() else None
    return put(args, lambda: document(args.words), lambda: print(described(args.words, width)))


def document(words: Sequence[str] = ()) -> dict[str, Any]:
    """Return the keys that `words` ask for, for programs: default and help by dotted key.

    default: as TOML; null if there is none, or if it is required or derived. Raises UserError as
        `described` does.
    """
    keys = (key for table in _chosen([*key_tables()], words) for key in table.keys)
    return {"keys": {key.name: _fields(key) for key in keys}}


def _fields(key: Key) -> dict[str, Any]:
    default = None if key.default in ("none", "required", "derived") else key.default
    return {"default": default, "required": key.default == "required", "help": key.help}


def described(words: Sequence[str] = (), width: int | None = None) -> str:
    """Return the keys that `words` ask for, all without words, at most `width` columns wide; None:
    one line a key.

    Raises UserError for a word that no table and no key has in its name.
    """
    tables = _chosen([*key_tables()], words)
    return "\n\n".join("\n".join(_lines(table, width)) for table in tables)


def _chosen(tables: list[KeyTable], words: Sequence[str]) -> list[KeyTable]:
    """Return the tables with those keys that a word asks for; all keys without words. Raises
    UserError."""
    if not words:
        return tables
    names = {table.name for table in tables}
    if problems := [
        _unknown(word, tables) for word in words if not any(_asked(tables, word, names))
    ]:
        raise UserError(*problems)
    wanted = {key.name for word in words for key in _asked(tables, word, names)}
    kept = (
        replace(table, keys=tuple(key for key in table.keys if key.name in wanted))
        for table in tables
    )
    return [table for table in kept if table.keys]


def _asked(tables: Iterable[KeyTable], word: str, names: set[str]) -> Iterator[Key]:
    """Yield the keys of the table `word` and those named so, or else the keys with `word` in their
    names."""
    word = word.strip("[]").lower()
    for table in tables:
        for key in table.keys:
            name = key.name.partition(".")[2]
            if word in (table.name, name) if word in names else word in key.name:
                yield key


def _unknown(word: str, tables: Iterable[KeyTable]) -> str:
    keys = [key.name for table in tables for key in table.keys]
    known = {**{key.partition(".")[2]: key for key in reversed(keys)}, **{key: key for key in keys}}
    known |= {table.name: table.name for table in tables}
    close = closest(word.lower(), known)
    return (
        f'"{word}": no table and no key has this in its '
        f"name{f'; did you mean {known[close]}?' if close else ''}"
    )


def _lines(table: KeyTable, width: int | None) -> Iterator[str]:
    """Yield the lines of a table, at most `width` columns wide; None: one line a key."""
    if width is None:
        yield f"[{table.name}]  {table.subject}"
        yield from (f"{key.name:34}{key.default:16}{key.help}" for key in table.keys)
        return
    broken = partial(textwrap.wrap, width=width, break_on_hyphens=False)
    yield from broken(f"[{table.name}]  {table.subject}", subsequent_indent="    ")
    for key in table.keys:
        yield from broken(f"{key.name} = {key.default}", subsequent_indent="        ")
        yield from broken(key.help, initial_indent="    ", subsequent_indent="    ")
