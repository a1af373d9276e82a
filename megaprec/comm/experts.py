"""The ranks that share the experts of a layer: a second cut of the data x tensor ranks of a
pipeline stage.

Attention and norms are cut over tp and copied over dp. Experts are many and each token needs few,
so ranks hold a part of them each, and tokens travel. The ranks of a stage, numbered as in the mesh,
are cut once more for experts:

    rank = (replica * experts + expert) * tensor + slice

    spread    neighbouring ranks that hold different experts; tokens travel along it
    tp        the ranks that hold slices of the same experts
    replicas  the ranks that hold the same slices of the same experts; gradients are summed along it

Experts with slices on all tp ranks are the usual cut of a feed-forward; then `spread` runs along
dp. With one slice an expert is whole, and `spread` runs along tp first. Megatron-LM names the sizes
expert and expert tensor parallel (megatron/core/parallel_state.py).
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.comm.groups import make_groups
from megaprec.errors import Problem, UserError


@dataclass(frozen=True)
class ExpertAxes:
    """The three axes of this rank's experts."""

    spread: Axis
    tp: Axis
    replicas: Axis

    @staticmethod
    def of(
        mesh: DeviceMesh | None,
        expert: int = 1,
        tensor: int = 0,
    ) -> "ExpertAxes | None":
        """Return the axes of `mesh` for experts that are cut over the ranks of a stage.

        expert: the number of ranks that hold different experts.
        tensor: the number of slices of an expert; 0: one on each tp rank.
        None if experts are cut as any other feed-forward: all of them on every dp rank, in slices
        over tp. Raises UserError for sizes that do not fit the mesh. Collective over the world.
        """
        pp = Axis.of(mesh, "pp")
        tp = Axis.of(mesh, "tp")
        stage_size = 1 if mesh is None else mesh.size() // pp.size
        # 0: as other feed-forwards are cut
        tensor = tensor or tp.size
        if problem := describe_misfit(stage_size // tp.size, tp.size, expert, tensor):
            raise UserError(problem)
        if mesh is None or (expert == 1 and tensor == tp.size):
            return None
        # world ranks, [stage, replica, expert, slice]
        ranks = mesh.mesh.reshape(pp.size, -1, expert, tensor)
        (own_position,) = (ranks == dist.get_rank()).nonzero().tolist()  # a rank is there once
        _, replica, expert_rank, slice_rank = own_position
        # in one order on all ranks, for each makes process groups
        expert_tp = tp if tensor == tp.size else _axis("tp", ranks, 3, slice_rank)
        spread = _axis("expert", ranks, 2, expert_rank)
        replicas = _axis("replicas", ranks, 1, replica)
        return ExpertAxes(spread, expert_tp, replicas)

    def local_experts(self, experts: int) -> range:
        """Return the numbers of the experts that this rank holds, of `experts`."""
        experts_per_rank = experts // self.spread.size
        first = self.spread.rank * experts_per_rank
        return range(first, first + experts_per_rank)


def describe_misfit(
    data: int,
    tensor: int,
    expert: int,
    expert_tensor: int,
) -> Problem | None:
    """Return why a cut of experts does not fit the ranks of a stage; None if it does.

    data, tensor: sizes of the stage; expert, expert_tensor: ranks of different experts, and slices
    of an expert.
    """
    if tensor % expert_tensor:
        return Problem.of("comm.experts_slices", expert_tensor=expert_tensor, tensor=tensor)
    stage_size = data * tensor
    expert_ranks = expert * expert_tensor
    if stage_size % expert_ranks:
        return Problem.of(
            "comm.experts_ranks",
            expert=expert,
            expert_tensor=expert_tensor,
            expert_ranks=expert_ranks,
            data=data,
            tensor=tensor,
            stage_size=stage_size,
        )
    return None


def _axis(
    name: str,
    ranks: torch.Tensor,
    dim: int,
    rank: int,
) -> Axis:
    """Return the axis along `dim` of the world ranks `ranks`, on which this rank is number
    `rank`."""
    size = ranks.shape[dim]
    # a row for each group of ranks that differ in this coordinate only
    rank_groups = ranks.movedim(dim, -1).reshape(-1, size)
    group = make_groups(rank_groups) if size > 1 else None
    return Axis(name, rank, size, group, rank_groups)
