"""Ranks that share experts, and those that hold the same, are the neighbours that the mesh says."""

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.experts import ExpertAxes
from tests.ranks import run_ranks


def places(mesh: DeviceMesh, expert: int, tensor: int) -> tuple[int, ...]:
    """Of this rank: its number, and its place among experts, slices and replicas."""
    axes = ExpertAxes.of(mesh, expert, tensor)
    assert axes is not None
    return dist.get_rank(), axes.spread.rank, axes.tp.rank, axes.replicas.rank


@pytest.mark.parametrize(
    ("axes", "expert", "tensor", "expected"),
    [
        ({"dp": 2, "tp": 2}, 2, 2, [(0, 0, 0, 0), (1, 0, 1, 0), (2, 1, 0, 0), (3, 1, 1, 0)]),
        ({"dp": 2, "tp": 2}, 2, 1, [(0, 0, 0, 0), (1, 1, 0, 0), (2, 0, 0, 1), (3, 1, 0, 1)]),
        ({"pp": 2, "dp": 2}, 2, 1, [(0, 0, 0, 0), (1, 1, 0, 0), (2, 0, 0, 0), (3, 1, 0, 0)]),
    ],
)
def test_each_rank_has_its_own_place_among_experts_slices_and_replicas(
    axes: dict[str, int], expert: int, tensor: int, expected: list[tuple[int, ...]]
) -> None:
    assert run_ranks(places, axes, expert=expert, tensor=tensor) == expected
