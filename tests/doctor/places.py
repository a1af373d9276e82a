"""Ranks to check without a launch: places over the store of the test's own world, on hosts that are
made up."""

from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from tools.verify.doctor.questions import RankContext

HOSTS = ("alpha", "beta", "gamma", "delta")


def place(folder: Path, layout: tuple[int, int, int] = (1, 1, 1)) -> RankContext:
    """This rank of the joined world, each on a host of its own; one rank on alpha if none is
    joined."""
    joined = dist.is_initialized()
    rank, size = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
    store = _get_default_store() if joined else dist.HashStore()
    made = RankContext(rank, size, 0, HOSTS[rank], store, layout, "cpu", folder, 0)
    if rank == 0:
        made.publish("hosts", HOSTS[:size])
    return made
