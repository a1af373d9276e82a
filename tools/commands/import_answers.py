"""The answers to a refusal of `megaprec import-args`, as one command to paste."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megaprec.errors import Problem
from tools.config.run_file import known_keys
from tools.interop.importing.megatron_model import REQUIRED

ARGUMENT = re.compile(r"(?<!\S)--([\w.-]+)")
NOT_THERE = re.compile(r"^--drop (\S+): no such argument is given")
MISSING = re.compile(r"([a-z][a-z0-9]*\.[a-z_]+) is missing")
ASSUME = re.compile(r"--assume (\w+)=VALUE")
KEY = re.compile(r"(?<![\w.])([a-z][a-z0-9]*\.[a-z_]+)=(\"\w*\"|\w+(?:[.-]\w+)*|)")
# arguments that no run of Megatron-LM is without
NEEDED = frozenset(
    {
        *REQUIRED,
        "seq_length",
        "micro_batch_size",
        "global_batch_size",
        "train_iters",
        "lr",
        "data_path",
    }
)
LONGEST = 1500  # letters of a command


@dataclass(frozen=True)
class Asked:
    """The words that a command was given.

    sources: all but options. options: those of answers but --drop. dropped: the names that --drop
    has. output: the file to write.
    """

    sources: Sequence[str]
    options: Sequence[str] = ()
    output: str = "run.toml"
    dropped: Sequence[str] = ()


def command_with_answers(asked: Asked, problems: Sequence[Problem]) -> str:
    """Return the line that proposes a command with the answers to problems; "" if there are
    none."""
    not_there = {name for problem in problems for name in NOT_THERE.findall(problem)}
    kept = [name for name in asked.dropped if name.replace("-", "_") not in not_there]
    dropped = dict.fromkeys(kept)
    others = dict[str, None]()
    for problem in problems:
        answer, name = _answer(problem)
        if name:
            dropped[name] = None
        elif answer:
            others[answer] = None
    if len(dropped) == len(kept) and not others and not not_there:
        return ""
    words = [shlex.quote(option) for option in asked.options]
    words += others
    if dropped:
        words.append(f"--drop {','.join(dropped)}")
    given = shlex.join(asked.sources)
    end = " ".join([*words, "-o", shlex.quote(asked.output)])
    command = f"megaprec import-args {given} {end}"
    if len(command) > LONGEST:
        command = f"megaprec import-args ... {end}"
    return f"all answers at once, with your values for words in capitals: {command}"


def _answer(problem: Problem) -> tuple[str, str]:
    """Return the words that answer a problem, or the name of an argument to leave out; "" for
    neither.

    problem: what was given, a colon, and what is wrong with it or what to do, as in
        "--fim-rate 0.25: samples are not cut and moved to fill in the middle (FIM) here".
    """
    said, _, remedy = problem.partition(": ")
    if assumed := ASSUME.search(problem):
        return f"--assume {assumed[1]}=VALUE", ""
    if (missing := MISSING.match(problem)) and missing[1] in known_keys():
        return f"{missing[1]}=VALUE", ""
    if re.search(r"--ranks (?:N|says|gives)", problem):
        return "--ranks N", ""
    for key, value in KEY.findall(remedy):
        # a line may quote settings of another program
        if key in (*known_keys(), "model.preset"):
            return f"{key}={value or 'VALUE'}", ""
    if can_be_dropped(problem):
        droppable = [name for name in names_said(said) if name.replace("-", "_") not in NEEDED]
        return "", droppable[0]
    return "", ""


def names_said(said: str) -> list[str]:
    """Return the names of the arguments in a text, without their dashes."""
    return ARGUMENT.findall(said)


def can_be_dropped(problem: Problem) -> bool:
    """Return True if a problem is of arguments that were given, and a run may be without one of
    them."""
    # before the colon stands how they were given
    said, colon, _ = problem.partition(":")
    if NOT_THERE.match(problem) or not colon or not said.startswith("--") or " is missing" in said:
        return False
    names = {name.replace("-", "_") for name in names_said(said)}
    return not names.issubset(NEEDED)


def dropped_names(given: Sequence[str]) -> Iterator[str]:
    """Yield the names of --drop as Megatron-LM's argparse names them."""
    for name in typed_names(given):
        yield name.replace("-", "_")


def typed_names(given: Sequence[str]) -> Iterator[str]:
    """Yield the names of --drop without their first dashes. One --drop may have several, with
    commas."""
    for names in given:
        for name in names.split(","):
            yield name.strip().lstrip("-")


def with_names_of_drop(words: Sequence[str]) -> list[str]:
    """Return the words of a command line in which --drop may be followed by a name with dashes."""
    joined = list[str]()
    for word in words:
        if joined[-1:] == ["--drop"] and word.startswith("--"):
            joined[-1] = f"--drop={word}"
        else:
            joined.append(word)
    return joined
