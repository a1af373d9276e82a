"""What a training step tells: one record, from which the log line, the JSON line and the progress bar are drawn.

Because they are drawn from one record they cannot disagree: a step whose gradient norm is not finite is not
"applied", whichever precision it ran in.
"""

import json
import math
from dataclasses import asdict, dataclass
from typing import Literal

Outcome = Literal["applied", "skipped_overflow", "applied_nonfinite"]


@dataclass(frozen=True)
class Offender:
    """A slice of a logical tensor with non-finite gradient elements, as one tp rank of a pipeline rank saw it.

    stage: the pipeline rank. infs, nans: how many of its `elements`. largest_finite: the largest magnitude of the
    others, still scaled.
    """

    name: str
    stage: int
    tp_rank: int
    infs: int
    nans: int
    elements: int
    largest_finite: float

    @property
    def bad(self) -> int:
        """Elements that are not finite."""
        return self.infs + self.nans


@dataclass(frozen=True)
class StepReport:
    """The outcome of one step, the same on every rank.

    outcome: applied, or skipped_overflow: some gradient or the loss was not finite, and no weight changed; or
        applied_nonfinite: the same, but the plan says to ignore it.
    loss: mean over the step's tokens. grad_norm: before clipping, without the loss scale; the L2 norm unless the
        optimizer was given another.
    num_zeros, zero_ratio: gradient elements that are exactly zero, each logical element counted once.
    stage_zeros: the same count by pipeline rank.
    loss_scale: that this step's loss was multiplied by. lr: the learning rate of the step.
    offenders: of a skipped step, the tensors with the most non-finite elements, worst first.
    """

    outcome: Outcome
    loss: float
    grad_norm: float
    num_zeros: int
    zero_ratio: float
    stage_zeros: tuple[int, ...]
    loss_scale: float
    lr: float
    offenders: tuple[Offender, ...] = ()

    @property
    def changed(self) -> bool:
        """Whether weights changed."""
        return self.outcome != "skipped_overflow"


def describe(report: StepReport) -> str:
    """A step and, if it was skipped, what broke it, in a line or a few."""
    numbers = f"loss {report.loss:g}, gradient norm {report.grad_norm:g}, loss scale {report.loss_scale:g}"
    lines = [
        f"  {o.name} (stage {o.stage}, tensor rank {o.tp_rank}): {o.infs} inf, {o.nans} NaN of {o.elements} gradient "
        f"elements, largest other {o.largest_finite:.3g}"
        for o in report.offenders
    ]
    return "\n".join([f"{report.outcome}: {numbers}", *lines])


def to_json(record: dict[str, object]) -> str:
    """One line of strict JSON; inf and NaN, which JSON lacks, become the strings "inf", "-inf" and "nan"."""
    return json.dumps({k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()})


def report_fields(report: StepReport) -> dict[str, object]:
    """The report's numbers by name, in order; offenders are an event of their own."""
    fields = asdict(report)
    del fields["offenders"]
    return fields
