"""The part of docs/gpu.md that says what was seen on a GPU."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
SECTION = "## What has been seen"
LABELS = ("measurement", "at")  # what every record has


def with_results(page: str, machine: Mapping[str, str], records: Sequence[Record]) -> str:
    """Return the page with what was seen in place of what was seen before.

    records: of `python -m tools.bench gpu`.
    """
    facts = ", ".join(f"{name} {value}" for name, value in machine.items())
    lines = [SECTION, "", f"{facts}."]
    lines += _steps([record for record in records if _is_step(record)])
    lines += _outcomes([record for record in records if "outcome" in record])
    lines += _others([record for record in records if _is_other(record)])
    before, _, rest = page.partition(f"{SECTION}\n")
    _, next_section, after = rest.partition("\n## ")
    return before + "\n".join(lines) + "\n" + next_section + after


def _is_step(record: Record) -> bool:
    return "tokens_per_s" in record and "what" not in record


def _is_other(record: Record) -> bool:
    return not _is_step(record) and "outcome" not in record


def _steps(records: Sequence[Record]) -> Iterator[str]:
    """Yield the table of training steps."""
    yield ""
    yield (
        "Training steps in bf16 with FP32 masters: 8 layers of Llama 3 8B, vocabulary 32768, 4 x "
        "8192 tokens, unless the name says otherwise. The gradients of peers add up in bf16. MFU "
        "counts attention as if it were not causal."
    )
    yield from ("", "| | tokens/s | step | TFLOP/s | MFU | memory |", "|---|---|---|---|---|---|")
    for record in records:
        mfu = f"{record['mfu']:.1%}" if "mfu" in record else "not known"
        memory = f"{record['peak_gib']:.1f} GiB" if "peak_gib" in record else "not known"
        yield (
            f"| {record['measurement']} | {record['tokens_per_s']:,.0f} | "
            f"{record['step_s'] * 1e3:.1f} ms | {record['tflops']:.4g} | {mfu} | {memory} |"
        )


def _outcomes(records: Sequence[Record]) -> Iterator[str]:
    """Yield how many tests passed, and the others by name."""
    if not records:
        yield from ("", "The tests were not run.")
        return
    counts = Counter(record["outcome"].partition(":")[0] for record in records)
    totals = [f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped")]
    yield from ("", f"Tests: {', '.join(totals)}.", "")
    for record in records:
        if record["outcome"] != "passed":
            yield f"- `{record['test']}` {record['outcome']}"


def _others(records: Sequence[Record]) -> Iterator[str]:
    """Yield the other records as they are, those that were refused too."""
    yield from ("", "```text")
    for record in records:
        facts = {name: value for name, value in record.items() if name not in LABELS}
        yield f"{record['measurement']}: {json.dumps(facts)}"
    yield "```"
