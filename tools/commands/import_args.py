"""`megaprec import-args`: a run file from Megatron-LM's arguments, DeepSpeed's configuration, or
those of GPT-NeoX, NeMo 1 and Hugging Face's Trainer.

    megaprec import-args train.log -o run.toml
    megaprec import-args checkpoints/gpt -o run.toml
    megaprec import-args "--num-layers 24 --hidden-size 1024 ..." -o run.toml
    megaprec import-args train_gpt.sh --assume CHECKPOINT_PATH=runs/gpt -o run.toml
    megaprec import-args arguments.yaml deepspeed.json train.steps=1000 -o run.toml
    megaprec import-args 410M.yml local_setup.yml --ranks 16 -o run.toml
    megaprec import-args -o run.toml -- --num-layers 24 --hidden-size 1024 ...

The surest source is what Megatron-LM itself made of its arguments: the table at the beginning of
its log, or a checkpoint. Every argument is read, is listed in the run file as not used here, or is
refused by its name. Nothing is run: a script is read as text.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megaprec.errors import Problem, UserError
from megaprec.tokens.files import write_whole
from tools.commands.import_answers import (
    Asked,
    can_be_dropped,
    command_with_answers,
    dropped_names,
    typed_names,
    with_names_of_drop,
)
from tools.commands.notes import tell_notes
from tools.commands.options import add_strict
from tools.config.run_file import read_run_settings
from tools.interop.importing.run import import_run

OVERRIDE = re.compile(r"[a-z][a-z0-9_]*\.[a-z][a-z0-9_]* *=")
MAX_RANKS = 2**20  # beyond any cluster
DROP_HINT = "--drop NAME leaves out an argument that this run can do without; --drop A,B several"
LOG_HINT = (
    "of a script assignments, defaults and conditions of what is known are followed: in a copy of "
    "it write out what the shell makes of the rest, or give Megatron-LM's log, which begins with "
    "all its arguments, or a checkpoint"
)
NOT_FOLLOWED = ("import.variable_open", "import.variable_unset", "import.not_followed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `import-args`."""
    parser.add_argument(
        "overrides",
        metavar="SOURCE",
        nargs="*",
        default=[],
        help="Megatron-LM's log, which begins with all its arguments, or a folder of its "
        "checkpoints; a command line in quotes, a .sh or .yaml file with its arguments, "
        "DeepSpeed's .json; keys of the run file as table.key=value; arguments after --",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="run file to write; default: print it"
    )
    parser.add_argument(
        "--ranks", metavar="N", type=int, help="number of ranks, from which the replicas follow"
    )
    parser.add_argument(
        "--assume",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="value of a variable that the script leaves open, such as DATA_PATH=tokens/mine; may "
        "be given several times",
    )
    parser.add_argument(
        "--drop",
        metavar="NAME",
        action="append",
        default=[],
        help="argument of Megatron-LM to leave out, such as mock-data; several with commas, or "
        "--drop again",
    )
    add_strict(parser)
    parser.set_defaults(run=main)


def words_to_parse(words: Sequence[str]) -> list[str]:
    """Return the words of the command line as argparse can read them: the names that --drop is
    given may begin with dashes."""
    return with_names_of_drop(words)


def main(args: argparse.Namespace) -> int:
    """Run `megaprec import-args`; return the exit code."""
    items, keys = _split_arguments(args.overrides)
    assumed = dict(_parse_assumption(assumption) for assumption in args.assume)
    settings, problems = read_run_settings(None, keys)
    if problems:
        raise UserError(*problems)
    dropped = frozenset(dropped_names(args.drop))
    if args.ranks is not None and not 0 < args.ranks <= MAX_RANKS:
        raise UserError.of("command.ranks", ranks=args.ranks, max_ranks=MAX_RANKS)
    if args.output is not None and args.output.exists():
        raise UserError.of("command.file_exists", output=args.output)
    try:
        imported = import_run(items, settings, assumed, args.ranks, dropped)
    except UserError as error:
        raise UserError(*error.problems, *_hints(error.problems, _asked(args))) from None
    tell_notes(imported.notes, args.strict)
    counts = f"{imported.read} arguments read, {imported.unused} not needed here"
    # the text alone on stdout, to be piped
    if args.output is None:
        print(imported.text, end="")
        print(counts, file=sys.stderr)
    else:
        write_whole(args.output, imported.text.encode())
        print(f"{counts}; wrote {args.output}")
    return 0


def _asked(args: argparse.Namespace) -> Asked:
    """Return the words that the command was given, from which `command_with_answers` makes the
    command that answers its problems."""
    options = [f"--assume={assumption}" for assumption in args.assume]
    options += [f"--ranks={args.ranks}"] if args.ranks is not None else []
    output = str(args.output) if args.output is not None else "run.toml"
    return Asked(args.overrides, options, output, [*typed_names(args.drop)])


def _hints(problems: Sequence[Problem], asked: Asked) -> Iterator[str]:
    """Yield the ways out of the problems of an import."""
    if command := command_with_answers(asked, problems):
        yield command
    is_open = [problem.code in NOT_FOLLOWED for problem in problems]
    if any(map(can_be_dropped, problems)) and not all(is_open):
        yield DROP_HINT
    if any(is_open):
        yield LOG_HINT


def how_to_quote(argument: str) -> str:
    """Return the line for an argument that is none of this command's options: most likely one of
    Megatron-LM's."""
    # the text of a UserError is the argument with signs that do not print escaped
    return (
        f"{UserError(argument)} is no option of import-args: give a command line in quotes, as in "
        'megaprec import-args "--num-layers 24 --bf16" -o run.toml, or last, after --, as in '
        "megaprec import-args -o run.toml -- --num-layers 24 --bf16"
    )


def _split_arguments(words: list[str]) -> tuple[list[str], list[str]]:
    """Return sources, and keys of the run file. After an argument of Megatron-LM all words are its
    own."""
    first_option = len(words)
    for i, word in enumerate(words):
        # a command line in quotes has blanks, and is a source
        if word.startswith("-") and not re.search(r"[ \t\n]", word):
            first_option = i
            break
    before = words[:first_option]
    keys = [word for word in before if OVERRIDE.match(word)]
    sources = [word for word in before if word not in keys]
    return sources + words[first_option:], keys


def _parse_assumption(text: str) -> tuple[str, str]:
    """Return name and value of --assume NAME=VALUE. Raises UserError."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise UserError.of("command.assumption", text=text)
    return name, value
