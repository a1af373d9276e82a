"""Collectives of all local ranks by size, and messages to the next rank, timed together."""

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megaprec.comm.axis import Axis
from tools.analysis.calibration.record import Collective, CollectiveRow
from tools.analysis.planning.fp8_timing import synchronize

SIZES = (2**10, 2**14, 2**18, 2**22, 2**24)  # bytes of the whole message
ROUNDS = 12


def collectives(axis: Axis, device: torch.device) -> Iterator[CollectiveRow]:
    """Yield the times of collectives over an axis; nothing of an axis of one rank. Collective."""
    if axis.size == 1:
        return
    others = (axis.size - 1) / axis.size
    for size in SIZES:
        whole = torch.zeros(size // 4 // axis.size * axis.size, device=device)
        part = whole[: len(whole) // axis.size].clone()
        # an all-reduce is a reduce-scatter and an all-gather
        kinds: tuple[tuple[Collective, Callable[[], object], float], ...] = (
            ("all-reduce", _summing(axis, whole), 2 * others),
            ("all-gather", _gathering(axis, part), others),
            ("reduce-scatter", _scattering(axis, whole), others),
            ("point to point", _shifting(axis, whole), 1.0),
        )
        for kind, step, share in kinds:
            seconds = _fastest_of_slowest(axis, step, device)
            sent = max(1, round(share * whole.nbytes))
            yield CollectiveRow(kind=kind, ranks=axis.size, bytes=sent, seconds=seconds)


def _summing(axis: Axis, tensor: Tensor) -> Callable[[], object]:
    return lambda: axis.sum_(tensor)


def _gathering(axis: Axis, tensor: Tensor) -> Callable[[], object]:
    return lambda: axis.gather(tensor)


def _scattering(axis: Axis, tensor: Tensor) -> Callable[[], object]:
    return lambda: axis.scatter_sum(tensor)


def _shifting(axis: Axis, tensor: Tensor) -> Callable[[], object]:
    return lambda: axis.start_shift(tensor)()


def _fastest_of_slowest(axis: Axis, step: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest round, each of which ends with its slowest rank."""
    best = float("inf")
    for number in range(ROUNDS):
        axis.barrier()
        start = time.perf_counter()
        step()
        synchronize(device)
        seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        slowest = float(axis.max_(seconds.to(device)))
        # the first sets up connections
        if number:
            best = min(best, slowest)
    return best
