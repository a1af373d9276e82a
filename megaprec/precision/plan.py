"""The precision plan: every numeric decision of a run, made once, in one frozen value.

After it is made, the plan is only read. No field means "decide later", and `origin` records the
configuration key that decided each field, so that "why is my reduction FP32?" has an answer.

`compute` is the dtype of matrix products and activations, and usually of the weights. Gradient
accumulation and the optimizer use a wider dtype, and a few operators (norms, softmax, loss) never
use less than FP32.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal

import torch

from megaprec.errors import Problem, UserError, did_you_mean
from megaprec.kinds import NamedArguments, wrong_kinds
from megaprec.precision.fp8_recipe import FP8Recipe
from megaprec.precision.names_elsewhere import PLAN

# what a step with a non-finite gradient does
OnNonfinite = Literal["skip", "raise", "ignore"]


@dataclass(frozen=True)
class LossScaling(NamedArguments):
    """Settings of the loss scale, which keeps small half-precision gradients from underflowing in
    the backward pass.

    kind: none | constant | dynamic. A constant scale has the value `initial`.
    The other fields are of a dynamic scale, with the defaults of Megatron but for `initial`, which
    is that of torch, apex and DeepSpeed: from Megatron's 2**32 a run skips a dozen steps at first.
    initial, minimum, maximum: its first, smallest and largest value; None for no maximum.
    growth_factor, growth_interval: what multiplies it after as many good steps in a row.
    backoff_factor: what multiplies it after an overflow that is not tolerated.
    hysteresis: the number of overflows of which the last is not tolerated.
    hysteresis_refill: when that number is refilled: as the scale grows, or after each good step.
    """

    ELSEWHERE: ClassVar[Mapping[str, str]] = {
        "init_scale": "it is initial=",
        "initial_scale": "it is initial=",
        "loss_scale": "it is initial=, with kind 'constant'",
        "min_scale": "it is minimum=",
        "max_scale": "it is maximum=",
        "enabled": "LossScaling('none') scales nothing",
        "scale_window": "it is growth_interval=",
        "scale_factor": "it is growth_factor= and backoff_factor=",
        "loss_scale_window": "it is growth_interval=",
    }

    kind: Literal["none", "constant", "dynamic"] = "none"
    initial: float = 2.0**16
    minimum: float = 1.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    maximum: float | None = None
    hysteresis_refill: Literal["growth", "good_step"] = "growth"

    def __post_init__(self) -> None:
        if wrong := wrong_kinds(self):
            raise UserError(*(f"loss scale: {line}" for line in wrong))


@dataclass(frozen=True)
class PrecisionPlan:
    """Every dtype and numeric rule of a run.

    compute: dtype of matrix products and of activations between layers.
    residual: dtype of the residual stream, which begins with the embedding and to which each branch
        of a layer adds.
    pipeline: dtype of the activations and their gradients that pipeline stages send each other.
    attention: dtype of query, key and value in attention's two products; rotary positions are
        applied before.
    parameters: dtype of the weights of the layers.
    keep_fp32: patterns (`fnmatch`) of logical names; a matching parameter is stored, used and
        reduced in the dtype `sensitive`.
    gradients: dtype in which gradients are accumulated over micro-batches.
    reduce: dtype of gradients in communication, when they are summed over ranks.
    masters: dtype of the weights that the optimizer updates; the weights of the layers are rounded
        from them. If it is the dtype of `parameters`, the weights are the masters and there is no
        second copy.
    remainders: FP32 masters are stored as the BF16 weight and the 16 bits that it lacks, not as a
        separate copy.
    moments: dtype of the optimizer's moments.
    rounding: rounding of masters to weights: to nearest, or stochastic, whose mean is exact.
    sensitive: dtype of norms, softmax, router and loss.
    scores: dtype to which attention scores and probabilities are rounded. If it is that of
        `sensitive`, they are not rounded to `attention`, except in bf16 on a CPU with bf16
        instructions.
    buffers: dtype of the model's buffers, such as rotary angles.
    output: dtype of the logits that the model returns; the loss is computed from them in
        `sensitive`.
    cast_inputs: the modules whose floating-point inputs are cast to their compute dtype: the model
        itself ("root"), every module below it ("inner"), both ("all") or none. For models wrapped
        in `PlannedModel`: this project's own models take token ids, and each of their layers casts
        the factors of its products.
    fp8: the recipe of FP8 products of linear layers; None: all products are in `compute`.
    scaling: the loss scale.
    on_nonfinite: what happens in a step whose gradients contain an inf or a NaN, in any precision:
        skip it, raise FloatingPointError after skipping it, or apply it anyway.
    masters_in_checkpoint: True if checkpoints contain the masters, False if only the rounded
        weights.
    tf32: True if FP32 products may use TF32. A CPU has no TF32: there linear layers multiply
        factors rounded to TF32, and products of attention and of a router stay in FP32.
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
        if wrong := wrong_kinds(self):
            raise UserError(*(f"precision plan: {line}" for line in wrong))
        problems = [*self._problems_of_state(), *self._problems_of_gradients()]
        problems += self._problems_of_activations()
        problems += self._problems_of_rounding()
        problems += self._problems_of_fp8()
        if problems:
            raise UserError(*problems)

    def _problems_of_state(self) -> Iterator[Problem]:
        """Yield a line for each dtype of parameters, masters and moments that does not fit the
        others."""
        parameters = dtype_name(self.parameters)
        masters = dtype_name(self.masters)
        moments = dtype_name(self.moments)
        # FP16 has too little range for averages of squares
        if self.moments not in (torch.float64, torch.float32, torch.bfloat16):
            yield Problem.of("precision.moments", moments=moments)
        if self.masters.itemsize < self.parameters.itemsize:
            yield Problem.of("precision.narrow_masters", masters=masters, parameters=parameters)
        # a second 16-bit copy would have no more bits than the weights
        if self.masters.itemsize <= 2 and self.masters != self.parameters:
            yield Problem.of("precision.half_masters", masters=masters, parameters=parameters)
        # an FP64 run is for proofs: a narrower copy anywhere would make it none
        dtypes = {self.parameters, self.masters, self.moments}
        if torch.float64 in dtypes and len(dtypes) > 1:
            yield Problem.of(
                "precision.partly_fp64", parameters=parameters, masters=masters, moments=moments
            )

    def _problems_of_gradients(self) -> Iterator[Problem]:
        """Yield a line for each dtype of gradients that does not fit another one."""
        gradients = dtype_name(self.gradients)
        if self.reduce == torch.float64 and self.gradients != torch.float64:
            yield Problem.of(
                "precision.reduce_fp64", reduce=dtype_name(self.reduce), gradients=gradients
            )
        if self.gradients not in (torch.float32, self.parameters):
            yield Problem.of(
                "precision.gradients", gradients=gradients, parameters=dtype_name(self.parameters)
            )

    def _problems_of_activations(self) -> Iterator[Problem]:
        """Yield a line for each dtype of activations that does not fit another one."""
        if self.residual.itemsize < self.compute.itemsize:
            yield Problem.of(
                "precision.narrow_residual",
                residual=dtype_name(self.residual),
                compute=dtype_name(self.compute),
            )
        if self.scores not in (self.attention, self.sensitive):
            yield Problem.of(
                "precision.scores",
                scores=dtype_name(self.scores),
                attention=dtype_name(self.attention),
                sensitive=dtype_name(self.sensitive),
            )

    def _problems_of_rounding(self) -> Iterator[Problem]:
        """Yield a line if masters of these dtypes cannot be split or rounded as the plan says."""
        parameters = dtype_name(self.parameters)
        # the 16 bits that bf16 lacks are a remainder of FP32 only
        splittable = self.parameters == torch.bfloat16 and self.masters == torch.float32
        if self.remainders and not splittable:
            yield Problem.of(
                "precision.split_masters", parameters=parameters, masters=dtype_name(self.masters)
            )
        if self.rounding == "stochastic" and self.parameters != torch.bfloat16:
            yield Problem.of("precision.stochastic_weights", parameters=parameters)
        if self.rounding == "stochastic" and self.remainders:
            yield Problem.of("precision.stochastic_split")

    def _problems_of_fp8(self) -> Iterator[Problem]:
        """Yield a line for each setting that FP8 products or parameters do not allow."""
        if self.fp8 is None:
            return
        if self.compute == torch.float64:
            yield Problem.of("precision.fp8_in_fp64")
        # the masters are the only copy of such weights that is worth saving
        fp32_saved = self.masters == torch.float32 and self.masters_in_checkpoint
        if self.fp8.parameters and not fp32_saved:
            yield Problem.of(
                "precision.fp8_masters",
                masters=dtype_name(self.masters),
                in_checkpoint=str(self.masters_in_checkpoint).lower(),
            )

    def param_dtype(self, name: str) -> torch.dtype:
        """Return the dtype of the parameter of this logical name."""
        return self.sensitive if self.keeps_fp32(name) else self.parameters

    def compute_dtype(self, name: str) -> torch.dtype:
        """Return the dtype of products with the parameter of this logical name."""
        return self.sensitive if self.keeps_fp32(name) else self.compute

    def bytes_per_parameter(
        self,
        averages: int,
        in_fp8: bool = False,
        shards_gradients: bool = False,
        shards_weights: bool = False,
        ema: bool = False,
        offload: bool = False,
    ) -> tuple[int, int]:
        """Return the bytes that a parameter takes on the device, as two numbers: those that every
        rank has, and those that are cut over the ranks that share optimizer state.

        averages: number of moments of the update rule.
        in_fp8: for a weight stored in FP8 only; its scales are not counted.
        shards_gradients: under ZeRO-2; gradients that have not been reduced are not counted.
        shards_weights: under ZeRO-3, which shards gradients too; weights that are gathered are not
            counted.
        ema: a moving average of the weights is kept.
        offload: masters, moments and average lie in host memory, and are not counted.
        """
        weight = 1 if in_fp8 else self.parameters.itemsize
        if self.remainders and not in_fp8:
            master = 2
        elif self.masters.itemsize > weight:
            master = self.masters.itemsize
        else:
            master = 0  # the weights are the masters
        state = master + averages * self.moments.itemsize
        if ema:
            state += self.average.itemsize
        if offload:
            state = 0
        if shards_weights:
            return 0, weight + self.gradients.itemsize + state
        if shards_gradients:
            return weight, self.gradients.itemsize + state
        return weight + self.gradients.itemsize, state

    @property
    def average(self) -> torch.dtype:
        """Return the dtype of a moving average of weights: FP32, or FP64 beside FP64 masters."""
        return torch.float64 if self.masters == torch.float64 else torch.float32

    def keeps_fp32(self, name: str) -> bool:
        """Return True if a pattern of `keep_fp32` matches this logical name."""
        return any(fnmatchcase(name, pattern) for pattern in self.keep_fp32)


