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

# of each command, written " data build": words that may follow it, with their help
Completions = Mapping[str, dict[str, str]]


def add_parser(subparsers: Any, full_parser: argparse.ArgumentParser) -> None:
    """Add `completion` to the commands. full_parser: the parser of all commands."""
    parser = subparsers.add_parser(
        "completion",
        help="print a script that completes the commands in a shell",
        description='Use it in bash or zsh with eval "$(megaprec completion bash)", in fish with '
        "megaprec completion fish | source; put the line into the start file of the shell.",
    )
    parser.add_argument("shell", choices=SHELLS, help="shell that runs the script")
    parser.set_defaults(run=lambda args: main(args, full_parser))


def main(args: argparse.Namespace, full_parser: argparse.ArgumentParser) -> int:
    """Run `megaprec completion`."""
    completions = dict(_completions(full_parser, ""))
    if args.shell == "fish":
        print(_fish_script(completions), end="")
        return 0
    if args.shell == "zsh":
        print(ZSH, end="")
    print(_bash_script(completions), end="")
    return 0


def _completions(
    parser: argparse.ArgumentParser, command: str
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each command with the words that may follow it: commands, options, choices and keys.

    Subcommands come before the command itself.
    """
    words: dict[str, str] = {}
    # argparse has no public way to its arguments
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from _completions(inner, f"{command} {name}")
        words |= _action_words(action)
    yield command, words


def _action_words(action: argparse.Action) -> dict[str, str]:
    """Return the words of one argument of a command, with their help."""
    if isinstance(action, argparse._SubParsersAction):
        # argparse keeps the help of subcommands apart from their parsers
        help_of = {choice.dest: choice.help for choice in action._choices_actions}
        return {name: help_of.get(name) or "" for name in action.choices}
    words: dict[str, str] = {}
    if action.help != argparse.SUPPRESS:
        names = (*action.option_strings, *map(str, action.choices or ()))
        words |= dict.fromkeys(names, action.help or "")
    if action.dest == "overrides":
        words |= _key_words()
    if action.dest == "words":
        words |= {table.name: table.subject for table in key_tables()}
    return words


def _key_words() -> dict[str, str]:
    """Return every key of a run file as an override begins with it, with its help."""
    return {f"{key.name}=": key.help for table in key_tables() for key in table.keys}


def _bash_script(completions: Completions) -> str:
    """Return the script for bash, a case per command."""
    commands = "|".join(f'"{command}"' for command in completions if command)
    keys = list(_key_words())
    cases = list[str]()
    for command, words in completions.items():
        # the keys of a run file stand in the script once, as a variable
        shown = ["$keys"] if keys[0] in words else []
        shown += [word for word in words if word not in keys]
        cases.append(f'        "{command}") words="{" ".join(shown)}" ;;')
    return BASH.format(paths=commands, cases="\n".join(cases), keys=" ".join(keys))


def _fish_script(completions: Completions) -> str:
    """Return the script for fish, a line per command and word."""
    commands = " ".join(f'"{command}"' for command in completions if command)
    lines = [FISH.format(paths=commands)]
    for command, words in completions.items():
        begin = f"complete -c megaprec -n '__megaprec_at \"{command}\"'"
        for word, help_text in words.items():
            lines.append(f"{begin} -a '{word}' -d {_fish_quoted(help_text)}\n")
    return "".join(lines)


def _fish_quoted(text: str) -> str:
    """Return the first clause of a help in fish's quotes."""
    clause = text.partition(";")[0]
    escaped = clause.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
