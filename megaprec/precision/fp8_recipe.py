"""The FP8 recipe: how products are made of eight-bit numbers, as one frozen value of the precision plan.

E4M3 has more mantissa and reaches 448, E5M2 has more range and reaches 57344. Neither has enough range for a whole
model, so every tensor is multiplied by a scale of its own before it is rounded. Recipes differ in what shares a scale
and in when the largest magnitude (amax) that decides it is taken:

    delayed    one scale per tensor, from the amaxes of earlier passes
    current    one scale per tensor, from the tensor itself
    rowwise    one scale per row
    blockwise  one scale per block of 128 (128 x 128 for weights)
    mx         one power of two per 32 elements
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from megaprec.errors import UserError

Kind = Literal["delayed", "current", "rowwise", "blockwise", "mx"]
Backend = Literal["torch", "transformer_engine"]


@dataclass(frozen=True)
class FP8Recipe:
    """format: "hybrid" is E4M3 forward and E5M2 for gradients, "e4m3" is E4M3 for all.
    margin: delayed scales are 2**margin lower than what the amax asks for, which leaves room for it to grow.
    history_length: amaxes that a delayed scale looks back on; amax_algo: which of them decides it, or what makes one
    [n] of the histories of n tensors [length, n], the newest last.
    history: when delayed histories advance. "step": after a step, whose micro-batches share their scales. "te": after
    each forward pass of a micro-batch, and gradients' after each backward pass, as in Transformer Engine; and an amax
    that is not finite stays in the window, and its scale as it is while it does.
    scale_algo: makes delayed scales [n] of amaxes [n], the scales before, the largest numbers of the formats [n] and
    the recipe, instead of the formula of `megaprec.fp8.scaling`; only from Python.
    reduce_amax: delayed amaxes are agreed on by all ranks of a pipeline stage; if not, by its tensor-parallel ranks
    alone. reduce_over: "world" comes to the same as "stage", for no two stages share a tensor.
    power_2_scales: scales are rounded down to powers of two.
    parameters: weights are kept in FP8 alone; the optimizer's masters are their only wide copy.
    weight_gradients: their products are in FP8 too.
    dot_product_attention, multi_head_attention: attention's products, or all between its linear layers, are in FP8.
    first_layers, last_layers: how many stay in the plan's compute dtype.
    wide: so do the products with weights whose logical name matches one of these patterns (`fnmatch`).
    pad: weights whose sizes do not suit FP8 are multiplied in it all the same, filled up with zeros.
    calibrating: amaxes are recorded, but products are made in the plan's compute dtype.
    calibrate: so it is in so many first steps.
    backend: who casts and multiplies where one scale serves a tensor: torch, or Transformer Engine, which has to be
    installed (`megaprec.fp8.transformer_engine`). Scales and histories are made here in either case.
    """

    kind: Kind = "delayed"
    format: Literal["hybrid", "e4m3"] = "hybrid"
    margin: int = 0
    history_length: int = 1024
    amax_algo: Literal["max", "most_recent"] | Callable[[Tensor], Tensor] = "max"
    scale_algo: "Callable[[Tensor, Tensor, Tensor, FP8Recipe], Tensor] | None" = None
    history: Literal["step", "te"] = "step"
    reduce_amax: bool = True
    reduce_over: Literal["world", "stage"] = "world"
    power_2_scales: bool = False
    parameters: bool = False
    weight_gradients: bool = True
    dot_product_attention: bool = False
    multi_head_attention: bool = False
    first_layers: int = 0
    last_layers: int = 0
    wide: tuple[str, ...] = ()
    pad: bool = False
    calibrating: bool = False
    calibrate: int = 0
    backend: Backend = "torch"

    def __post_init__(self) -> None:
        if broken := [rule for rule, holds in self._rules().items() if not holds]:
            raise UserError(*(f"fp8.{rule}" for rule in broken))

    def _rules(self) -> dict[str, bool]:
        """What any recipe must keep."""
        delayed = self.kind == "delayed"
        return {
            f"history_length = {self.history_length}: at least 1, for a scale needs an amax": self.history_length >= 1,
            f"margin = {self.margin}: only delayed scales leave room for an amax to grow, {self.kind} ones come of the "
            "numbers that they scale; use 0": delayed or not self.margin,
            f"calibrate = {self.calibrate}: only delayed scales come of earlier amaxes, not {self.kind} ones": (
                delayed or not self.calibrate
            ),
            f'history = "{self.history}": only delayed scales have one, not {self.kind} ones; use "step"': (
                delayed or self.history == "step"
            ),
            f'history = "{self.history}": weights are cast for each micro-batch and amaxes are those of products in '
            "FP8: leave parameters, calibrate and calibrating out": (
                self.history == "step" or not (self.parameters or self.calibrate or self.calibrating)
            ),
            f'history = "{self.history}": a function as amax_algo has another way there: use "max" or "most_recent"': (
                self.history == "step" or not callable(self.amax_algo)
            ),
            "parameters = true: steps that only record need wide weights: leave calibrate and calibrating out": (
                not self.parameters or not (self.calibrate or self.calibrating)
            ),
            f"first_layers = {self.first_layers}, last_layers = {self.last_layers}: at least 0": (
                min(self.first_layers, self.last_layers) >= 0
            ),
            f'backend = "{self.backend}": only of tensors with one scale, kind "delayed" or "current", not '
            f'"{self.kind}"; use backend "torch"': self.backend == "torch" or self.kind in ("delayed", "current"),
        }
