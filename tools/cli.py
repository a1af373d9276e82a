"""The `megaprec` command.

Exit codes: 0 success; 1 a fault of megaprec, or runs that differ in `parity` or `prove`; 2 wrong
input, or a file that cannot be read or written (a line for each problem); 3 training stopped itself
because of skipped steps, with its state saved; 128 + signal: stopped by a signal, SIGPIPE where the
reader of the output has gone.
"""

import argparse
import os
import platform
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from megaprec.checkpoint.atomic import replaced_since
from megaprec.errors import Problem, UserError, did_you_mean
from megaprec.parsing import is_unicode
from megaprec.resources import require_threads
from megaprec.train_program import end_file_in, tell_end
from parallel.described_world import require_consistent, slurm_environment
from tools.commands.table import COMMANDS, GROUPS, Command
from tools.console.json_output import to_json
from tools.console.streams import guard_streams
from tools.parts import optional_parts
from tools.training.ends import EXIT_CODES, ON_PURPOSE, RanksFailed, Stopped, as_user_error
from tools.training.launched import is_consequence, is_local_rank, prints_own_failure

MAX_ATTEMPTS = 4  # at a run whose checkpoints are replaced
# arguments whose paths are read as texts, for a few are URLs or names
PATHS_AS_TEXTS = ("file", "source", "prefix", "path", "run_", "a", "b", "own", "data")
URL_AS_PATH = re.compile(r"[a-z][a-z0-9+.-]+:(?=/)", re.IGNORECASE)
MAY_BE_EMPTY = ("--prompt", "--stop")  # options whose own lines say what an empty text means


def main(
    argv: Sequence[str] | None = None, modules_are_read: Callable[[], object] = lambda: None
) -> int:
    """Run the command line `argv` (default: the process's own) and return the exit code.

    Ends the process if torch.distributed could not be shut down: see `parallel.mesh.world`.

    modules_are_read: called when the modules of the command have been imported, before it begins.
    """
    guard_streams()
    try:
        os.environ.update(slurm_environment(os.environ))
        require_consistent(os.environ)
        require_threads(os.environ)
    except UserError as error:
        if not _tell_program(error):
            _print_error(error, _asks_for_document(sys.argv))
        return 2
    args = _parse(argv)
    modules_are_read()
    joined_before = _is_in_world()  # by who calls this in a process of its own
    try:
        code = _run(args)
    except Exception:
        if joined_before or not _is_in_world():
            raise
        traceback.print_exc()
        code = 1
    # a world that is left over would keep the process at its exit, waiting for other ranks
    if not joined_before and _is_in_world():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _is_in_world() -> bool:
    """Return True if this process has joined a world of ranks, for which it has loaded torch."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized()


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
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        if prints_own_failure():
            _print_error(UserError.of("command.interrupted"), args.json)
        return 130
    except Exception as error:
        return _code_of_failure(error, args)


def _code_of_failure(error: Exception, args: argparse.Namespace) -> int:
    """Print an error that is the user's, and return its exit code; raise any other again."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:  # of a rank
        optional_parts.note_failure(error)
    cause = as_user_error(error)
    # a rank ends with its traceback, for its launcher may start it again
    if isinstance(error, MemoryError) and not is_local_rank():
        cause = UserError.of("command.no_memory")
    if is_consequence(cause) and is_local_rank():
        # the launcher tells the reason of the rank that was first
        return 1
    # `megaprec.train` raises it in the program that has called it
    is_told = getattr(args, "end_file", None) is not None
    if prints_own_failure() and not is_told:
        _tell_failure(cause, args.json)
    if isinstance(cause, Stopped | RanksFailed):
        return cause.exit_code
    if isinstance(cause, ON_PURPOSE):
        return EXIT_CODES[type(cause)]
    raise error


def _tell_failure(cause: Exception, as_document: bool) -> None:
    """Print why a command has failed, as far as nothing else prints it. as_document: print it on
    stdout too, as the one JSON document."""
    if isinstance(cause, ON_PURPOSE) and not isinstance(cause, Stopped):
        _print_error(cause, as_document)
    elif as_document:
        # On stderr stand the lines of a rank or a launcher, or Python prints the traceback.
        is_told = isinstance(cause, Stopped | RanksFailed)
        problems = _problems_of(cause) if is_told else [_crash(cause)]
        _print_document(problems)


