"""The `megaprec` command.

Exit codes: 0 success; 1 a fault of megaprec, or runs that differ in `parity` or `prove`; 2 wrong
input, or a file that cannot be read or written (a line for each problem); 3 training stopped itself
because of skipped steps, with its state saved; 128 + signal: stopped by a signal.
"""

import argparse
import os
import platform
import re
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from megaprec.checkpoint.atomic import replaced_since
from megaprec.errors import Problem, UserError, did_you_mean
from megaprec.parsing import is_unicode
from megaprec.resources import require_threads
from megaprec.train_program import end_file_in, tell_end
from parallel.described_world import require_consistent, slurm_environment
from tools.commands import (
    bisect,
    calibrate,
    compare,
    completion,
    data,
    diagnose,
    diff,
    doctor,
    evaluate,
    explain_overflow,
    explain_spike,
    fp8_advice,
    generate,
    import_answers,
    import_args,
    init,
    inspect,
    keys,
    merge,
    mup_check,
    plan,
    precision,
    prove,
    report,
    schedule,
    train,
)
from tools.commands import convert as convert
from tools.commands import parity as parity
from tools.console.streams import guard_streams
from tools.console.tables import print_result
from tools.training.launch import is_consequence, is_local_rank, prints_own_failure
from tools.training.stopping import EXIT_CODES, ON_PURPOSE, Stopped, as_user_error, note_failure

MAX_ATTEMPTS = 4  # at a run whose checkpoints are replaced
MAY_BE_EMPTY = ("--prompt", "--stop")  # options whose own lines say what an empty text means
RETRIED_COMMANDS = (
    inspect.main,
    diff.main,
    generate.main,
    evaluate.main,
    convert.main,
    merge.main,
    report.main,
    compare.main,
)
"""Commands that change nothing in the run that they read, and so may be run again."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return the exit code.

    Ends the process if torch.distributed could not be shut down: see `parallel.mesh.world`.
    """
    guard_streams()
    try:
        os.environ.update(slurm_environment(os.environ))
        require_consistent(os.environ)
        require_threads(os.environ)
    except UserError as error:
        if not _tell_program(error):
            print(error, file=sys.stderr)
        return 2
    args = _parse(argv)
    joined_before = dist.is_initialized()  # by who calls this in a process of its own
    try:
        code = _run(args)
    except Exception:
        if joined_before or not dist.is_initialized():
            raise
        traceback.print_exc()
        code = 1
    # a world that is left over would keep the process at its exit, waiting for other ranks
    if not joined_before and dist.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _tell_program(error: UserError) -> bool:
    """Let `megaprec.train` raise an error in the program that has called it; return False if this
    process is none of its commands."""
    end_file = end_file_in(sys.argv)
    if end_file is None:
        return False
    tell_end(end_file, error.problems, "", None)
    return True


def _run(args: argparse.Namespace) -> int:
    """Run a command and answer what it raises; return the exit code."""
    try:
        code = _run_with_retries(args)
        sys.stdout.flush()  # here, where a closed pipe can still be told from a fault
        return code
    except BrokenPipeError:
        # `megaprec ... | head` has closed the pipe; nothing may be written to it, at exit neither
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        if prints_own_failure():
            print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        note_failure(error)
        cause = as_user_error(error)
        # where a rank was short of memory, its launcher may start it again, and its traceback says
        if isinstance(error, MemoryError) and not is_local_rank():
            cause = UserError.of("command.no_memory")
        if isinstance(cause, Stopped):  # the first rank has printed it
            return cause.exit_code
        if is_consequence(cause) and is_local_rank():
            # the launcher tells the reason of the rank that was first
            return 1
        if not isinstance(cause, ON_PURPOSE):
            raise
        # `megaprec.train` raises it in the program that has called it
        is_told = getattr(args, "end_file", None) is not None
        if prints_own_failure() and not is_told:
            _print_error(cause, args)
        return EXIT_CODES[type(cause)]


def _print_error(error: Exception, args: argparse.Namespace) -> None:
    """Print an error on stderr; for `--json` also as the one JSON document on stdout."""
    problems = error.problems if isinstance(error, UserError) else (Problem(str(error)),)
    print(*problems, sep="\n", file=sys.stderr)
    if getattr(args, "json", False):
        errors = [
            {"code": problem.code, "message": str(problem), "fields": problem.fields}
            for problem in problems
        ]
        print_result(args, lambda: {"errors": errors}, lambda: None)


def _run_with_retries(args: argparse.Namespace) -> int:
    """Run a command; again if a checkpoint that it read was replaced meanwhile by a run that
    trains."""
    # the last attempt is below: its error is the user's
    for _ in range(MAX_ATTEMPTS - 1 if args.run in RETRIED_COMMANDS else 0):
        start = time.time()
        try:
            return int(args.run(args))
        except (UserError, OSError) as error:
            message = str(error)
            replaced = any(replaced_since(start, message, path) for path in _path_values(args))
            if dist.is_initialized() or not replaced:
                raise
    return int(args.run(args))


