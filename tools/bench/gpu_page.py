"""The part of docs/gpu.md that says what was seen on a GPU."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
SECTION = "## What has been seen"
WORK = (
    "Training steps in bf16 with FP32 masters: 8 layers of Llama 3 8B, vocabulary 32768, 4 x 8192 "
    "tokens, unless the name says otherwise. The gradients of peers add up in bf16. MFU counts "
    "attention as if it were not causal."
)
LABELS = ("measurement", "at", "on")  # what every record has


def with_results(page: str, machine: Mapping[str, str], records: Sequence[Record]) -> str:
    """Return the page with what was seen in place of what was seen before.

    records: of `python -m tools.bench gpu`.
    """
    by_kind: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_kind[_kind_of(record)].append(record)
    facts = ", ".join(f"{name} {value}" for name, value in machine.items())
    lines = [SECTION, "", f"{facts}.", ""]
    lines += _steps(by_kind["step"])
    lines += _outcomes(by_kind["test"])
    lines += _others(by_kind["other"])
    before, _, rest = page.partition(f"{SECTION}\n")
    _, next_section, after = rest.partition("\n## ")
    section = "\n".join(lines)
    return f"{before}{section}\n{next_section}{after}"


def _kind_of(record: Record) -> str:
    """Return what a record is of: a training step, a test, or something other."""
    if "outcome" in record:
        return "test"
    # a record of FP8 steps says what it compares
    if "tokens_per_s" in record and "what" not in record:
        return "step"
    return "other"


def _steps(records: Sequence[Record]) -> Iterator[str]:
    """Yield the table of training steps."""
    yield WORK
    yield ""
    yield "| | tokens/s | step | TFLOP/s | MFU | memory |"
    yield "|---|---|---|---|---|---|"
    for record in records:
        cells = [
            record["measurement"],
            f"{record['tokens_per_s']:,.0f}",
            f"{1e3 * record['step_s']:.1f} ms",
            f"{record['tflops']:.4g}",
            _known("{:.1%}", record.get("mfu")),
            _known("{:.1f} GiB", record.get("peak_gib")),
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


def _others(records: Sequence[Record]) -> Iterator[str]:
    """Yield the other records as they are, those that were refused too."""
    yield ""
    yield "```text"
    for record in records:
        facts = {name: value for name, value in record.items() if name not in LABELS}
        yield f"{record['measurement']}: {json.dumps(facts)}"
    yield "```"
