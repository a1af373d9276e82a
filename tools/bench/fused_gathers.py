"""Products fused with their transfers over tensor ranks, by torch's symmetric memory, beside the
same product and transfer one after the other.

These are the places where a layer under sequence parallelism waits for a transfer, unless
`parallel.async_tensor` fuses it, with the sizes of a layer of Llama 3 70B:

    gather, product               before a column-parallel product
    product, sum                  after a row-parallel product
    gather that is kept, product  of a row-parallel product's gradient, which two products need

On a CPU, which tries the program, torch's own unfused forms of these calls stand for them.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megaprec.comm.axis import Axis, device_of
from megaprec.errors import UserError
from parallel.fused_products import gathered_and_product, product_of_gathered, sum_of_products
from parallel.mesh import make_mesh
from tools.bench.measurement import (
    Step,
    add_device,
    add_integers,
    print_record,
    require_gpu,
    run_on_ranks,
    seconds_in_turn,
)

SUBJECT = "products fused with gathers and sums over tensor ranks, on several GPUs of a machine"
SIZES = {
    "tokens": (8192, "of a micro-batch, over all ranks"),
    "hidden": (8192, "features between layers"),
    "ffn": (28672, "features within the feed-forward, over all ranks"),
    "rounds": (20, "in which both ways are taken in turn"),
}


@dataclass(frozen=True)
class Ways:
    """A product and its transfer, in two ways with equal results but for rounding."""

    apart: Callable[[], Tensor]
    fused: Callable[[], Tensor]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this measurement."""
    add_device(parser)
    add_integers(
        parser, {"ranks": (0, "that share a layer; 0: as many as there are GPUs"), **SIZES}
    )


def main(args: argparse.Namespace) -> int:
    """Run `python -m tools.bench fused-gathers`. Raises UserError."""
    require_gpu(args.device)
    ranks = args.ranks or (torch.cuda.device_count() if args.device == "cuda" else 2)
    if ranks < 2:
        raise UserError.of("bench.too_small", name="ranks", least=2)

    def measure() -> None:
        mesh = make_mesh(tp=ranks, device=args.device)
        tp = Axis.of(mesh, "tp")
        device = device_of(mesh)
        for place, ways in ways_of(tp, device, args.tokens, args.hidden, args.ffn).items():
            record = {"place": place, "ranks": ranks, **compare(ways, args.rounds, device)}
            if tp.rank == 0:
                print_record(record)

    return run_on_ranks(measure, ranks, threads=1, device=args.device)


def ways_of(
    tp: Axis,
    device: torch.device,
    tokens: int,
    hidden: int,
    ffn: int,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Ways]:
    """Return for each place in a layer its product and transfer, apart and fused, as functions on
    this rank's random tensors. Their calls are collective over tp."""
    generator = torch.Generator(device).manual_seed(tp.rank)

    def random(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator, dtype=dtype, device=device)

    own_tokens = random(tokens // tp.size, hidden)
    own_features = random(tokens, ffn // tp.size)
    up = random(ffn // tp.size, hidden)
    down = random(hidden, ffn // tp.size)

    def gather_then_product() -> Tensor:
        return tp.gather(own_tokens) @ up.t()

    def fused_gather() -> Tensor:
        return product_of_gathered(own_tokens, up.t(), tp)

    def product_then_sum() -> Tensor:
        return tp.scatter_sum(own_features @ down.t())

    def fused_sum() -> Tensor:
        return sum_of_products(own_features, down.t(), tp)

    def gradient_then_product() -> Tensor:
        return tp.gather(own_tokens) @ down

    def fused_gradient() -> Tensor:
        _, product = gathered_and_product(own_tokens, down, tp)
        return product

    return {
        "gather, product": Ways(gather_then_product, fused_gather),
        "product, sum": Ways(product_then_sum, fused_sum),
        "gather that is kept, product": Ways(gradient_then_product, fused_gradient),
    }


def compare(ways: Ways, rounds: int, device: torch.device) -> dict[str, Any]:
    """Return the milliseconds of both ways, and how far their results are apart, by the largest
    number of them. Collective over the ranks of the ways."""
    apart = ways.apart()
    difference = (ways.fused() - apart).abs().max() / apart.abs().max()
    steps: Mapping[str, Step] = {"apart": ways.apart, "fused": ways.fused}
    times = seconds_in_turn(steps, rounds, device)
    milliseconds = {f"{name}_ms": round(1e3 * seconds, 3) for name, seconds in times.items()}
    return {**milliseconds, "difference": float(difference)}
