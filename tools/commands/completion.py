"""`megaprec completion bash|zsh|fish`: a script that completes commands, options and keys in a
shell.

The script is made from the parser of all commands, and holds all words: completing starts no
Python. zsh runs the script of bash, by its own bashcompinit. Where megaprec has no word, the shell
completes file names.
"""

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from tools.config.key_help import key_tables

SHELLS = ("bash", "zsh", "fish")
BASH = """_megaprec() {{
    local at="" word words keys="{keys}"
    for word in "${{COMP_WORDS[@]:1:$((COMP_CWORD - 1))}}"; do
        case "$at $word" in
            {paths}) at="$at $word" ;;
        esac
    done
    case "$at" in
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
    case "${{COMPREPLY[*]}}" in *=) compopt -o nospace 2> /dev/null ;; esac
    return 0
}}
complete -o default -F _megaprec megaprec
"""
ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
FISH = """function __megaprec_at
    set -l at ""
    for word in (commandline -opc)[2..-1]
        contains -- "$at $word" {paths}; and set at "$at $word"
    end
    test "$at" = "$argv[1]"
end
"""

# of each command, written " data build": words with their help
Words = Mapping[str, dict[str, str]]


def add_parser(subparsers: Any, whole: argparse.ArgumentParser) -> None:
    """Add `completion` to the commands. whole: the parser of all commands."""
    parser = subparsers.add_parser(
        "completion", help="print a script that completes the commands in a shell"
    )
    parser.description = (
        'Use it in bash or zsh with eval "$(megaprec completion bash)", in fish with '
    )
    parser.description += (
        "megaprec completion fish | source; put the line into the start file of the shell."
    )
    parser.add_argument("shell", choices=SHELLS, help="shell that runs the script")
    parser.set_defaults(run=lambda args: main(args, whole))


def main(args: argparse.Namespace, whole: argparse.ArgumentParser) -> int:
    """Run `megaprec completion`."""
    words = dict(_words(whole, ""))
    if args.shell == "fish":
        print(_fish(words), end="")
    else:
        print((ZSH if args.shell == "zsh" else "") + _bash(words), end="")
    return 0


def _words(parser: argparse.ArgumentParser, at: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each command with the words that may follow it: commands, options, choices and keys."""
    found: dict[str, str] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            told = {choice.dest: choice.help or "" for choice in action._choices_actions}
            found |= {word: told.get(word, "") for word in action.choices}
            for word, inner in action.choices.items():
                yield from _words(inner, f"{at} {word}")
        elif action.help != argparse.SUPPRESS:
            found |= dict.fromkeys(
                (*action.option_strings, *map(str, action.choices or ())), action.help or ""
            )
        if action.dest == "overrides":
            found |= {f"{key.name}=": key.help for table in key_tables() for key in table.keys}
        if action.dest == "words":
            found |= {table.name: table.subject for table in key_tables()}
    yield at, found


def _bash(words: Words) -> str:
    paths = "|".join(f'"{at}"' for at in words if at)
    keys = [f"{key.name}=" for table in key_tables() for key in table.keys]
    lines = []
    for at, found in words.items():
        said = [
            *(["$keys"] if keys[0] in found else []),
            *(word for word in found if word not in keys),
        ]
        lines.append(f'        "{at}") words="{" ".join(said)}" ;;')
    return BASH.format(paths=paths, cases="\n".join(lines), keys=" ".join(keys))


def _fish(words: Words) -> str:
    lines = [FISH.format(paths=" ".join(f'"{at}"' for at in words if at))]
    for at, found in words.items():
        where = f"complete -c megaprec -n '__megaprec_at \"{at}\"'"
        lines += [f"{where} -a '{word}' -d {_quoted(told)}\n" for word, told in found.items()]
    return "".join(lines)


def _quoted(text: str) -> str:
    """Return the first clause of a help in fish's quotes."""
    return "'" + text.partition(";")[0].replace("\\", "\\\\").replace("'", "\\'") + "'"
