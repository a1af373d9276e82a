"""Dialect of NeMo 1: `trainer.precision`, `model.megatron_amp_O2` and related keys of its Megatron
models' YAML.

    [precision.nemo.v1]
    precision = "bf16-mixed"            trainer.precision
    megatron_amp_O2 = true              default: false, which is torch's autocast over FP32 parameters
    optim_name = "distributed_fused_adam"       model.optim.name; distributed ones shard their state as ZeRO-1 does
    optim_dtype = "fp32"                model.optim.dtype, of masters and moments of distributed_fused_adam
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
DISTRIBUTED = ("distributed_fused_adam", "mcore_distributed_optim")
FP8_KEYS = (
    "fp8",
    "fp8_e4m3",
    "fp8_hybrid",
    "fp8_margin",
    "fp8_amax_history_len",
    "fp8_amax_compute_algo",
)
FP8_KEYS += ("fp8_params", "fp8_wgrad", "reduce_amax")
SCALE_KEYS = ("native_amp_init_scale", "native_amp_growth_interval", "hysteresis")


def _precision(value: object) -> object:
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
    asked = reading.read(Nemo1, values, TABLE)
    half = DTYPES[asked.precision]
    _contradictions(reading, asked, half)
    reading.raise_problems()
    compute = _by(reading, half, "precision")
    held = _by(reading, half, "megatron_amp_O2", "precision")
    if not asked.megatron_amp_O2:
        held = _by(reading, torch.float32, "megatron_amp_O2")
    state = NAMED[asked.optim_dtype or "fp32"]
    fused = (
        asked.megatron_amp_O2
        and half == torch.bfloat16
        and asked.optim_name == "distributed_fused_adam"
    )
    synced = NAMED[asked.grad_sync_dtype] if asked.grad_sync_dtype else state
    wide = asked.fp32_residual_connection or held.value == torch.float32
    decisions = {
        "compute": compute,
        "parameters": held,
        "residual": _by(reading, torch.float32, "fp32_residual_connection", "megatron_amp_O2")
        if wide
        else compute,
        "pipeline": compute,
        "reduce": _by(reading, synced, "grad_sync_dtype", "optim_dtype"),
        "gradients": reading.always(torch.float32),
        **all_of(("masters", "moments"), _by(reading, state, "optim_dtype")),
        **_summed(reading, asked, synced),
        "remainders": _by(reading, fused and state == torch.float32, "optim_name", "optim_dtype"),
        "scaling": _scaling(reading, asked, half),
        "fp8": _by(reading, _fp8(asked), *FP8_KEYS),
    }
    clip = asked.gradient_clip_val or 0.0
    settings = {
        "optimizer.clip": _by(reading, max(clip, 0.0), "gradient_clip_val"),
        "parallel.zero": _by(reading, asked.optim_name in DISTRIBUTED, "optim_name"),
    }
    notes: tuple[str, ...] = ()
    if half != torch.float16:
        keys = [key.removeprefix(f"{TABLE}.") for key in SCALE_KEYS]
        notes = reading.idle_note(asked, keys, "without FP16, which alone has a loss scale", TABLE)
    return reading.resolved(decisions, settings, notes)


def _summed(reading: Reading, asked: Nemo1, synced: torch.dtype) -> dict[str, Decision]:
    """Return the dtype of gradient accumulation under Megatron-core's distributed optimizer: that
    of reduction."""
    if asked.optim_name != "mcore_distributed_optim":
        return {}
    return {"gradients": _by(reading, synced, "grad_sync_dtype", "optim_name")}


def _by(reading: Reading, value: Any, *keys: str) -> Decision:
    return reading.decided_by(value, *(f"{TABLE}.{key}" for key in keys))


def _contradictions(reading: Reading, asked: Nemo1, half: torch.dtype) -> None:
    if half == torch.float16 and asked.megatron_amp_O2 and asked.optim_name not in DISTRIBUTED:
        why = "NeMo 1 does not train FP16 with O2: use bf16, or megatron_amp_O2 = false"
        reading.refuse(f"{TABLE}.megatron_amp_O2", True, why)
    if asked.optim_dtype is not None and asked.optim_name != "distributed_fused_adam":
        reading.refuse(
            f"{TABLE}.optim_dtype", asked.optim_dtype, "only distributed_fused_adam has a dtype"
        )
    if asked.fp8 and not (asked.fp8_e4m3 or asked.fp8_hybrid):
        reading.refuse(f"{TABLE}.fp8", True, "needs fp8_hybrid or fp8_e4m3 beside it")


def _scaling(reading: Reading, asked: Nemo1, half: torch.dtype) -> Decision:
    if half != torch.float16:
        return _by(reading, LossScaling(), "precision")
    growth = asked.native_amp_growth_interval
    hysteresis = asked.hysteresis
    scaling = LossScaling(
        "dynamic",
        asked.native_amp_init_scale,
        FLOOR,
        growth_interval=growth,
        hysteresis=hysteresis,
        hysteresis_refill="good_step",
    )
    return _by(reading, scaling, "precision", *SCALE_KEYS)


def _fp8(asked: Nemo1) -> FP8Recipe | None:
    if not asked.fp8:
        return None
    return FP8Recipe(
        format="e4m3" if asked.fp8_e4m3 else "hybrid",
        margin=asked.fp8_margin,
        history_length=asked.fp8_amax_history_len,
        amax_algo=asked.fp8_amax_compute_algo,
        reduce_amax=asked.reduce_amax,
        reduce_over="stage",
        parameters=asked.fp8_params,
        weight_gradients=asked.fp8_wgrad,
    )
