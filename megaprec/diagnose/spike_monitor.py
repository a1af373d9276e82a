"""Monitor of loss spikes: names the steps whose loss or gradient norm leaves its own band.

The band of a quantity is computed from the steps before, as logarithms, before the next step is
taken:

- expected is the median of the newest NEWEST values, or of twice as many as the patience.
- The width is the larger of two, each as the standard deviation of normal noise. One is the noise
  from step to step, without the trend: the median magnitude of the differences of neighbours, over
  sqrt(2), of the newest WINDOW steps or of the newer half if that is noisier. The other is how far
  values were from what was expected of them: the median distance of these errors from their own
  median, which is larger where noise stays for several steps.
- The limit is DEVIATIONS widths above what is expected; and at least RECURRING_FACTOR times a rise
  from one step to the next that came RECURRING times in the newest MEMORY steps, for what comes
  again and again is no spike, as in heavy tails; and at least the factor LOSS_FACTOR or
  NORM_FACTOR, for a curve without noise has no width.

Medians do not move with a few outliers, so one or two earlier spikes neither hide the next one nor
widen the band. A loss or a norm that falls is no spike, however fast. A batch of fewer tokens than
is usual has more noise: by the square root of the tokens' ratio. Until NEEDED steps are taken there
is no band. Spikes that were skipped are in it like those that were applied: otherwise hard batches
that come again and again, or a level that has changed, would be skipped for ever.

A limit depends on numbers before the step only, so that all ranks have the same, and a step can be
skipped by it.
"""

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from megaprec.optim.decision.step_limits import NO_LIMITS, StepLimits
from megaprec.optim.decision.step_report import SPIKE, StepReport

MEMORY = 256  # newest steps, in which rises are counted
WINDOW = 64  # newest steps, which give the width
NEWEST = 16  # newest steps, whose median is expected next
NEEDED = 32  # steps before the first that is judged
DEVIATIONS = 9.0
RECURRING = 3
RECURRING_FACTOR = 1.25
LOSS_FACTOR = 1.1
NORM_FACTOR = 5.0
NORMAL = 1.4826  # standard deviation of normal noise over its median magnitude


class SeenStep(NamedTuple):
    """The numbers of a finite step, applied or skipped. tokens: of the global batch."""

    loss: float
    norm: float
    tokens: int


class Spike(NamedTuple):
    """A step above its band. loss, norm: its own. limits: the ends of its bands."""

    loss: float
    norm: float
    limits: StepLimits

    @property
    def in_loss(self) -> bool:
        return self.loss > self.limits.loss

    @property
    def in_norm(self) -> bool:
        return self.norm > self.limits.norm

    def describe(self) -> str:
        """Return the numbers that left their bands, in words."""
        clauses: list[str] = []
        if self.in_loss:
            clauses.append(f"loss {self.loss:.4g} above {self.limits.loss:.4g}")
        if self.in_norm:
            clauses.append(f"gradient norm {self.norm:.3g} above {self.limits.norm:.3g}")
        return f"{' and '.join(clauses)}, where its band ends"