# the fields that are decisions; `origin` says which key made each of them
FIELDS = tuple(each.name for each in fields(PrecisionPlan) if each.name != "origin")
# a dtype's name in a run file -> dtype
DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
# torch's name -> dtype
TORCH_DTYPES = {
    "float16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float": torch.float32,
}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name in DTYPES; torch's own name for any other dtype."""
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    return str(dtype).removeprefix("torch.")


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
    """Return the default plan of a compute precision, changed by the other arguments.

    compute: fp64 (for proofs), fp32, bf16 or fp16. parameters: default: as compute. reduce:
        default: as gradients.
    masters: a dtype, or "split" (BF16 weight and 16 further bits, together FP32), or "none" (the
        weights are updated).
    others: fields of PrecisionPlan, passed on unchanged. The default of fp16 is a dynamic loss
    scale; with fp64 every field that is FP32 by default is FP64.
    """
    _require_fields(others)
    if compute not in DTYPES:
        raise UserError(_unknown_dtype("compute", compute))
    # of all that is FP32 by default
    wide = "fp64" if compute == "fp64" else "fp32"
    parameters = parameters or compute
    gradients = _widen_fp32(gradients, wide)
    # words that are no dtypes, and the default
    dtype_of_masters = {"none": parameters, "split": "fp32", "fp32": wide}
    dtype_names = {
        "compute": compute,
        "parameters": parameters,
        "gradients": gradients,
        "reduce": reduce or gradients,
        "moments": _widen_fp32(moments, wide),
        "masters": dtype_of_masters.get(masters, masters),
    }
    values = _dtypes_of(dtype_names)
    values |= dict.fromkeys(("sensitive", "scores", "buffers", "output"), DTYPES[wide])
    values |= dict.fromkeys(("residual", "pipeline", "attention"), DTYPES[compute])
    values |= {"remainders": masters == "split", "on_nonfinite": on_nonfinite}
    values |= others  # last, so that they win
    values["scaling"] = scaling or LossScaling("dynamic" if compute == "fp16" else "none")
    return PrecisionPlan(**values, origin=dict.fromkeys(values, "precision.compute"))


