"""Tries drawn mutants of the training code beside its fast laws, in a copy of the last commit.

`python -m tests.mutants N SEED` draws N of them. It goes on where an earlier call has ended, if it
is given the same file of results, seed and commit.
"""

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.mutants.changes import TRAINING, Mutant, draw
from tests.mutants.equivalent import reason_of
from tests.mutants.session import Reach
from tests.mutants.sessions import chosen_laws, reaches, switched, try_all
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
    parser.add_argument("--seconds", type=float, default=60, help="time of laws for a mutant")
    parser.add_argument("--results", type=Path, help="file of the verdicts; mutants-SEED.jsonl")
    parser.add_argument("--folders", nargs="+", help="folders of code; those that train")
    parser.add_argument("--trained", action="store_true", help="only lines that runs execute")
    parser.add_argument("--workers", type=int, default=2, help="sessions of pytest side by side")
    arguments = parser.parse_args(words)
    results = arguments.results or Path(f"mutants-{arguments.seed}.jsonl")
    commit = commit_of(root)
    # ended as by Ctrl-C, so that the copy of the tree is removed
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with copy_of(root) as tree:
        lines = None
        if arguments.trained:
            noted = results.with_suffix(".lines.json")
            found = _once(noted, [commit], lambda: sorted(trained_lines(tree)))
            lines = {(path, number) for path, number in found}
        folders = arguments.folders or TRAINING
        mutants = draw(tree, arguments.number, arguments.seed, folders, lines)
        verdicts = _known(tree, mutants, read_results(results, commit))
        for number, verdict in verdicts.items():
            print(described(str(mutants[number]), verdict), flush=True)

        def tell(number: int, verdict: Verdict) -> None:
            verdicts[number] = verdict
            _keep(results, commit, str(mutants[number]), verdict)
            print(described(str(mutants[number]), verdict), flush=True)

        untried = [number for number in range(len(mutants)) if number not in verdicts]
        if untried:
            _try(tree, mutants, untried, arguments, tell)
    print(summary(list(verdicts.values())))
    return int(any(verdict.outcome == SURVIVED for verdict in verdicts.values()))


def _known(
    tree: Path, mutants: Sequence[Mutant], results: Mapping[str, Verdict]
) -> dict[int, Verdict]:
    """Return the verdicts of an earlier call, and on mutants that are equivalent, by number."""
    verdicts: dict[int, Verdict] = {}
    for number, mutant in enumerate(mutants):
        if reason := reason_of(mutant, tree):
            verdicts[number] = Verdict(EQUIVALENT, reason)
        elif str(mutant) in results:
            verdicts[number] = results[str(mutant)]
    return verdicts


def _try(
    tree: Path,
    mutants: Sequence[Mutant],
    untried: Sequence[int],
    arguments: argparse.Namespace,
    tell: Callable[[int, Verdict], None],
) -> None:
    """Try the mutants that have no verdict: by themselves those that can have no switch."""
    commit = commit_of(tree)
    results = arguments.results or Path(f"mutants-{arguments.seed}.jsonl")
    with copy_of(tree) as with_switches:
        have = switched(with_switches, mutants)
        paths = {mutant.path for mutant in have.values()}
        found = _once(
            results.with_suffix(".reached.json"),
            [commit, *map(str, mutants)],
            lambda: _reached(with_switches, paths, arguments.workers),
        )
        reached = [Reach(**one) for one in found["laws"]]
        have = {number: one for number, one in have.items() if number not in found["at_import"]}
        laws = {
            number: chosen_laws(tree, number, mutants[number], reached, arguments.seconds)
            for number in untried
            if number in have
        }
        try_all(with_switches, laws, arguments.seconds, arguments.workers, tell)
    trials = Trials(tree, arguments.seconds)
    for number in untried:
        if number not in have:
            tell(number, trials.tried(mutants[number]))


def _reached(tree: Path, paths: Iterable[str], workers: int) -> dict[str, Any]:
    laws, at_import = reaches(tree, paths, workers)
    return {"laws": [asdict(law) for law in laws], "at_import": sorted(at_import)}


def _once(file: Path, key: list[str], find: Callable[[], Any]) -> Any:
    """Return what `find` returns; it is kept in a file, for the same key."""
    if file.exists():
        noted = json.loads(file.read_text())
        if noted["key"] == key:
            return noted["found"]
    found = find()
    file.write_text(json.dumps({"key": key, "found": found}))
    return found


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
