"""How long a linear layer's three products take on a device, wide and in FP8 with all that FP8 needs."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megaprec.fp8.formats import Role
from megaprec.fp8.matmul import add_product_, multiply
from megaprec.fp8.quantize import Codes, amax_of, quantize_both
from megaprec.precision import gemm
from megaprec.precision.fp8_recipe import FP8Recipe
from megaprec.precision.gemm import product

ENOUGH = 0.02  # seconds that a timed run takes at least


@dataclass(frozen=True)
class Shape:
    """x [tokens, inputs], weight [outputs, inputs]."""

    tokens: int
    inputs: int
    outputs: int

    @property
    def flops(self) -> int:
        """Of one of the three products; each has the same."""
        return 2 * self.tokens * self.inputs * self.outputs

    def __str__(self) -> str:
        return f"{self.tokens} x {self.inputs} x {self.outputs}"


@dataclass(frozen=True)
class Times:
    """Seconds. wide: y, the input's gradient and the weight's, added to an FP32 main gradient. products: the same of
    FP8 codes. casts: of input and gradient into codes, for both directions; weight: of the weight."""

    wide: float
    products: float
    casts: float
    weight: float

    def gain(self, microbatches: int) -> float:
        """How many times as fast FP8 is where a weight is cast once for so many micro-batches."""
        return self.wide / (self.products + self.casts + self.weight / microbatches)


def both_with_amax(
    x: Tensor, recipe: FP8Recipe, role: Role, scale: Tensor | None
) -> tuple[tuple[Codes, Codes], Tensor | None]:
    """All that FP8 does to a tensor before its products: under delayed scaling its amax is noted as well."""
    return quantize_both(x, recipe, role, scale), amax_of(x) if recipe.kind == "delayed" else None


def linear_times(
    shape: Shape, recipe: FP8Recipe, dtype: torch.dtype, device: torch.device, compiled: bool = False
) -> Times:
    """Times one layer. compiled: the casts are fused by torch.compile."""
    x, weight, grad = (
        torch.randn(rows, columns, dtype=dtype, device=device)
        for rows, columns in (
            (shape.tokens, shape.inputs),
            (shape.outputs, shape.inputs),
            (shape.tokens, shape.outputs),
        )
    )
    total = torch.zeros(shape.outputs, shape.inputs, device=device)
    scale = torch.full((), 2.0, device=device) if recipe.kind == "delayed" else None
    cast = torch.compile(both_with_amax, fullgraph=True) if compiled else both_with_amax
    (x_row, x_column), _ = cast(x, recipe, "input", scale)
    (w_row, w_column), _ = cast(weight, recipe, "weight", scale)
    (g_row, g_column), _ = cast(grad, recipe, "gradient", scale)

    def wide() -> None:
        product(x, weight.t())
        product(grad, weight)
        gemm.add_product_(total, grad.t(), x)

    def products() -> None:
        multiply(x_row, w_row, dtype, True, recipe.backend)
        multiply(g_row, w_column, dtype, backend=recipe.backend)
        add_product_(total, g_column, x_column, recipe.backend)

    return Times(
        seconds(wide, device),
        seconds(products, device),
        seconds(lambda: (cast(x, recipe, "input", scale), cast(grad, recipe, "gradient", scale)), device),
        seconds(lambda: cast(weight, recipe, "weight", scale), device),
    )


def seconds(work: Callable[[], object], device: torch.device, rounds: int = 5) -> float:
    """The fastest of some runs of `work`, each repeated until it takes long enough to be timed."""
    once = _run(work, 2, device) / 2
    repeats = max(1, int(ENOUGH / max(once, 1e-7)))
    return min(_run(work, repeats, device) for _ in range(rounds)) / repeats


def _run(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
