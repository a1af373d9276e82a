"""Process groups for tied parameters: parameters that several pipeline ranks have, such as a tied
embedding and head.

torch creates a process group only if all ranks of the world call for it, in the same order. A
pipeline rank without a tied parameter does not know which others have one, so the ranks first
all-gather the sets of tied ranks.
"""

from collections.abc import Iterable

import torch
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis, device_of
from megaprec.comm.groups import make_groups

# different sets of tied pipeline ranks to which one rank may belong
_MAX_SETS = 4


def tied_axes(
    mesh: DeviceMesh | None,
    sets: Iterable[tuple[int, ...]],
) -> dict[tuple[int, ...], Axis]:
    """Return an axis for each set of pipeline ranks (ascending) to which this rank belongs.

    sets: `Layout.tied` of this rank's parameters. Collective over the world.
    """
    # two copies on one rank need no group
    across_ranks = [ranks for ranks in sets if len(set(ranks)) > 1]
    local_sets = list(dict.fromkeys(across_ranks))
    pp = Axis.of(mesh, "pp")
    # one pipeline rank shares nothing
    if pp.rank_groups is None or pp.size == 1:
        return {}
    axes: dict[tuple[int, ...], Axis] = {}
    for members in _all_gather_sets(pp, local_sets, device_of(mesh)):
        rank_groups = pp.rank_groups[:, list(members)]
        group = make_groups(rank_groups)  # by every rank, also by those that are no members
        if pp.rank in members:
            index = members.index(pp.rank)
            axes[members] = Axis("tied", index, len(members), group, rank_groups)
    return axes


def _all_gather_sets(
    pp: Axis,
    local_sets: list[tuple[int, ...]],
    device: torch.device,
) -> list[tuple[int, ...]]:
    """All-gather the sets of all pipeline ranks and return them in the same order on every rank.

    A set is sent as a row of `pp.size` bytes: number r is 1 if rank r is in it.
    """
    if len(local_sets) > _MAX_SETS:
        raise ValueError(
            f"a pipeline rank may share parameters with at most {_MAX_SETS} different sets of "
            "others"
        )
    rows = torch.zeros(_MAX_SETS, pp.size, dtype=torch.uint8, device=device)
    for number, ranks in enumerate(local_sets):
        rows[number, list(ranks)] = 1
    sets: set[tuple[int, ...]] = set()
    for row in pp.gather(rows).cpu():
        sets.add(tuple(row.nonzero().flatten().tolist()))
    # sorted, so that all ranks create the groups in the same order; () is an unused row
    return sorted(sets - {()})
