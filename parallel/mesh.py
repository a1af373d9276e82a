"""The device mesh: every rank has coordinates (pp, dp, cp, tp), and tp varies fastest.

Ranks of one tensor-parallel group communicate most, so they are neighbours and share a host;
pipeline stages communicate least and lie farthest apart. Rank = ((pp * data + dp) * context + cp) *
tensor + tp. A mesh whose sequences are whole on each rank has no axis cp. The same call builds the
mesh on gloo and on NCCL, under torchrun and under local ranks.
"""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import AXES
from megaprec.comm.gloo_ports import making_gloo_group
from megaprec.comm.groups import make_groups
from megaprec.errors import Problem, UserError
from megaprec.kinds import is_number
from parallel.described_world import read_number, require_consistent, slurm_environment
from parallel.joining import NEWS, join
from parallel.local_store import file_of_groups
from parallel.loopback import within_machine

PARTING = 10.0  # seconds that a failed rank waits for its communication in progress


def make_mesh(
    pp: int = 1,
    dp: int = 1,
    tp: int = 1,
    device: str = "cpu",
    cp: int = 1,
) -> DeviceMesh:
    """Return a mesh of pp * dp * cp * tp ranks over all ranks of the joined world, with a process
    group for each of its axes.

    pp, dp, tp, cp: the number of ranks along each axis.
    device: the type of device, like "cpu" or "cuda", without a number.
    Raises UserError if the world has another size or was not joined, and for sizes of axes that are
    not whole numbers from 1 on. Collective over the world.
    """
    degrees = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
    _require_degrees(degrees)
    _require_type_of_device(device)
    if not dist.is_initialized():
        raise UserError.of("parallel.no_world")
    world = dist.get_world_size()
    needed = pp * dp * cp * tp
    if world != needed:
        context = f"context {cp} x " if cp > 1 else ""
        raise UserError.of(
            "parallel.ranks_do_not_fit",
            world=world,
            pp=pp,
            dp=dp,
            context=context,
            tp=tp,
            needed=needed,
        )
    # in the order of AXES, of which the last varies fastest
    names = tuple(name for name in AXES if name != "cp" or cp > 1)
    sizes = [degrees[name] for name in names]
    ranks = torch.arange(world, dtype=torch.int).view(sizes)
    return DeviceMesh.from_group(_groups_of_axes(ranks), device, ranks, mesh_dim_names=names)


def _groups_of_axes(ranks: torch.Tensor) -> list[dist.ProcessGroup]:
    """Return this rank's process group along each axis of the mesh. Collective over the world.

    ranks: the mesh as a tensor of rank numbers, with one dimension for each axis.
    """
    groups: list[dist.ProcessGroup] = []
    alone: dist.ProcessGroup | None = None  # the group of this rank only, for all axes of size 1
    for dim in range(ranks.ndim):
        # One row for each group along this axis: its ranks differ in this coordinate alone.
        ranks_of_groups = ranks.movedim(dim, -1).flatten(0, -2)
        if ranks_of_groups.shape[1] > 1 or ranks.numel() == 1:
            groups.append(_group(ranks_of_groups))
            continue
        # nothing is sent along it, and a used group over NCCL takes some 300 MB of a GPU
        alone = alone or make_groups(ranks_of_groups)
        groups.append(alone)
    return groups


def _require_degrees(degrees: Mapping[str, object]) -> None:
    """Raise UserError unless all degrees are whole numbers from 1 on."""
    problems: list[Problem] = []
    for name, degree in degrees.items():
        if not is_number(degree, whole=True) or degree < 1:  # type: ignore[operator]
            problems.append(Problem.of("parallel.degree", name=name, degree=degree))
    if problems:
        raise UserError(*problems)


def _require_type_of_device(device: object) -> None:
    """Raise UserError for what names no type of device.

    A device with a number, such as "cuda:0", is refused: it would silently mean a CPU.
    """
    try:
        is_type = isinstance(device, str) and torch.device(device).type == device
    except RuntimeError:
        is_type = False
    if not is_type:
        raise UserError.of("parallel.device_type", device=device)


def _group(ranks_of_groups: torch.Tensor) -> dist.ProcessGroup:
    """Return the group of this rank among those of an axis; if there is only one, the group of the
    world. ranks_of_groups: [groups, ranks of a group]."""
    world_group = dist.group.WORLD
    assert world_group is not None
    if len(ranks_of_groups) == 1:
        return world_group
    return make_groups(ranks_of_groups)


@contextmanager
def world(
    device: str = "cpu",
    minutes: float = 10.0,
    failed: Callable[[Exception], None] = lambda error: None,
) -> Iterator[dist.Store]:
    """Join the world that the environment describes, in torchrun's variables or Slurm's, and leave
    it at the end.

    Without these variables the world is this process alone. On CUDA each local rank takes its own
    device; a rank that sees a single device takes that one. Yields the store that all ranks share.
    minutes: time limit of each collective, in all groups that `make_mesh` and
    `megaprec.comm.groups` make too. failed(error): called before the world is left after an
    exception, while it is handled.

    Raises UserError if not all ranks join (`joining.py`), if this rank has no device of its own or
    no network interface, and if this process has joined a world before. After an exception the
    world is left if that is possible within a few seconds (`_leave_world`).
    """
    _require_type_of_device(device)
    if not is_number(minutes) or minutes <= 0:
        raise UserError.of("parallel.minutes", minutes=minutes)
    if dist.is_initialized():
        raise UserError.of("parallel.joined_already", backend=dist.get_backend())
    # nothing outside of Slurm
    os.environ.update(slurm_environment(os.environ))
    gpu = _own_device() if device == "cuda" else None
    timeout = timedelta(minutes=minutes)
    # waits for all ranks, with messages; torch's own rendezvous then finds them there
    store, rank, size = join(over_gloo=gpu is None)
    # torch puts one around it, at each joining anew, that names the rank in each line
    hook_before = sys.excepthook
    with within_machine(store):
        _form_world(store, rank, size, timeout, gpu)
        try:
            yield store
        except BaseException as error:
            if isinstance(error, Exception):
                failed(error)
            _leave_world(gpu)
            raise
        dist.destroy_process_group()
        sys.excepthook = hook_before


