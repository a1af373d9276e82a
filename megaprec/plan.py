"""The precision plan: every numeric decision of a run, made once, in one frozen value.

Afterwards the plan is only read. Nothing in it means "decide later", and `origin` remembers which
configuration key decided each field, so that "why is my reduction FP32?" has an answer.

`compute` is what products and activations are in. Weights are held in it too, gradients are summed and the
optimizer works in something wider, and a few operators (norms, softmax, loss) are never done in less than FP32.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from megaprec.errors import UserError


@dataclass(frozen=True)
class LossScaling:
    """How the loss is scaled before the backward pass, so that small half-precision gradients survive.

    kind: none | constant | dynamic. A constant scale is `initial`.
    The other fields are those of `megaprec.scaler.DynamicGradScaler`, with Megatron's defaults.
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
    """compute: dtype of products and of activations between layers, and of what pipeline stages send.
    parameters: dtype of the weights that the layers hold.
    gradients: dtype in which gradients are accumulated over micro-batches and reduced over dp.
    masters: dtype of the optimizer's weights and moments.
    sensitive: dtype of norms, softmax and loss.
    scaling: of the loss.
    on_nonfinite: what a step does whose gradients hold an inf or a NaN, in any precision.
    origin: field name -> the configuration key that decided it.
    """

    compute: torch.dtype
    parameters: torch.dtype
    gradients: torch.dtype = torch.float32
    masters: torch.dtype = torch.float32
    sensitive: torch.dtype = torch.float32
    scaling: LossScaling = LossScaling()
    on_nonfinite: Literal["skip", "raise"] = "skip"
    origin: Mapping[str, str] = field(default_factory=dict, compare=False)


DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def plan(
    compute: str = "fp32", scaling: LossScaling | None = None, on_nonfinite: Literal["skip", "raise"] = "skip"
) -> PrecisionPlan:
    """The plan named by its compute precision: fp64 (for proofs), fp32, bf16 or fp16.

    Half weights get FP32 masters, moments and gradients. fp16 scales its loss dynamically unless told otherwise.
    """
    if compute not in DTYPES:
        raise UserError(f"precision.compute = {compute!r} is not known: use one of {', '.join(DTYPES)}")
    if scaling is None:
        scaling = LossScaling("dynamic" if compute == "fp16" else "none")
    dtype = DTYPES[compute]
    decided: tuple[str, ...] = ("compute", "parameters", "gradients", "masters", "sensitive")
    origin: dict[str, str] = dict.fromkeys(decided, "precision.compute")
    made = PrecisionPlan(dtype, dtype, scaling=scaling, on_nonfinite=on_nonfinite, origin=origin)
    if dtype == torch.float64:
        made = replace(made, gradients=dtype, masters=dtype, sensitive=dtype)
    return made
