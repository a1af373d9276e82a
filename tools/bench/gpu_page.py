"""The part of docs/gpu.md that says what was seen on a GPU, of the lines of JSON that `gpu` has
written. Needs no GPU."""

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megaprec.tokens.files import write_whole
from tools.bench.gpu_plan import ROOT
from tools.bench.gpu_records import CALL, LABELS, machine_of, read_records

SUBJECT = "docs/gpu.md, of what `gpu` has written"
PAGE = ROOT / "docs" / "gpu.md"
RECORDS = ROOT / "runs" / "gpu" / "gpu.jsonl"
Record = Mapping[str, Any]
SECTION = "## What has been seen"
WORK = (
    "Training steps in bf16 with FP32 masters: 8 layers of Llama 3 8B, vocabulary 32768, 4 x 8192 "
    "tokens, unless the name says otherwise. The gradients of peers add up in bf16. MFU counts "
    "attention as if it were not causal. Idle is the share of a step, from its first kernel to its "
    "last, in which the GPU had none."
)
KERNELS = 12  # rows of a table of kernels
NAME_LENGTH = 60  # characters of a kernel's name
ENDINGS = ("done", "cut")  # of measurements, which are no results


def add_files(parser: argparse.ArgumentParser) -> None:
    """Add the page and the file of records as options."""
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE", help="page to write")
    parser.add_argument(
        "--records", type=Path, default=RECORDS, metavar="FILE", help="lines of JSON"
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_files(parser)


def main(args: argparse.Namespace) -> int:
    """Run `python -m tools.bench gpu-page`; return the exit code."""
    write_page(args.records, args.page)
    print(f"written    {args.page}, from {args.records}")
    return 0


def write_page(records_file: Path, page: Path) -> None:
    """Write the page with the records of the newest call's device; whole, or not at all: the page
    that is there is what the next one is made of, and a lent machine may go at any moment."""
    records = read_records(records_file)
    text = with_results(PAGE.read_text(encoding="utf-8"), machine_of(records), records)
    write_whole(page, text.encode())


def with_results(page: str, machine: Mapping[str, str], records: Sequence[Record]) -> str:
    """Return the page with what was seen in place of what was seen before.

    records: of `python -m tools.bench gpu`.
    """
    by_kind: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_kind[_kind_of(record)].append(record)
    facts = ", ".join(f"{name} {value}" for name, value in machine.items())
    lines = [SECTION, "", f"{facts}.", ""]
    lines += _steps(by_kind["step"], by_kind["profile"])
    lines += _outcomes(by_kind["test"])
    for record in by_kind["profile"]:
        lines += _kernels(record)
    lines += _others(by_kind["other"])
    before, _, rest = page.partition(f"{SECTION}\n")
    _, next_section, after = rest.partition("\n## ")
    section = "\n".join(lines)
    return f"{before}{section}\n{next_section}{after}"


def _kind_of(record: Record) -> str:
    """Return what kind of record this is: of an ending, a test, a profile, steps, or other."""
    if record["measurement"] == CALL or any(name in record for name in ENDINGS):
        return "ending"
    if "outcome" in record:
        return "test"
    if "profile" in record:
        return "profile"
    # a record of FP8 steps says what it compares
    if "tokens_per_s" in record and "what" not in record:
        return "step"
    return "other"


def _steps(records: Sequence[Record], profiles: Sequence[Record]) -> Iterator[str]:
    """Yield the table of training steps."""
    idle = {record["measurement"]: record["profile"].get("idle_share") for record in profiles}
    yield WORK
    yield ""
    yield "| | tokens/s | step | TFLOP/s | MFU | memory | idle |"
    yield "|---|---|---|---|---|---|---|"
    for record in records:
        cells = [
            record["measurement"],
            f"{record['tokens_per_s']:,.0f}",
            f"{1e3 * record['step_s']:.1f} ms",
            _known("{:.4g}", record.get("tflops")),
            _known("{:.1%}", record.get("mfu")),
            _known("{:.1f} GiB", record.get("peak_gib")),
            _known("{:.1%}", idle.get(record["measurement"])),
        ]
        yield f"| {' | '.join(cells)} |"


def _known(form: str, number: float | None) -> str:
    return "not known" if number is None else form.format(number)


def _outcomes(records: Sequence[Record]) -> Iterator[str]:
    """Yield how many tests passed, and the others by name."""
    yield ""
    if not records:
        yield "The tests were not run."
        return
    counts = Counter[str]()
    for record in records:
        kind, _, _ = record["outcome"].partition(":")
        counts[kind] += 1
    totals = [f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped")]
    yield f"Tests: {', '.join(totals)}."
    yield ""
    for record in records:
        if record["outcome"] != "passed":
            yield f"- `{record['test']}` {record['outcome']}"


def _kernels(record: Record) -> Iterator[str]:
    """Yield the kernels of a step that take most of its time."""
    profile = record["profile"]
    yield ""
    yield f"Kernels of one step, {record['measurement']}: {profile['kernels']:,} in all."
    yield ""
    if "kernel_table" not in profile:
        return
    yield "| kernel | runs | ms | share |"
    yield "|---|---|---|---|"
    for name, runs, milliseconds, share in profile["kernel_table"][:KERNELS]:
        shown = name.replace("|", "/").replace("`", "'")[:NAME_LENGTH]
        yield f"| `{shown}` | {runs:,} | {milliseconds:.2f} | {share:.1%} |"


def _others(records: Sequence[Record]) -> Iterator[str]:
    """Yield the other records as they are, those that were refused too."""
    yield ""
    yield "```text"
    for record in records:
        facts = {name: value for name, value in record.items() if name not in LABELS}
        yield f"{record['measurement']}: {json.dumps(facts)}"
    yield "```"
