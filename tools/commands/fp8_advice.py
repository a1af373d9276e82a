"""`megaprec fp8-advice RUN.toml`: list which matrix products of a run are faster in FP8 and which
are slower.

FP8 halves the time of a large product, but every factor must be read and rounded first, so a small
product is slower. With a GPU both are timed, casts included; without one the speed is estimated
from two published numbers. Weights with sizes that FP8 does not support are named.
"""

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from math import log
from pathlib import Path
from typing import Any

import torch

from megaprec.errors import UserError
from megaprec.fp8.matmul import EMULATED, ways
from megaprec.precision.fp8_recipe import FP8Recipe
from models.config import ModelConfig
from tools.commands.fp8_timing import Shape, linear_times
from tools.config.run_file import RunConfig, load_run
from tools.console.tables import add_json, put
from tools.training.fp8_summary import reaches

# Speed of a linear layer in FP8 over bf16 on an H100, tensor-wise scales, casts fused by
# torch.compile.
SOURCE = "torchao's documentation, tensor-wise scales"
PUBLISHED = ((Shape(1024, 2048, 1024), 0.80), (Shape(4096, 8192, 16384), 1.39))
EVEN = 0.02  # smaller gains and losses count as none


@dataclass(frozen=True)
class Product:
    """Equal products of all layers. count: number of them. wide: reason why they are not in FP8, or
    empty.

    gain: speed in FP8 relative to bf16; 1 for products that are not in FP8.
    """

    name: str
    shape: Shape
    count: int
    wide: str
    gain: float = 1.0

    @property
    def flops(self) -> int:
        """FLOPs of one forward pass of a micro-batch, on one rank."""
        return self.count * self.shape.flops


