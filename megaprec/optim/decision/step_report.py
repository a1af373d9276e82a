"""The report of a training step, and observers that are called while a step is decided and applied.

The report is the one source of the log line, the JSON line and the progress bar, so that they
cannot disagree: a step whose gradient norm is not finite is never "applied", whatever its
precision. An optimizer calls its observers on every rank, in the order of their methods.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from megaprec.optim.state.flat_buffer import Buffer

Outcome = Literal[
    "applied",
    "skipped_overflow",
    "skipped_no_tokens",
    "skipped_spike",
    "applied_nonfinite",
]
NO_TOKENS: Outcome = "skipped_no_tokens"
SPIKE: Outcome = "skipped_spike"
SKIPPED = ("skipped_overflow", NO_TOKENS, SPIKE)  # outcomes of steps that changed no weight
LOSS = "loss"  # the only offender that is not a parameter


@dataclass(frozen=True)
class Offender:
    """A slice of a logical tensor with non-finite gradient elements, as one tp rank of a pipeline
    rank saw it.

    name: of the tensor, or LOSS: the step's loss, unscaled.
    stage: the pipeline rank.
    infs, nans: how many of its `elements`.
    largest_finite: the largest magnitude of the finite elements, including the loss scale.
    traced: True if the step was replayed to find its origin. If so:
    microbatch, dp_rank: the first micro-batch, and its dp rank, after which the tensor was not
        finite. None if it stayed finite on every rank: then only the sum over ranks was not, or the
        failure is not reproducible.
    samples: [first, last + 1) of that micro-batch, as numbers within the global batch.
    """

    name: str
    stage: int
    tp_rank: int
    infs: int
    nans: int
    elements: int
    largest_finite: float
    traced: bool = False
    microbatch: int | None = None
    dp_rank: int | None = None
    samples: tuple[int, int] | None = None

    @property
    def bad(self) -> int:
        """Return the number of elements that are not finite."""
        return self.infs + self.nans

    @property
    def origin(self) -> str:
        """Return the origin of the non-finite values, in words; empty if the step was not
        replayed."""
        if not self.traced and self.samples is None:
            return ""
        if self.samples is None:
            return "in no micro-batch of the replay: only the ranks' sum is bad, or it was chance"
        first, end = self.samples
        return (
            f"first in micro-batch {self.microbatch} of dp rank {self.dp_rank}, "
            f"samples {first} to {end - 1} of the batch"
        )


def loss_offender(loss: float, stage: int) -> Offender:
    """Return the offender that is a loss, inf or NaN, of a pipeline rank."""
    is_nan = math.isnan(loss)
    return Offender(
        LOSS,
        stage,
        0,
        infs=int(not is_nan),
        nans=int(is_nan),
        elements=1,
        largest_finite=0.0,
    )


@dataclass(frozen=True)
class RouterReport:
    """The work of the router of one layer on the tokens of a step, skipped or not.

    layer: its number; modules of multi-token prediction go on from the model's last layer.
    max_load, min_load: the largest and the smallest share of the tokens that an expert was given,
        from 0 to 1. If all are equal it is the experts of a token over all experts.
    used_experts: the number of experts that the tokens went to, where one with a smaller load
        counts less: the exponential of the entropy of the loads. It is at least the experts of a
        token, and at most all experts.
    entropy: of the mean of the router's probabilities, divided by that of equal ones: 0 to 1.
    balance_loss, z_loss: as the model trains them, without their weights; None if it does not.
    corrections: the lowest and the highest correction of the choice; None if there are none.
    """

    layer: int
    max_load: float
    min_load: float
    used_experts: float
    entropy: float
    balance_loss: float | None = None
    z_loss: float | None = None
    corrections: tuple[float, float] | None = None


class AttentionReport(NamedTuple):
    """The attention of one layer in the passes of a step, skipped or not.

    layer: its number; modules of multi-token prediction go on from the model's last layer.
    largest_logits: of each head, over all tokens of the step: products of queries and keys times
        their factor, before a soft cap.
    """

    layer: int
    largest_logits: tuple[float, ...]


class SourceReport(NamedTuple):
    """The part of a step's samples that is of one data set of a blend.

    loss: mean over its tokens that count; NaN if none does. tokens: their number, or the sum of
        their weights.
    """

    loss: float
    tokens: float


@dataclass(frozen=True)
class StepReport:
    """The outcome of one step, the same on every rank.

    outcome: applied; skipped_overflow: a gradient or the loss was not finite, and no weight
        changed; skipped_no_tokens: no token of the batch counts in the loss, and no weight changed;
        skipped_spike: finite, but above a limit that `ParallelAMPOptimizer.step` was given, and no
        weight changed; or applied_nonfinite: not finite either, but the plan says to ignore it.
    loss: mean over the step's tokens that count; NaN if none does, or if no rank gave `step` a
        loss.
    grad_norm: before clipping, without the loss scale; the L2 norm unless the optimizer was given
        another.
    num_zeros, zero_ratio: gradient elements that are exactly zero, each logical element counted
        once.
    stage_zeros: the same count by pipeline rank.
    loss_scale: the factor of this step's loss.
    lr: the learning rate of the step.
    offenders: of a step that is not finite, the loss if it is not, and the tensors with the most
        non-finite elements, worst first.
    stop: True if some rank was asked to stop before this step was agreed on.
    mtp_loss: mean loss of the modules of multi-token prediction; None if the model has none.
    z_loss: mean over the same tokens of the square of the log of the sum of the exponentials of
        the logits; None if the model does not train it. It is no part of `loss`.
    routers: of the layers with experts, in order.
    sources: of the data sets of a blend, in order; none without a blend.
    attentions: of the layers with attention, in order; none unless the engine looks at their
        logits.
    further: the further numbers that `ParallelAMPOptimizer.step` was given.
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
    stop: bool = False
    mtp_loss: float | None = None
    z_loss: float | None = None
    routers: tuple[RouterReport, ...] = ()
    sources: tuple[SourceReport, ...] = ()
    attentions: tuple[AttentionReport, ...] = ()
    further: tuple[float, ...] = ()

    @property
    def changed(self) -> bool:
        """Return True if the step changed weights."""
        return self.outcome not in SKIPPED

    @property
    def overflowed(self) -> bool:
        """Return True if a gradient or the loss was not finite."""
        return self.outcome in ("skipped_overflow", "applied_nonfinite")