class SpikeMonitor:
    """Follows the losses and gradient norms of a run's steps; the state is the same on every rank.

    patience: number of spikes in a row after which skipping them is of no use.
    """

    def __init__(self, patience: int = 8) -> None:
        self.patience = patience
        self.in_a_row = 0  # spikes since the last step inside of its band
        self._seen: deque[SeenStep] = deque(maxlen=MEMORY)
        # Else a new level would be expected before patience ends.
        self._newest = max(NEWEST, 2 * patience)

    def limits(self, tokens: int) -> StepLimits:
        """Return the limits of the next step, of a global batch of so many tokens."""
        if len(self._seen) < NEEDED:
            return NO_LIMITS
        window = list(self._seen)[-WINDOW:]
        usual = median(step.tokens for step in window)
        noise = max(1.0, math.sqrt(usual / tokens))
        losses = [step.loss for step in self._seen]
        norms = [step.norm for step in self._seen]
        return StepLimits(
            loss=_limit(losses, LOSS_FACTOR, noise, self._newest),
            # the norm itself grows with the noise
            norm=_limit(norms, NORM_FACTOR, noise, self._newest) * noise,
        )

    def note(self, report: StepReport, limits: StepLimits, tokens: int) -> Spike | None:
        """Record a step; return its spike, if it is one. limits: those before the step."""
        # what is not finite is the subject of OverflowMonitor, and says nothing about bands
        if report.outcome not in ("applied", SPIKE):
            return None
        self._seen.append(SeenStep(report.loss, report.grad_norm, tokens))
        spike = Spike(report.loss, report.grad_norm, limits)
        if not spike.in_loss and not spike.in_norm:
            self.in_a_row = 0
            return None
        self.in_a_row += 1
        return spike

    @property
    def hopeless(self) -> bool:
        """Return True if a run that skips spikes should stop: too many came in a row."""
        return self.in_a_row >= self.patience

    def advice(self) -> str:
        """Return one line about spikes in a row that were skipped."""
        return (
            f"{self.in_a_row} spikes in a row were skipped: this is no spike, but another level; "
            "ask megaprec explain-spike for its cause, and go on with a lower learning rate, other "
            'data, or train.on_spike = "note"'
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the monitor as JSON values."""
        return {
            "losses": [step.loss for step in self._seen],
            "norms": [step.norm for step in self._seen],
            "tokens": [step.tokens for step in self._seen],
            "in_a_row": self.in_a_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a monitor. If its run had been stopped, reset the count, so that a
        restarted run can go on for `patience` steps."""
        columns = (state["losses"], state["norms"], state["tokens"])
        steps = [SeenStep(*numbers) for numbers in zip(*columns, strict=True)]
        self._seen = deque(steps, maxlen=MEMORY)
        self.in_a_row = state["in_a_row"]
        if self.hopeless:
            self.in_a_row = 0


def _limit(values: Sequence[float], factor: float, noise: float, newest: int) -> float:
    """Return the upper end of the band of the next value; inf if it has none, as of values that are
    not positive.

    factor: the limit is at least so many times what is expected.
    noise: how many times as noisy the next value is as those before.
    newest: number of values whose median is expected.
    """
    if min(values) <= 0:
        return math.inf
    logs = [math.log(value) for value in values]
    expected = median(logs[-newest:])
    width = max(_noise_of_rises(logs), _noise_of_errors(logs))
    rises = [later - earlier for earlier, later in pairwise(logs)]
    recurring_rise = sorted(rises)[-RECURRING]  # so large a rise came RECURRING times
    usual_rise = max(DEVIATIONS * width, RECURRING_FACTOR * recurring_rise) * noise
    return math.exp(expected + max(usual_rise, math.log(factor)))


def _noise_of_rises(logs: Sequence[float]) -> float:
    """Return the standard deviation of the noise from step to step, from the differences of
    neighbours in the window, or in its newer half if that is noisier: noise grows as losses
    fall."""
    magnitudes = [abs(later - earlier) for earlier, later in pairwise(logs[-WINDOW:])]
    newer_half = magnitudes[-len(magnitudes) // 2 :]
    typical = max(median(magnitudes), median(newer_half))
    # a difference has the noise of two values
    return NORMAL * typical / math.sqrt(2)


def _noise_of_errors(logs: Sequence[float]) -> float:
    """Return the standard deviation of the errors of the window: how far each value was from the
    median of the NEWEST values before it, by which it was expected."""
    first = max(NEWEST, len(logs) - WINDOW)
    errors = [logs[at] - median(logs[at - NEWEST : at]) for at in range(first, len(logs))]
    trend = median(errors)
    return NORMAL * median(abs(error - trend) for error in errors)
