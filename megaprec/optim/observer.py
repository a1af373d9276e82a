"""Looking on while a step is decided and applied.

An optimizer calls its observers on every rank, in the order of the methods below. Without observers nothing is called.
An observer may read what it is shown; one that changes it changes the step, which is how tests plant faults.
"""

from collections.abc import Sequence

from torch import Tensor

from megaprec.optim.flat_buffer import Buffer
from megaprec.optim.step_report import StepReport


class StepObserver:
    """Does nothing at any of the moments of a step; override those that are of interest.

    buffers: all of this rank's. Gradients are final in each buffer's own slice alone, and still times `scale`, float32
    of shape [].
    """

    def gradients_ready(self, buffers: Sequence[Buffer], scale: Tensor) -> None:
        """Gradients are summed over ranks, and no statistics of them are taken yet."""

    def decided(self, buffers: Sequence[Buffer], scale: Tensor, found: Tensor) -> None:
        """All ranks have agreed, and nothing is changed yet. found: float32 of shape [], 1 if nothing will be."""

    def updated(self, buffers: Sequence[Buffer]) -> None:
        """Masters and averages are updated, if they were to be; weights may still be travelling."""

    def outcome(self, report: StepReport) -> None:
        """The step is over."""
