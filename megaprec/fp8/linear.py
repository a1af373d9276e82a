"""The three matrix products of a linear layer in FP8, with the interface of those in
`megaprec.precision.gemm`.

    product                      factors                           sums over
    y          = x @ W.T         input E4M3, weight E4M3           k, inputs
    grad of x  = grad @ W        gradient E5M2 *, weight E4M3      n, outputs
    grad of W  = grad.T @ x      gradient E5M2 *, input E4M3       m, tokens          * or E4M3

Codes are always summed over their last dim, so every factor has two sets of codes, one of the
matrix and one of its transpose. The two sets are equal where a tensor has one scale. The codes of
the transposed x are kept for the backward pass: one byte per element.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.errors import UserError
from megaprec.fp8.eligibility import Eligibility
from megaprec.fp8.formats import Role
from megaprec.fp8.matmul import add_product_, multiply
from megaprec.fp8.nvfp4 import Rounding, nvfp4_casts
from megaprec.fp8.params import FP8Param
from megaprec.fp8.quantize import (
    Codes,
    amax_of,
    block_of,
    quantize_both,
)
from megaprec.fp8.state import OFF, Casts, FP8State, Scope
from megaprec.leaf_calls import CallLeaf, uncompiled
from megaprec.precision.fp8_recipe import FP8Recipe
from megaprec.precision.gemm import Gemm
from megaprec.precision.gemm_provider import Factor


@dataclass(frozen=True)
class FP8Gemm:
    """The products with one weight: in FP8 if the autocast of their forward pass says so, else
    those of `wide`.

    cut: the dim of the weight that is sharded over `tp`; None: each rank has all of it, and maybe
        tokens of its own.
    fp8_param: the codes of a weight that is stored in FP8 only.
    rounding: the stochastic rounding of the gradients of the weight's outputs, in NVFP4 only.
    leaves: calls the passes of casts over a tensor, in their compiled forms if there are any.
    scales, advances: of the forward pass, if scales change within a step. The output and the
    input's gradient have high-precision dtypes.
    """

    state: FP8State
    eligibility: Eligibility
    cut: int | None
    wide: Gemm
    tp: Axis
    fp8_param: FP8Param | None = None
    rounding: Rounding | None = None
    leaves: CallLeaf = uncompiled
    scope: Scope = OFF
    scales: Mapping[Role, Tensor] = field(default_factory=dict)
    advances: int = 0

    def for_pass(self) -> "FP8Gemm":
        """Bind the products to the current autocast and scales, so that a later backward pass uses
        them too."""
        if not self.state.by_microbatch:
            rounding = self.rounding
            if rounding is not None:
                rounding = replace(rounding, microbatch=self.state.microbatch)
            return replace(self, scope=self.state.scope, rounding=rounding)
        # Scales change before the backward pass: it must see copies of those of this pass.
        roles: tuple[Role, ...] = ("input", "weight")
        scales: dict[Role, Tensor] = {}
        for role in roles:
            scales[role] = self.state.scale(self.eligibility.name, role).clone()
        return replace(
            self,
            scope=self.state.scope,
            scales=scales,
            advances=self.state.advances,
        )

    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Factor]:
        """Compute x [m, k], weight [n, k] -> y [m, n], and the form of x that `keep` returns."""
        if not self.scope.computes:
            # calibration, or an autocast that is off: amaxes are recorded at most
            self._record(x, "input")
            if not self._is_in_codes(weight):  # else its masters' amaxes are recorded
                self._record(weight, "weight")
            return self.wide.forward(x, self._widen(weight))
        codes, transposed = self._cast_first(x, "input")
        weight_codes, _ = self._weight_casts(weight, first=True)
        y = multiply(
            codes,
            weight_codes,
            self.wide.out,
            fast=True,
            backend=self._recipe.backend,
        )
        return y, self._saved(x, transposed)

    def keep(self, x: Tensor) -> Factor:
        """Return x.T in codes, or x itself if the gradient of the weight is not computed in FP8."""
        if not self.scope.computes or not self._recipe.weight_gradients:
            return (x,)
        _, transposed = self._cast(x, "input")
        return self._saved(x, transposed)

    def gradient_factors(self, grad: Tensor) -> tuple[Factor, Factor]:
        """Return grad [m, n] in the form for the input's gradient and in the form for the weight's
        gradient."""
        if not self.scope.computes:
            self._record(grad, "gradient")
            return self.wide.gradient_factors(grad)
        codes, transposed = self._cast_first(grad, "gradient")
        return _tensors(codes), self._saved(grad, transposed)

    def input_gradient(self, grad: Factor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute the gradient of x [m, k], of `dtype`, with weight [n, k]."""
        if not self.scope.computes:
            return self.wide.input_gradient(grad, self._widen(weight), dtype)
        gradient = self._restore(grad, "gradient")
        _, weight_transposed = self._weight_casts(weight)
        return multiply(gradient, weight_transposed, dtype, backend=self._recipe.backend)

    def weight_gradient(self, grad: Factor, x: Factor) -> Tensor:
        """Compute the gradient of the weight [n, k]."""
        if not self.scope.computes or not self._recipe.weight_gradients:
            return self.wide.weight_gradient(grad, x)
        gradient = self._restore(grad, "gradient")
        saved_input = self._restore(x, "input")
        return multiply(gradient, saved_input, self.wide.dtype, backend=self._recipe.backend)

    def add_weight_gradient_(
        self,
        total: Tensor,
        grad: Factor,
        x: Factor,
        first: bool,
    ) -> None:
        """Add the weight's gradient to total [n, k], unrounded if `total` is float32. first:
        overwrite it instead."""
        if not self.scope.computes or not self._recipe.weight_gradients:
            self.wide.add_weight_gradient_(total, grad, x, first)
        else:
            gradient = self._restore(grad, "gradient")
            saved_input = self._restore(x, "input")
            add_product_(
                total,
                gradient,
                saved_input,
                self._recipe.backend,
                first,
            )

    @property
    def _recipe(self) -> FP8Recipe:
        assert self.state.recipe is not None
        return self.state.recipe

    def _weight_casts(self, weight: Tensor, first: bool = False) -> Casts:
        """Return the weight and its transpose in codes, computed once a pass. first: this may be
        the first use in the pass, in which the amax is recorded."""
        make = partial(self._cast_weight, weight.detach(), first)
        # a process may have the slices of several (virtual) tp ranks
        name = f"{self.eligibility.name} of rank {self.tp.rank}"
        return self.state.cast_of(name, weight, self.advances, make)

    def _cast_weight(self, weight: Tensor, first: bool) -> Casts:
        """Return the weight and its transpose in codes: those that are stored, or computed ones.
        first: the amax is recorded too."""
        if self.fp8_param is not None and self._is_in_codes(weight):
            codes = self.fp8_param.codes(weight)
            return codes, codes.t()
        if first:
            return self._cast_first(weight, "weight")
        return self._cast(weight, "weight")

    def _widen(self, weight: Tensor) -> Tensor:
        """Return the weight in high precision, for a product that is not in FP8."""
        if self.fp8_param is not None and self._is_in_codes(weight):
            return self.fp8_param.codes(weight.detach()).wide()
        return weight

    def _is_in_codes(self, weight: Tensor) -> bool:
        """Return True if the weight is stored in FP8 and a buffer holds its codes already."""
        return self.fp8_param is not None and weight.dtype == self.fp8_param.dtype

    def _cast_first(self, x: Tensor, role: Role) -> Casts:
        """Return `_cast` of a tensor that is used for the first time in a pass: its amax is
        recorded."""
        note_amax = None
        # who does not record should not have to compute an amax
        if self._recipe.scales.keeps_history and self.scope.records:
            note_amax = partial(self.state.record, self.eligibility.name, role)
        return self._cast(x, role, note_amax)

    def _cast(
        self,
        x: Tensor,
        role: Role,
        note_amax: Callable[[Tensor], None] | None = None,
    ) -> Casts:
        """Return x and its transpose in codes.

        With delayed scaling the scale is that of the pass. With other kinds the scales come from x,
        whose amax is reduced over tp if each tp rank has a part of it.
        note_amax: called with the amax of x.
        """
        scale = None
        reduce_max = None
        if not self._recipe.scales.keeps_history:
            if self.tp.size > 1 and self._differs_over_tp(role):
                reduce_max = self._reduce_max
        elif role in self.scales:
            scale = self.scales[role]
        else:
            scale = self.state.scale(self.eligibility.name, role)
        if self._recipe.scales.four_bits:
            rounding = self._rounding_of_pass() if role == "gradient" else None
            codes, transposed = nvfp4_casts(x, role, reduce_max, rounding)
        else:
            codes, transposed = quantize_both(
                x,
                self._recipe,
                role,
                scale=scale,
                reduce_max=reduce_max,
                leaves=self._leaves_for(x),
                note_amax=note_amax,
            )
        # counts nothing unless somebody watches
        self.state.note_lost(self.eligibility.name, role, x, codes)
        return codes, transposed

    def _rounding_of_pass(self) -> Rounding:
        """Return the rounding of this pass's gradients. Raises UserError if no layer has said which
        micro-batch the pass belongs to."""
        if self.rounding is None or self.rounding.microbatch is None:
            raise UserError.of("fp8.nvfp4_microbatch", name=self.eligibility.name)
        return self.rounding

    def _differs_over_tp(self, role: Role) -> bool:
        """Return True if each tp rank has a part of the tensor only: a slice, or some tokens."""
        if role == "weight":
            return self.cut is not None
        # The weight [n, k] is cut along the dim that it shares with the tensor. If it is not cut,
        # each rank may have tokens of its own.
        shared_dim = 1 if role == "input" else 0
        return self.cut in (shared_dim, None)

    def _record(self, x: Tensor, role: Role) -> None:
        """Record the amax of a tensor that is not cast."""
        if self.scope.records:
            self.state.record(self.eligibility.name, role, self._leaves_for(x)(amax_of, x))

    def _leaves_for(self, x: Tensor) -> CallLeaf:
        """Return `leaves` for a tensor of a GPU. A CPU emulates products, and torch's compiler has
        not all formats there."""
        return uncompiled if x.device.type == "cpu" else self.leaves

    def _reduce_max(self, amax: Tensor) -> None:
        self.tp.max_(amax)

    def _saved(self, x: Tensor, transposed: Codes) -> Factor:
        """Return the form that is saved for the weight's gradient."""
        return _tensors(transposed) if self._recipe.weight_gradients else (x,)

    def _restore(self, factor: Factor, role: Role) -> Codes:
        """Return the codes of which `_tensors` made a factor."""
        # the block is not saved: the shape tells it
        values, inverse, *tensor = factor
        return Codes(values, inverse, block_of(self._recipe, role, values.shape), *tensor)


def _tensors(codes: Codes) -> Factor:
    if codes.tensor is None:
        return codes.values, codes.inverse
    return codes.values, codes.inverse, codes.tensor
