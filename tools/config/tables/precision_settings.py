"""The tables [precision] and [fp8] of a run file: every key with its type, default, unit and a
sentence of help."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from megaprec.diagnose.overflow_monitor import OverflowMonitor
from megaprec.errors import UserError
from megaprec.precision.fp8_recipe import LARGEST_MARGIN, SCALE_KINDS, FP8Recipe, Kind
from megaprec.precision.plan import LossScaling, PrecisionPlan
from tools.config.tables.table import Table, default_of

PLAN_ONLY: Mapping[str, str] = {
    "precision.cast_inputs": (
        "a run has no modules whose inputs are cast (only models wrapped in PlannedModel have)"
    ),
    "fp8.dot_product_attention": (
        "the products inside attention are computed in precision.attention, never in FP8"
    ),
    "fp8.multi_head_attention": (
        "the tensors between attention's products are in precision.attention, never in FP8"
    ),
}
"""Fields of a plan that other systems set and no run computes with, each with the reason."""
_USUALLY_E4M3 = " and ".join(
    kind for kind, row in SCALE_KINDS.items() if row.usual_format == "e4m3"
)
Scaling = Literal["none", "constant", "dynamic"]


def _not_fp8(compute: object) -> object:
    if compute == "fp8":
        raise UserError.of("config.compute_fp8")
    return compute


def _default_scaling(values: dict[str, Any]) -> Scaling:
    """Return the loss scaling that follows from the keys of [precision] before it."""
    if values["loss_scale"]:
        return "constant"
    return "dynamic" if values["compute"] == "fp16" else "none"


class Precision(Table):
    """Dtypes and loss scaling: these keys, or one table in the words of another system
    (docs/migrating.md)."""

    # products and weights
    compute: Annotated[Literal["fp32", "bf16", "fp16", "fp64"], BeforeValidator(_not_fp8)] = Field(
        default="fp32",
        description="Dtype of matrix products and activations; fp64 is for parity checks.",
    )
    parameters: Literal["fp32", "bf16", "fp16", "fp64"] = Field(
        default_factory=lambda values: values["compute"],
        description="Dtype of the model's weights; if wider than precision.compute, weights are "
        "cast for each product; default: precision.compute.",
    )
    keep_fp32: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Parameters held, computed and reduced in fp32, as patterns of names: "
        '["*norm.weight", "head.weight"].',
    )

    # gradients and the optimizer's state
    gradients: Literal["fp32", "bf16", "fp16"] = Field(
        default="fp32", description="Dtype in which gradients are accumulated over micro-batches."
    )
    reduce: Literal["fp32", "bf16", "fp16"] = Field(
        default_factory=lambda values: values["gradients"],
        description="Dtype in which gradients are reduced over ranks; default: "
        "precision.gradients.",
    )
    masters: Literal["fp32", "split", "none"] = Field(
        default="fp32",
        description="Master weights of the optimizer. fp32: a copy in FP32; split: the bf16 weight "
        "and the 16 bits that FP32 has more; none: the optimizer updates the model's weights.",
    )
    masters_in_checkpoint: bool = Field(
        default=True,
        description="Save master weights in checkpoints; false: save the model's weights only.",
    )
    moments: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description="Dtype of the optimizer's moments (AdamW's two running averages).",
    )
    rounding: Literal["nearest", "stochastic"] = Field(
        default=default_of(PrecisionPlan, "rounding"),
        description="Rounding of updated weights to precision.parameters: to the nearest, or "
        "stochastic.",
    )

    # activations that are not products
    residual: Literal["fp32", "bf16", "fp16", "fp64"] = Field(
        default_factory=lambda values: values["compute"],
        description="Dtype of the residual stream; default: precision.compute.",
    )
    pipeline: Literal["fp32", "bf16", "fp16", "fp64"] = Field(
        default_factory=lambda values: values["residual"],
        description=(
            "Dtype of the tensors that pipeline stages send each other; default: "
            "precision.residual."
        ),
    )
    attention: Literal["fp32", "bf16", "fp16", "fp64"] = Field(
        default_factory=lambda values: values["compute"],
        description="Dtype of query, key and value in attention's products, after rotary "
        "positions; default: precision.compute.",
    )
    scores: Literal["fp32", "bf16", "fp16"] = Field(
        default="fp32",
        description="Dtype to which attention scores and probabilities are rounded; fp32: not "
        "rounded, as in a fused attention kernel.",
    )
    buffers: Literal["fp32", "bf16", "fp16"] = Field(
        default="fp32", description="Dtype of the model's constant tables, such as rotary angles."
    )
    output: Literal["fp32", "bf16", "fp16"] = Field(
        default="fp32", description="Dtype of the logits that the model returns and the loss reads."
    )

    # how the products of fp32 tensors are computed
    tf32: bool = Field(
        default=default_of(PrecisionPlan, "tf32"),
        description="Allow TF32 in matrix products of fp32 tensors.",
    )

    # loss scaling
    loss_scale: float = Field(
        default=0.0, ge=0, description="Constant loss scale; 0: none, precision.scaling decides."
    )
    scaling: Scaling = Field(
        default_factory=_default_scaling,
        description="Loss scaling; default: constant if precision.loss_scale is given, otherwise "
        "dynamic if precision.compute is fp16, otherwise none.",
    )
    initial_scale: float = Field(
        default=default_of(LossScaling, "initial"),
        gt=0,
        description="Dynamic loss scale of the first step.",
    )
    min_scale: float = Field(
        default=default_of(LossScaling, "minimum"), gt=0, description="Lowest dynamic loss scale."
    )
    max_scale: float = Field(
        default=default_of(LossScaling, "maximum") or 0.0,
        ge=0,
        description="Highest dynamic loss scale; 0: 2^127.",
    )
    hysteresis_refill: Literal["growth", "good_step"] = Field(
        default=default_of(LossScaling, "hysteresis_refill"),
        description="When the overflows that precision.hysteresis tolerates are restored. growth: "
        "when the loss scale grows, as in Megatron-LM; good_step: after each step without "
        "overflow.",
    )
    growth_factor: float = Field(
        default=default_of(LossScaling, "growth_factor"),
        gt=1,
        description=(
            "Factor by which the loss scale grows after precision.growth_interval steps without "
            "overflow."
        ),
    )
    backoff_factor: float = Field(
        default=default_of(LossScaling, "backoff_factor"),
        gt=0,
        lt=1,
        description="Factor by which the loss scale falls after precision.hysteresis overflows.",
    )
    growth_interval: int = Field(
        default=default_of(LossScaling, "growth_interval"),
        gt=0,
        description="Number of consecutive steps without overflow after which the loss scale "
        "grows.",
    )
    hysteresis: int = Field(
        default=default_of(LossScaling, "hysteresis"),
        gt=0,
        description="Number of overflowing steps after which the loss scale falls.",
    )

    # steps whose loss or gradients are not finite
    on_nonfinite: Literal["skip", "raise", "ignore"] = Field(
        default=default_of(PrecisionPlan, "on_nonfinite"),
        description="What happens if the loss or a gradient is inf or NaN. skip: skip the update; "
        "raise: skip it and stop the run; ignore: apply the update.",
    )
    trace_overflows: bool = Field(
        default=True,
        description="Repeat a skipped step to find the micro-batch and the samples that "
        "overflowed; not under parallel.zero = 2 or 3, which have no memory for all gradients.",
    )
    patience: int = Field(
        default=default_of(OverflowMonitor, "patience"),
        gt=0,
        description="Number of consecutive skipped steps, at the lowest loss scale or with a loss "
        "that is inf or NaN, after which the run stops.",
    )


class FP8(Table):
    """FP8 matrix products of linear layers: recipe, which weights, comparison with
    precision.compute."""

    # scales, and the format of the codes
    kind: Literal["none", Kind] = Field(
        default="none",
        description="FP8 recipe, by the scales of its codes. none: no FP8; "
        + "; ".join(f"{kind}: {row.said}" for kind, row in SCALE_KINDS.items())
        + ".",
    )
    format: Literal["auto", "hybrid", "e4m3"] = Field(
        default=default_of(FP8Recipe, "format"),
        description=(
            "FP8 formats. hybrid: E5M2 for gradients, E4M3 for weights and activations; e4m3: "
            f"E4M3 for all; auto: e4m3 for {_USUALLY_E4M3}, hybrid for other kinds."
        ),
    )
    margin: int = Field(
        default=default_of(FP8Recipe, "margin"),
        ge=-LARGEST_MARGIN,
        le=LARGEST_MARGIN,
        description="Headroom of delayed scales: they are 2^margin lower than the amax requires.",
    )

    # delayed scales: from the amaxes of steps before
    history_length: int = Field(
        default=default_of(FP8Recipe, "history_length"),
        gt=0,
        le=65_536,
        description="Length of the amax history of delayed scales, in steps, or in micro-batches "
        'if fp8.history = "te".',
    )
    amax_algo: Literal["max", "most_recent"] = Field(
        default=default_of(FP8Recipe, "amax_algo"),
        description=(
            "Amax of the history that sets a delayed scale: the largest (max) or the latest "
            "(most_recent)."
        ),
    )
    history: Literal["step", "te"] = Field(
        default=default_of(FP8Recipe, "history"),
        description="When delayed scales are updated. step: after each step; te: after each "
        "micro-batch, as in Transformer Engine.",
    )
    reduce_amax: bool = Field(
        default=default_of(FP8Recipe, "reduce_amax"),
        description="Share the amaxes of delayed scales among replicas, by their maximum; false: "
        "each replica has its own scales.",
    )
    power_2_scales: bool = Field(
        default=default_of(FP8Recipe, "power_2_scales"),
        description="Round scales down to powers of two.",
    )

    # which tensors and products are in FP8
    parameters: bool = Field(
        default=default_of(FP8Recipe, "parameters"),
        description=(
            "Hold the weights of FP8 products in FP8 only; the master weights are their only "
            "wide copy."
        ),
    )
    weight_gradients: bool = Field(
        default=default_of(FP8Recipe, "weight_gradients"),
        description="Compute the products of weight gradients in FP8 too; false: in "
        "precision.compute.",
    )

    # which layers and weights are left out
    first_layers: int = Field(
        default=default_of(FP8Recipe, "first_layers"),
        ge=0,
        description="Number of layers at the start of the model whose products are in "
        "precision.compute.",
    )
    last_layers: int = Field(
        default=default_of(FP8Recipe, "last_layers"),
        ge=0,
        description="Number of layers at the end of the model whose products are in "
        "precision.compute.",
    )
    wide: tuple[str, ...] = Field(
        default=default_of(FP8Recipe, "wide"),
        strict=False,
        description="Weights whose products are in precision.compute, as patterns of names: "
        '["layers.*.mlp.down.weight"].',
    )
    pad: bool = Field(
        default=default_of(FP8Recipe, "pad"),
        description=(
            "Pad misaligned weights with zeros; false: compute their products in precision.compute."
        ),
    )

    # steps that only record amaxes
    calibrate: int = Field(
        default=default_of(FP8Recipe, "calibrate"),
        ge=0,
        description="Number of steps at the start of the run that record amaxes for delayed scales "
        "and compute in precision.compute.",
    )
    calibrating: bool = Field(
        default=default_of(FP8Recipe, "calibrating"),
        description="Record amaxes throughout the run and compute in precision.compute.",
    )
    backend: Literal["torch", "transformer_engine"] = Field(
        default=default_of(FP8Recipe, "backend"),
        description="Library that casts and multiplies. torch: PyTorch's kernels; "
        "transformer_engine: for the kinds delayed and current, on a GPU, if installed.",
    )

    # comparison with the same pass without FP8
    shadow_every: int = Field(
        default=0,
        ge=0,
        description="Number of steps between comparisons, in which one micro-batch is also "
        "computed without FP8; 0: never.",
    )
    shadow_loss_gap: float = Field(
        default=0.01,
        gt=0,
        description="Relative difference between the losses with and without FP8 above which a "
        "comparison raises an alarm.",
    )
    shadow_cosine: float = Field(
        default=0.9,
        gt=-1,
        lt=1,
        description="Cosine between a weight's gradients with and without FP8 below which a "
        "comparison raises an alarm.",
    )

    @property
    def keeps_history(self) -> bool:
        """Return True if scales come from the amaxes of earlier passes."""
        return self.kind != "none" and SCALE_KINDS[self.kind].keeps_history

    @property
    def four_bits(self) -> bool:
        """Return True if codes have four bits."""
        return self.kind != "none" and SCALE_KINDS[self.kind].four_bits

    @property
    def power_2(self) -> bool:
        """Return True if scales are powers of two whatever fp8.power_2_scales says."""
        return self.kind != "none" and SCALE_KINDS[self.kind].power_2
