"""`megaprec import-args`: a run file from Megatron-LM's arguments or DeepSpeed's configuration.

    megaprec import-args "--num-layers 24 --hidden-size 1024 ..." -o run.toml
    megaprec import-args train_gpt.sh --assume CHECKPOINT_PATH=runs/gpt -o run.toml
    megaprec import-args arguments.yaml deepspeed.json train.steps=1000 -o run.toml
    megaprec import-args -o run.toml -- --num-layers 24 --hidden-size 1024 ...

Every argument is read, has no meaning here for a reason that the run file states, or is refused by
its name. Nothing is
run: a script is read as text.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from megaprec.data.files import write_whole
from megaprec.errors import UserError
from tools.config.run_file import given_in
from tools.importing.run import import_run
from tools.training.notes import add_strict, tell_notes

OVERRIDE = re.compile(r"[a-z][a-z0-9_]*\.[a-z][a-z0-9_]* *=")
NAME = re.compile(r"\w+|[@*]")
MOST_RANKS = 2**20


DROP = "--drop NAME leaves out an argument that this run can do without"


def add_parser(subparsers: Any) -> None:
    """Add `import-args`."""
    parser = subparsers.add_parser(
        "import-args",
        help="make a run file from Megatron-LM's arguments or DeepSpeed's configuration",
    )
    parser.add_argument(
        "overrides",
        metavar="SOURCE",
        nargs="*",
        default=[],
        help="a command line in quotes, a .sh or .yaml file with Megatron-LM's arguments, "
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
        "be given several times; 1=... is the script's first argument",
    )
    parser.add_argument(
        "--drop",
        metavar="NAME",
        action="append",
        default=[],
        help="argument of Megatron-LM to leave out, such as mock-data; may be given several times",
    )
    add_strict(parser)
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run `megaprec import-args`."""
    items, keys = _parted(args.overrides)
    assumed = dict(_assumption(item) for item in args.assume)
    given, problems = given_in(None, keys)
    if problems:
        raise UserError(*problems)
    dropped = frozenset(name.lstrip("-").replace("-", "_") for name in args.drop)
    if args.ranks is not None and not 0 < args.ranks <= MOST_RANKS:
        raise UserError(f"--ranks {args.ranks}: give a number from 1 to {MOST_RANKS}")
    if args.output is not None and args.output.exists():
        raise UserError(f"{args.output} exists: give another name, or remove it")
    try:
        made = import_run(items, given, assumed, args.ranks, dropped)
    except UserError as error:
        typed = any(problem.startswith("--") for problem in error.problems)
        raise UserError(*error.problems, *[DROP] * typed) from None
    tell_notes(made.notes, args.strict)
    counts = f"{made.read} arguments read, {made.unused} not needed here"
    if args.output is None:
        print(made.text, end="")
        print(counts, file=sys.stderr)
    else:
        write_whole(args.output, made.text.encode())
        print(f"{counts}; wrote {args.output}")
    return 0


def how_to_quote(argument: str) -> str:
    """Return the line for an argument that is none of this command's options: most likely one of
    Megatron-LM's."""
    return (
        f"{UserError(argument)} is no option of import-args: give a command line in quotes, as in "
        'megaprec import-args "--num-layers 24 --bf16" -o run.toml, or last, after --, as in '
        "megaprec import-args -o run.toml -- --num-layers 24 --bf16"
    )


def _parted(words: list[str]) -> tuple[list[str], list[str]]:
    """Return sources, and keys of the run file. After an argument of Megatron-LM all words are its
    own."""
    for i, word in enumerate(words):
        if word.startswith("-") and not any(sign in word for sign in " \t\n"):
            before = words[:i]
            rest = words[i:]
            break
    else:
        before = words
        rest = []
    keys = [word for word in before if OVERRIDE.match(word)]
    return [*(word for word in before if word not in keys), *rest], keys


def _assumption(item: str) -> tuple[str, str]:
    name, equals, value = item.partition("=")
    if not equals or not NAME.fullmatch(name):
        raise UserError(f"--assume {item}: give NAME=VALUE, as DATA_PATH=tokens/mine")
    return name, value
