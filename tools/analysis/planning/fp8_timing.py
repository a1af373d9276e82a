"""The times of a linear layer's three products on a device, in 16 or 32 bits and in FP8 with its
casts."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megaprec.fp8.formats import Role
from megaprec.fp8.matmul import add_product_, multiply
from megaprec.fp8.quantize import Codes, quantize_both
from megaprec.leaf_calls import CallLeaf, uncompiled
from megaprec.precision import gemm
from megaprec.precision.fp8_recipe import FP8Recipe
from megaprec.precision.gemm import product

MIN_TIMED_SECONDS = 0.02  # seconds that a timed run takes at least


@dataclass(frozen=True)
class Shape:
    """The sizes of a product: x [tokens, inputs], weight [outputs, inputs]."""

    tokens: int
    inputs: int
    outputs: int

    @property
    def flops(self) -> int:
        """FLOPs of one of the three products; each has the same."""
        return 2 * self.tokens * self.inputs * self.outputs

    def __str__(self) -> str:
        return f"{self.tokens} x {self.inputs} x {self.outputs}"


@dataclass(frozen=True)
class Times:
    """Times in seconds.

    wide: all three products without FP8: y, the gradient of x, and the gradient of the weight,
    added to an FP32 gradient. products: the three products of FP8 codes. casts: casts of x and of
    y's gradient, for both directions.
    weight: cast of the weight.
    """

    wide: float
    products: float
    casts: float
    weight: float

    def gain(self, microbatches: int) -> float:
        """Return the speedup of FP8 if a weight is cast once for so many micro-batches."""
        return self.wide / (self.products + self.casts + self.weight / microbatches)


def both_with_amax(
    x: Tensor,
    recipe: FP8Recipe,
    role: Role,
    scale: Tensor | None,
    leaves: CallLeaf = uncompiled,
) -> tuple[tuple[Codes, Codes], list[Tensor]]:
    """Do all that FP8 does to a tensor before its products.

    Return its codes by rows and by columns, and under delayed scaling its amax, else an empty list.
    """
    amaxes: list[Tensor] = []
    note_amax = amaxes.append if recipe.scales.keeps_history else None
    casts = quantize_both(x, recipe, role, scale, leaves=leaves, note_amax=note_amax)
    return casts, amaxes


def form_to_compile(
    leaf: Callable[..., Any],
    *arguments: Any,
    otherwise: Callable[..., Any] | None = None,
) -> Any:
    """Return what a leaf returns, called itself within a function that torch.compile compiles as a
    whole. `otherwise`, the form for runs that do not compile, is not used."""
    return leaf(*arguments)


def linear_times(
    shape: Shape,
    recipe: FP8Recipe,
    dtype: torch.dtype,
    device: torch.device,
    compiled: bool = False,
) -> Times:
    """Return the times of one linear layer's products and casts. compiled: fuse the casts by
    torch.compile."""

    def random(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, dtype=dtype, device=device)

    x = random(shape.tokens, shape.inputs)
    weight = random(shape.outputs, shape.inputs)
    grad = random(shape.tokens, shape.outputs)
    weight_grad = torch.zeros(shape.outputs, shape.inputs, device=device)  # FP32
    scale = torch.full((), 2.0, device=device) if recipe.scales.keeps_history else None
    cast: Callable[..., Any] = both_with_amax
    if compiled:
        cast = torch.compile(partial(both_with_amax, leaves=form_to_compile), fullgraph=True)
    # codes of each tensor by rows and by columns, as the two products need them that read it
    (x_rows, x_columns), _ = cast(x, recipe, "input", scale)
    (weight_rows, weight_columns), _ = cast(weight, recipe, "weight", scale)
    (grad_rows, grad_columns), _ = cast(grad, recipe, "gradient", scale)

    def wide_products() -> None:
        product(x, weight.t())
        product(grad, weight)
        gemm.add_product_(weight_grad, grad.t(), x)

    def fp8_products() -> None:
        multiply(x_rows, weight_rows, dtype, True, recipe.backend)
        multiply(grad_rows, weight_columns, dtype, backend=recipe.backend)
        add_product_(weight_grad, grad_columns, x_columns, recipe.backend)

    def cast_activations() -> None:
        cast(x, recipe, "input", scale)
        cast(grad, recipe, "gradient", scale)

    return Times(
        wide=seconds(wide_products, device),
        products=seconds(fp8_products, device),
        casts=seconds(cast_activations, device),
        weight=seconds(lambda: cast(weight, recipe, "weight", scale), device),
    )


def seconds(work: Callable[[], object], device: torch.device, rounds: int = 5) -> float:
    """Return the fastest of several runs of `work`, each repeated until it is long enough to be
    timed."""
    once = _run(work, 2, device) / 2  # warms up, and tells how many repetitions are long enough
    repeats = max(1, int(MIN_TIMED_SECONDS / max(once, 1e-7)))  # a clock may see no time at all
    # the fastest run is least disturbed by other work
    return min(_run(work, repeats, device) for _ in range(rounds)) / repeats


def _run(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the seconds that all repetitions of `work` take together."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
