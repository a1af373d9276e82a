"""Skipped steps: the event that each writes to events.jsonl, and the exception that ends a diverged
run."""

from dataclasses import asdict
from typing import Any

from megaprec.data.blend import Blend
from megaprec.data.samples import Samples
from megaprec.diagnose.overflow_monitor import OverflowMonitor
from megaprec.optim.step_report import NO_TOKENS, Offender, StepReport
from tools.convert.train_state import TrainState
from tools.journal.records import NO_TOKENS_EVENT

NOTHING_COUNTS = (
    "data.eod_mask_loss leaves out the first token of each document, and the batch has no other: "
    "put documents of one token together, or take larger batches"
)


class TrainingDiverged(Exception):
    """Training stopped itself because steps keep overflowing or must not overflow.

    The command exits with code 3.
    """


def require_applied(progress: TrainState, watch: OverflowMonitor) -> None:
    """Raise TrainingDiverged if a run has ended and not one of its steps was applied.

    Its state is saved.
    """
    if not progress.step or progress.applied:
        return
    # A dynamic scale begins high: a short run may end before it has fallen far enough.
    if watch.scaling.kind == "dynamic" and not watch.hopeless:
        advice = (
            "the loss scale was still falling: take more steps, or lower precision.initial_scale"
        )
    else:
        advice = watch.advice()
    steps = "its only step was" if progress.step == 1 else f"all {progress.step:,} steps were"
    raise TrainingDiverged(
        f"the run has ended, state saved, but {steps} skipped and nothing was learned: {advice}"
    )


def overflow_event(
    report: StepReport, step: int, samples: range, watch: OverflowMonitor, data: Samples | Blend
) -> dict[str, Any]:
    """Return the record of a skipped step for events.jsonl.

    samples: positions of the global batch in the run's order. data: the samples in that order,
    which have numbers in their data set; in a blend with the name of the data set.
    """
    return {
        "event": "overflow",
        "step": step,
        "outcome": report.outcome,
        "loss": report.loss,
        "loss_scale": report.loss_scale,
        "first_sample": samples.start,  # with the length enough: a batch is consecutive
        "num_samples": len(samples),
        "skipped_in_a_row": watch.in_a_row,
        "advice": watch.advice(),
        "offenders": [
            _offender_fields(offender, samples.start, data) for offender in report.offenders
        ],
    }


def no_tokens_event(step: int, samples: range) -> dict[str, Any]:
    """Return the record for events.jsonl of a step of which no token counts in the loss.

    The step was skipped.

    samples: positions of the global batch in the run's order.
    """
    return {
        "event": NO_TOKENS_EVENT,
        "step": step,
        "outcome": NO_TOKENS,
        "first_sample": samples.start,
        "num_samples": len(samples),
        "advice": NOTHING_COUNTS,
    }


def _offender_fields(offender: Offender, start: int, data: Samples | Blend) -> dict[str, Any]:
    """Return the fields of an offender.

    With its samples as positions in the run's order and as numbers in the data set.
    """
    fields = asdict(offender)
    if offender.samples is not None:
        first_in_batch, end_in_batch = offender.samples  # numbers within the global batch
        first = start + first_in_batch
        end = start + end_in_batch
        fields["samples"] = [first, end]
        fields["sample_ids"] = data.labels(data.batch(first, end - first).ids)
    return fields
