"""The ranks that are checked: those of a launched world, or local ones that the command has
started.

First comes what a rank can tell without the others; then the ranks meet, and what needs all of them
is tried.
"""

import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megaprec.comm.gloo_ports import making_gloo_group
from parallel.described_world import read_number
from parallel.joining import join
from parallel.local_store import file_of_groups
from parallel.loopback import within_machine
from tools.console.units import counted
from tools.verify.doctor import clocks, disk, kernels, links, machine, shared
from tools.verify.doctor.finding import Finding, ok
from tools.verify.doctor.questions import Check, RankContext, conduct

JOIN_SECONDS = 30.0  # in which all ranks must join
MESSAGE_SECONDS = 12.0  # that a message between ranks may take


@dataclass(frozen=True)
class DoctorRequest:
    """The request of the command line.

    layout: pipeline, data and tensor ranks; zeros: one tensor rank for each local rank, and a
    replica for each host. device: auto, cpu or cuda. bytes_needed: what the run writes to `folder`.
    """

    layout: tuple[int, int, int] = (0, 0, 0)
    device: str = "auto"
    folder: Path = Path()
    bytes_needed: int = 0


def take_part(request: DoctorRequest) -> tuple[RankContext, list[Finding], bool]:
    """Join the world and carry out all checks.

    Return the context of this rank, and what `conduct` returns.

    Raises UserError if not all ranks join.
    """
    store, rank, size = join(seconds=JOIN_SECONDS)
    local_rank = read_number("LOCAL_RANK", default="0")
    local_size = read_number("LOCAL_WORLD_SIZE", default="1")

    gpus = torch.cuda.device_count()
    # GPUs only if there is one for each rank of this host.
    device = "cuda" if request.device != "cpu" and 0 < local_size <= gpus else "cpu"
    if device == "cuda":
        # A launcher may show each rank its own GPU only, which is then number 0.
        torch.cuda.set_device(local_rank if gpus > 1 else 0)

    # without a run file: tensor ranks within a host, where links are fast
    layout = request.layout if all(request.layout) else (1, size // local_size, local_size)
    context = RankContext(
        rank=rank,
        size=size,
        local=local_rank,
        host=socket.gethostname(),
        store=store,
        layout=layout,
        device=device,
        folder=request.folder,
        bytes_needed=request.bytes_needed,
    )
    with within_machine(store):
        findings, all_answered = conduct(CHECKS, context)
    return context, findings, all_answered


def _report_host(context: RankContext) -> str:
    return context.host


def _judge_presence(hosts: Sequence[Any]) -> Iterator[Finding]:
    ranks = counted(len(hosts), "rank")
    distinct_hosts = counted(len(set(hosts)), "host")
    message = f"{ranks} on {distinct_hosts} answer"
    yield ok("ranks", message, hosts=list(hosts))


def _form_world(context: RankContext) -> bool:
    """Form the world of all ranks, over gloo. Returns True: the ranks have met.

    The checks steer over CPUs, whatever the links are.
    """
    with making_gloo_group():
        dist.init_process_group(
            "gloo",
            store=file_of_groups(context.store),
            rank=context.rank,
            world_size=context.size,
            timeout=timedelta(seconds=MESSAGE_SECONDS),
        )
    dist.barrier()
    return True


def _judge_world(answers: Sequence[Any]) -> Iterator[Finding]:
    """Yield nothing: ranks that could not meet are named as ranks that failed or are late."""
    yield from ()


# In this order: first what a rank can do alone, then the world, then what needs it.
CHECKS = (
    Check("ranks", _report_host, _judge_presence),
    Check("machine", machine.facts, machine.judge),
    Check("kernels", kernels.probe, kernels.judge, needed=False),
    Check("disk", disk.probe, disk.judge),
    Check("world", _form_world, _judge_world, together=True),
    Check("clocks", clocks.readings, clocks.judge, together=True),
    Check("shared disk", shared.probe, shared.judge, together=True, seconds=45.0),
    Check("links", links.measure, links.judge, together=True, seconds=45.0),
)
