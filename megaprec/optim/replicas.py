"""The ranks that hold the same weights, and those of them that share one copy of the optimizer
state.

Over all replicas gradients are summed; over the sharing ones, which are neighbours, ZeRO-1 cuts
masters and moments. All dp ranks are replicas of a weight, but for the experts of a layer whose
experts are spread over ranks: an expert has fewer replicas, and more of them where ranks hold a
smaller part of it.
"""

from dataclasses import dataclass

from megaprec.comm.axis import Axis
from megaprec.comm.experts import ExpertAxes
from megaprec.errors import UserError


@dataclass(frozen=True)
class Replicas:
    """The replicas of a weight.

    every: all of them.
    sharing: those among which one copy of masters and moments is cut.
    """

    every: Axis
    sharing: Axis


def expert_replicas(
    experts: ExpertAxes | None, dp: int, tp: int, zero_size: int
) -> Replicas | None:
    """Return the replicas of experts that lie on ranks of their own, if any do.

    zero_size: dp ranks that share one copy of the state of other weights.

    The same neighbouring ranks of a stage share the state of experts and of other weights: those
    among them that hold the same experts. Raises UserError if these would differ from rank to rank.
    Collective over the world.
    """
    if experts is None:
        return None
    every = experts.replicas
    if zero_size == dp:  # ZeRO-1 over all of them
        return Replicas(every, every)
    num_sharing = sharing_replicas(tp, zero_size, experts.spread.size, experts.tp.size)
    return Replicas(every, every.in_runs(num_sharing, "zero"))


def sharing_replicas(tp: int, zero_size: int, expert: int, expert_tensor: int) -> int:
    """Return how many neighbouring replicas of an expert share one copy of its state. Raises
    UserError."""
    sharing_ranks = zero_size * tp
    expert_ranks = expert * expert_tensor  # that hold all experts once
    if sharing_ranks % expert_ranks and expert_ranks % sharing_ranks:
        raise UserError.of(
            "optimizer.zero_with_experts",
            zero_size=zero_size,
            tp=tp,
            expert=expert,
            expert_tensor=expert_tensor,
            sharing_ranks=sharing_ranks,
            expert_ranks=expert_ranks,
        )
    return max(1, sharing_ranks // expert_ranks)
