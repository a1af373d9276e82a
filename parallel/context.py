"""The context of the parallel layers: precision plan, tensor-parallel axis and options, as one
frozen value."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from megaprec.comm.axis import Axis
from megaprec.comm.experts import ExpertAxes
from megaprec.comm.layout import Part, layout_of
from megaprec.errors import Problem, UserError
from megaprec.fp8.linear import FP8Gemm
from megaprec.fp8.nvfp4 import Rounding
from megaprec.fp8.params import FP8Param, mark_fp8
from megaprec.fp8.state import FP8State
from megaprec.kinds import is_number
from megaprec.precision.gemm import Gemm
from megaprec.precision.gemm_provider import GemmProvider
from megaprec.precision.plan import PrecisionPlan
from parallel.activation_checkpoint import KEEP, MODULES, Recompute
from parallel.leaves import PLAIN, Leaves
from parallel.weight_grad_queue import WeightGradQueue


@dataclass(frozen=True)
class Context:
    """The settings that every parallel layer of a model shares.

    plan: dtypes of products, weights and sensitive operators.
    tp: the tensor-parallel axis.
    cp: the context-parallel axis, over which each sequence is cut (`sequence_cut.py`).
    ring: keys and values go round the ranks of cp; False: each rank gathers those of a whole
        sequence.
    sequence: activations between blocks are sharded over tp along the sequence (sequence
        parallelism).
    async_tensor: products are fused with the transfers of sequence parallelism, where they can be.
        `fused_products.require_fused_products` says whether the ranks' devices can.
    seed: seed of initial weights and dropout.
    deferred: the queue for weight gradients that can wait; the executor of a schedule with split
        backwards must be given the same queue.
    recompute: the activations that the backward pass recomputes.
    fp8: the state that the FP8 products of all layers share; required if the plan has FP8 products.
    blank: initial weights are not drawn, because others will be loaded; until then every weight is
        NaN.
    experts: the ranks that share the experts of a layer; None if experts are cut as any other
        feed-forward is.
    of_experts: the parameters of these layers are those of experts that lie on their own ranks.
    together: `Layout.together` of the parameters of these layers.
    refused_kernels: why layers compute without a package of kernels that is there, by its name; the
        same on all ranks.
    leaves: calls norms, rotations, gates, dropout, losses and FP8 casts, in their compiled forms if
        there are any. These are leaves of the model's code, not of autograd's graph.

    Raises ValueError if `fp8` has another recipe than the plan, and UserError if whole layers are
    recomputed although FP8 scales advance with every micro-batch, for async_tensor without
    sequence, and for values of another kind.
    """

    plan: PrecisionPlan
    tp: Axis = Axis("tp")
    sequence: bool = False
    seed: int = 0
    deferred: WeightGradQueue = field(default_factory=WeightGradQueue, compare=False)
    recompute: Recompute = KEEP
    fp8: FP8State = field(default_factory=FP8State, compare=False)
    blank: bool = False
    experts: ExpertAxes | None = None
    of_experts: bool = False
    together: str = ""
    cp: Axis = Axis("cp")
    ring: bool = True
    refused_kernels: Mapping[str, str] = field(default_factory=dict, compare=False)
    leaves: Leaves = field(default=PLAIN, compare=False)
    async_tensor: bool = False

    def __post_init__(self) -> None:
        """Raise the errors that the docstring of the class lists."""
        self._require_types()
        # the recipe stands in both, and the caller may have changed one
        if self.plan.fp8 != self.fp8.recipe:
            raise ValueError(
                "the plan and fp8 have different recipes: give the context an FP8State of the same "
                "recipe"
            )
        if self.async_tensor and not self.sequence:
            raise UserError.of("parallel.async_tensor_sequence")
        recipe = self.plan.fp8
        local_scales = recipe and recipe.scales.keeps_history and not recipe.reduce_amax
        # replicas hold different experts, so their amaxes are of different tensors
        if self.experts is not None and local_scales:
            raise UserError.of("parallel.fp8_reduce_amax_experts")
        # a recomputed layer would quantize with scales that have advanced since its first pass
        if self.fp8.by_microbatch and (self.recompute.fraction or self.recompute.layers):
            raise UserError.of("parallel.fp8_history_recompute")

    def _require_types(self) -> None:
        """Raise UserError, with all messages, for settings of another type.

        A text "no" would otherwise count as true.
        """
        problems: list[Problem] = []
        for name in ("sequence", "blank", "of_experts", "ring", "async_tensor"):
            value = getattr(self, name)
            if type(value) is not bool:
                problems.append(Problem.of("parallel.not_a_truth_value", name=name, value=value))
        for name, axis in (("tp", self.tp), ("cp", self.cp)):
            if not hasattr(axis, "size"):
                problems.append(Problem.of("parallel.not_an_axis", name=name, axis=axis))
        if not isinstance(self.plan, PrecisionPlan):
            problems.append(Problem.of("precision.not_a_plan", plan=self.plan))
        if not _is_recompute(self.recompute):
            modules = ", ".join(MODULES)
            problems.append(
                Problem.of("parallel.recompute", recompute=self.recompute, modules=modules)
            )
        if not is_number(self.seed, whole=True):
            problems.append(Problem.of("parallel.seed", seed=self.seed))
        if problems:
            raise UserError(*problems)

    def products(self, weight: nn.Parameter) -> GemmProvider:
        """Return what computes the matrix products with a layer's weight [n, k]: in FP8, or in the
        plan's dtype of products if the layer has no product in FP8.

        The results are activations. A layer calls this once, while it is built. If the plan has
        FP8, the weight is registered with `fp8` unless it stays in FP32, and marked if it is stored
        in FP8. Raises UserError if the layer's products cannot be in NVFP4, which the plan asks
        for.
        """
        parts = layout_of(weight).parts
        name = parts[0].name
        wide = Gemm(self.plan.compute_dtype(name), self.plan.compute, self.plan.tf32)
        if self.fp8.recipe is None or self.plan.keeps_fp32(name):
            return wide
        eligibility = self.fp8.register(parts)
        # not every layer can compute in FP8, for instance because of its sizes
        if eligibility.fallback_reason:
            return wide
        codes = None  # of the weight, if it is stored in FP8
        if self.fp8.recipe.parameters:
            codes = FP8Param(self.fp8, eligibility)
            mark_fp8(weight, codes)
        rounding = None
        if self.fp8.recipe.scales.four_bits:
            self._require_nvfp4(parts)
            rounding = Rounding(self.seed, name, _global_row_ranges(parts))
        return FP8Gemm(
            state=self.fp8,
            eligibility=eligibility,
            cut=parts[0].dim,
            wide=wide,
            tp=self.tp,
            fp8_param=codes,
            rounding=rounding,
            leaves=self.leaves,
        )

    def _require_nvfp4(self, parts: Sequence[Part]) -> None:
        """Raise UserError if ranks would quantize these weights to other numbers than one process
        does."""
        name = parts[0].name
        if self.cp.size > 1:
            raise UserError.of("parallel.nvfp4_context", size=self.cp.size)
        if self.of_experts or self.together:
            raise UserError.of("parallel.nvfp4_experts", name=name)
        # copies of key/value heads have partial gradients, rounded before they are summed
        copies = max(part.copies for part in parts)
        if copies > 1:
            raise UserError.of("parallel.nvfp4_copies", name=name, copies=copies)

    def products_of_head(self, name: str, grad_scale: float = 1.0) -> Gemm:
        """Return what computes the matrix products of an output head.

        name: the logical name of its weight. grad_scale: the factor of the gradient of its weight.
        Logits stay in the dtype of the products; a head is never in FP8.
        """
        dtype = self.plan.compute_dtype(name)
        return Gemm(dtype, dtype, self.plan.tf32, grad_scale)

    def fuses(self, products: GemmProvider) -> bool:
        """Return True if these products are fused with the transfers of sequence parallelism: it is
        requested, and their factors are in the dtype that travels."""
        if not (self.async_tensor and self.cut_sequence and isinstance(products, Gemm)):
            return False
        return products.dtype == products.out == self.plan.compute

    def in_fp32(self) -> "Context":
        """Return this context for layers that hold and compute everything in the sensitive
        dtype."""
        wide = self.plan.sensitive
        dtypes = dict.fromkeys(("compute", "residual", "attention", "scores"), wide)
        plan = replace(self.plan, **dtypes, keep_fp32=("*",), fp8=None)
        # a state without a recipe, as the plan has none
        return replace(self, plan=plan, fp8=FP8State())

    def for_experts(self, name: str) -> "Context":
        """Return this context for the layers of the experts called `name`: over the tp axis of
        experts, if they have one."""
        if self.experts is None:
            return replace(self, together=name)
        return replace(self, tp=self.experts.tp, of_experts=True, together=name)

    def for_experts_elsewhere(self, name: str) -> "Context":
        """Return the context for layers of an expert of another rank: no weights are drawn."""
        return replace(self.for_experts(name), blank=True)

    @property
    def cut_sequence(self) -> bool:
        """Return True if activations between blocks are sharded along the sequence: it is
        requested, and tp > 1."""
        return self.sequence and self.tp.size > 1

    @property
    def sequence_ranks(self) -> int:
        """Return over how many ranks of tp activations between blocks are sharded: 1 without
        sequence parallelism."""
        return self.tp.size if self.sequence else 1


def _global_row_ranges(parts: Sequence[Part]) -> tuple[range, ...]:
    """Return, for each stacked matrix, which rows of the unsharded stack this rank's rows are,
    padding included."""
    ranges: list[range] = []
    rows_before = 0
    for part in parts:
        first = rows_before + (part.start if part.dim == 0 else 0)
        ranges.append(range(first, first + part.padded[0]))
        rows_before += part.shape[0]
    return tuple(ranges)


def _is_recompute(value: object) -> bool:
    """Return True if `value` is a Recompute of known modules, a fraction from 0 to 1 and a number
    of layers."""
    return (
        isinstance(value, Recompute)
        and {*value.modules} <= {*MODULES}
        and 0 <= value.fraction <= 1
        and value.layers >= 0
    )
