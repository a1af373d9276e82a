"""The ranks that train one model, and those of them that hold the same weights.

Over all replicas of a weight gradients are summed; over the sharing ones, which are neighbours,
ZeRO-1 cuts masters and moments. All dp ranks are replicas of a weight, but for the experts of a
layer whose experts are spread over ranks: an expert has fewer replicas, and more of them where
ranks hold a smaller part of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis, device_of
from megaprec.comm.experts import ExpertAxes
from megaprec.comm.layout import parameters_of, trained_parameters
from megaprec.errors import UserError
from megaprec.optim.torch_wrappers import is_dtensor, require_spread_over_all


@dataclass(frozen=True)
class Ranks:
    """The ranks that train one model, as this rank sees them, and the device that it computes on.

    dp: those with equal weights, whose gradients are summed: replicas, and the ranks that share
        their sequences.
    """

    pp: Axis
    dp: Axis
    tp: Axis
    world: Axis
    device: torch.device
    experts: ExpertAxes | None = None

    @staticmethod
    def of(
        mesh: DeviceMesh | None,
        model_parts: Sequence[nn.Module],
        experts: ExpertAxes | None = None,
    ) -> "Ranks":
        """Return the ranks of `mesh`, and those that share the experts of a layer.

        Without a mesh these are this process alone, or all ranks that torch has sharded each
        parameter over. Raises UserError if each of several ranks would train a separate model.
        """
        pp = Axis.of(mesh, "pp")
        dp = Axis.replicas(mesh)
        tp = Axis.of(mesh, "tp")
        device = device_of(mesh)
        if mesh is None:  # the device of the model
            device = next((parameter.device for parameter in parameters_of(model_parts)), device)
        dtensors = [
            (path, parameter)
            for path, parameter in trained_parameters(model_parts)
            if is_dtensor(parameter)
        ]
        if mesh is None and dist.is_initialized() and dist.get_world_size() > 1:
            if not dtensors:
                raise UserError.of(
                    "optimizer.mesh_missing", ranks=dist.get_world_size(), device=device.type
                )
            dp = Axis("dp", dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
        world = dp if mesh is None else Axis.world(mesh)
        for path, parameter in dtensors:
            require_spread_over_all(path, parameter, pp, tp, world)
        world = Axis("world", world.rank, world.size, world.group)
        return Ranks(pp, dp, tp, world, device, experts)


@dataclass(frozen=True)
class Replicas:
    """The replicas of a weight.

    every: all of them.
    sharing: those among which one copy of masters and moments is cut.
    """

    every: Axis
    sharing: Axis


def expert_replicas(
    experts: ExpertAxes | None,
    dp: int,
    tp: int,
    zero_size: int,
    separate_group: bool = False,
) -> Replicas | None:
    """Return the replicas of experts that lie on ranks of their own, if any do.

    zero_size: number of dp ranks that share one copy of the state of other weights.
    separate_group: those that share have a process group of their own.

    Among the ranks of a stage that share the state of other weights, those that hold the same
    experts share the state of these. Raises UserError if their number would differ from rank to
    rank. Collective over the world.
    """
    if experts is None:
        return None
    every = experts.replicas
    if zero_size == dp:  # over all of them
        return Replicas(every, every.subaxis(every.size, "zero", separate_group))
    num_sharing = sharing_replicas(tp, zero_size, experts.spread.size, experts.tp.size)
    return Replicas(every, every.subaxis(num_sharing, "zero", separate_group))


def sharing_replicas(tp: int, zero_size: int, expert: int, expert_tensor: int) -> int:
    """Return how many neighbouring replicas of an expert share one copy of its state.

    Arguments are numbers of ranks: `zero_size` dp ranks share the state of other weights; `expert`
    ranks have different experts, each cut over `expert_tensor` ranks. Raises UserError unless one
    of the two groups of ranks is cut evenly by the other.
    """
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
