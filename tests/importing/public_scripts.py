"""Answers that a user must give before the scripts of a folder are imported.

    python -m tests.importing.public_scripts FOLDER

FOLDER/SOURCES.md lists them, a row each: `NN | repository | path | ...`; the file stands in the
folder whose name begins with NN. Each is imported again and again, with the answers that the
refusal before proposes: `--drop NAME`, `--assume NAME=VALUE`, `--ranks N` or a key of the run file.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from megaprec.errors import UserError
from tools.config.run_file import read_run_settings
from tools.interop.arguments.megatron import NUMBERS, READ
from tools.interop.importing.run import import_run

MOST_ROUNDS = 8
# of a user who is asked: the second if batch and experts do not fit the first
RANKS = (256, 288)
ROW = re.compile(r"(\d\d) \| [^|]+ \| (\S+) \|")
ASSUME = re.compile(r"--assume (\w+)=VALUE")
MISFIT = re.compile(
    r"ranks are no multiple|not a multiple of train\.micro_batch .* x parallel\.data"
)
KEY = re.compile(r"(?<![\w.])([a-z][a-z0-9]*\.[a-z_]+)=")
OPTION = re.compile(r"(?<!\S)--([\w.-]+)")
# what a user would type for a key
VALUES = {
    "data.source": '"tokens/mine"',
    "model.vocab": "50304",
    "train.steps": "1000",
    "train.seq_length": "1024",
    "train.global_batch": "1024",
    "train.micro_batch": "1",
    "lr.peak": "1e-4",
    "lr.warmup": "0",
    "optimizer.name": '"adamw"',
    "parallel.zero": "true",
}


@dataclass
class Answers:
    """What a user has typed beside the file."""

    dropped: set[str] = field(default_factory=set)
    assumed: dict[str, str] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    ranks: int | None = None

    @property
    def count(self) -> int:
        """Return the number of them."""
        return len(self.dropped) + len(self.assumed) + len(self.keys) + (self.ranks is not None)

    def import_file(self, path: Path) -> None:
        """Import a file with them. Raises UserError."""
        settings, problems = read_run_settings(None, [f"{k}={v}" for k, v in self.keys.items()])
        if problems:
            raise UserError(*problems)
        dropped = frozenset(self.dropped)
        import_run([str(path)], settings, self.assumed, self.ranks, dropped)

    def add_remedy(self, problem: str) -> bool:
        """Do what a line of a refusal says. Returns False if it says nothing more to do."""
        before = self.count
        if self.ranks == RANKS[0] and MISFIT.search(problem):
            self.ranks = RANKS[1]
            return True
        said, _, remedy = problem.partition(": ")
        option = OPTION.match(said)
        name = option[1].replace("-", "_") if option else ""
        is_missing = " is missing" in said
        if assumption := ASSUME.search(problem):
            self.assumed.setdefault(assumption[1], _value(name))
        elif key := next((key for key in KEY.findall(remedy) if key in VALUES), None):
            self.keys.setdefault(key, VALUES[key])
        elif re.search("--ranks (?:N|says|gives)", problem):
            self.ranks = self.ranks or RANKS[0]
        elif name and not is_missing:
            self.dropped.add(name)
        return self.count > before


def _value(name: str) -> str:
    """Return a value of an argument."""
    row = READ.get(name)
    if row is None:
        return ""
    return "1" if row.kind in NUMBERS else "mine"


def answers_of(path: Path) -> tuple[int | None, str]:
    """Return how many answers an import needs, None if none are enough, and what it says then."""
    answers = Answers()
    for _ in range(MOST_ROUNDS):
        try:
            answers.import_file(path)
        except UserError as error:
            done = [answers.add_remedy(problem) for problem in error.problems]
            if not any(done):
                return None, error.problems[0]
        else:
            return answers.count, ""
    return None, "the answers lead to further questions"


def files_of(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the number and the file of each row of the list of sources."""
    for number, path in ROW.findall((folder / "SOURCES.md").read_text()):
        (of_row,) = folder.glob(f"{number}_*")
        yield number, of_row / Path(path).name


def main(argv: Sequence[str]) -> None:
    """Print a row for each file, and how many need at most two answers."""
    counts = list[int | None]()
    for number, path in files_of(Path(argv[0])):
        count, why = answers_of(path)
        counts.append(count)
        print(f"| {number} | {'refused' if count is None else count} | {why} |", flush=True)
    given = [count for count in counts if count is not None]
    few = sum(count <= 2 for count in given)
    print(f"{len(given)} of {len(counts)} imported, {few} with at most two answers; ", end="")
    print(f"median of those imported {median(given)}")


if __name__ == "__main__":
    main(sys.argv[1:])
