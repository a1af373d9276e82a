"""Communicators for parameters that several pipeline ranks hold, such as an embedding that is also the head.

torch makes a group only if all ranks of the world call for it, in one order. A rank between the holders does not
know that they share anything, so everyone first hears of everyone's shared parameters.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis, device_of

_MOST = 4  # different sets of holders that one rank may belong to


def tied_axes(mesh: DeviceMesh | None, sets: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], Axis]:
    """For each set of pipeline ranks (ascending) to which this rank belongs, an axis over them.

    sets: those that this rank's parameters name. Collective over the world.
    """
    mine = list(dict.fromkeys(s for s in sets if s))
    pp = Axis.of(mesh, "pp")
    if mesh is None or pp.size == 1:
        return {}
    known = _everyones(pp, mine, device_of(mesh))
    axes: dict[tuple[int, ...], Axis] = {}
    for members in known:
        for world_ranks in mesh.mesh[list(members)].reshape(len(members), -1).t().tolist():
            group = dist.new_group(world_ranks)
            if isinstance(group, dist.ProcessGroup) and dist.get_rank() in world_ranks:
                axes[members] = Axis("tied", members.index(pp.rank), len(members), group)
    return axes


def _everyones(pp: Axis, mine: list[tuple[int, ...]], device: torch.device) -> list[tuple[int, ...]]:
    """The sets of all pipeline ranks, in an order that all share. A set travels as the bits of a number."""
    if len(mine) > _MOST:
        raise ValueError(f"a pipeline rank may share parameters with at most {_MOST} different sets of others")
    codes = torch.zeros(_MOST, dtype=torch.int64, device=device)
    codes[: len(mine)] = torch.tensor([sum(1 << rank for rank in s) for s in mine], dtype=torch.int64)
    found = sorted({int(code) for code in pp.gather(codes).tolist()} - {0})
    return [tuple(rank for rank in range(pp.size) if code >> rank & 1) for code in found]
