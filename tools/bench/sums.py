"""The time of a sum over CPU ranks, by its size: of `Axis.sum_`, and of both ways that it chooses
from.

`direct` sends everything to everyone; `ring` is gloo's own all-reduce. Sums come one after another,
as those of tensor parallelism do, and nothing is computed between them.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.comm.gloo import start_gather
from megaprec.errors import Problem, UserError
from parallel.mesh import make_mesh
from tools.bench.measurement import add_integers, print_record, run_on_ranks

SUBJECT = "time of sums over CPU ranks, by size"
LEAST = {"ranks": 2, "numbers": 1, "rounds": 1}
WARMUP_SUMS = 10  # of each size and way, before the clock starts


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this measurement."""
    add_integers(
        parser, {"ranks": (2, "that take part"), "rounds": (200, "sums of each size and way")}
    )
    parser.add_argument(
        "--numbers",
        type=int,
        nargs="+",
        default=[4, 4096, 65536, 1048576],
        metavar="N",
        help="FP32 numbers in a sum",
    )


def main(args: argparse.Namespace) -> int:
    """Run `python -m tools.bench sums`. Raises UserError."""
    values = {"ranks": args.ranks, "numbers": min(args.numbers), "rounds": args.rounds}
    problems: list[Problem] = []
    for name, least in LEAST.items():
        if values[name] < least:
            problems.append(Problem.of("bench.too_small", name=name, least=least))
    if problems:
        raise UserError(*problems)

    def measure_all() -> None:
        axis = Axis.of(make_mesh(tp=args.ranks), "tp")
        for numbers in args.numbers:
            record = measure(axis, numbers, args.rounds)
            if axis.rank == 0:
                print_record(record)

    return run_on_ranks(measure_all, args.ranks, threads=1)


def measure(axis: Axis, numbers: int, rounds: int) -> dict[str, Any]:
    """Return the record of sums of as many numbers. Collective over the axis."""
    record: dict[str, Any] = {"ranks": axis.size, "numbers": numbers, "rounds": rounds}
    for name, way in WAYS.items():
        record[f"{name}_ms"] = _milliseconds(way, axis, numbers, rounds)
    return record


def _milliseconds(
    way: Callable[[Axis, Tensor], object], axis: Axis, numbers: int, rounds: int
) -> float:
    """Return the mean milliseconds of a sum, in this way, of a tensor of so many numbers, after
    some sums that warm up."""
    tensor = torch.zeros(numbers)
    for _ in range(WARMUP_SUMS):
        way(axis, tensor)
    # Ranks whose warm-up took longer would count it as a sum.
    axis.barrier()
    start = time.perf_counter()
    for _ in range(rounds):
        way(axis, tensor)
    seconds = time.perf_counter() - start
    return round(1000 * seconds / rounds, 4)


def _sum_directly(axis: Axis, tensor: Tensor) -> Tensor:
    # Every rank sends its numbers to all others, and adds what it receives.
    wait = start_gather(tensor, axis.rank, _group(axis))
    of_ranks = wait().view(axis.size, -1)
    return tensor.copy_(of_ranks.sum(0))


def _sum_in_ring(axis: Axis, tensor: Tensor) -> None:
    dist.all_reduce(tensor, group=_group(axis))


def _group(axis: Axis) -> dist.ProcessGroup:
    assert axis.group is not None, "an axis of several ranks has a group"
    return axis.group


WAYS: dict[str, Callable[[Axis, Tensor], object]] = {
    "sum": Axis.sum_,
    "direct": _sum_directly,
    "ring": _sum_in_ring,
}
