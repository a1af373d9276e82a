"""`megaprec diagnose RUN_DIR`: print what each rank was doing when a run ended abnormally, and the
culprit."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parallel.hangs.heartbeat import Beat
from parallel.hangs.verdict import ranks_in_words, where_in_words
from tools.console.json_output import add_json, print_result
from tools.journal.invariant_records import InvariantFinding, broken_ones, read_findings
from tools.journal.records import odd_records, read_all_events, read_metrics
from tools.training.hangs import EndRecord, read_earlier_records, read_records


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `diagnose`."""
    parser.description = __doc__
    parser.add_argument("folder", metavar="RUN_DIR", type=Path, help="folder of a run")
    add_json(parser)
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run `megaprec diagnose`; return the exit code."""
    # of an end after which the run began again; none if it has ended once more since
    earlier = read_earlier_records(args.folder)
    records = earlier or read_records(args.folder)
    lines = describe(records)
    findings = read_findings(read_all_events(args.folder))
    lines += [f"{'WRONG':10} {line}" for line in broken_ones(findings)]
    notes = odd_records(args.folder)
    lines += [f"note       {note}" for note in notes]
    if earlier:
        lines.insert(0, _since(args.folder))
    return print_result(
        args,
        lambda: {**_document(records, bool(earlier), findings), "notes": notes},
        lambda: print(*lines, sep="\n"),
    )


def _since(folder: Path) -> str:
    """Return a line on the run since an end after which it began again."""
    steps = read_metrics(folder)
    place = f"and has come to step {steps[-1]['step']}" if steps else "and has taken no step"
    return f"since      the run began again after this end, {place}"


def _document(
    records: Sequence[EndRecord], began_again: bool, findings: Mapping[str, InvariantFinding]
) -> dict[str, Any]:
    """Return the diagnosis for programs. began_again: the run did, after this end. findings: what
    is known of its invariants."""
    recorded = {record.rank.rank for record in records}
    world_size = max(record.ranks for record in records)
    silent = set(range(world_size)) - recorded
    return {
        "culprit": _cause(records, silent),
        "began_again": began_again,
        "invariants": {name: finding._asdict() for name, finding in findings.items()},
        "ranks": [record.model_dump(mode="json") for record in records],
    }


def describe(records: Sequence[EndRecord]) -> list[str]:
    """Return the cause of the end, then a line for each rank: where it was, and how it ended."""
    record_of = {record.rank.rank: record for record in records}
    # a rank's own record knows best where it was; of others, those that watched them
    position_of = dict[int, Beat]()
    for record in records:
        position_of |= {beat.rank: beat for beat in record.others}
    position_of |= {rank: record.rank for rank, record in record_of.items()}
    # by records and heartbeats, for either may know of more ranks
    world_size = max(max(position_of) + 1, *(record.ranks for record in records))
    silent = set(range(world_size)) - set(record_of)
    lines = [f"culprit    {_cause(records, silent)}"]
    for rank in range(world_size):
        record = record_of.get(rank)
        ended = record.ended if record else "left no record"
        position = _position(position_of.get(rank))
        name = f"rank {rank}"
        lines.append(f"{name:10} {position}; {ended}")
    return lines


def _cause(records: Sequence[EndRecord], silent: set[int]) -> str:
    """Return the cause in a line. silent: ranks without a record."""
    verdicts = [record.verdict for record in records if record.verdict]
    if verdicts:
        # each once: all ranks that watched a hang give the same one
        return "; ".join(dict.fromkeys(verdicts))
    # ranks that failed by themselves: others have lost the connection to them
    failed = [record for record in records if record.culprits]
    if failed:
        causes: list[str] = []
        for record in failed:
            beat = record.rank
            causes.append(f"rank {beat.rank} on {beat.host} failed: {record.ended}")
        return "; ".join(causes)
    if silent:
        return f"{ranks_in_words(silent)}, which left no record: killed, or the machine is down"
    return "unknown: every rank lost the connection to another"


def _position(beat: Beat | None) -> str:
    """Return in words where a rank was. beat: its last heartbeat, if one is known."""
    if beat is None:
        return "where it was is not known"
    verb = "waited in" if beat.waits else "was in"
    if beat.beat:  # it may have gone on for a second or two since
        verb = "had its last heartbeat in"
    position = f"on {beat.host} (process {beat.pid}) {verb} {where_in_words(beat)}"
    if beat.at:
        position += f", at {' < '.join(beat.at)}"
    return position
