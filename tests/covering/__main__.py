"""Tries rows of the array until each triple has been seen, or the time is over; goes on where an
earlier call has ended. Says how many triples there are, were seen, and are refused by which rules."""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

import tests.ranks
from tests.covering import precisions
from tests.covering.array import Array, Combination, Row, combinations_of
from tests.covering.equal_rows import equal_rows, keep_equal_row
from tests.covering.options import CHEAP_RANKS, DEFAULT, NEEDED
from tests.covering.trial import (
    Outcome,
    command_of,
    ranks_of,
    refusal,
    tried,
    values_of_options,
)
from tests.parity.campaign import Pool
from tools.verify.parity.ranks import RecordedRun

COMPILE = "compile"
EQUAL = "equal"  # a row whose combinations have been seen
# after which ranks are started anew: each row makes groups, and a thread of gloo for each wakes up a
# hundred times a second as long as the rank lives
ROWS_OF_A_POOL = 6


class Pools:
    """Ranks that stay for many rows, by their number."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}
        self._uses = Counter[int]()

    def together(self, runs: Sequence[RecordedRun], folder: Path) -> list[None]:
        """As `run_together`."""
        ranks = runs[0].config.world_size
        if self._uses[ranks] % ROWS_OF_A_POOL == 0 and ranks in self._pools:
            self._pools.pop(ranks).close()
        self._uses[ranks] += 1
        if ranks not in self._pools:
            self._pools[ranks] = Pool(ranks)
        return self._pools[ranks].together(runs, folder)

    def close(self) -> None:
        """The ranks end."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    def drop(self) -> None:
        """Forget ranks of which one has failed."""
        self._pools.clear()


def main() -> int:
    """Returns 1 if a row was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.covering", description=__doc__)
    parser.add_argument("--minutes", type=float, default=170)
    parser.add_argument(
        "--precisions", action="store_true", help="pairs of options of mixed precision instead"
    )
    parser.add_argument(
        "--having",
        action="append",
        default=[],
        metavar="OPTION=VALUE",
        help="only triples with one of these values; may be repeated",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--kept", type=Path, help="file of rows with other verdicts than equal, and of precisions"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tests.ranks.SECONDS = 3600.0
    if arguments.kept is None:
        name = "covering-precisions" if arguments.precisions else "covering"
        arguments.kept = Path(f"runs/{name}.jsonl")
    arguments.kept.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * arguments.minutes
    if arguments.precisions:
        return _try_precisions(arguments.seed, arguments.kept, end)
    reasons = Counter[str]()

    def takes(row: Row) -> bool:
        return not refusal(row)

    options = values_of_options()
    # forms are compiled for each shape: pairs with them, and triples of all else
    uncompiled = {option: values for option, values in options.items() if option != COMPILE}
    triples = _having(arguments.having, combinations_of(uncompiled, 3))
    array = Array(uncompiled, triples, takes, ranks_of, CHEAP_RANKS, arguments.seed, NEEDED)
    pairs = combinations_of(options, 2, COMPILE)
    compiled = Array(options, pairs, takes, ranks_of, CHEAP_RANKS, arguments.seed, NEEDED)
    verdicts = Counter[str]()
    for row in equal_rows():
        array.count(row)
        compiled.count(row)
        verdicts[EQUAL] += 1
    pools = Pools()
    for some_options in chain(array.rows(), compiled.rows()):
        row = DEFAULT | some_options
        if time.monotonic() > end:
            print("the time is over: the same command goes on")
            break
        outcome = _tried(row, pools)
        verdicts[outcome.verdict] += 1
        if outcome.verdict == EQUAL:
            array.count(row)
            compiled.count(row)
            keep_equal_row(row)
        else:
            _keep(arguments.kept, row, outcome)
        if outcome.verdict == "refused":
            reasons[outcome.why] += 1
        if outcome.verdict == "wrong":
            print(f"wrong: {outcome.why}\n  {command_of(row)}", flush=True)
        done = sum(verdicts.values())
        if done % 20 == 0:
            print(f"{done} rows, {len(array.left):,} triples left", flush=True)
    pools.close()
    _say_what_is_seen("triples", array)
    _say_what_is_seen("pairs with compiled leaves", compiled)
    print(dict(verdicts), dict(reasons))
    return int(verdicts["wrong"] > 0)


def _say_what_is_seen(name: str, array: Array) -> None:
    """Say how many combinations were seen, are left, and are refused by which rules."""
    seen = array.number - len(array.left) - len(array.refused)
    print(
        f"{array.number:,} {name}: {seen:,} seen, {len(array.refused):,} refused by a rule, "
        f"{len(array.left):,} left"
    )
    for rule, count in refusing_rules(array.refused).most_common():
        print(f"  {count:,} refused by {rule}")


def refusing_rules(refused: Iterable[Combination]) -> Counter[str]:
    """Return how many combinations each rule refuses, with all other options at their defaults."""
    rules = Counter[str]()
    for combination in refused:
        rule = refusal({**DEFAULT, **dict(combination)})
        assert rule, f"{combination}: no rule refuses it"
        rules[rule] += 1
    return rules


def _having(wanted: Sequence[str], triples: Iterable[Combination]) -> Iterable[Combination]:
    """Return the triples with one of the values, each "OPTION=VALUE"; all if none is wanted."""
    if not wanted:
        return triples
    parted = [one.partition("=") for one in wanted]
    entries = {(option, value) for option, _, value in parted}
    return [triple for triple in triples if entries.intersection(triple)]


def _try_precisions(seed: int, kept: Path, end: float) -> int:
    """Returns 1 if a row of options of mixed precision was wrong."""
    options = {name: list(values) for name, values in precisions.OPTIONS.items()}
    pairs = combinations_of(options, 2)

    def takes(row: Row) -> bool:
        return not precisions.refusal(row)

    array = Array(options, pairs, takes, lambda row: 1, 1, seed)
    verdicts = Counter[str]()
    for entry in _kept(kept):
        array.count(entry["row"])
        verdicts[entry["verdict"]] += 1
    for row in array.rows():
        if time.monotonic() > end:
            print("the time is over: the same command goes on")
            break
        array.count(row)
        with tempfile.TemporaryDirectory() as folder:
            outcome = precisions.tried(row, Path(folder))
        verdicts[outcome.verdict] += 1
        _keep(kept, row, outcome)
        if outcome.verdict == "wrong":
            print(f"wrong: {outcome.why}: {row}", flush=True)
    seen = array.number - len(array.refused) - len(array.left)
    print(
        f"{array.number} pairs: {seen} seen, {len(array.refused)} refused by a rule, "
        f"{len(array.left)} left"
    )
    print(dict(verdicts))
    return int(verdicts["wrong"] > 0)


def _keep(path: Path, row: Row, outcome: Outcome) -> None:
    with path.open("a") as kept:
        kept.write(json.dumps({"row": row, **vars(outcome)}) + "\n")


def _kept(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def _tried(row: Row, pools: Pools) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        try:
            return tried(row, Path(folder), pools.together)
        except Exception as error:  # whatever it is, it is no refusal
            pools.drop()
            return Outcome("wrong", f"{type(error).__name__}: {error}"[:2000])


if __name__ == "__main__":
    sys.exit(main())
