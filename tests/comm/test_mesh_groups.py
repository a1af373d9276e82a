"""A mesh makes a group of processes for each axis of several ranks, and one for all others."""

from torch.distributed.device_mesh import DeviceMesh

from tests.ranks import on_ranks


@on_ranks(tp=2)
def test_axes_of_one_rank_share_a_group(mesh: DeviceMesh) -> None:
    assert mesh.get_group("pp") is mesh.get_group("dp")
    assert mesh.get_group("pp").size() == 1
    assert mesh.get_group("tp").size() == 2


@on_ranks(pp=2, tp=2)
def test_an_axis_of_one_rank_takes_no_group_of_others(mesh: DeviceMesh) -> None:
    assert mesh.get_group("dp").size() == 1
    sizes = [mesh.get_group(name).size() for name in ("pp", "tp")]
    assert sizes == [2, 2]