def _crash(error: Exception) -> Problem:
    """Return the line on an error that is a fault of the program."""
    return Problem(f"{type(error).__name__}: {error}")


def _print_error(error: Exception, as_document: bool) -> None:
    """Print an error on stderr. as_document: print it on stdout too, as the one JSON document."""
    problems = _problems_of(error)
    print(*problems, sep="\n", file=sys.stderr)
    if as_document:
        _print_document(problems)


def _problems_of(error: Exception) -> Iterable[Problem]:
    """Return what is wrong, a line each."""
    lines = error.problems if isinstance(error, UserError) else (str(error),)
    return [line if isinstance(line, Problem) else Problem(line) for line in lines]


def _print_document(problems: Iterable[Problem]) -> None:
    """Print problems as the one JSON document of a command on stdout."""
    errors = [
        {"code": problem.code, "message": str(problem), "fields": problem.fields}
        for problem in problems
    ]
    print(to_json({"errors": errors}))


def _asks_for_document(words: Iterable[str]) -> bool:
    """Return True if one of the words of a command line is `--json`, or its beginning, which
    argparse takes for it."""
    return any(len(word) > len("--") and "--json".startswith(word) for word in words)


def _run_with_retries(args: argparse.Namespace) -> int:
    """Run a command and return its exit code. A command that may be repeated is run again if a
    checkpoint that it read was replaced meanwhile by a run that trains."""
    attempts = MAX_ATTEMPTS if COMMANDS[args.command].repeatable else 1
    # all but the last, whose error is the user's
    for _ in range(attempts - 1):
        start = time.time()
        try:
            return int(args.run(args))
        except (UserError, OSError) as error:
            message = str(error)
            replaced = any(replaced_since(start, message, path) for path in _path_values(args))
            if _is_in_world() or not replaced:
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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # argparse takes -5 for a value and -5GB for an option; no option of ours begins so
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def error(self, message: str) -> NoReturn:
        """Tell an error to `megaprec.train`, with `--json` as the document, or else on stderr, and
        exit with code 2."""
        hint = _hint_at_dashes(message)
        # a message without a hint may be a Problem, which has a code
        error = UserError(f"{message}{hint}" if hint else message)
        if _tell_program(error):
            self.exit(2)
        # what is wrong may stand before it
        if _asks_for_document(sys.argv):
            _print_document(_problems_of(error))
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


class _ParserOfAll(_Parser):
    """The parser of the command line, whose help lists the commands by group."""

    def format_help(self) -> str:
        """Return usage, options and the commands of each group."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        formatter.start_section("options")
        formatter.add_arguments(self._optionals._group_actions)
        formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()


def _hint_at_dashes(message: str) -> str:
    """Return how a value that begins with a dash is written, for argparse's message about an option
    without a value; "" for other messages."""
    option = re.fullmatch(r"argument (?:-\w/)?(--[\w-]+): expected one argument", message)
    return f'; a value that begins with "-" is written {option[1]}=VALUE' if option else ""


def parser_of_all() -> argparse.ArgumentParser:
    """Return the parser of all commands, with the options of each."""
    return _parser_of(COMMANDS)


def _parser_of(called: Container[str]) -> argparse.ArgumentParser:
    """Return the parser of all commands, with the options of those that are called: the modules of
    others are not imported."""
    parser = _ParserOfAll(
        prog="megaprec",
        description="Train, check and convert transformer models in any tensor, pipeline and data "
        "layout.",
        epilog=_described_commands(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(
        required=True, metavar="COMMAND", dest="command", parser_class=_Parser
    )
    for name, command in COMMANDS.items():
        command_parser = commands.add_parser(name, help=command.help)
        if name in called:
            command.load().add_arguments(command_parser)
            command_parser.epilog = _example_of(command)
    # `completion` calls the first; the second is for commands without an option --json
    parser.set_defaults(parser_of_all=parser_of_all, json=False)
    return parser


def _described_commands() -> str:
    """Return the help of all commands, by group."""
    lines = list[str]()
    for group in GROUPS:
        lines.append(f"{group}:")
        for name, command in COMMANDS.items():
            if command.group == group:
                lines.append(f"  {name:20}{command.help}")
        lines.append("")
    return "\n".join([*lines, "megaprec COMMAND --help describes a command."])


def _example_of(command: Command) -> str:
    """Return the line of a command's help that shows its use."""
    return f"example: megaprec {command.examples[0]}"


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
    words = list(sys.argv[1:] if argv is None else argv)
    # options before the command are those of all commands
    called = next((word for word in words if not word.startswith("-")), "")
    parser = _parser_of({called})
    if not words:
        parser.print_help(sys.stderr)
        parser.exit(2)
    _require_texts(parser, words)
    if words[:1] == ["import-args"]:
        words = COMMANDS["import-args"].load().words_to_parse(words)
    # argparse leaves over the overrides that stand behind options
    args, unparsed = parser.parse_known_args(words)
    if unparsed:
        _take_overrides(parser, args, unparsed)
    if problem := _path_problem(args):
        parser.error(problem)
    for name, value in vars(args).items():
        if isinstance(value, int) and abs(value) >= 2**63:
            parser.error(f"--{name.replace('_', '-')}: a number of more than 64 bits")
    return args


