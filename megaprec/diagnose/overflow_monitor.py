"""Monitor of skipped steps, which judges if they are normal.

A dynamic loss scale adapts by overflowing now and then, so a skipped step is normal. It is not
normal to skip a step with the scale already at its minimum, because the next step will overflow as
well. A constant scale, or no scale, is always at its minimum. A non-finite loss does not depend on
the scale, because the loss is scaled after the forward pass; there is no point in waiting for the
scale to fall to its minimum.
"""

import math
from collections import deque
from typing import Any

from megaprec.optim.decision.step_report import NO_TOKENS, SPIKE, StepReport
from megaprec.precision.plan import LossScaling

WINDOW = 1000  # recent steps that are counted
FEW_SKIPS = 8  # in the window; so few are normal whatever the growth interval


class OverflowMonitor:
    """Follows the outcomes of a run's steps; the state is the same on every rank.

    patience: number of skips in a row, each of which a lower scale could not prevent, after which
        training should stop.
    """

    def __init__(self, scaling: LossScaling, patience: int = 20) -> None:
        self.scaling = scaling
        self.patience = patience
        self.in_a_row = 0  # skipped steps since the last applied one
        self.at_floor = 0  # skipped steps in a row with the scale at its minimum
        self.bad_losses = 0  # skipped steps in a row whose loss was not finite
        self.ever_applied = False
        self._loss_finite = True  # in the last step
        self._recent: deque[bool] = deque(maxlen=WINDOW)

    def note(self, report: StepReport) -> None:
        """Record the outcome of the next step. One in which no token counts, and a spike, say
        nothing about overflows."""
        if report.outcome in (NO_TOKENS, SPIKE):
            return
        skipped = not report.changed
        self._loss_finite = math.isfinite(report.loss)
        self._recent.append(skipped)
        self.ever_applied |= not skipped
        if not skipped:
            self.in_a_row = 0
            self.at_floor = 0
            self.bad_losses = 0
            return
        self.in_a_row += 1
        # counted apart: a step may have a bad loss with a scale that can still fall
        self.at_floor = self.at_floor + 1 if self._is_floor(report.loss_scale) else 0
        self.bad_losses = 0 if self._loss_finite else self.bad_losses + 1

    def _is_floor(self, scale: float) -> bool:
        """Return True if the scale cannot fall further."""
        return self.scaling.kind != "dynamic" or scale <= self.scaling.minimum

    @property
    def hopeless(self) -> bool:
        """Return True if training should stop: steps overflow, and the scale cannot fall or a lower
        one cannot help."""
        return max(self.at_floor, self.bad_losses) >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the monitor as JSON values."""
        return {
            "in_a_row": self.in_a_row,
            "at_floor": self.at_floor,
            "bad_losses": self.bad_losses,
            "ever_applied": self.ever_applied,
            "recent": list(self._recent),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a monitor. If its run had been stopped, reset the counters, so that
        a restarted run can go on for `patience` steps."""
        self.in_a_row = state["in_a_row"]
        self.at_floor = state["at_floor"]
        self.bad_losses = state.get("bad_losses", 0)
        self.ever_applied = state["ever_applied"]
        self._recent = deque(state["recent"], maxlen=WINDOW)
        if self.hopeless:
            # not `in_a_row`, which is only reported
            self.at_floor = 0
            self.bad_losses = 0

    def advice(self) -> str:
        """Return one line of advice for the user, after a skipped step."""
        if self.bad_losses > 1:
            lost = "the loss itself was not finite, which a lower scale cannot help"
            return (
                f"{self.bad_losses} in a row in which {lost}: this will not recover by itself; "
                f"{self._cure()}"
            )
        if self.at_floor > 1:
            scale = {
                "dynamic": "at the minimum scale",
                "constant": "at a constant scale",
                "none": "and there is no scale to lower",
            }[self.scaling.kind]
            return (
                f"{self.at_floor} in a row {scale}: this will not recover by itself; {self._cure()}"
            )
        # single skips, which may be normal
        num_skipped = sum(self._recent)
        if not self._loss_finite:
            return (
                f"{num_skipped} in the last {len(self._recent)} steps: the loss itself is not "
                f"finite; {self._cure()}"
            )
        if not self.ever_applied and self.scaling.kind == "dynamic":
            return (
                f"{self.in_a_row} in a row at the start: normal, the scale falls until gradients "
                "fit"
            )
        return f"{num_skipped} in the last {len(self._recent)} steps: {self._judge(num_skipped)}"

    def _cure(self) -> str:
        if self._loss_finite and self.scaling.kind == "constant":
            return (
                f"lower precision.loss_scale = {self.scaling.initial:g}, or leave it out for a "
                "dynamic scale"
            )
        return "lower the learning rate, look at the samples, or train in bf16"

    def _judge(self, num_skipped: int) -> str:
        """Return in words whether so many skipped steps of the newest WINDOW are normal."""
        if self.scaling.kind == "none":
            return "without a loss scale each one is a sign of instability"
        if self.scaling.kind == "constant":
            return f"the gradients do not fit; {self._cure()}"
        # A scale overflows about once after each growth; up to four times as often is normal too.
        expected = 2 + 4 * len(self._recent) // self.scaling.growth_interval
        if num_skipped <= max(expected, FEW_SKIPS):
            return "normal while the scale adapts"
        return "more than an adapting scale explains; watch the gradient norm"
