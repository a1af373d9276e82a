"""The position of a rank within the optimizer's step."""

from collections.abc import Sequence

from torch import Tensor

from megaprec.diagnose.position import Phase, Position
from megaprec.optim.flat_buffer import Buffer
from megaprec.optim.step_report import StepObserver, StepReport


class StepPosition(StepObserver):
    """Notes the moments of the optimizer's step in `position`. After a skipped step a replay may
    follow."""

    def __init__(self, position: Position) -> None:
        self.position = position

    def gradients_ready(self, buffers: Sequence[Buffer], scale: Tensor) -> None:
        self.position.at("consensus of all ranks")

    def decided(self, buffers: Sequence[Buffer], scale: Tensor, found: Tensor) -> None:
        self.position.at("update")

    def updated(self, buffers: Sequence[Buffer]) -> None:
        self.position.at("report of the step")

    def outcome(self, report: StepReport) -> None:
        if report.overflowed:
            self.position.enter(Phase.REPLAY)
        else:
            self.position.at("end of the step")
