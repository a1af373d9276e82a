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
from megaprec.dialects.scaling import FLOOR, LossScale
from megaprec.precision.fp8_recipe import LARGEST_MARGIN, FP8Recipe
from megaprec.precision.plan import LossScaling

TABLE = "v1"
# the trainer's name of a precision -> dtype
PRECISION_DTYPES = {
    **dict.fromkeys(("16", "16-mixed"), torch.float16),
    **dict.fromkeys(("bf16", "bf16-mixed"), torch.bfloat16),
    **dict.fromkeys(("32", "32-true"), torch.float32),
}
# names in `model.optim` -> dtype
OPTIM_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
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
    """Return a precision as text. Raises ValueError for a text that is none."""
    # YAML reads 16 and 32 as numbers
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    name = str(value) if is_integer else value
    if isinstance(name, str) and name not in PRECISION_DTYPES:
        raise ValueError(f"no such precision: use one of {', '.join(PRECISION_DTYPES)}")
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
    native_amp_init_scale: LossScale = 2.0**32
    native_amp_growth_interval: int = Field(default=1000, gt=0)
    hysteresis: int = Field(default=2, gt=0)
    fp32_residual_connection: bool = False
    fp8: bool = False
    fp8_e4m3: bool = False
    fp8_hybrid: bool = False
    fp8_margin: int = Field(default=0, ge=-LARGEST_MARGIN, le=LARGEST_MARGIN)
    fp8_interval: Literal[1] = 1
    fp8_amax_history_len: int = Field(default=1024, ge=1)
    fp8_amax_compute_algo: Literal["max", "most_recent"] = "max"
    fp8_params: bool = False
    fp8_wgrad: bool = True
    reduce_amax: bool = True


def resolve_v1(reading: Reading, values: Any) -> Resolved:
    """Return the plan and settings of `values`, the table [precision.nemo.v1]. Raises UserError."""
    config = reading.read(Nemo1, values, TABLE)
    dtype = PRECISION_DTYPES[config.precision]
    _refuse_contradictions(reading, config, dtype)
    reading.raise_problems()
    compute = _decided_by(reading, dtype, "precision")
    parameters = _decided_by(reading, dtype, "megatron_amp_O2", "precision")
    # torch's autocast casts FP32 parameters for each product
    if not config.megatron_amp_O2:
        parameters = _decided_by(reading, torch.float32, "megatron_amp_O2")
    state = OPTIM_DTYPES[config.optim_dtype or "fp32"]
    is_bf16_o2 = config.megatron_amp_O2 and dtype == torch.bfloat16
    # distributed_fused_adam keeps FP32 masters as BF16 weights and the bits that these lack
    is_fused = is_bf16_o2 and config.optim_name == "distributed_fused_adam"
    remainders = is_fused and state == torch.float32
    reduce = OPTIM_DTYPES[config.grad_sync_dtype] if config.grad_sync_dtype else state
    # autocast adds branches to an FP32 stream, for the embedding is in FP32
    residual = compute
    if config.fp32_residual_connection or parameters.value == torch.float32:
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
        **_accumulation(reading, config, reduce),  # which may replace gradients
        "remainders": _decided_by(reading, remainders, "optim_name", "optim_dtype"),
        "scaling": _scaling(reading, config, dtype),
        "fp8": _decided_by(reading, _fp8(config), *FP8_KEYS),
    }
    # none, 0 or a negative number: no clipping
    clip = config.gradient_clip_val or 0.0
    settings = {
        "optimizer.clip": _decided_by(reading, max(clip, 0.0), "gradient_clip_val"),
        "parallel.zero": _decided_by(reading, config.optim_name in DISTRIBUTED, "optim_name"),
    }
    return reading.resolved(decisions, settings, _idle_notes(reading, config, dtype))


def _idle_notes(reading: Reading, config: Nemo1, dtype: torch.dtype) -> tuple[str, ...]:
    """Return notes on keys that are set and change nothing beside the others."""
    notes: tuple[str, ...] = ()
    if dtype != torch.float16:
        why = "without FP16, which alone has a loss scale"
        notes = reading.idle_note(config, SCALE_KEYS, why, TABLE)
    if not config.fp8:
        # files say the format of FP8 where it is off too
        keys = [key for key in FP8_KEYS if key not in ("fp8_hybrid", "fp8_e4m3")]
        notes += reading.idle_note(config, keys, "without fp8", TABLE)
    elif config.fp8_amax_compute_algo == "most_recent":
        why = 'with fp8_amax_compute_algo = "most_recent"'
        notes += reading.idle_note(config, ("fp8_amax_history_len",), why, TABLE)
    return notes


def _accumulation(reading: Reading, config: Nemo1, reduce: torch.dtype) -> dict[str, Decision]:
    """Return the dtype of gradient accumulation under Megatron-core's distributed optimizer: that
    of reduction."""
    if config.optim_name != "mcore_distributed_optim":
        return {}
    return {"gradients": _decided_by(reading, reduce, "grad_sync_dtype", "optim_name")}


def _decided_by(reading: Reading, value: Any, *keys: str) -> Decision:
    """Return `Reading.decided_by` for keys of this table."""
    return reading.decided_by(value, *(f"{TABLE}.{key}" for key in keys))


def _refuse_contradictions(reading: Reading, config: Nemo1, dtype: torch.dtype) -> None:
    """Record a problem for each key whose value does not go with another one."""
    if dtype == torch.float16 and config.megatron_amp_O2 and config.optim_name not in DISTRIBUTED:
        why = "NeMo 1 does not train FP16 with O2: use bf16, or megatron_amp_O2 = false"
        reading.refuse(f"{TABLE}.megatron_amp_O2", True, why)
    if config.optim_dtype is not None and config.optim_name != "distributed_fused_adam":
        reading.refuse(
            f"{TABLE}.optim_dtype", config.optim_dtype, "only distributed_fused_adam has a dtype"
        )
    if config.fp8 and not (config.fp8_e4m3 or config.fp8_hybrid):
        reading.refuse(f"{TABLE}.fp8", True, "needs fp8_hybrid or fp8_e4m3 beside it")


def _scaling(reading: Reading, config: Nemo1, dtype: torch.dtype) -> Decision:
    """Return the loss scale: a dynamic one with FP16, else none."""
    if dtype != torch.float16:
        return _decided_by(reading, LossScaling(), "precision")
    scaling = LossScaling(
        "dynamic",
        initial=config.native_amp_init_scale,
        minimum=FLOOR,
        growth_interval=config.native_amp_growth_interval,
        hysteresis=config.hysteresis,
        hysteresis_refill="good_step",  # Megatron refills it only when the scale grows
    )
    return _decided_by(reading, scaling, "precision", *SCALE_KEYS)


def _fp8(config: Nemo1) -> FP8Recipe | None:
    """Return the recipe of FP8 products, None without FP8."""
    if not config.fp8:
        return None
    return FP8Recipe(
        format="e4m3" if config.fp8_e4m3 else "hybrid",
        margin=config.fp8_margin,
        history_length=config.fp8_amax_history_len,
        amax_algo=config.fp8_amax_compute_algo,
        reduce_amax=config.reduce_amax,
        # amaxes are reduced over the ranks of a pipeline stage
        reduce_over="stage",
        parameters=config.fp8_params,
        weight_gradients=config.fp8_wgrad,
    )
