"""All that needs a GPU, one process after the other: what the machine can do, the tests of
tests/gpu, and training steps beside other systems. docs/gpu.md is written of it.

Each result is a line of JSON in a file, written as it is known, and a line on the screen. A call
takes what is not there yet of this device, the most telling first, and ends after --minutes; the
next call goes on, within a file of tests too. What has failed is not tried again before it is
named: the last lines say how. Nothing is downloaded. Without a GPU one line says so, the exit code
is 2, and nothing is written. `--device cpu` tries the program itself, with small sizes; its page
says so.
"""

import argparse
import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import torch

from megaprec.errors import UserError
from tools.bench.gpu_page import add_files, write_page
from tools.bench.gpu_plan import ROOT, Measurement, measurements
from tools.bench.gpu_records import (
    CALL,
    append,
    describe_failures,
    read_records,
    tests_of,
    to_repeat,
    to_take,
)
from tools.bench.gpu_take import take
from tools.bench.measurement import add_device, require_gpu

SUBJECT = "tests and benchmarks that need a GPU"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this measurement."""
    add_device(parser)
    add_files(parser)
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="after which the call ends, whatever is left"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="measurements, taken again"
    )


def main(args: argparse.Namespace) -> int:
    """Run `python -m tools.bench gpu`.

    Exit code 1: a test has failed, or a measurement of megaprec. Raises UserError without a GPU,
    and for a name that no measurement has.
    """
    require_gpu(args.device)
    end = time.monotonic() + 60 * args.minutes
    planned = measurements(args.device)
    chosen = _named(planned, args.only)
    machine = describe_machine(args.device)
    device = machine["device"]
    args.records.parent.mkdir(parents=True, exist_ok=True)
    begun = {"measurement": CALL, "at": _now(), "on": device}
    append(args.records, {**begun, "machine": machine})
    remaining = chosen or to_take(planned, read_records(args.records, device))
    with args.records.with_suffix(".log").open("a+b") as log:
        # a measurement that usually takes longer than is left is not begun
        while remaining and time.monotonic() + remaining[0].usual < end:
            measurement = remaining.pop(0)
            labels = {"measurement": measurement.name, "at": _now(), "on": device}
            left = end - time.monotonic()
            limit = min(measurement.seconds, left)
            print(f"measuring  {measurement.name}, at most {limit:.0f} s", flush=True)
            # what is asked for by name is tried again
            known = read_records(args.records, device) if not chosen else []
            for record in take(measurement, left, log, tests_of(measurement.name, known)):
                append(args.records, {**labels, **record})
                print(f"           {outline(record)}", flush=True)
            write_page(args.records, args.page)
    return _tell(args, remaining)


def _named(planned: Sequence[Measurement], only: Sequence[str]) -> list[Measurement]:
    """Return the measurements of these names. Raises UserError for a name that none has."""
    names = [measurement.name for measurement in planned]
    unknown = [name for name in only if name not in names]
    if unknown:
        raise UserError.of(
            "bench.unknown_measurement", names="; ".join(unknown), known="; ".join(names)
        )
    return [measurement for measurement in planned if measurement.name in only]


def _tell(args: argparse.Namespace, remaining: Sequence[Measurement]) -> int:
    """Write the page and say what is left and what has failed; return the exit code."""
    write_page(args.records, args.page)
    print(f"written    {args.page}, from {args.records}")
    if remaining:
        names = "; ".join(measurement.name for measurement in remaining)
        print(f"left       {names}: run it again")
    records = read_records(args.records)
    failed = list(describe_failures(records))
    for line in failed:
        print(f"failed     {line}")
    if failed:
        names = " ".join(f'"{name}"' for name in to_repeat(records))
        print(f"again      python -m tools.bench gpu --only {names}")
    return 1 if failed else 0


def outline(record: Mapping[str, Any]) -> str:
    """Return what a record says, in one line for the screen."""
    if "refused" in record:
        return f"refused: {record['refused']}"
    if "outcome" in record:
        return f"{record['outcome']}  {record['test']}"[:160]
    if "tokens_per_s" in record:
        mfu = f", MFU {record['mfu']:.1%}" if "mfu" in record else ""
        return f"{record['tokens_per_s']:,.0f} tokens/s{mfu}"
    return json.dumps(record)[:160]


def describe_machine(device: str) -> dict[str, str]:
    """Return what a reader must know of the machine and the software."""
    if device == "cpu":
        facts = {"device": "no GPU: the CPU, to try the program"}
    else:
        devices = torch.cuda.device_count()
        facts = {
            "device": f"{devices} x {torch.cuda.get_device_name()}",
            "CUDA": str(torch.version.cuda),
        }
    return facts | {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "torch": torch.__version__,
        "commit": _commit(),
    }


def _now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S.%f}"


def _commit() -> str:
    """Return the commit of the clone, or the one that was packed; "not known" without either."""
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    # git prints nothing where there is no clone
    commit = git.stdout.strip()
    packed = ROOT / ".gpu" / "commit"
    if not commit and packed.is_file():
        commit = packed.read_text("utf-8")
    return commit or "not known"
