"""The three products of a linear layer in FP8, behind the same protocol as wide ones (`megaprec.precision.gemm`).

    product                      factors                           sums over
    y          = x @ W.T         input E4M3, weight E4M3           k, inputs
    grad of x  = grad @ W        gradient E5M2 *, weight E4M3      n, outputs
    grad of W  = grad.T @ x      gradient E5M2 *, input E4M3       m, tokens          * or E4M3

Codes are always summed over their last dim, so of every factor there are two sets, of the matrix and of its transpose,
which are one and the same where a tensor has one scale. What is kept of x until the backward pass is the second set:
a byte an element.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from megaprec.fp8.eligibility import Eligibility
from megaprec.fp8.formats import Role
from megaprec.fp8.matmul import add_product_, multiply
from megaprec.fp8.params import FP8Param
from megaprec.fp8.quantize import Codes, amax_of, block_of, quantize_both
from megaprec.fp8.state import OFF, Casts, FP8State, Scope
from megaprec.precision.fp8_recipe import FP8Recipe
from megaprec.precision.gemm import Factor, Gemm


@dataclass(frozen=True)
class FP8Gemm:
    """`Products` with one weight: in FP8 where the autocast of their forward pass says so, else as `wide` makes them.

    cut: the dim of the weight that is cut over tp. held: of a weight that is kept in FP8 alone. scales, moment: those
    of the forward pass, where they change within a step. Output and gradient of the input are in the wide dtypes.
    """

    state: FP8State
    reach: Eligibility
    cut: int | None
    wide: Gemm
    held: FP8Param | None = None
    scope: Scope = OFF
    scales: Mapping[Role, Tensor] = field(default_factory=dict)
    moment: int = 0

    def now(self) -> "FP8Gemm":
        """Those of the present autocast; their backward pass may come after it, and after scales have moved on."""
        if not self.state.by_microbatch:
            return replace(self, scope=self.state.scope)
        roles: tuple[Role, ...] = ("input", "weight")
        scales = {role: self.state.scale(self.reach.name, role).clone() for role in roles}
        return replace(self, scope=self.state.scope, scales=scales, moment=self.state.moment)

    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Factor]:
        """x [m, k], weight [n, k] -> y [m, n], and what `keep` keeps of x."""
        if not self.scope.computes:
            self._record(x, "input")
            if not self._kept_in_codes(weight):
                self._record(weight, "weight")
            return self.wide.forward(x, self._widened(weight))
        codes, turned = self._codes(x, "input")
        y = multiply(codes, self._weight(weight, first=True)[0], self.wide.out, fast=True, backend=self._recipe.backend)
        return y, self._kept(x, turned)

    def keep(self, x: Tensor) -> Factor:
        """x.T in codes; x itself where the gradient of the weight is not made in FP8."""
        if not self.scope.computes or not self._recipe.weight_gradients:
            return (x,)
        return self._kept(x, self._casts_of(x, "input")[1])

    def gradient(self, grad: Tensor) -> tuple[Factor, Factor]:
        """grad [m, n], as the input's gradient and as the weight's needs it."""
        if not self.scope.computes:
            self._record(grad, "gradient")
            return self.wide.gradient(grad)
        codes, turned = self._codes(grad, "gradient")
        return _tensors(codes), self._kept(grad, turned)

    def input_gradient(self, grad: Factor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """weight [n, k] -> gradient of x [m, k], of `dtype`."""
        if not self.scope.computes:
            return self.wide.input_gradient(grad, self._widened(weight), dtype)
        return multiply(self._restored(grad, "gradient"), self._weight(weight)[1], dtype, backend=self._recipe.backend)

    def weight_gradient(self, grad: Factor, x: Factor) -> Tensor:
        """-> [n, k]."""
        if not self.scope.computes or not self._recipe.weight_gradients:
            return self.wide.weight_gradient(grad, x)
        gradient, kept = self._restored(grad, "gradient"), self._restored(x, "input")
        return multiply(gradient, kept, self.wide.dtype, backend=self._recipe.backend)

    def add_weight_gradient_(self, total: Tensor, grad: Factor, x: Factor, first: bool) -> None:
        """total [n, k] += gradient of the weight, unrounded if `total` is float32. first: written over it."""
        if not self.scope.computes or not self._recipe.weight_gradients:
            self.wide.add_weight_gradient_(total, grad, x, first)
        else:
            gradient, kept = self._restored(grad, "gradient"), self._restored(x, "input")
            add_product_(total, gradient, kept, self._recipe.backend, first)

    @property
    def _recipe(self) -> FP8Recipe:
        assert self.state.recipe is not None
        return self.state.recipe

    def _weight(self, weight: Tensor, first: bool = False) -> Casts:
        make = partial(self._casts, weight.detach(), first)
        return self.state.cast_of(self.reach.name, weight, self.moment, make)

    def _casts(self, weight: Tensor, first: bool) -> Casts:
        if self.held is None or not self._kept_in_codes(weight):
            return self._codes(weight, "weight") if first else self._casts_of(weight, "weight")
        codes = self.held.codes(weight)
        return codes, codes.t()

    def _widened(self, weight: Tensor) -> Tensor:
        """A weight for a product in a wider dtype."""
        if self.held is None or not self._kept_in_codes(weight):
            return weight
        return self.held.codes(weight.detach()).wide()

    def _kept_in_codes(self, weight: Tensor) -> bool:
        return self.held is not None and weight.dtype == self.held.dtype

    def _codes(self, x: Tensor, role: Role) -> Casts:
        """`_casts_of` where the tensor is seen first in a pass: then its amax is recorded."""
        if self._recipe.kind == "delayed":
            self._record(x, role)
        return self._casts_of(x, role)

    def _casts_of(self, x: Tensor, role: Role) -> Casts:
        """x and its transpose in codes; a current amax is agreed on as the recipe says."""
        recipe, scale, agree = self._recipe, None, None
        if recipe.kind == "delayed":
            scale = self.scales[role] if role in self.scales else self.state.scale(self.reach.name, role)
        elif {"input": self.cut == 1, "gradient": self.cut == 0, "weight": self.cut is not None}[role]:
            agree = self._agree if self.state.tp.size > 1 else None
        casts = quantize_both(x, recipe, role, scale=scale, agree=agree)
        self.state.note_lost(self.reach.name, role, x, casts[0])
        return casts

    def _record(self, x: Tensor, role: Role) -> None:
        if self.scope.records:
            self.state.record(self.reach.name, role, amax_of(x))

    def _agree(self, amax: Tensor) -> None:
        self.state.tp.max_(amax)

    def _kept(self, x: Tensor, turned: Codes) -> Factor:
        return _tensors(turned) if self._recipe.weight_gradients else (x,)

    def _restored(self, factor: Factor, role: Role) -> Codes:
        values, inverse = factor
        return Codes(values, inverse, block_of(self._recipe, role, values.shape))


def _tensors(codes: Codes) -> Factor:
    return codes.values, codes.inverse
