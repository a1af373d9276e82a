"""The ranks that are checked: those of a launched world, or local ones that the command has
started.

First comes what a rank can tell without the others; then the ranks meet, and what needs all of them
is tried.
"""

import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megaprec.comm.gloo_threads import waiting_their_turn
from parallel.joining import join
from tools.console.units import counted
from tools.doctor import clocks, disk, kernels, links, machine, shared
from tools.doctor.finding import Finding, ok
from tools.doctor.place import Place
from tools.doctor.questions import Check, conduct

JOIN = 30.0  # seconds in which all ranks must join
MESSAGE = 12.0  # seconds that a message between ranks may take


@dataclass(frozen=True)
class Asked:
    """The request of the command line. layout: pipeline, data and tensor ranks; zeros: one tensor
    rank for each local rank, and a replica for each host. device: auto, cpu or cuda. bytes_needed:
    what the run writes to `folder`.
    """

    layout: tuple[int, int, int] = (0, 0, 0)
    device: str = "auto"
    folder: Path = Path()
    bytes_needed: int = 0


def take_part(asked: Asked) -> tuple[Place, list[Finding], bool]:
    """Join the world and carry out all checks. Return the place of this rank, and what `conduct`
    returns.

    Raises UserError if not all ranks join.
    """
    store, rank, size = join(seconds=JOIN)
    local, ranks = (int(os.environ.get(name, default)) for name, default in _LOCAL)
    here = torch.cuda.device_count()
    device = "cuda" if asked.device != "cpu" and 0 < ranks <= here else "cpu"
    if device == "cuda":
        torch.cuda.set_device(local if here > 1 else 0)
    layout = asked.layout if all(asked.layout) else (1, size // ranks, ranks)
    place = Place(
        rank,
        size,
        local,
        socket.gethostname(),
        store,
        layout,
        device,
        asked.folder,
        asked.bytes_needed,
    )
    return place, *conduct(CHECKS, place)


_LOCAL = (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))


def _present(place: Place) -> str:
    return place.host


def _all_present(hosts: Sequence[Any]) -> Iterator[Finding]:
    count = len(set(hosts))
    said = f"{counted(len(hosts), 'rank')} on {counted(count, 'host')} answer"
    yield ok("ranks", said, hosts=list(hosts))


def _meet(place: Place) -> bool:
    """Form the world of all ranks, over gloo: the checks steer over CPUs, whatever the links
    are."""
    with waiting_their_turn():
        dist.init_process_group(
            "gloo",
            store=place.store,
            rank=place.rank,
            world_size=place.size,
            timeout=timedelta(seconds=MESSAGE),
        )
    dist.barrier()
    return True


def _met(answers: Sequence[Any]) -> Iterator[Finding]:
    yield from ()


CHECKS = (
    Check("ranks", _present, _all_present),
    Check("machine", machine.facts, machine.judge),
    Check("kernels", kernels.probe, kernels.judge, needed=False),
    Check("disk", disk.probe, disk.judge),
    Check("world", _meet, _met, together=True),
    Check("clocks", clocks.readings, clocks.judge, together=True),
    Check("shared disk", shared.probe, shared.judge, together=True, seconds=45.0),
    Check("links", links.measure, links.judge, together=True, seconds=45.0),
)
