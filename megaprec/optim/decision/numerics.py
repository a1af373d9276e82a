"""The order in which a step adds numbers: any order, whichever is fastest.

Sums over micro-batches, ranks and slices are the only places where a layout changes bits.
`megaprec.optim.canonical.numerics` is the other choice, with one order for all layouts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megaprec.comm.axis import Axis
from megaprec.leaf_calls import CallLeaf
from megaprec.optim.decision.consensus import StepConsensus
from megaprec.optim.rules.update_rules import Step, UpdateRule
from megaprec.optim.state.flat_buffer import Buffer, StartSum, start_sum
from megaprec.optim.state.update_tile import Wide
from megaprec.precision.plan import PrecisionPlan


class RunningSums:
    """The sums of gradients over micro-batches, to which each backward pass adds by itself.

    count: the number of micro-batches of this step, if it is known.
    """

    count = 0

    def end(self, microbatch: int, count: int, chunk: int, complete: bool) -> None:
        """Note the end of a backward pass of a micro-batch, of `count` on this rank, in a chunk.

        complete: False if a second pass of the micro-batch computes further gradients.
        """

    def finish(self, parameters: Sequence[nn.Parameter], in_backward: bool) -> None:
        """Complete the sums of these parameters, whose gradients are final, in `main_grad`.

        in_backward: True within the backward pass of the last micro-batch, whose end has not been
            announced.
        """

    def forget(self) -> None:
        """Discard all sums, to begin a new step."""


class Numerics:
    """The order of additions in a step: any."""

    start_sum: StartSum = staticmethod(start_sum)
    """Start to sum gradients over dp in place, by an all-reduce or a reduce-scatter."""

    def require_supported(
        self,
        model_parts: Sequence[nn.Module],
        plan: PrecisionPlan,
        dp: Axis,
        tp: Axis,
        average: bool,
    ) -> None:
        """Raise UserError for a setting that contradicts these numerics."""

    def sums_over_microbatches(self, chunks: Sequence[Sequence[Buffer]]) -> RunningSums:
        """Return the sums of gradients over micro-batches. chunks: the buffers of each."""
        return RunningSums()

    def consensus(
        self,
        pp: Axis,
        world: Axis,
        order: float,
        device: torch.device,
        leaves: CallLeaf | None = None,
    ) -> StepConsensus:
        """Return what packs a rank's numbers and reads their sum.

        order: of the gradients' norm. leaves: calls the statistics in their compiled form, if
            there is one.
        """
        return StepConsensus(pp, world, order, device, leaves)

    def arrange_loss(
        self,
        loss: Tensor | None,
        num_microbatches: int,
        dp: Axis,
        device: torch.device,
    ) -> Tensor | None:
        """Return the loss of this rank as it is summed over the ranks: here as it is. Canonical
        numerics put the loss of each micro-batch in a place of its own."""
        return loss

    def update_(self, rule: UpdateRule, wide: Wide, step: Step) -> None:
        """Apply a rule to the tensors of a tile, in place."""
        rule.update_(wide.masters, wide.grads, wide.moments, step)
