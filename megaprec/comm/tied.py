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
from megaprec.comm.groups import split

_MOST = 4  # different sets of tied pipeline ranks to which one rank may belong


def tied_axes(
    mesh: DeviceMesh | None, sets: Iterable[tuple[int, ...]]
) -> dict[tuple[int, ...], Axis]:
    """Return an axis for each set of pipeline ranks (ascending) to which this rank belongs.

    sets: `Layout.tied` of this rank's parameters. Collective over the world.
    """
    # two copies on one rank need no group
    mine = list(dict.fromkeys(s for s in sets if len(set(s)) > 1))
    pp = Axis.of(mesh, "pp")
    if pp.runs is None or pp.size == 1:
        return {}
    known = _all_gather_sets(pp, mine, device_of(mesh))
    axes: dict[tuple[int, ...], Axis] = {}
    for members in known:
        group = split(runs := pp.runs[:, list(members)])
        if pp.rank in members:
            axes[members] = Axis("tied", members.index(pp.rank), len(members), group, runs)
    return axes


def _all_gather_sets(
    pp: Axis, mine: list[tuple[int, ...]], device: torch.device
) -> list[tuple[int, ...]]:
    """All-gather the sets of all pipeline ranks and return them in the same order on every rank.

    A set is sent as the bits of an integer.
    """
    if len(mine) > _MOST:
        raise ValueError(
            f"a pipeline rank may share parameters with at most {_MOST} different sets of others"
        )
    codes = torch.zeros(_MOST, dtype=torch.int64, device=device)
    codes[: len(mine)] = torch.tensor(
        [sum(1 << rank for rank in s) for s in mine], dtype=torch.int64
    )
    found = sorted({int(code) for code in pp.gather(codes).tolist()} - {0})
    return [tuple(rank for rank in range(pp.size) if code >> rank & 1) for code in found]
