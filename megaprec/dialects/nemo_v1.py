"""Dialect of NeMo 1: `trainer.precision`, `model.megatron_amp_O2` and related keys of its Megatron
models' YAML.

    [precision.nemo.v1]
    precision = "bf16-mixed"            trainer.precision
    megatron_amp_O2 = true              default: false, which is torch's autocast over FP32
                                        parameters
    optim_name = "distributed_fused_adam"
                                        model.optim.name; distributed ones shard their state as
                                        ZeRO-1 does
    optim_dtype = "fp32"                model.optim.dtype, of masters and moments of
                                        distributed_fused_adam
    gradient_clip_val = 1.0             default: none

With O2 parameters are BF16, with FP32 masters and gradient accumulation; NeMo 1 does not train FP16
with O2. The loss scale of FP16 has no minimum or maximum, and each good step refills its hysteresis
(nlp/parts/nlp_overrides.py: GradScaler). FP8 has delayed scales
(nlp/models/language_modeling/megatron_gpt_model.py).
"""

from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field

from megaprec.dialects.reading import Decision, Keys, Reading, Resolved, all_of
from megaprec.dialects.scaling import CEILING, FLOOR
from megaprec.precision.fp8_recipe import FP8Recipe
from megaprec.precision.plan import LossScaling

TABLE = "v1"
DTYPES = {
    **dict.fromkeys(("16", "16-mixed"), torch.float16),
    **dict.fromkeys(("bf16", "bf16-mixed"), torch.bfloat16),
    **dict.fromkeys(("32", "32-true"), torch.float32),
}
NAMED = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# optimizers that shard their state over data-parallel ranks
DISTRIBUTED = ("distributed_fused_adam", "mcore_distributed_optim")
FP8_KEYS = (
    "fp8",
    "fp8_e4m3",
    "fp8_hybrid",
    "fp8_margin",
    "fp8_amax_history_len",
    "fp8_amax_compute_algo",
    "fp8_params",
    "fp8_wgrad",
    "reduce_amax",
)
SCALE_KEYS = ("native_amp_init_scale", "native_amp_growth_interval", "hysteresis")


def _precision(value: object) -> object:
    # YAML reads 16 and 32 as numbers
    name = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if isinstance(name, str) and name not in DTYPES:
        raise ValueError(f"no such precision: use one of {', '.join(DTYPES)}")
    return name


class Nemo1(Keys):
    """Keys of trainer and model in one table. optim_name, optim_dtype and grad_sync_dtype: keys of
    `model.optim`."""

    precision: Annotated[str, BeforeValidator(_precision)] = "32"
    megatron_amp_O2: bool = False
    optim_name: str = ""
    optim_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    grad_sync_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    gradient_clip_val: float | None = None
    native_amp_init_scale: float = Field(default=2.0**32, ge=FLOOR, le=CEILING)
    native_amp_growth_interval: int = Field(default=1000, gt=0)
    hysteresis: int = Field(default=2, gt=0)
    fp32_residual_connection: bool = False
    fp8: bool = False
    fp8_e4m3: bool = False
    fp8_hybrid: bool = False
    fp8_margin: int = 0
    fp8_interval: Literal[1] = 1
    fp8_amax_history_len: int = Field(default=1024, ge=1)
    fp8_amax_compute_algo: Literal["max", "most_recent"] = "max"
    fp8_params: bool = False
    fp8_wgrad: bool = True
    reduce_amax: bool = True


