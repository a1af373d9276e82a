"""The mesh: every rank has a place (pp, dp, tp), and tp is the fastest.

Ranks of one tensor-parallel group talk most, so they are neighbours and share a host; pipeline stages talk
least and lie farthest apart. Rank = (pp * data + dp) * tensor + tp. The same call builds the mesh on gloo
and on NCCL, under torchrun or under local ranks.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megaprec.errors import UserError

AXES = ("pp", "dp", "tp")


def make_mesh(pp: int = 1, dp: int = 1, tp: int = 1, device: str = "cpu") -> DeviceMesh:
    """A mesh of pp * dp * tp ranks over all ranks of the joined world.

    Raises UserError when the world has another size.
    """
    world = dist.get_world_size()
    if world != pp * dp * tp:
        raise UserError(
            f"{world} ranks joined, but pipeline {pp} x data {dp} x tensor {tp} needs {pp * dp * tp}: "
            f"start {pp * dp * tp} ranks or change [parallel]"
        )
    return init_device_mesh(device, (pp, dp, tp), mesh_dim_names=AXES)


@contextmanager
def world(device: str = "cpu", minutes: float = 10.0) -> Iterator[None]:
    """Joins the world that the environment describes (torchrun's variables) and leaves it at the end.

    Without such variables the world is this process alone. On CUDA each local rank takes its own device.
    """
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "nccl" if device == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timedelta(minutes=minutes))
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
