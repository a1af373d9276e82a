"""Canonical numerics: sums whose bits are the same in every layout of data ranks and stages."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from megaprec.comm.axis import Axis
from megaprec.comm.tree import start_tree_scatter_sum_, start_tree_sum_
from megaprec.leaf_calls import CallLeaf
from megaprec.optim.canonical.consensus import CanonicalConsensus, in_slots
from megaprec.optim.canonical.microbatch_sums import MicrobatchSums
from megaprec.optim.canonical.requirements import require_canonical
from megaprec.optim.decision.numerics import Numerics
from megaprec.optim.rules.update_rules import Step, UpdateRule, update_padded
from megaprec.optim.state.flat_buffer import Buffer
from megaprec.optim.state.update_tile import Wide
from megaprec.precision.plan import PrecisionPlan


def start_tree_sum(dp: Axis, gradients: Tensor, only_local: bool) -> Callable[[], object]:
    """Start to sum gradients over dp by the upper part of a tree over micro-batches; as
    `flat_buffer.start_sum`."""
    start = start_tree_scatter_sum_ if only_local else start_tree_sum_
    return start(dp, gradients)


class CanonicalNumerics(Numerics):
    """One order of additions for all layouts: trees over micro-batches and ranks, exact sums of
    norms and losses, and updates that are the same in every slice. Methods as in `Numerics`."""

    start_sum = staticmethod(start_tree_sum)

    def require_supported(
        self,
        model_parts: Sequence[nn.Module],
        plan: PrecisionPlan,
        dp: Axis,
        tp: Axis,
        average: bool,
    ) -> None:
        require_canonical(model_parts, plan, dp, tp, average)

    def sums_over_microbatches(self, chunks: Sequence[Sequence[Buffer]]) -> MicrobatchSums:
        return MicrobatchSums(chunks)

    def consensus(
        self,
        pp: Axis,
        world: Axis,
        order: float,
        device: torch.device,
        leaves: CallLeaf | None = None,
    ) -> CanonicalConsensus:
        return CanonicalConsensus(pp, world, order, device)

    def arrange_loss(
        self,
        loss: Tensor | None,
        num_microbatches: int,
        dp: Axis,
        device: torch.device,
    ) -> Tensor:
        return in_slots(loss, num_microbatches, dp, device)

    def update_(self, rule: UpdateRule, wide: Wide, step: Step) -> None:
        update_padded(rule, wide.masters, wide.grads, wide.moments, step)
