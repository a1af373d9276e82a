"""Skipped steps: the event that each writes to events.jsonl, and the exception that ends a diverged run."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from megaprec.diagnose.overflow_monitor import OverflowMonitor
from megaprec.optim.step_report import Offender, StepReport

Ids = Callable[[int, int], list[int] | list[str]]


class TrainingDiverged(Exception):
    """Training stopped itself because steps keep overflowing or must not overflow. The command exits with code 3."""


def overflow_event(report: StepReport, step: int, samples: range, watch: OverflowMonitor, ids: Ids) -> dict[str, Any]:
    """Return the record of a skipped step for events.jsonl.

    samples: positions of the global batch in the run's order. ids(position, count): numbers of the samples at these
    positions in the data set; in a blend with the name of the data set.
    """
    return {
        "event": "overflow",
        "step": step,
        "outcome": report.outcome,
        "loss": report.loss,
        "loss_scale": report.loss_scale,
        "first_sample": samples.start,
        "num_samples": len(samples),
        "skipped_in_a_row": watch.in_a_row,
        "advice": watch.advice(),
        "offenders": [_fields(offender, samples.start, ids) for offender in report.offenders],
    }


def _fields(offender: Offender, start: int, ids: Ids) -> dict[str, Any]:
    """Return the fields of an offender, with its samples as positions in the run's order and as numbers in the
    data set.
    """
    fields = asdict(offender)
    if offender.samples is not None:
        first, end = (start + sample for sample in offender.samples)
        fields |= {"samples": [first, end], "sample_ids": ids(first, end - first)}
    return fields
