"""Monitor of loss spikes: names the steps whose loss or gradient norm leaves its own band.

The band of a quantity is computed from its last WINDOW applied steps, before the next step is
taken:

- Of the logarithms of its values, expected is the median of the newest NEWEST.
- The width is that of the noise from step to step, without the trend: the median magnitude of the
  differences of neighbours, times 1.4826 / sqrt(2), which makes it the standard deviation of normal
  noise. It is that of the whole window, or of its newer half if that is noisier.
- The limit is DEVIATIONS widths above what is expected; and at least RECURRING_FACTOR times a rise
  from one step to the next that came RECURRING times in the window, for what comes again and again
  is no spike, as in heavy tails; and at least the factor LOSS_FACTOR or NORM_FACTOR, for a curve
  without noise has no width.

Medians do not move with a few outliers, so one or two earlier spikes that were applied neither hide
the next one nor widen the band. A loss or a norm that falls is no spike, however fast. A batch of
fewer tokens than is usual has more noise: by the square root of the tokens' ratio. Until NEEDED
steps are applied there is no band. Steps that were skipped are not in it.

A limit depends on numbers before the step only, so that all ranks have the same, and a step can be
skipped by it.
"""

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from megaprec.optim.step_limits import NO_LIMITS, StepLimits
from megaprec.optim.step_report import SPIKE, StepReport

WINDOW = 64  # newest applied steps
NEWEST = 16  # of them, whose median is expected next
NEEDED = 32  # applied steps before the first that is judged
DEVIATIONS = 9.0
RECURRING = 3
RECURRING_FACTOR = 1.25
LOSS_FACTOR = 1.1
NORM_FACTOR = 5.0
NORMAL = 1.4826  # standard deviation of normal noise over its median magnitude


class AppliedStep(NamedTuple):
    """The numbers of a step in the window. tokens: of the global batch."""

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
        self._window: deque[AppliedStep] = deque(maxlen=WINDOW)

    def limits(self, tokens: int) -> StepLimits:
        """Return the limits of the next step, of a global batch of so many tokens."""
        if len(self._window) < NEEDED:
            return NO_LIMITS
        usual = median(step.tokens for step in self._window)
        noise = max(1.0, math.sqrt(usual / tokens))
        losses = [step.loss for step in self._window]
        norms = [step.norm for step in self._window]
        return StepLimits(
            loss=_limit(losses, LOSS_FACTOR, noise),
            # the norm itself grows with the noise
            norm=_limit(norms, NORM_FACTOR, noise) * noise,
        )

    def note(self, report: StepReport, limits: StepLimits, tokens: int) -> Spike | None:
        """Record a step; return its spike, if it is one. limits: those before the step."""
        # what is not finite is the subject of OverflowMonitor, and says nothing about bands
        if report.outcome not in ("applied", SPIKE):
            return None
        if report.outcome == "applied":
            self._window.append(AppliedStep(report.loss, report.grad_norm, tokens))
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
            "losses": [step.loss for step in self._window],
            "norms": [step.norm for step in self._window],
            "tokens": [step.tokens for step in self._window],
            "in_a_row": self.in_a_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a monitor. If its run had been stopped, reset the count, so that a
        restarted run can go on for `patience` steps."""
        columns = (state["losses"], state["norms"], state["tokens"])
        steps = [AppliedStep(*numbers) for numbers in zip(*columns, strict=True)]
        self._window = deque(steps, maxlen=WINDOW)
        self.in_a_row = state["in_a_row"]
        if self.hopeless:
            self.in_a_row = 0


def _limit(values: Sequence[float], factor: float, noise: float) -> float:
    """Return the upper end of the band of the next value; inf if it has none, as of values that are
    not positive.

    factor: the least that the limit is above what is expected. noise: of the next value, over that
        of those before.
    """
    if min(values) <= 0:
        return math.inf
    logs = [math.log(value) for value in values]
    rises = [later - earlier for earlier, later in pairwise(logs)]
    # of the whole window, or of its newer half if that is noisier: noise grows as losses fall
    magnitudes = [abs(rise) for rise in rises]
    typical = max(median(magnitudes), median(magnitudes[-len(magnitudes) // 2 :]))
    width = NORMAL * typical / math.sqrt(2)
    recurring = sorted(rises)[-RECURRING]
    least = max(DEVIATIONS * width, RECURRING_FACTOR * recurring) * noise
    expected = median(logs[-NEWEST:])
    return math.exp(expected + max(least, math.log(factor)))
