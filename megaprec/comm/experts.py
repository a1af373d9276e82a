"""The ranks that share the experts of a layer: a second cut of the data x tensor ranks of a
pipeline stage.

Attention and norms are cut over tp and copied over dp. Experts are many and each token needs few,
so ranks hold a part of them each, and tokens travel. The ranks of a stage, numbered as in the mesh,
are cut once more for experts:

    rank = (replica * experts + expert) * tensor + slice

    spread    neighbouring ranks that hold different experts; tokens travel along it
    tp        the ranks that hold slices of the same experts
    replicas  the ranks that hold the same slices of the same experts: gradients are summed over them

Experts with slices on all tp ranks are the usual cut of a feed-forward; then `spread` runs along
dp. With one slice an expert is whole, and `spread` runs along tp first. Megatron-LM names the sizes
expert and expert tensor parallel (megatron/core/parallel_state.py).
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.comm.groups import split
from megaprec.errors import UserError


@dataclass(frozen=True)
class ExpertAxes:
    """The three axes of this rank's experts."""

    spread: Axis
    tp: Axis
    replicas: Axis

    @staticmethod
    def of(mesh: DeviceMesh | None, expert: int = 1, tensor: int = 0) -> "ExpertAxes | None":
        """Return the axes of `mesh` for experts over `expert` ranks, each in `tensor` slices (0:
        one on each tp rank).

        None if experts lie as any other feed-forward does: all of them on every dp rank, in slices
        over tp. Raises UserError for sizes that do not fit the mesh. Collective over the world.
        """
        pp = Axis.of(mesh, "pp")
        tp = Axis.of(mesh, "tp")
        stage = 1 if mesh is None else mesh.size() // pp.size
        tensor = tensor or tp.size
        if problem := misfit(stage // tp.size, tp.size, expert, tensor):
            raise UserError(problem)
        if mesh is None or (expert == 1 and tensor == tp.size):
            return None
        planes = mesh.mesh.reshape(pp.size, -1, expert, tensor)
        _, replica, number, part = (planes == dist.get_rank()).nonzero()[0].tolist()
        cut = tp if tensor == tp.size else _axis("tp", planes, 3, part)
        return ExpertAxes(
            _axis("expert", planes, 2, number), cut, _axis("replicas", planes, 1, replica)
        )

    def own(self, experts: int) -> range:
        """Return the numbers of the experts that this rank holds, of `experts`."""
        each = experts // self.spread.size
        return range(self.spread.rank * each, (self.spread.rank + 1) * each)


def misfit(data: int, tensor: int, expert: int, expert_tensor: int) -> str:
    """Return why `expert` ranks x `expert_tensor` slices of experts do not fit data x tensor ranks;
    "" if they do."""
    if tensor % expert_tensor:
        return f"{expert_tensor} slices of an expert do not divide {tensor} tensor-parallel ranks"
    if (data * tensor) % (expert * expert_tensor):
        asked = f"{expert} ranks x {expert_tensor} slices = {expert * expert_tensor}"
        return (
            f"{asked} do not divide the data {data} x tensor {tensor} = {data * tensor} ranks of "
            "a stage"
        )
    return ""


def _axis(name: str, planes: torch.Tensor, dim: int, rank: int) -> Axis:
    size = planes.shape[dim]
    runs = planes.movedim(dim, -1).reshape(-1, size)
    return Axis(name, rank, size, split(runs) if size > 1 else None, runs)
