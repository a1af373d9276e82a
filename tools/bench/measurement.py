"""The parts that measurements share: options, ranks, the clock of a device, and lines of JSON."""

import argparse
import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megaprec.errors import UserError
from megaprec.resources import status_bytes
from parallel.mesh import world
from tools.analysis.planning.fp8_timing import synchronize
from tools.training.launch import start_ranks
from tools.training.launched import share_of_cores
from tools.training.machine import keep_freed_memory

Step = Callable[[], object]


def add_integers(parser: argparse.ArgumentParser, options: Mapping[str, tuple[int, str]]) -> None:
    """Add options that take a number. options: the default and the meaning of each name."""
    for name, (default, meaning) in options.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=meaning)


def add_device(parser: argparse.ArgumentParser, default: str = "cuda") -> None:
    """Add the device of the ranks as an option."""
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default=default, help="device of each rank"
    )


def require_gpu(device: str) -> None:
    """Raise UserError if a measurement on a GPU is asked for and there is none."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError.of("bench.no_gpu")


def print_record(record: Mapping[str, Any]) -> None:
    """Print one line of JSON, also if the output is a file and the program is killed later."""
    print(json.dumps(record), flush=True)


def run_on_ranks(measure: Callable[[], None], ranks: int, threads: int, device: str = "cpu") -> int:
    """Call `measure` on each of `ranks` ranks of this program; return the exit code.

    The process that the user starts starts the ranks, unless it is the only one. threads: of each
    rank; 0: its share of the cores. device: type of the ranks' devices.
    """
    # A rank that this program, torchrun or Slurm has started finds RANK.
    if ranks > 1 and "RANK" not in os.environ:
        return start_ranks([sys.executable, "-m", "tools.bench", *sys.argv[1:]], ranks, threads)
    torch.set_num_threads(threads or share_of_cores(ranks))
    # As `megaprec train` does, or steps would take longer than there.
    keep_freed_memory()
    with world(device):
        measure()
    return 0


def seconds_of(step: Step, device: torch.device) -> float:
    """Return the seconds of one step, when the device has finished it."""
    # what was queued before is not of this step
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - start


def seconds_in_turn(
    steps: Mapping[str, Step],
    rounds: int,
    device: torch.device,
    prepare: Mapping[str, Step] | None = None,
) -> dict[str, float]:
    """Return the median seconds of each step, by name.

    The steps are taken in turn, so that whatever disturbs the machine disturbs all of them. The
    first round warms up, and does not count.

    prepare: what is done before each step, and is not timed.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            if prepare is not None:
                prepare[name]()
            seconds = seconds_of(step, device)
            times[name].append(seconds)
    medians: dict[str, float] = {}
    for name, seconds_by_round in times.items():
        medians[name] = statistics.median(seconds_by_round[1:])
    return medians


def extra_bytes(step: Step, device: torch.device) -> int | None:
    """Return the most memory that a step has beyond what was there before it; None if it is not
    known."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    clear_refs = Path("/proc/self/clear_refs")
    if device.type != "cpu" or not clear_refs.exists():
        return None
    # memory that was freed goes back to the system: it would not count a second time
    ctypes.CDLL(None).malloc_trim(0)
    clear_refs.write_text("5")  # Linux: forget the highest memory use so far
    before = status_bytes("VmRSS:")
    step()
    return status_bytes("VmHWM:") - before


def print_profile(step: Step, rows: int = 30) -> None:
    """Print the operators of a step by the CPU time of their own, on the first rank."""
    cpu_only = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu_only) as profiler:
        # on every rank: a step waits for the others
        step()
    if os.environ.get("RANK", "0") == "0":
        print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=rows))


def rounded_median(seconds: Sequence[float], digits: int = 3) -> float:
    """Return the median of some times, rounded to so many digits after the point."""
    return round(statistics.median(seconds), digits)
