"""Observers of a step: callbacks while the step is decided and applied.

An optimizer calls its observers on every rank, in the order of the methods below. Without observers
nothing is called. An observer may read its arguments. An observer that changes them changes the
step, which is how tests plant faults.
"""

from collections.abc import Sequence

from torch import Tensor

from megaprec.optim.flat_buffer import Buffer
from megaprec.optim.step_report import StepReport


class StepObserver:
    """A base class that does nothing at any moment of a step; override the moments of interest.

    buffers: all buffers of this rank. Gradients are final only in each buffer's own slice, and
    still multiplied by `scale`, float32 of shape [].
    """

    def gradients_ready(self, buffers: Sequence[Buffer], scale: Tensor) -> None:
        """Observe gradients that are reduced over ranks, before their statistics are computed."""

    def decided(self, buffers: Sequence[Buffer], scale: Tensor, found: Tensor) -> None:
        """Observe the agreement of all ranks, before any change. found: float32 of shape [], 1 to
        skip the step."""

    def updated(self, buffers: Sequence[Buffer]) -> None:
        """Observe the masters and moments after their update, if there was one. Weights may still
        be all-gathered."""

    def outcome(self, report: StepReport) -> None:
        """Observe the end of the step."""
