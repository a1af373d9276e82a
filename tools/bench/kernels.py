"""The kernels of a step on a GPU by their time, and how long the GPU had nothing to do in it.

The time of a step is from its first kernel's beginning to the end of its last: what the host does
before the first is not in it. While several streams have kernels the GPU is busy once.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from tools.analysis.planning.fp8_timing import synchronize
from tools.bench.measurement import Step

ROWS = 25  # kernels that are named; the others are one row
NAME_LENGTH = 90  # characters: kernels of templates have names of hundreds


@dataclass(frozen=True)
class Kernel:
    """One run of a kernel, a copy or a fill on a GPU. start, end: microseconds."""

    name: str
    start: float
    end: float


def kernels_of(step: Step, device: torch.device) -> list[Kernel]:
    """Return the kernels of a step, which has warmed up."""
    synchronize(device)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        synchronize(device)
    return kernels_among(profiler.events() or ())


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
    span = max(kernel.end for kernel in kernels) - min(kernel.start for kernel in kernels)
    idle = 1 - _busy(kernels) / span if span else 0.0
    return {
        "kernels": len(kernels),
        "kernel_span_ms": round(span / 1e3, 3),
        "idle_share": round(idle, 4),
        "kernel_table": _table(kernels, rows),
    }


def _busy(kernels: Iterable[Kernel]) -> float:
    """Return the microseconds in which at least one kernel ran."""
    busy = 0.0
    until = float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        busy += max(0.0, kernel.end - max(kernel.start, until))
        until = max(until, kernel.end)
    return busy


def _table(kernels: Iterable[Kernel], rows: int) -> list[list[Any]]:
    times: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        times[kernel.name].append(kernel.end - kernel.start)
    by_time = sorted(times.items(), key=lambda item: -sum(item[1]))
    total = sum(map(sum, times.values()))
    table = [_row(name, of_kernel, total) for name, of_kernel in by_time[:rows]]
    others = [time for _, of_kernel in by_time[rows:] for time in of_kernel]
    if others:
        table.append(_row("all others", others, total))
    return table


def _row(name: str, times: Sequence[float], total: float) -> list[Any]:
    spent = sum(times)
    share = spent / total if total else 0.0
    return [name[:NAME_LENGTH], len(times), round(spent / 1e3, 3), round(share, 4)]
