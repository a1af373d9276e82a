"""The kernels of a step on a GPU by their time, and how long the GPU had nothing to do in it.

The time of a step is from its first kernel's beginning to the end of its last: what the host does
before the first is not in it. While several streams have kernels the GPU is busy once.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

ROWS = 25  # kernels that are named; the others are one row
NAME_LENGTH = 90  # characters: kernels of templates have names of hundreds


@dataclass(frozen=True)
class Kernel:
    """One run of a kernel, a copy or a fill on a GPU. start, end: microseconds."""

    name: str
    start: float
    end: float


def kernels_among(events: Iterable[Any]) -> list[Kernel]:
    """Return the kernels among the events of torch's profiler."""
    kernels: list[Kernel] = []
    for event in events:
        # spans that a program names are drawn on the GPU too
        is_on_gpu = event.device_type == torch.autograd.DeviceType.CUDA
        if is_on_gpu and not getattr(event, "is_user_annotation", False):
            time_range = event.time_range
            kernels.append(Kernel(event.name, time_range.start, time_range.end))
    return kernels


def kernel_record(kernels: Sequence[Kernel], rows: int = ROWS) -> dict[str, Any]:
    """Return the number of kernels, the milliseconds from the first to the last, the share of them
    in which none ran, and a row for each kernel: name, runs, milliseconds, share of all kernels'
    time."""
    if not kernels:
        return {"kernels": 0}
    first_start = min(kernel.start for kernel in kernels)
    last_end = max(kernel.end for kernel in kernels)
    microseconds = last_end - first_start
    idle = 1 - _busy(kernels) / microseconds if microseconds else 0.0
    return {
        "kernels": len(kernels),
        "kernel_span_ms": round(microseconds / 1e3, 3),
        "idle_share": round(idle, 4),
        "kernel_table": _table(kernels, rows),
    }


def _busy(kernels: Iterable[Kernel]) -> float:
    """Return the microseconds in which at least one kernel ran."""
    busy = 0.0
    until = float("-inf")  # the end of all kernels so far
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        # what of it no kernel before it has covered
        alone_from = max(kernel.start, until)
        busy += max(0.0, kernel.end - alone_from)
        until = max(until, kernel.end)
    return busy


def _table(kernels: Iterable[Kernel], rows: int) -> list[list[Any]]:
    """Return the rows of the kernels that took most time, as `_row` makes them, and one of all
    others, if there are more than `rows`."""
    times_of: dict[str, list[float]] = defaultdict(list)  # microseconds of each run, by name
    for kernel in kernels:
        microseconds = kernel.end - kernel.start
        times_of[kernel.name].append(microseconds)
    longest_first = sorted(times_of, key=lambda name: -sum(times_of[name]))
    total = sum(map(sum, times_of.values()))
    table = [_row(name, times_of[name], total) for name in longest_first[:rows]]
    others = list[float]()
    for name in longest_first[rows:]:
        others += times_of[name]
    if others:
        table.append(_row("all others", others, total))
    return table


def _row(name: str, times: Sequence[float], total: float) -> list[Any]:
    """Return name, runs, milliseconds and share of a kernel. times, total: microseconds."""
    spent = sum(times)
    share = spent / total if total else 0.0
    milliseconds = round(spent / 1e3, 3)
    return [name[:NAME_LENGTH], len(times), milliseconds, round(share, 4)]
