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
from dataclasses import astuple, dataclass, replace
from math import log
from pathlib import Path
from typing import Any

import torch

from megaprec.errors import UserError
from megaprec.fp8.matmul import EMULATED, describe_kernels
from megaprec.precision.fp8_recipe import FP8Recipe
from models.config import ModelConfig
from tools.analysis.planning.fp8_timing import Shape, linear_times
from tools.analysis.planning.report import aligned
from tools.commands.options import add_overrides
from tools.config.resolved_run import resolve_run
from tools.config.run_file import RunConfig
from tools.console.json_output import add_json, print_result
from tools.training.fp8_summary import weight_eligibility

# Speed of a linear layer in FP8 over bf16 on an H100, tensor-wise scales, casts fused by
# torch.compile.
SOURCE = "torchao's documentation, tensor-wise scales"
PUBLISHED = ((Shape(1024, 2048, 1024), 0.80), (Shape(4096, 8192, 16384), 1.39))
EVEN_GAIN = 0.02  # smaller gains and losses count as none


@dataclass(frozen=True)
class Product:
    """Equal products of all layers.

    count: number of them.
    why_wide: reason why they are not in FP8, or empty.
    gain: speed in FP8 relative to bf16; 1 for products that are not in FP8.
    """

    name: str
    shape: Shape
    count: int
    why_wide: str
    gain: float = 1.0

    @property
    def flops(self) -> int:
        """FLOPs of one forward pass of a micro-batch, on one rank."""
        return self.count * self.shape.flops


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `fp8-advice`."""
    parser.description = __doc__
    parser.add_argument("file", metavar="RUN.toml", type=Path, help="run file")
    add_overrides(parser)
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
    config = resolve_run(args.file, args.overrides)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError.of("command.no_cuda")
    device = args.device or ("cuda" if torch.cuda.is_available() else "")
    recipe = config.plan.fp8 or FP8Recipe()
    if recipe.scales.four_bits:
        raise UserError.of("planning.nvfp4_times", advice="ask about another kind")
    model = config.sized_model
    of_run = products(config, model, recipe)
    judged = [judge(product, config, recipe, device) for product in of_run]
    other_flops = never_fp8_flops(config, model)

    def show() -> None:
        lines = [
            *_basis_lines(config, recipe, device),
            *table(judged, other_flops),
            *_note_lines(judged, config, other_flops),
        ]
        print("\n".join(lines))

    return print_result(args, lambda: _document(judged, other_flops, device), show)


def _document(judged: Sequence[Product], other_flops: float, device: str) -> dict[str, Any]:
    """Return the advice for programs. flops: of a micro-batch's forward pass on a rank. gain: null
    if not in FP8."""
    rows: list[dict[str, Any]] = []
    for product in judged:
        rows.append(
            {
                "weight": product.name,
                "shape": list(astuple(product.shape)),
                "count": product.count,
                "flops": product.flops,
                "gain": None if product.why_wide else product.gain,
                "verdict": verdict(product),
                "why_wide": product.why_wide,
            }
        )
    return {
        "basis": f"timed on {device}" if device else SOURCE,
        "products": rows,
        "never_in_fp8_flops": other_flops,
        "speedup": speedup(judged, other_flops),
    }


def products(config: RunConfig, model: ModelConfig, recipe: FP8Recipe) -> list[Product]:
    """Return the products with each kind of weight, as one tensor-parallel rank computes them for a
    micro-batch.

    The tokens of an expert are counted as if all experts had equally many.
    """
    tokens = config.train.micro_batch * config.train.seq_length
    counts = Counter[tuple[str, tuple[int, int], str]]()
    for weight in weight_eligibility(config, model, recipe):
        # the same weight of all layers and all experts counts as one kind
        name = re.sub(r"^layers\.\d+\.", "layers.*.", weight.name)
        name = re.sub(r"\.experts\.\d+\.", ".experts.*.", name)
        counts[name, weight.shape, weight.fallback_reason] += 1
    kinds = list[Product]()
    for (name, (outputs, inputs), why_wide), count in counts.items():
        shape = Shape(_tokens(name, tokens, model), inputs, outputs)
        kinds.append(Product(name, shape, count, why_wide))
    return kinds


def _tokens(name: str, tokens: int, model: ModelConfig) -> int:
    """Return the tokens of a product: of a micro-batch, or of an expert on average, rounded up."""
    if ".experts." in name:
        return -(-tokens * model.experts_per_token // model.experts)
    return tokens


def never_fp8_flops(config: RunConfig, model: ModelConfig) -> float:
    """Return the FLOPs of a rank's forward products that are never in FP8: those inside attention
    and the output head.
    """
    tokens = config.train.micro_batch * config.train.seq_length
    # queries with keys, and probabilities with values
    seq_length = config.train.seq_length
    attention = model.over_layers(lambda kind: kind.attention_flops(seq_length))
    return tokens * (attention + model.head_flops()) / config.parallel.tensor


def judge(product: Product, config: RunConfig, recipe: FP8Recipe, device: str) -> Product:
    """Return the product with its gain: measured on `device`, or estimated if that is empty."""
    if product.why_wide:
        return product
    if not device:
        return replace(product, gain=estimate(product.shape))
    # with fused casts, as in the published numbers
    compiled = device == "cuda" and recipe.backend == "torch"
    times = linear_times(product.shape, recipe, config.plan.compute, torch.device(device), compiled)
    return replace(product, gain=times.gain(config.num_microbatches))


def estimate(shape: Shape) -> float:
    """Return the gain interpolated between the published numbers by the logarithm of FLOPs, and
    constant beyond them.
    """
    (small, low), (large, high) = PUBLISHED
    fraction = log(shape.flops / small.flops) / log(large.flops / small.flops)
    fraction = min(1.0, max(0.0, fraction))
    return low + (high - low) * fraction


def verdict(product: Product) -> str:
    """Return the verdict on a product: wide, even, gains or loses."""
    if product.why_wide:
        return "wide"
    if abs(product.gain - 1) < EVEN_GAIN:
        return "even"
    return "gains" if product.gain > 1 else "loses"


def table(judged: Sequence[Product], other_flops: float) -> list[str]:
    """Return a line per product, and one for the products that are never in FP8."""
    total = sum(product.flops for product in judged) + other_flops
    rows = [("weight", "products", "", "share", "speed", "")]
    for product in judged:
        share = f"{product.flops / total:.1%}"
        gain = "" if product.why_wide else f"{product.gain:.2f}"
        count = f"x {product.count}"
        rows.append((product.name, str(product.shape), count, share, gain, verdict(product)))
    share = f"{other_flops / total:.1%}"
    rows.append(("attention, output head", "", "", share, "", "never in FP8"))
    return ["", *aligned(rows), ""]


def speedup(judged: Sequence[Product], other_flops: float) -> float:
    """Return the speedup of all products together, if products outside of FP8 take equal time per
    FLOP."""
    before = sum(product.flops for product in judged) + other_flops
    # a product that stays wide has gain 1
    after = sum(product.flops / product.gain for product in judged) + other_flops
    return before / after


def _basis_lines(config: RunConfig, recipe: FP8Recipe, device: str) -> list[str]:
    """Return lines on the recipe and on the source of the speeds."""
    assumed = "" if config.plan.fp8 else " (an assumption: fp8.kind is none)"
    lines = [
        f"recipe     {recipe.kind}, {recipe.format}{assumed}",
        "products   tokens x inputs x outputs of a rank and micro-batch; the share is of all FLOPs "
        "of products",
    ]
    if not device:
        published = ", ".join(f"{shape} {gain:.2f}" for shape, gain in PUBLISHED)
        lines += [
            "speed      FP8 over bf16. No GPU here: estimated between two numbers published for an "
            "H100,",
            f"           {published} ({SOURCE})",
        ]
        return lines
    name = torch.cuda.get_device_name() if device == "cuda" else "this CPU"
    lines.append(
        f"speed      FP8 over {config.precision.compute}, all three products and the casts, as "
        f"timed on {name}"
    )
    kernels = describe_kernels(
        recipe, torch.device(device), config.plan.compute, config.plan.gradients
    )
    for product, kernel in kernels.items():
        if kernel.startswith(EMULATED):
            lines.append(f"           {product}: {kernel}")
    return lines


def _note_lines(judged: Sequence[Product], config: RunConfig, other_flops: float) -> list[str]:
    """Return lines on the total speedup and advice."""
    total = speedup(judged, other_flops)
    lines = [f"together   {total:.2f} times as fast, counting matrix products only"]
    wide = [product for product in judged if product.why_wide]
    lines += [f"wide       {product.name}: {product.why_wide}" for product in wide]
    losing = [f'"{product.name}"' for product in judged if verdict(product) == "loses"]
    if losing:
        lines.append(
            f"advice     keep losing products out of FP8 by fp8.wide = [{', '.join(losing)}], or "
            "make micro-batches larger"
        )
    tokens = config.train.micro_batch * config.train.seq_length
    # FP8 products need multiples of 16 in the dimension that is summed
    if tokens % 16:
        lines.append(
            f"advice     {tokens} tokens are not a multiple of 16: weight gradients are padded "
            "with zeros"
        )
    return lines
