"""Tries drawn mutants of the training code beside its fast laws, in a copy of the last commit.

`python -m tests.mutants N SEED` draws N of them. It goes on where an earlier call has ended, if it
is given the same file of results, seed and commit.
"""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.mutants.changes import TRAINING, draw
from tests.mutants.trained import trained_lines
from tests.mutants.trial import (
    EQUIVALENT,
    HANGS,
    KILLED,
    SURVIVED,
    Trials,
    Verdict,
    commit_of,
    copy_of,
)

ROOT = Path(__file__).parents[2]


def main(words: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Returns 1 if a mutant has survived."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("number", type=int)
    parser.add_argument("seed", type=int)
    parser.add_argument("--seconds", type=float, default=120, help="processor time for a mutant")
    parser.add_argument("--results", type=Path, help="file of the verdicts; mutants-SEED.jsonl")
    parser.add_argument("--folders", nargs="+", help="folders of code; those that train")
    parser.add_argument("--trained", action="store_true", help="only lines that runs execute")
    arguments = parser.parse_args(words)
    results = arguments.results or Path(f"mutants-{arguments.seed}.jsonl")
    commit = commit_of(root)
    # ended as by Ctrl-C, so that the copy of the tree is removed
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    verdicts: dict[str, Verdict] = {}
    with copy_of(root) as tree:
        lines = trained_lines(tree) if arguments.trained else None
        folders = arguments.folders or TRAINING
        mutants = draw(tree, arguments.number, arguments.seed, folders, lines)
        trials = Trials(tree, arguments.seconds)
        for mutant in mutants:
            known = read_results(results, commit).get(str(mutant))
            verdict = known or trials.tried(mutant)
            verdicts[str(mutant)] = verdict
            if known is None:
                _keep(results, commit, str(mutant), verdict)
            print(described(str(mutant), verdict), flush=True)
    print(summary(list(verdicts.values())))
    return int(any(verdict.outcome == SURVIVED for verdict in verdicts.values()))


def described(mutant: str, verdict: Verdict) -> str:
    """Return the line about one mutant."""
    if verdict.outcome == KILLED:
        how = "a crash" if verdict.crashed else "an assertion"
        said = f"killed by {verdict.by} ({how})"
    elif verdict.outcome == HANGS:
        said = "nothing goes on"
    elif verdict.outcome == EQUIVALENT:
        said = f"equivalent: {verdict.by}"
    else:
        said = "SURVIVED all laws" if verdict.whole else "SURVIVED the laws that the time was for"
    return f"{mutant}: {said}, {verdict.seconds:.0f} s"


def summary(verdicts: Sequence[Verdict]) -> str:
    """Return the line about all mutants."""
    outcomes = [verdict.outcome for verdict in verdicts]
    crashed = sum(verdict.crashed for verdict in verdicts)
    seconds = sum(verdict.seconds for verdict in verdicts)
    return (
        f"{len(verdicts)} mutants: {outcomes.count(KILLED)} killed, {crashed} of them by a plain "
        f"crash, {outcomes.count(HANGS)} hang, {outcomes.count(EQUIVALENT)} are equivalent, "
        f"{outcomes.count(SURVIVED)} survived; "
        f"{seconds:.0f} s of processor time"
    )


def read_results(file: Path, commit: str) -> dict[str, Verdict]:
    """Return the verdicts of one commit in a file of results, by mutant."""
    if not file.exists():
        return {}
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return {
        line["mutant"]: Verdict(**line["verdict"]) for line in lines if line["commit"] == commit
    }


def _keep(file: Path, commit: str, mutant: str, verdict: Verdict) -> None:
    line = {"commit": commit, "mutant": mutant, "verdict": asdict(verdict)}
    with file.open("a") as kept:
        kept.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main())
