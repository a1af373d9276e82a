"""The three products of a linear layer in FP8, behind the same protocol as wide ones (`megaprec.gemm`).

    product                      factors                           sums over
    y          = x @ W.T         input E4M3, weight E4M3           k, inputs
    grad of x  = grad @ W        gradient E5M2 *, weight E4M3      n, outputs
    grad of W  = grad.T @ x      gradient E5M2 *, input E4M3       m, tokens          * or E4M3

Codes are always summed over their last dim, so of every factor there are two sets, of the matrix and of its transpose,
which are one and the same where a tensor has one scale. What is kept of x until the backward pass is the second set:
a byte an element.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from megaprec.fp8.align import padded
from megaprec.fp8.formats import Role
from megaprec.fp8.product import add_product_, multiply
from megaprec.fp8.quantize import Codes, amax_of, block_of, quantize_both
from megaprec.fp8.reach import Reach
from megaprec.fp8.recipe import FP8Recipe
from megaprec.fp8.state import Casts, FP8State, Scope
from megaprec.gemm import Factor, Gemm, Products


@dataclass(frozen=True)
class FP8Products:
    """Products with one weight: in FP8 inside an autocast, wide outside, where amaxes are recorded as the pass says.

    cut: the dim of the weight that is cut over tp.
    """

    state: FP8State
    reach: Reach
    cut: int | None
    wide: Gemm

    def now(self) -> Products:
        """Those that the present autocast asks for."""
        scope = self.state.scope
        return FP8Gemm(self, scope) if scope.computes or scope.records else self.wide


@dataclass(frozen=True)
class FP8Gemm:
    """`Products` of one forward pass and its backward pass. Output and gradient of the input are in the wide dtypes."""

    of: FP8Products
    scope: Scope

    def now(self) -> "FP8Gemm":
        """These."""
        return self

    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Factor]:
        """x [m, k], weight [n, k] -> y [m, n], and what `keep` keeps of x."""
        if not self.scope.computes:
            self._record(x, "input")
            self.of.state.cast_of(self._name, weight, lambda: self._record(weight, "weight"))
            return self.of.wide.forward(x, weight)
        codes, turned = self._codes(x, "input")
        y = multiply(codes, self._weight(weight)[0], self.of.wide.out, fast=True)
        return y[:, : weight.shape[0]], self._kept(x, turned)

    def keep(self, x: Tensor) -> Factor:
        """x.T in codes; x itself where the gradient of the weight is not made in FP8."""
        if not self.scope.computes or not self._recipe.weight_gradients:
            return (x,)
        return self._kept(x, self._codes(x, "input")[1])

    def gradient(self, grad: Tensor) -> tuple[Factor, Factor]:
        """grad [m, n], as the input's gradient and as the weight's needs it."""
        if not self.scope.computes:
            self._record(grad, "gradient")
            return self.of.wide.gradient(grad)
        codes, turned = self._codes(grad, "gradient")
        return _tensors(codes), self._kept(grad, turned)

    def input_gradient(self, grad: Factor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """weight [n, k] -> gradient of x [m, k], of `dtype`."""
        if not self.scope.computes:
            return self.of.wide.input_gradient(grad, weight, dtype)
        return multiply(self._restored(grad, "gradient"), self._weight(weight)[1], dtype)[:, : weight.shape[1]]

    def weight_gradient(self, grad: Factor, x: Factor) -> Tensor:
        """-> [n, k]."""
        if not self.scope.computes or not self._recipe.weight_gradients:
            return self.of.wide.weight_gradient(grad, x)
        n, k = self.of.reach.shape
        return multiply(self._restored(grad, "gradient"), self._restored(x, "input"), self.of.wide.dtype)[:n, :k]

    def add_weight_gradient_(self, total: Tensor, grad: Factor, x: Factor) -> None:
        """total [n, k] += gradient of the weight, unrounded if `total` is float32."""
        if not self.scope.computes or not self._recipe.weight_gradients:
            self.of.wide.add_weight_gradient_(total, grad, x)
            return
        factors = self._restored(grad, "gradient"), self._restored(x, "input")
        if self.of.reach.padded:
            total.add_(multiply(*factors, total.dtype)[: total.shape[0], : total.shape[1]])
        else:
            add_product_(total, *factors)

    @property
    def _name(self) -> str:
        return self.of.reach.name

    @property
    def _recipe(self) -> FP8Recipe:
        assert self.of.state.recipe is not None
        return self.of.state.recipe

    def _weight(self, weight: Tensor) -> Casts:
        return self.of.state.cast_of(self._name, weight, lambda: self._codes(weight.detach(), "weight"))

    def _codes(self, x: Tensor, role: Role) -> Casts:
        """x and its transpose in codes; the amax is recorded, or agreed on, as the recipe says."""
        state, recipe = self.of.state, self._recipe
        if self.of.reach.padded:
            x = self._padded(x, role)
        if recipe.kind == "delayed":
            self._record(x, role)
            return quantize_both(x, recipe, role, scale=state.scale(self._name, role))
        cut = {"input": self.of.cut == 1, "gradient": self.of.cut == 0, "weight": self.of.cut is not None}[role]
        return quantize_both(x, recipe, role, agree=self._agree if cut else None)

    def _record(self, x: Tensor, role: Role) -> None:
        if self.scope.records:
            self.of.state.record(self._name, role, amax_of(x))

    def _agree(self, amax: Tensor) -> None:
        self.of.state.tp.max_(amax)

    def _padded(self, x: Tensor, role: Role) -> Tensor:
        """x with rows and columns of zeros, but for the tokens, of which there may be any number."""
        n, k = padded(self._recipe.kind, *self.of.reach.shape)
        rows = n if role == "weight" else len(x)
        columns = n if role == "gradient" else k
        return F.pad(x, (0, columns - x.shape[1], 0, rows - x.shape[0]))

    def _kept(self, x: Tensor, turned: Codes) -> Factor:
        return _tensors(turned) if self._recipe.weight_gradients else (x,)

    def _restored(self, factor: Factor, role: Role) -> Codes:
        values, inverse = factor
        return Codes(values, inverse, block_of(self._recipe, role, values.shape))


def _tensors(codes: Codes) -> Factor:
    return codes.values, codes.inverse