def _path_problem(args: argparse.Namespace) -> Problem | None:
    """Return the problem with a path that is a dash, which other programs take for standard input
    or output, or with a URL for which a path of this machine is needed; None if there is none."""
    for name, value in vars(args).items():
        items = value if isinstance(value, list | tuple) else [value]
        for item in items:
            is_path = isinstance(item, Path)
            if (is_path or name in PATHS_AS_TEXTS) and str(item) == "-":
                return Problem.of("command.path_is_dash")
            # a path has one slash where a URL has two; a URL that may be given is none
            scheme = URL_AS_PATH.match(str(item)) if is_path else None
            if scheme and not os.path.lexists(scheme[0]):
                return Problem.of("command.path_is_url", scheme=scheme[0])
    return None


def _require_texts(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """End with an error for an argument that is empty or no text."""
    for word in words:
        if "\0" in word or not is_unicode(word):
            parser.error(f"the argument {word!a} is no UTF-8 text without NUL")
    if empty := _empty_argument(words):
        parser.error(f"{empty} is empty: give a value, or leave it out")


def _empty_argument(words: Sequence[str]) -> str:
    """Return in words which argument or option is an empty text, as a variable of a shell that is
    not set gives it; "" if none is."""
    if words[0] == "import-args":
        # the words behind the first are Megatron-LM's
        return 'the argument behind "import-args"' if words[1:2] == [""] else ""
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
    if args.command == "import-args":
        how_to_quote = COMMANDS["import-args"].load().how_to_quote
        parser.exit(2, f"{how_to_quote(unparsed[0])}\n")
    hint = _override_hint(unparsed) or _option_hint(parser, args, unparsed)
    parser.error(f"unrecognized arguments: {' '.join(unparsed)}{hint}")


def _override_hint(words: Sequence[str]) -> str:
    """Return a hint for an override that is written as an option, such as --train.steps=14; empty
    if there is none."""
    # the value may be the word that follows
    for word, following in pairwise([*words, ""]):
        name, sign, value = word.lstrip("-").partition("=")
        # no option has a dot in its name
        if word.startswith("--") and re.fullmatch(r"[a-z]+\.\w+", name):
            return f"; an override has no dashes: {name}={value if sign else following}"
    return ""


def _option_hint(
    parser: argparse.ArgumentParser, args: argparse.Namespace, words: Sequence[str]
) -> str:
    """Return a hint for the first option that the command has not: the closest one that it has, or
    where all are listed; empty if there is no option among the words."""
    unknown = [word for word in words if word.startswith("-")]
    if not unknown:
        return ""
    command_parser = _called_parser(parser, args)
    name, _, _ = unknown[0].partition("=")
    hint = did_you_mean(name, command_parser._option_string_actions)
    return hint or f"; {command_parser.prog} --help lists the options"


def _called_parser(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> argparse.ArgumentParser:
    """Return the parser of the command that was called, such as `megaprec data build`."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return _called_parser(action.choices[getattr(args, action.dest)], args)
    return parser


if __name__ == "__main__":
    sys.exit(main())