def add_parser(subparsers: Any) -> None:
    """Add `fp8-advice` to the commands."""
    parser = subparsers.add_parser(
        "fp8-advice",
        help="list the matrix products that gain from FP8",
        description=__doc__,
    )
    parser.add_argument("file", metavar="RUN.toml", type=Path, help="run file")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="table.key=value",
        help="keys that differ from the file",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help=(
            "device to time the products on (default: cuda if there is one; otherwise an estimate)"
        ),
    )
    add_json(parser)
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run `megaprec fp8-advice`."""
    config = load_run(args.file, args.overrides)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device here; remove it for an estimate")
    device = args.device or ("cuda" if torch.cuda.is_available() else "")
    recipe = config.plan.fp8 or FP8Recipe()
    model = config.sized_model
    found = products(config, model, recipe)
    judged = [judge(one, config, recipe, device) for one in found]
    rest = others(config, model)
    return put(
        args,
        lambda: _document(judged, rest, device),
        lambda: print(
            *_basis(config, recipe, device),
            *table(judged, rest),
            *_notes(judged, config, rest),
            sep="\n",
        ),
    )


def _document(judged: Sequence[Product], rest: float, device: str) -> dict[str, Any]:
    """Return the advice for programs. flops: of a micro-batch's forward pass on a rank. gain: null
    if not in FP8."""
    products = [
        {
            "weight": one.name,
            "shape": list(astuple(one.shape)),
            "count": one.count,
            "flops": one.flops,
            "gain": None if one.wide else one.gain,
            "verdict": verdict(one),
            "why_wide": one.wide,
        }
        for one in judged
    ]
    basis = f"timed on {device}" if device else SOURCE
    return {
        "basis": basis,
        "products": products,
        "never_in_fp8_flops": rest,
        "speedup": speedup(judged, rest),
    }


def products(config: RunConfig, model: ModelConfig, recipe: FP8Recipe) -> list[Product]:
    """Return the products with each kind of weight, as one tensor-parallel rank computes them for a
    micro-batch.

    The tokens of an expert are counted as if all experts had equally many.
    """
    tokens = config.train.micro_batch * config.train.seq_length
    counts = Counter[tuple[str, tuple[int, int], str]]()
    for one in reaches(config, model, recipe):
        name = re.sub(
            r"\.experts\.\d+\.", ".experts.*.", re.sub(r"^layers\.\d+\.", "layers.*.", one.name)
        )
        counts[name, one.shape, one.fallback_reason] += 1
    return [
        Product(name, Shape(_tokens(name, tokens, model), inputs, outputs), count, wide)
        for (name, (outputs, inputs), wide), count in counts.items()
    ]


def _tokens(name: str, tokens: int, model: ModelConfig) -> int:
    if ".experts." in name:
        return -(-tokens * model.experts_per_token // model.experts)
    return tokens


def others(config: RunConfig, model: ModelConfig) -> float:
    """Return the FLOPs of a rank's forward products that are never in FP8: those inside attention
    and the output head.
    """
    tokens = config.train.micro_batch * config.train.seq_length
    attention = model.layers * model.attention_flops(config.train.seq_length)
    return tokens * (attention + model.head_flops()) / config.parallel.tensor


def judge(product: Product, config: RunConfig, recipe: FP8Recipe, device: str) -> Product:
    """Return the product with its gain: measured on `device`, or estimated if that is empty."""
    if product.wide:
        return product
    if not device:
        gain = estimate(product.shape)
    else:
        compiled = device == "cuda" and recipe.backend == "torch"
        times = linear_times(
            product.shape, recipe, config.plan.compute, torch.device(device), compiled
        )
        gain = times.gain(config.num_microbatches)
    return Product(product.name, product.shape, product.count, product.wide, gain)


def estimate(shape: Shape) -> float:
    """Return the gain interpolated between the published numbers by the logarithm of FLOPs, and
    constant beyond them.
    """
    (small, low), (large, high) = PUBLISHED
    way = log(shape.flops / small.flops) / log(large.flops / small.flops)
    return low + (high - low) * min(1.0, max(0.0, way))


def verdict(product: Product) -> str:
    """Return the verdict on a product: wide, even, gains or loses."""
    if product.wide:
        return "wide"
    if abs(product.gain - 1) < EVEN:
        return "even"
    return "gains" if product.gain > 1 else "loses"


def table(products: Sequence[Product], rest: float) -> list[str]:
    """Return a line per product, and one for the products that are never in FP8."""
    whole = sum(one.flops for one in products) + rest
    rows = [("weight", "products", "", "share", "speed", "")]
    for one in products:
        share = f"{one.flops / whole:.1%}"
        gain = "" if one.wide else f"{one.gain:.2f}"
        rows.append((one.name, str(one.shape), f"x {one.count}", share, gain, verdict(one)))
    rows.append(("attention, output head", "", "", f"{rest / whole:.1%}", "", "never in FP8"))
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return ["", *(line.rstrip() for line in lines), ""]


def speedup(products: Sequence[Product], rest: float) -> float:
    """Return the speedup of all products together, if products outside of FP8 take equal time per
    FLOP."""
    return (sum(one.flops for one in products) + rest) / (
        sum(one.flops / one.gain for one in products) + rest
    )


def _basis(config: RunConfig, recipe: FP8Recipe, device: str) -> list[str]:
    """Return lines on the recipe and on the source of the speeds."""
    off = "" if config.plan.fp8 else " (an assumption: fp8.kind is none)"
    lines = [
        f"recipe     {recipe.kind}, {recipe.format}{off}",
        (
            "products   tokens x inputs x outputs of a rank and micro-batch; the share is of all "
            "FLOPs of products"
        ),
    ]
    if device:
        name = torch.cuda.get_device_name() if device == "cuda" else "this CPU"
        lines.append(
            f"speed      FP8 over {config.precision.compute}, all three products and the "
            f"casts, as timed on {name}"
        )
        made = ways(recipe, torch.device(device), config.plan.compute, config.plan.gradients)
        lines += [
            f"           {product}: {way}"
            for product, way in made.items()
            if way.startswith(EMULATED)
        ]
        return lines
    anchors = ", ".join(f"{shape} {gain:.2f}" for shape, gain in PUBLISHED)
    lines.append(
        "speed      FP8 over bf16. No GPU here: estimated between two numbers published for "
        "an H100,"
    )
    lines.append(f"           {anchors} ({SOURCE})")
    return lines


def _notes(products: Sequence[Product], config: RunConfig, rest: float) -> list[str]:
    """Return lines on the total speedup and advice."""
    lines = [
        f"together   {speedup(products, rest):.2f} times as fast, counting matrix products only"
    ]
    lines += [f"wide       {one.name}: {one.wide}" for one in products if one.wide]
    if losing := [f'"{one.name}"' for one in products if verdict(one) == "loses"]:
        lines.append(
            f"advice     keep losing products out of FP8 by fp8.wide = [{', '.join(losing)}], or "
            "make micro-batches larger"
        )
    tokens = config.train.micro_batch * config.train.seq_length
    if tokens % 16:
        lines.append(
            f"advice     {tokens} tokens are not a multiple of 16: weight gradients are "
            "padded with zeros"
        )
    return lines
