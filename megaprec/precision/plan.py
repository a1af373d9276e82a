"""The precision plan: every numeric decision of a run, made once, in one frozen value.

Afterwards the plan is only read. Nothing in it means "decide later", and `origin` remembers which
configuration key decided each field, so that "why is my reduction FP32?" has an answer.

`compute` is what products and activations are in. Weights are held in it too, gradients are summed and the
optimizer works in something wider, and a few operators (norms, softmax, loss) are never done in less than FP32.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch

from megaprec.errors import UserError
from megaprec.precision.fp8_recipe import FP8Recipe

OnNonfinite = Literal["skip", "raise", "ignore"]


@dataclass(frozen=True)
class LossScaling:
    """How the loss is scaled before the backward pass, so that small half-precision gradients survive.

    kind: none | constant | dynamic. A constant scale is `initial`.
    The other fields are those of `megaprec.optim.scaler.DynamicGradScaler`, with Megatron's defaults.
    """

    kind: Literal["none", "constant", "dynamic"] = "none"
    initial: float = 2.0**32
    minimum: float = 1.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    maximum: float | None = None
    hysteresis_refill: Literal["growth", "good_step"] = "growth"


@dataclass(frozen=True)
class PrecisionPlan:
    """compute: dtype of products and of activations between layers.
    residual: dtype of the residual stream, to which each branch of a layer adds; the embedding begins it.
    pipeline: dtype of what pipeline stages send each other.
    attention: dtype in which query, key and value enter attention's two products; positions are turned before.
    parameters: dtype of the weights that the layers hold.
    keep_fp32: patterns (`fnmatch`) of logical names; a parameter that matches one is held, used and reduced in the
        sensitive dtype.
    gradients: dtype in which gradients are accumulated over micro-batches.
    reduce: dtype in which gradients travel when they are summed over ranks.
    masters: dtype of the weights that the optimizer updates; those of the layers are rounded from them. There are no
        others if it is that of `parameters`.
    remainders: FP32 masters are kept as the BF16 weight and the 16 bits that it lacks, not as a copy of their own.
    moments: dtype of the optimizer's averages.
    rounding: of masters into weights: to the nearest, or up or down with the probability that makes the mean exact.
    sensitive: dtype of norms, softmax, router and loss.
    scores: dtype that attention's scores and weights are rounded to. That of `sensitive`: they need not be, and are
        only in bf16 on a CPU with instructions for it.
    buffers: dtype of the model's tables, such as rotary angles.
    output: dtype of the logits that a model hands out, and from which the loss is computed, in `sensitive`.
    cast_inputs: which modules have their floating inputs cast to the dtype that they compute in: the model itself
        ("root"), every module below it ("inner"), both ("all") or none. For models wrapped in `PlannedModel`: this
        project's own take token ids, and each of their layers casts what its products are made of.
    fp8: how products of linear layers are made in FP8 instead of `compute`; None: they are not.
    scaling: of the loss.
    on_nonfinite: what a step does whose gradients hold an inf or a NaN, in any precision: skip it, raise
        FloatingPointError after skipping it, or apply it all the same.
    masters_in_checkpoint: whether checkpoints hold the masters, or only the rounded weights.
    tf32: whether FP32 products may be made in TF32. A CPU has none: those of linear layers are made from factors that
        are rounded to it, those of attention and of a router stay in FP32.
    origin: field name -> the configuration key that decided it.
    """

    compute: torch.dtype
    residual: torch.dtype
    pipeline: torch.dtype
    attention: torch.dtype
    parameters: torch.dtype
    keep_fp32: tuple[str, ...] = ()
    gradients: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32
    masters: torch.dtype = torch.float32
    remainders: bool = False
    moments: torch.dtype = torch.float32
    rounding: Literal["nearest", "stochastic"] = "nearest"
    sensitive: torch.dtype = torch.float32
    scores: torch.dtype = torch.float32
    buffers: torch.dtype = torch.float32
    output: torch.dtype = torch.float32
    cast_inputs: Literal["none", "root", "inner", "all"] = "root"
    fp8: FP8Recipe | None = None
    scaling: LossScaling = LossScaling()
    on_nonfinite: OnNonfinite = "skip"
    masters_in_checkpoint: bool = True
    tf32: bool = False
    origin: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if broken := [rule for rule, holds in self._rules().items() if not holds]:
            raise UserError(*broken)

    def _rules(self) -> dict[str, bool]:
        """What any plan must keep, whichever configuration made it."""
        named = {name: dtype_name(getattr(self, name)) for name in ("parameters", "gradients", "masters", "moments")}
        return {
            f"moments = {named['moments']}: use fp32 or bf16, whose range is FP32's": (
                self.moments in (torch.float64, torch.float32, torch.bfloat16)
            ),
            f"masters = {named['masters']} are narrower than parameters = {named['parameters']}": (
                self.masters.itemsize >= self.parameters.itemsize
            ),
            f"masters = {named['masters']}, parameters = {named['parameters']}: half masters must be the weights": (
                self.masters.itemsize > 2 or self.masters == self.parameters
            ),
            f"parameters = {named['parameters']}, masters = {named['masters']}, moments = {named['moments']}: fp64 "
            "goes with fp64": len({d == torch.float64 for d in (self.parameters, self.masters, self.moments)}) == 1,
            f"reduce = {dtype_name(self.reduce)} is wider than gradients = {named['gradients']} can be": (
                self.reduce != torch.float64 or self.gradients == torch.float64
            ),
            f"gradients = {named['gradients']} must be fp32 or that of the parameters, {named['parameters']}": (
                self.gradients in (torch.float32, self.parameters)
            ),
            f"residual = {dtype_name(self.residual)} is narrower than compute = {dtype_name(self.compute)}": (
                self.residual.itemsize >= self.compute.itemsize
            ),
            f"scores = {dtype_name(self.scores)} must be that of attention, {dtype_name(self.attention)}, or "
            f"{dtype_name(self.sensitive)}": self.scores in (self.attention, self.sensitive),
            f"split masters need bf16 parameters and FP32 masters, not {named['parameters']} and {named['masters']}": (
                not self.remainders or (self.parameters, self.masters) == (torch.bfloat16, torch.float32)
            ),
            f"stochastic rounding makes bf16 weights, but parameters = {named['parameters']}": (
                self.rounding == "nearest" or self.parameters == torch.bfloat16
            ),
            "compute = fp64: products in FP8 are summed in FP32, so compute in fp32, bf16 or fp16": (
                self.fp8 is None or self.compute != torch.float64
            ),
            f"masters = {named['masters']}, masters_in_checkpoint = {str(self.masters_in_checkpoint).lower()}: with "
            "fp8.parameters = true masters are the only wide weights, so they must be fp32 and in checkpoints": (
                self.fp8 is None
                or not self.fp8.parameters
                or (self.masters == torch.float32 and self.masters_in_checkpoint)
            ),
            "stochastic rounding cannot be undone, so masters cannot be split into weight and remainder": (
                self.rounding == "nearest" or not self.remainders
            ),
        }

    def param_dtype(self, name: str) -> torch.dtype:
        """The dtype in which the parameter of this logical name is held."""
        return self.sensitive if self.keeps_fp32(name) else self.parameters

    def compute_dtype(self, name: str) -> torch.dtype:
        """The dtype of products with the parameter of this logical name."""
        return self.sensitive if self.keeps_fp32(name) else self.compute

    def bytes_per_parameter(self, averages: int, in_fp8: bool = False) -> tuple[int, int]:
        """(on every rank, cut over the ranks that share optimizer state) for a rule that keeps so many averages.

        in_fp8: of a weight that is kept in FP8 alone, without its scales.
        """
        held = 1 if in_fp8 else self.parameters.itemsize
        own = self.masters.itemsize if self.masters.itemsize > held else 0
        masters = 2 if self.remainders and not in_fp8 else own
        return held + self.gradients.itemsize, masters + averages * self.moments.itemsize

    def keeps_fp32(self, name: str) -> bool:
        """Whether the parameter of this logical name is one that is kept in FP32."""
        return any(fnmatchcase(name, pattern) for pattern in self.keep_fp32)


DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TORCH_DTYPES = {
    "float16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float": torch.float32,
}  # by torch's names


def dtype_name(dtype: torch.dtype) -> str:
    """The name in DTYPES, torch's own for any other."""
    return next((name for name, known in DTYPES.items() if known == dtype), str(dtype).removeprefix("torch."))


