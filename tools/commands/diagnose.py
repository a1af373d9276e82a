"""`megaprec diagnose RUN_DIR`: print what each rank was doing when a run ended abnormally, and the
culprit."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parallel.hangs.heartbeat import Beat
from parallel.hangs.verdict import ranks_in_words, where_in_words
from tools.console.tables import add_json, put
from tools.training.end_records import EndRecord, read_records


def add_parser(subparsers: Any) -> None:
    """Add `diagnose` to the commands."""
    parser = subparsers.add_parser(
        "diagnose",
        help="print what each rank was doing when a run ended abnormally",
        description=__doc__,
    )
    parser.add_argument("folder", metavar="RUN_DIR", type=Path, help="folder of a run")
    add_json(parser)
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run `megaprec diagnose`."""
    records = read_records(args.folder)
    silent = set(range(max(record.ranks for record in records))) - {
        record.rank.rank for record in records
    }
    return put(
        args,
        lambda: {
            "culprit": _cause(records, silent),
            "ranks": [record.model_dump(mode="json") for record in records],
        },
        lambda: print(*describe(records), sep="\n"),
    )


def describe(records: Sequence[EndRecord]) -> list[str]:
    """Return the cause of the end, then a line for each rank: where it was, and how it ended."""
    ended = {record.rank.rank: record for record in records}
    seen: dict[int, Beat] = {beat.rank: beat for record in records for beat in record.others}
    seen |= {rank: record.rank for rank, record in ended.items()}
    ranks = range(max(max(seen) + 1, *(record.ranks for record in records)))
    lines = [f"culprit    {_cause(records, set(ranks) - set(ended))}"]
    for rank in ranks:
        beat = seen.get(rank)
        record = ended.get(rank)
        lines.append(
            f"{f'rank {rank}':10} {_place(beat)}; {record.ended if record else 'left no record'}"
        )
    return lines


def _cause(records: Sequence[EndRecord], silent: set[int]) -> str:
    """Return the cause in a line. silent: ranks without a record."""
    if verdicts := [record.verdict for record in records if record.verdict]:
        return "; ".join(dict.fromkeys(verdicts))
    if failed := [record for record in records if record.culprits]:
        return "; ".join(
            f"rank {one.rank.rank} on {one.rank.host} failed: {one.ended}" for one in failed
        )
    if silent:
        return f"{ranks_in_words(silent)}, which left no record: killed, or the machine is down"
    return "unknown: every rank lost the connection to another"


def _place(beat: Beat | None) -> str:
    if beat is None:
        return "where it was is not known"
    waits = "waited in " if beat.waits else "was in "
    at = f", at {' < '.join(beat.at)}" if beat.at else ""
    return f"on {beat.host} (process {beat.pid}) {waits}{where_in_words(beat)}{at}"
