"""The mesh: every rank has a place (pp, dp, tp), and tp is the fastest.

Ranks of one tensor-parallel group talk most, so they are neighbours and share a host; pipeline stages talk
least and lie farthest apart. Rank = (pp * data + dp) * tensor + tp. The same call builds the mesh on gloo
and on NCCL, under torchrun or under local ranks.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megaprec.comm.axis import AXES
from megaprec.errors import UserError

PATIENCE = timedelta(days=7)  # tokenizing a large text takes long; stores do not count beyond 24 days
PARTING = 10.0  # seconds that a rank which failed waits for what it has under way with others


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
def world(device: str = "cpu", minutes: float = 10.0) -> Iterator[dist.Store]:
    """Joins the world that the environment describes (torchrun's variables) and leaves it at the end.

    Without such variables the world is this process alone. On CUDA each local rank takes its own device: the only one
    that it sees, if there is but one. Yields the store that all ranks share. `minutes` bound each collective.

    After an exception the world is left if that is possible soon, see `_part`.
    """
    own = _own_device() if device == "cuda" else None
    timeout = timedelta(minutes=minutes)
    store, rank, size = _rendezvous(timeout)
    backend = "nccl" if own else "gloo"
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size, device_id=own)
    try:
        yield store
    except BaseException:
        _part(own)
        raise
    dist.destroy_process_group()


def _part(own: torch.device | None) -> None:
    """Leaves the world, or gives up after PARTING; `dist.is_initialized()` then says that this process is still in it.

    NCCL first waits for all that is under way. That is well where all ranks end together; but if this one alone has
    failed, others wait for it, and nobody would hear of the failure before their patience ends. Nor does the process
    end by itself then, for in its last moments the same is done again: it must leave by os._exit.
    """

    def leave() -> None:
        if own is not None:
            torch.cuda.set_device(own)  # which each thread has to say
        dist.destroy_process_group()

    parting = Thread(target=leave, daemon=True)
    parting.start()
    parting.join(PARTING)


def told_by_first(store: dist.Store, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `make` returns on rank 0, on every rank; the others wait for it, for days if it takes that long.

    If `make` raises UserError, every rank does. Once for each store.
    """
    key = "told by rank 0"
    if dist.get_rank() == 0:
        try:
            made = make()
        except UserError as error:
            store.set(key, json.dumps({"problems": error.problems}))
            raise
        store.set(key, json.dumps({"made": made}))
        return made
    store.wait([key], PATIENCE)
    told = json.loads(store.get(key))
    if "problems" in told:
        raise UserError(*told["problems"])
    return told["made"]


def _rendezvous(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Store, rank and number of ranks."""
    if "RANK" not in os.environ:
        return dist.HashStore(), 0, 1
    return next(iter(dist.rendezvous("env://", timeout=timeout)))


def _own_device() -> torch.device:
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local if torch.cuda.device_count() > 1 else 0)
    torch.cuda.set_device(device)
    # Messages of stages have communicators of their own (`parallel.links`): torch need not warn that they might not.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    return device