class StepObserver:
    """A base class that does nothing at any moment of a step; override the moments of interest.
    `gradients_ready` may raise, on every rank, to stop the step before it changes anything.

    buffers: all buffers of this rank. Gradients are final only in each buffer's own slice, and
    still multiplied by `scale`, float32 of shape [].
    """

    def gradients_ready(self, buffers: Sequence[Buffer], scale: Tensor) -> None:
        """Observe gradients that are reduced over ranks, before their statistics are computed."""

    def decided(self, buffers: Sequence[Buffer], scale: Tensor, skip: Tensor) -> None:
        """Observe the agreement of all ranks, before any change. skip: float32 of shape [], 1 to
        skip the step."""

    def updated(self, buffers: Sequence[Buffer]) -> None:
        """Observe the masters and moments after their update, if there was one. Weights may still
        be all-gathered."""

    def outcome(self, report: StepReport) -> None:
        """Observe the end of the step."""


class NonFiniteStep(FloatingPointError):
    """A step that was not finite under a plan that raises; it changed nothing. `report` describes
    the step."""

    def __init__(self, report: StepReport) -> None:
        super().__init__(f"a gradient or the loss is not finite\n{describe(report)}")
        self.report = report


def describe(report: StepReport) -> str:
    """Return a step and, if it was skipped, its offenders, in one line or several."""
    numbers = (
        f"loss {report.loss:g}, gradient norm {report.grad_norm:g}, loss scale "
        f"{report.loss_scale:g}"
    )
    lines = [f"{report.outcome}: {numbers}"]
    lines += [_describe_offender(offender) for offender in report.offenders]
    return "\n".join(lines)


def _describe_offender(offender: Offender) -> str:
    """Return an offender on one line: its place, how many elements were not finite, and the origin
    if it is known."""
    line = f"  {offender.name} (stage {offender.stage}, tensor rank {offender.tp_rank})"
    if offender.name != LOSS:
        line += (
            f": {offender.infs} inf, {offender.nans} NaN of {offender.elements} gradient "
            f"elements, largest other {offender.largest_finite:.3g}"
        )
    if offender.origin:
        line += f"; {offender.origin}"
    return line


def report_fields(report: StepReport) -> dict[str, object]:
    """Return the fields of the report by name, in order, without those that the model lacks.

    Offenders are a separate event; routers, attentions and data sets have fields of their own.
    Further numbers have no names.
    """
    fields: dict[str, object] = dict(vars(report))
    del fields["offenders"]
    del fields["stop"]
    del fields["routers"]
    del fields["sources"]
    del fields["attentions"]
    del fields["further"]
    for name in ("mtp_loss", "z_loss"):
        if fields[name] is None:
            del fields[name]
    return fields
