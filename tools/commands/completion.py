"""`megaprec completion SHELL`: a script that completes commands, options and keys in a shell.

shtab makes the script from the parser of all commands. The script holds all words, so completing
starts no Python.
"""

import argparse
import shlex
from typing import Any

import shtab

from tools.config.key_help import key_tables, keys_of

# shtab also knows tcsh and powershell; they are not tested here
SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `completion`."""
    parser.description = (
        'Use it in bash or zsh with eval "$(megaprec completion bash)", in fish with '
        "megaprec completion fish | source; put the line into the start file of the shell."
    )
    parser.add_argument("shell", choices=SHELLS, help="shell that runs the script")
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run `megaprec completion`; return the exit code."""
    print(completion_script(args.parser_of_all(), args.shell))
    return 0


def completion_script(full_parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script for a shell. full_parser: the parser of all commands."""
    _add_keys(full_parser)
    return shtab.complete(full_parser, shell)


def _add_keys(parser: argparse.ArgumentParser) -> None:
    """Let the overrides of all commands complete to the keys of a run file."""
    tables = list(key_tables())
    keys = [f"{key.name}=" for key in keys_of(tables)]
    # by the name that an argument has in its command: `overrides` of many, `words` of `keys`
    words = {"overrides": keys, "words": [table.name for table in tables]}
    # argparse has no public way to its arguments
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _add_keys(command)
        elif action.dest in words:
            action.complete = _words_of_shell(action.dest, words[action.dest])  # type: ignore[attr-defined]


def _words_of_shell(name: str, words: list[str]) -> dict[str, Any]:
    """Return what shtab takes for an argument that completes to `words`, by shell."""
    function = f"_megaprec_{name}"
    quoted = " ".join(map(shlex.quote, words))
    bash = f'{function}() {{ compgen -W "{quoted}" -- "$1"; compgen -f -- "$1"; }}'
    return {
        "bash": function,
        "zsh": function,
        "fish": f"({function})",
        "preamble": {
            "bash": bash,
            # without a space behind it: the value follows
            "zsh": f"{function}() {{ compadd -S '' -- {quoted}; _files; }}",
            "fish": f"function {function}\n  printf '%s\\n' {quoted}\nend",
        },
    }
