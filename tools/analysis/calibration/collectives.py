"""Collectives of all local ranks by size, and messages to the next rank, timed together."""

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from megaprec.comm.axis import Axis
from tools.analysis.calibration.record import Collective, CollectiveRow
from tools.analysis.planning.fp8_timing import synchronize

SIZES = (2**10, 2**14, 2**18, 2**22, 2**24)  # bytes of the whole message
ROUNDS = 12
FLOAT32_BYTES = 4


def collectives(axis: Axis, device: torch.device) -> Iterator[CollectiveRow]:
    """Yield the times of collectives over an axis; nothing of an axis of one rank. Collective."""
    if axis.size == 1:
        return
    for size in SIZES:
        # the message, a multiple of the ranks, and the part of it that a rank has
        part_length = size // FLOAT32_BYTES // axis.size
        whole = torch.zeros(part_length * axis.size, device=device)
        part = whole[:part_length].clone()
        calls: tuple[tuple[Collective, Callable[[Axis, Tensor], None], Tensor], ...] = (
            ("all-reduce", _sum, whole),
            ("all-gather", _gather, part),
            ("reduce-scatter", _scatter_sum, whole),
            ("point to point", _shift, whole),
        )
        for kind, collective, tensor in calls:
            call = partial(collective, axis, tensor)
            seconds = _fastest_of_slowest(axis, call, device)
            sent = round(_share_sent(kind, axis.size) * whole.nbytes)
            yield CollectiveRow(kind=kind, ranks=axis.size, bytes=max(1, sent), seconds=seconds)


def _share_sent(kind: Collective, ranks: int) -> float:
    """Return how much a rank sends, as a share of the whole message."""
    if kind == "point to point":
        return 1.0
    to_others = (ranks - 1) / ranks
    # an all-reduce is a reduce-scatter and an all-gather
    return 2 * to_others if kind == "all-reduce" else to_others


def _sum(axis: Axis, tensor: Tensor) -> None:
    axis.sum_(tensor)


def _gather(axis: Axis, tensor: Tensor) -> None:
    axis.gather(tensor)


def _scatter_sum(axis: Axis, tensor: Tensor) -> None:
    axis.scatter_sum(tensor)


def _shift(axis: Axis, tensor: Tensor) -> None:
    wait = axis.start_shift(tensor)
    wait()


def _fastest_of_slowest(axis: Axis, call: Callable[[], None], device: torch.device) -> float:
    """Return the seconds of the fastest round, each of which ends with its slowest rank."""
    best = float("inf")
    for round_number in range(ROUNDS):
        axis.barrier()
        start = time.perf_counter()
        call()
        synchronize(device)
        own_seconds = time.perf_counter() - start
        of_ranks = torch.tensor([own_seconds], dtype=torch.float64).to(device)
        slowest = float(axis.max_(of_ranks))
        # the first round sets up connections, and is not counted
        if round_number > 0:
            best = min(best, slowest)
    return best