def plan(
    compute: str = "fp32",
    scaling: LossScaling | None = None,
    on_nonfinite: OnNonfinite = "skip",
    *,
    parameters: str = "",
    gradients: str = "fp32",
    reduce: str = "",
    masters: str = "fp32",
    moments: str = "fp32",
    **others: Any,
) -> PrecisionPlan:
    """The plan named by its compute precision: fp64 (for proofs), fp32, bf16 or fp16, changed by what is given.

    parameters: that of compute unless given. reduce: that of gradients unless given.
    masters: fp32, or "split" (BF16 weight and 16 further bits, together FP32), or "none" (the weights are updated).
    others: fields of PrecisionPlan as they are.
    fp16 scales its loss dynamically unless told otherwise; with fp64 everything that is FP32 by default is FP64.
    """
    wide = "fp64" if compute == "fp64" else "fp32"
    parameters = parameters or compute
    gradients, moments = (wide if name == "fp32" else name for name in (gradients, moments))
    held = {"none": parameters, "split": "fp32", "fp32": wide}
    named = {"compute": compute, "parameters": parameters, "gradients": gradients, "reduce": reduce or gradients}
    named |= {"moments": moments, "masters": held.get(masters, masters)}
    if unknown := [f"precision.{key} = {name!r} is not known" for key, name in named.items() if name not in DTYPES]:
        raise UserError(*(f"{problem}: use one of {', '.join(DTYPES)}" for problem in unknown))
    fields: dict[str, Any] = {key: DTYPES[name] for key, name in named.items()}
    fields |= dict.fromkeys(("sensitive", "scores", "buffers", "output"), DTYPES[wide]) | dict.fromkeys(
        ("residual", "pipeline", "attention"), DTYPES[compute]
    )
    fields |= {"remainders": masters == "split", "on_nonfinite": on_nonfinite} | others
    fields["scaling"] = scaling or LossScaling("dynamic" if compute == "fp16" else "none")
    return PrecisionPlan(**fields, origin=dict.fromkeys(fields, "precision.compute"))
