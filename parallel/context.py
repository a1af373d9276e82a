"""What every parallel layer is told about where it runs, as one frozen value."""

from dataclasses import dataclass, field, replace

from torch import nn

from megaprec.comm.axis import Axis
from megaprec.comm.layout import layout_of
from megaprec.errors import UserError
from megaprec.fp8.linear import FP8Gemm
from megaprec.fp8.params import FP8Param, hold
from megaprec.fp8.state import FP8State
from megaprec.precision.gemm import Gemm, GemmProvider
from megaprec.precision.plan import PrecisionPlan
from parallel.activation_checkpoint import KEEP, Recompute
from parallel.weight_grad_queue import WeightGradQueue


@dataclass(frozen=True)
class Context:
    """plan: dtypes of products, weights and sensitive operators.
    tp: the tensor-parallel axis. sequence: activations between blocks are cut along the sequence over tp.
    seed: of initial weights and dropout. deferred: where layers leave weight gradients that can wait; the executor
    that runs a schedule with split backwards must be given the same. recompute: which activations are made again.
    fp8: what the layers' products in FP8 share; to be given if the plan has any.
    """

    plan: PrecisionPlan
    tp: Axis = Axis("tp")
    sequence: bool = False
    seed: int = 0
    deferred: WeightGradQueue = field(default_factory=WeightGradQueue, compare=False)
    recompute: Recompute = KEEP
    fp8: FP8State = field(default_factory=FP8State, compare=False)

    def __post_init__(self) -> None:
        if self.plan.fp8 != self.fp8.recipe:
            raise ValueError("products of the plan are in FP8: give the context the FP8State of the same recipe")
        if self.fp8.by_microbatch and (self.recompute.fraction or self.recompute.layers):
            raise UserError(
                'fp8.history = "te" moves scales on before a layer is made again: recompute modules and no layers, or '
                'use "step"'
            )

    def products(self, weight: nn.Parameter) -> GemmProvider:
        """Who makes the products with a layer's weight [n, k]. What comes out is activations."""
        parts = layout_of(weight).parts
        name = parts[0].name
        wide = Gemm(self.plan.compute_dtype(name), self.plan.compute, self.plan.tf32)
        if self.fp8.recipe is None or self.plan.keeps_fp32(name):
            return wide
        eligible = self.fp8.register(parts)
        if eligible.fallback_reason:
            return wide
        held = FP8Param(self.fp8, eligible) if self.fp8.recipe.parameters else None
        if held is not None:
            hold(weight, held)
        return FP8Gemm(self.fp8, eligible, parts[0].dim, wide, held)

    def products_of_head(self, name: str, grad_scale: float = 1.0) -> Gemm:
        """The same for what comes out as logits, which stay in the dtype of the products; never FP8."""
        dtype = self.plan.compute_dtype(name)
        return Gemm(dtype, dtype, self.plan.tf32, grad_scale)

    def in_fp32(self) -> "Context":
        """The same for layers that are held and compute in the sensitive dtype throughout."""
        wide = self.plan.sensitive
        dtypes = dict.fromkeys(("compute", "residual", "attention", "scores"), wide)
        plan = replace(self.plan, **dtypes, keep_fp32=("*",), fp8=None)
        return replace(self, plan=plan, fp8=FP8State())

    @property
    def cut_sequence(self) -> bool:
        """Whether activations between blocks are really cut."""
        return self.sequence and self.tp.size > 1
