"""The time of a sum over CPU ranks, by its size: of `Axis.sum_`, and of both ways that it chooses
from.

`direct` sends everything to everyone; `ring` is gloo's own all-reduce. Sums come one after another,
as those of tensor parallelism do, and nothing is computed between them.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.comm.gloo import start_gather
from megaprec.errors import UserError
from parallel.mesh import make_mesh, world
from tools.training.launch import start_ranks


def add_parser(subparsers: Any) -> None:
    """Add `sums` to the measurements."""
    parser = subparsers.add_parser(
        "sums", help="time of sums over CPU ranks, by size", description=__doc__
    )
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="(default: 2)")
    parser.add_argument(
        "--numbers",
        type=int,
        nargs="+",
        default=[4, 4096, 65536, 1048576],
        metavar="N",
        help="FP32 numbers in a sum",
    )
    parser.add_argument(
        "--rounds", type=int, default=200, metavar="N", help="sums of each kind (default: 200)"
    )
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run `python -m tools.bench sums`: start the ranks, or be one of them. Raises UserError."""
    values = {"ranks": args.ranks, "numbers": min(args.numbers), "rounds": args.rounds}
    too_small = [name for name, value in values.items() if value < LEAST[name]]
    if too_small:
        raise UserError(*(f"--{name}: must be at least {LEAST[name]}" for name in too_small))
    if not dist.is_torchelastic_launched():
        return start_ranks([sys.executable, "-m", "tools.bench", *sys.argv[1:]], args.ranks, 1)
    torch.set_num_threads(1)
    with world():
        axis = Axis.of(make_mesh(tp=args.ranks), "tp")
        for numbers in args.numbers:
            record = measure(axis, numbers, args.rounds)
            if axis.rank == 0:
                print(json.dumps(record), flush=True)
    return 0


def measure(axis: Axis, numbers: int, rounds: int) -> dict[str, Any]:
    """Return the record of sums of as many numbers. Collective over the axis."""
    times = {f"{name}_ms": _timed(way, axis, numbers, rounds) for name, way in WAYS.items()}
    return {"ranks": axis.size, "numbers": numbers, "rounds": rounds, **times}


def _timed(way: Callable[[Axis, Tensor], object], axis: Axis, numbers: int, rounds: int) -> float:
    """Return the milliseconds of one sum of as many numbers, after some to warm up."""
    tensor = torch.zeros(numbers)
    for _ in range(10):
        way(axis, tensor)
    axis.barrier()
    start = time.perf_counter()
    for _ in range(rounds):
        way(axis, tensor)
    return round(1000 * (time.perf_counter() - start) / rounds, 4)


def _direct(axis: Axis, tensor: Tensor) -> Tensor:
    gathered = start_gather(tensor, axis.rank, _group(axis))()
    return tensor.copy_(gathered.view(axis.size, -1).sum(0))


def _ring(axis: Axis, tensor: Tensor) -> None:
    dist.all_reduce(tensor, group=_group(axis))


def _group(axis: Axis) -> dist.ProcessGroup:
    assert axis.group is not None, "an axis of several ranks has a group"
    return axis.group


LEAST = {"ranks": 2, "numbers": 1, "rounds": 1}
WAYS: dict[str, Callable[[Axis, Tensor], object]] = {
    "sum": Axis.sum_,
    "direct": _direct,
    "ring": _ring,
}
