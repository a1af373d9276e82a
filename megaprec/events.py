"""What a training step tells: one record, from which the log line, the JSON line and the progress bar are drawn.

Because they are drawn from one record they cannot disagree: a step whose gradient norm is not finite is not
"applied", whichever precision it ran in.
"""

import json
import math
from dataclasses import asdict, dataclass
from typing import Literal

Outcome = Literal["applied", "skipped_overflow"]


@dataclass(frozen=True)
class StepReport:
    """The outcome of one step, the same on every rank.

    outcome: applied, or skipped_overflow: some gradient or the loss was not finite, and no weight changed.
    loss: mean over the step's tokens. grad_norm: L2 norm before clipping, without the loss scale.
    num_zeros, zero_ratio: gradient elements that are exactly zero, each logical element counted once.
    loss_scale: that this step's loss was multiplied by. lr: the learning rate of the step.
    """

    outcome: Outcome
    loss: float
    grad_norm: float
    num_zeros: int
    zero_ratio: float
    loss_scale: float
    lr: float


def to_json(record: dict[str, object]) -> str:
    """One line of strict JSON; inf and NaN, which JSON lacks, become the strings "inf", "-inf" and "nan"."""
    return json.dumps({k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()})


def report_fields(report: StepReport) -> dict[str, object]:
    """The report's fields by name, in order."""
    return asdict(report)
