"""Several GPUs train over NCCL what one trains, and their links are in order. On the CPU the same
over gloo."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallel.mesh import make_mesh
from tests.doctor.places import place
from tests.layouts import Trained, train_rank
from tests.models.test_other_device import FOUR, run
from tests.ranks import run_ranks
from tools.verify.doctor.finding import OK
from tools.verify.doctor.links import judge, measure

FUSED = {"sequence": True, "async_tensor": True}
# the axes, and what a run has besides
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tp": ({"tp": 2}, {}),
    "tp, products fused with transfers": ({"tp": 2}, FUSED),
    "pp": ({"pp": 2}, {}),
    "dp": ({"dp": 2}, {}),
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu(2))])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def moved(mesh: DeviceMesh, device: str, folder: Path) -> DeviceMesh:
    """The mesh of the same ranks on this device: those of a GPU leave their world on gloo and join
    one on NCCL."""
    if device == "cpu":
        return mesh
    rank = dist.get_rank()
    size = dist.get_world_size()
    shape = tuple(mesh.mesh.shape)
    dist.destroy_process_group()
    torch.cuda.set_device(rank)
    store = dist.FileStore(str(folder / "nccl"), size)
    dist.init_process_group(
        "nccl", rank=rank, world_size=size, store=store, device_id=torch.device("cuda", rank)
    )
    return make_mesh(*shape, device="cuda")


def train(mesh: DeviceMesh, device: str, folder: Path, keys: dict[str, Any]) -> Trained:
    return train_rank(moved(mesh, device, folder), [run("fp64", FOUR, micro_batch=2, **keys)])[0]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_trains_in_float64_as_one_process(name: str, device: str, tmp_path: Path) -> None:
    (alone,) = run_ranks(train, {}, device="cpu", folder=tmp_path, keys={})
    axes, keys = LAYOUTS[name]
    for ours in run_ranks(train, axes, device=device, folder=tmp_path, keys=keys):
        for one, other in zip(ours.reports, alone.reports, strict=True):
            assert one.loss == pytest.approx(other.loss, rel=1e-10)
            assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-9)


def links(mesh: DeviceMesh, device: str, folder: Path) -> object:
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank())
    return measure(replace(place(folder, (1, 1, mesh.size())), device=device))


def test_links_of_all_axes_are_in_order(device: str, tmp_path: Path) -> None:
    (finding,) = judge(run_ranks(links, {"tp": 2}, device=device, folder=tmp_path))
    assert finding.verdict == OK, finding.message