def _path_values(args: argparse.Namespace) -> Iterator[Path]:
    """Yield the values of a command that may be paths."""
    for value in vars(args).values():
        items = value if isinstance(value, list | tuple) else [value]
        for item in items:
            if isinstance(item, str | Path):
                yield Path(item)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are lines of bounded length, as those of `UserError` are."""

    def error(self, message: str) -> NoReturn:
        error = UserError(message)
        if _tell_program(error):
            self.exit(2)
        super().error(str(error))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a word that is none of the choices, with the closest one."""
        if action.choices is None or value in action.choices:
            return
        kind = "command" if isinstance(action, argparse._SubParsersAction) else "value"
        choices = list(map(str, action.choices))
        hint = did_you_mean(str(value), choices)
        raise argparse.ArgumentError(
            action, f"no such {kind}: {value!r} (choose from {', '.join(choices)}){hint}"
        )


def parser_of_all() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = _Parser(
        prog="megaprec",
        description="Train, check and convert transformer models in any tensor, pipeline and data "
        "layout.",
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train.add_parser(commands)
    generate.add_parser(commands)
    evaluate.add_parser(commands)
    data.add_parser(commands)
    explain_overflow.add_parser(commands)
    explain_spike.add_parser(commands)
    diagnose.add_parser(commands)
    convert.add_parser(commands)
    inspect.add_parser(commands)
    import_args.add_parser(commands)
    diff.add_parser(commands)
    merge.add_parser(commands)
    compare.add_parser(commands)
    report.add_parser(commands)
    plan.add_parser(commands)
    calibrate.add_parser(commands)
    schedule.add_parser(commands)
    precision.add_parser(commands)
    parity.add_parser(commands)
    prove.add_parser(commands)
    bisect.add_parser(commands)
    mup_check.add_parser(commands)
    doctor.add_parser(commands)
    fp8_advice.add_parser(commands)
    init.add_parser(commands)
    keys.add_parser(commands)
    completion.add_parser(commands, parser)
    return parser


def _version() -> str:
    """Return the versions of megaprec, torch and Python: what a report of a fault needs."""
    try:
        installed = version("megaprec")
    except PackageNotFoundError:
        installed = f"(not installed, run from {Path(__file__).parents[1]})"
    return f"megaprec {installed}, torch {version('torch')}, Python {platform.python_version()}"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments. Overrides may stand before and after options, which argparse alone does
    not allow."""
    parser = parser_of_all()
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        parser.print_help(sys.stderr)
        parser.exit(2)
    for word in words:
        if "\0" in word or not is_unicode(word):
            parser.error(f"the argument {word!a} is no UTF-8 text without NUL")
    if empty := _empty_argument(words):
        parser.error(f"{empty} is empty: give a value, or leave it out")
    if words[:1] == ["import-args"]:
        argv = import_answers.with_names_of_drop(words)
    # argparse leaves over the overrides that stand behind options
    args, unparsed = parser.parse_known_args(argv)
    if unparsed:
        _take_overrides(parser, args, unparsed)
    for name, value in vars(args).items():
        if isinstance(value, int) and abs(value) >= 2**63:
            parser.error(f"--{name.replace('_', '-')}: a number of more than 64 bits")
    return args


def _empty_argument(words: Sequence[str]) -> str:
    """Return what has an empty value, as a variable of a shell that is not set gives it; "" if
    nothing has."""
    # the words behind it are Megatron-LM's
    if words[0] == "import-args":
        return ""
    for before, word in pairwise(["megaprec", *words]):
        is_option = before.startswith("-") and "=" not in before
        if not word and is_option and before not in MAY_BE_EMPTY:
            return f'{before} ""'
        if not word and not is_option:
            return f'the argument behind "{before}"'
        option, equals, value = word.partition("=")
        if equals and not value and option.startswith("-") and option not in MAY_BE_EMPTY:
            return word
    return ""


def _take_overrides(
    parser: argparse.ArgumentParser, args: argparse.Namespace, unparsed: list[str]
) -> None:
    """Add the words that argparse left over to the overrides of a command; exit if the command has
    none, or if one of them is an option."""
    has_option = any(word.startswith("-") for word in unparsed)
    if hasattr(args, "overrides") and not has_option:
        args.overrides = [*args.overrides, *unparsed]
        return
    if args.run is import_args.main:
        parser.exit(2, f"{import_args.how_to_quote(unparsed[0])}\n")
    parser.error(f"unrecognized arguments: {' '.join(unparsed)}{_override_hint(unparsed)}")


def _override_hint(words: Sequence[str]) -> str:
    """Return a hint for an override that is written as an option, such as --train.steps=14; empty
    if there is none."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, sign, value = word.lstrip("-").partition("=")
        # no option has a dot in its name
        if word.startswith("--") and re.fullmatch(r"[a-z]+\.\w+", name):
            return f"; an override has no dashes: {name}={value if sign else following}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