def resolve_v1(reading: Reading, values: Any) -> Resolved:
    """Return the plan of the table."""
    model = reading.read(Nemo1, values, TABLE)
    half = DTYPES[model.precision]
    _refuse_contradictions(reading, model, half)
    reading.raise_problems()
    compute = _decided_by(reading, half, "precision")
    parameters = _decided_by(reading, half, "megatron_amp_O2", "precision")
    # torch's autocast casts FP32 parameters for each product
    if not model.megatron_amp_O2:
        parameters = _decided_by(reading, torch.float32, "megatron_amp_O2")
    state = NAMED[model.optim_dtype or "fp32"]
    is_bf16_o2 = model.megatron_amp_O2 and half == torch.bfloat16
    # distributed_fused_adam keeps FP32 masters as BF16 weights and the bits that these lack
    is_fused = is_bf16_o2 and model.optim_name == "distributed_fused_adam"
    remainders = is_fused and state == torch.float32
    reduce = NAMED[model.grad_sync_dtype] if model.grad_sync_dtype else state
    # autocast adds branches to an FP32 stream, for the embedding is in FP32
    residual = compute
    if model.fp32_residual_connection or parameters.value == torch.float32:
        residual = _decided_by(
            reading, torch.float32, "fp32_residual_connection", "megatron_amp_O2"
        )
    decisions = {
        "compute": compute,
        "parameters": parameters,
        "residual": residual,
        "pipeline": compute,
        "reduce": _decided_by(reading, reduce, "grad_sync_dtype", "optim_dtype"),
        "gradients": reading.always(torch.float32),
        **all_of(("masters", "moments"), _decided_by(reading, state, "optim_dtype")),
        **_accumulation(reading, model, reduce),
        "remainders": _decided_by(reading, remainders, "optim_name", "optim_dtype"),
        "scaling": _scaling(reading, model, half),
        "fp8": _decided_by(reading, _fp8(model), *FP8_KEYS),
    }
    # none, 0 or a negative number: no clipping
    clip = model.gradient_clip_val or 0.0
    settings = {
        "optimizer.clip": _decided_by(reading, max(clip, 0.0), "gradient_clip_val"),
        "parallel.zero": _decided_by(reading, model.optim_name in DISTRIBUTED, "optim_name"),
    }
    notes: tuple[str, ...] = ()
    if half != torch.float16:
        keys = [key.removeprefix(f"{TABLE}.") for key in SCALE_KEYS]
        notes = reading.idle_note(model, keys, "without FP16, which alone has a loss scale", TABLE)
    return reading.resolved(decisions, settings, notes)


def _accumulation(reading: Reading, model: Nemo1, reduce: torch.dtype) -> dict[str, Decision]:
    """Return the dtype of gradient accumulation under Megatron-core's distributed optimizer: that
    of reduction."""
    if model.optim_name != "mcore_distributed_optim":
        return {}
    return {"gradients": _decided_by(reading, reduce, "grad_sync_dtype", "optim_name")}


def _decided_by(reading: Reading, value: Any, *keys: str) -> Decision:
    """Return `Reading.decided_by` for keys of this table."""
    return reading.decided_by(value, *(f"{TABLE}.{key}" for key in keys))


def _refuse_contradictions(reading: Reading, model: Nemo1, half: torch.dtype) -> None:
    """Record a problem for each key whose value does not go with another one."""
    if half == torch.float16 and model.megatron_amp_O2 and model.optim_name not in DISTRIBUTED:
        why = "NeMo 1 does not train FP16 with O2: use bf16, or megatron_amp_O2 = false"
        reading.refuse(f"{TABLE}.megatron_amp_O2", True, why)
    if model.optim_dtype is not None and model.optim_name != "distributed_fused_adam":
        reading.refuse(
            f"{TABLE}.optim_dtype", model.optim_dtype, "only distributed_fused_adam has a dtype"
        )
    if model.fp8 and not (model.fp8_e4m3 or model.fp8_hybrid):
        reading.refuse(f"{TABLE}.fp8", True, "needs fp8_hybrid or fp8_e4m3 beside it")


def _scaling(reading: Reading, model: Nemo1, half: torch.dtype) -> Decision:
    if half != torch.float16:
        return _decided_by(reading, LossScaling(), "precision")
    scaling = LossScaling(
        "dynamic",
        initial=model.native_amp_init_scale,
        minimum=FLOOR,
        growth_interval=model.native_amp_growth_interval,
        hysteresis=model.hysteresis,
        hysteresis_refill="good_step",  # Megatron refills it only when the scale grows
    )
    return _decided_by(reading, scaling, "precision", *SCALE_KEYS)


def _fp8(model: Nemo1) -> FP8Recipe | None:
    if not model.fp8:
        return None
    return FP8Recipe(
        format="e4m3" if model.fp8_e4m3 else "hybrid",
        margin=model.fp8_margin,
        history_length=model.fp8_amax_history_len,
        amax_algo=model.fp8_amax_compute_algo,
        reduce_amax=model.reduce_amax,
        reduce_over="stage",
        parameters=model.fp8_params,
        weight_gradients=model.fp8_wgrad,
    )