def _form_world(
    store: dist.Store,
    rank: int,
    size: int,
    timeout: timedelta,
    gpu: torch.device | None,
) -> None:
    """Make torch's group of all ranks: over NCCL if this rank has a GPU, otherwise over gloo.

    store: that of the ranks. gpu: the device of this rank; None: the CPU.
    """
    # gloo's ports are shut once the ranks are connected
    preparation = nullcontext() if gpu else making_gloo_group()
    with _explain_interface_errors(), preparation:
        dist.init_process_group(
            "nccl" if gpu else "gloo",
            timeout=timeout,
            # a file in place of the store, if a launcher on this machine serves it
            store=file_of_groups(store),
            rank=rank,
            world_size=size,
            device_id=gpu,
            pg_options=_nccl_options(timeout) if gpu else None,
        )
    if gpu is not None:
        _start_backward_thread(gpu)


def _nccl_options(timeout: timedelta) -> Any:
    """Return the options of the world's group, which all groups that are split from it take over.

    Messages run on streams of high priority: a GPU begins them although products wait before them.
    timeout: the world's own. The options have one too, and torch warns on each rank if they differ.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    return options


def _start_backward_thread(gpu: torch.device) -> None:
    """Compute a gradient, so that autograd's thread for this device has a context of CUDA.

    cuBLAS warns if the first operator of that thread is a product, as in a middle stage of a
    pipeline.
    """
    x = torch.ones(1, device=gpu, requires_grad=True)
    (x * x).sum().backward()


@contextmanager
def _explain_interface_errors() -> Iterator[None]:
    """Within the context, raise UserError in place of gloo's error about a network interface that
    cannot be used."""
    try:
        yield
    except RuntimeError as error:
        reason = re.search(r"Unable to (find|resolve) .*", str(error))
        if not reason:
            raise
        raise UserError.of("parallel.no_interface", reason=reason[0]) from error


def _leave_world(gpu: torch.device | None) -> None:
    """Leave the world, or give up after PARTING seconds; `dist.is_initialized()` is then still
    True.

    NCCL first waits for all work in progress. That is right if all ranks end together. If this rank
    alone has failed, however, the other ranks wait for it, and no rank would learn of the failure
    before the collectives time out. The process would not end by itself either, because NCCL waits
    again at exit: after a failed `_leave_world` the process must end with os._exit.
    """

    def leave() -> None:
        if gpu is not None:
            torch.cuda.set_device(gpu)  # the current device is a setting of each thread
        dist.destroy_process_group()

    thread = Thread(target=leave, daemon=True)
    thread.start()
    thread.join(PARTING)


def broadcast_from_first(
    store: dist.Store,
    make: Callable[[], dict[str, Any]],
    waiting: Callable[[float], None] = lambda seconds: None,
) -> dict[str, Any]:
    """Return on every rank what `make` returns on rank 0.

    The other ranks wait for it, however long it takes.
    waiting(seconds): called on the other ranks every NEWS seconds, with the seconds that they have
    waited. If `make` raises UserError, every rank raises it. Can be called once per store.
    """
    key = "told by rank 0"
    if dist.get_rank() == 0:
        try:
            result = make()
        except UserError as error:
            # a problem is its line, with code and fields as attributes
            problems = [vars(problem) | {"line": problem} for problem in error.problems]
            store.set(key, json.dumps({"problems": problems}))
            raise
        store.set(key, json.dumps({"made": result}))
        return result
    start = time.monotonic()
    next_news = NEWS
    while not store.check([key]):
        waited = time.monotonic() - start
        if waited > next_news:
            waiting(waited)
            next_news += NEWS
        # seldom in a long wait: each look is a request to the store
        time.sleep(min(2.0, 0.05 + waited / 20))
    message = json.loads(store.get(key))
    if "problems" in message:
        problems = [
            Problem(sent["line"], sent["code"], sent["fields"]) for sent in message["problems"]
        ]
        raise UserError(*problems)
    return message["made"]


def _own_device() -> torch.device:
    """Return the CUDA device of this rank, and make it the current one of this thread.

    It has the number of the rank on its machine (LOCAL_RANK), or 0 if the process sees one device
    only. Raises UserError if there is no such device, or if several are visible and a launcher has
    not set LOCAL_RANK.
    """
    require_consistent(os.environ)
    count = torch.cuda.device_count()
    alone = read_number("WORLD_SIZE", default="1") == 1
    if not os.environ.get("LOCAL_RANK") and count > 1 and not alone:
        raise UserError.of("parallel.local_rank_missing", count=count)
    local_rank = read_number("LOCAL_RANK", default="0")
    # A launcher may show each rank its own device only, which is then number 0.
    if count == 0 or (count > 1 and local_rank >= count):
        raise UserError.of("parallel.no_device_for_rank", local_rank=local_rank, count=count)
    # Steps of another length, such as evaluations, then do not fragment the memory. Read by torch
    # when it first allocates; an earlier setting counts.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    device = torch.device("cuda", local_rank if count > 1 else 0)
    torch.cuda.set_device(device)
    # Pipeline messages have their own communicators (`parallel.pipeline.p2p`), so torch's warning
    # does not apply.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    return device