def _require_fields(names: Iterable[str]) -> None:
    """Raise UserError for names that are no fields of PrecisionPlan."""
    field_names = [field.name for field in fields(PrecisionPlan)]
    problems: list[str] = []
    for name in names:
        if name not in field_names:
            instead = PLAN.get(name)
            hint = f": {instead}" if instead else did_you_mean(name, field_names)
            problems.append(f"plan has no field {name}{hint}")
    if problems:
        raise UserError(*problems)


def _dtypes_of(names: Mapping[str, str]) -> dict[str, Any]:
    """Return the dtypes of these names, by field. Raises UserError for all that are unknown."""
    unknown = [key for key, name in names.items() if name not in DTYPES]
    if unknown:
        raise UserError(*(_unknown_dtype(key, names[key]) for key in unknown))
    return {key: DTYPES[name] for key, name in names.items()}


def _widen_fp32(name: str, wide: str) -> str:
    """Return the name of a dtype; that of `wide` if it is fp32."""
    return wide if name == "fp32" else name


def _unknown_dtype(key: str, name: object) -> str:
    """Return the error line for the name of a dtype that is not in DTYPES. If another system calls
    a dtype so, the line says its name here."""
    text = str(name).removeprefix("torch.").lower()
    # Lightning's names: "16-mixed" has FP32 masters, "16-true" has none
    has_no_masters = text.endswith("-true") and not text.startswith(("32", "64"))
    text = text.removesuffix("-mixed").removesuffix("-true")
    text = {"16": "fp16", "32": "fp32", "64": "float64"}.get(text, text)
    # TORCH_DTYPES has the dtypes of other systems' configurations, none of which is FP64
    names_elsewhere = {**DTYPES, **TORCH_DTYPES, "float64": torch.float64, "double": torch.float64}
    dtype = names_elsewhere.get(text)
    if dtype is not None:
        hint = f'its name here is "{dtype_name(dtype)}"'
        if has_no_masters:
            hint += ', with masters = "none"'
    else:
        hint = f"use one of {', '.join(DTYPES)}"
    return f"precision.{key} = {name!r} is not known: {hint}"
