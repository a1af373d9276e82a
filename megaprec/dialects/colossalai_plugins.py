"""Dialect of the plugins of Colossal-AI's Booster, by which its later versions configure half
precision.

    [precision.colossalai.plugin]
    kind = "HybridParallelPlugin"       or LowLevelZeroPlugin, GeminiPlugin, TorchDDPPlugin
    precision = "bf16"                  default: fp16
    max_norm = 1.0                      default: 0, no clipping

A plugin casts the model to FP16 or BF16 and keeps FP32 masters and moments; gradients are
accumulated and reduced in the model's dtype, or reduced in `communication_dtype` under ZeRO. FP16
has Megatron's dynamic scale with a maximum. With TorchDDPPlugin the Booster's argument
`mixed_precision` decides; the other plugins override it. Defaults are those of Colossal-AI's
booster/plugin/*.py, and differ between plugins.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field

from megaprec.dialects.reading import Decision, Dtype, Keys, Reading, Resolved, all_of
from megaprec.dialects.scaling import CEILING, FLOOR, cap
from megaprec.errors import did_you_mean
from megaprec.precision.fp8_recipe import FP8Recipe
from megaprec.precision.plan import LossScaling

TABLE = "plugin"
FP8_TRAVEL = (
    "plugin.fp8_communication: not supported here; gradients are communicated in precision.reduce"
)
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
SCALE = (
    "initial_scale",
    "min_scale",
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "hysteresis",
    "max_scale",
)


class Plugin(Keys):
    """Keys common to the plugins that decide precision."""

    kind: str = ""
    precision: Literal["fp16", "bf16", "fp32"] = "fp16"
    initial_scale: float = Field(default=2.0**16, ge=FLOOR, le=CEILING)
    min_scale: float = Field(default=1, ge=FLOOR, le=CEILING)
    growth_factor: float = Field(default=2, gt=1)
    backoff_factor: float = Field(default=0.5, gt=0, lt=1)
    growth_interval: int = Field(default=1000, gt=0)
    hysteresis: int = Field(default=2, gt=0)
    max_scale: float = Field(default=2.0**32, ge=FLOOR, le=CEILING)
    max_norm: float = Field(default=0, ge=0)
    use_fp8: bool = False
    fp8_communication: bool = False


class HybridParallelPlugin(Plugin):
    """Keys of the plugin with tensor and pipeline parallelism and ZeRO."""

    tp_size: int | None = Field(default=None, gt=0)
    pp_size: int | None = Field(default=None, gt=0)
    zero_stage: Literal[0, 1, 2] = 0
    communication_dtype: Dtype | None = None


class LowLevelZeroPlugin(Plugin):
    """Keys of the plugin with ZeRO alone."""

    stage: Literal[1, 2] = 1
    initial_scale: float = Field(default=2.0**32, ge=FLOOR, le=CEILING)
    norm_type: Literal[2] = 2
    communication_dtype: Dtype | None = None
    master_weights: bool = True
    cast_inputs: bool = True


class GeminiPlugin(Plugin):
    """Keys of the plugin with ZeRO in chunks of memory, which has no FP32 mode."""

    norm_type: Literal[2] = 2
    master_weights: bool = True
    force_outputs_fp32: bool = False
    tp_size: int | None = Field(default=None, gt=0)


class TorchDDPPlugin(Keys):
    """Keys of the plugin with plain data parallelism, which leaves precision to the Booster."""

    kind: str = ""
    fp8_communication: bool = False


PLUGINS: Mapping[str, type[Keys]] = {
    "HybridParallelPlugin": HybridParallelPlugin,
    "MoeHybridParallelPlugin": HybridParallelPlugin,
    "LowLevelZeroPlugin": LowLevelZeroPlugin,
    "GeminiPlugin": GeminiPlugin,
    "TorchDDPPlugin": TorchDDPPlugin,
}


def plugin_class(reading: Reading, values: object) -> type[Keys]:
    """Return the class of keys of the plugin that `values` names. Raises UserError for an unknown
    name."""
    kind = values.get("kind", "") if isinstance(values, Mapping) else ""
    if kind not in PLUGINS:
        would = f"no such plugin; there are {', '.join(PLUGINS)}{did_you_mean(str(kind), PLUGINS)}"
        reading.refuse(f"{TABLE}.kind", kind, would)
        reading.raise_problems()
    return PLUGINS[str(kind)]


def resolve_plugin(reading: Reading, asked: Plugin) -> Resolved:
    """Return the plan of a plugin that decides precision."""
    _contradictions(reading, asked)
    reading.raise_problems()
    half = reading.decided_by(HALVES[asked.precision], f"{TABLE}.precision")
    masters = reading.decided_by(
        torch.float32 if getattr(asked, "master_weights", True) else half.value, *_masters(asked)
    )
    decisions = {
        **all_of(("compute", "pipeline", "parameters", "gradients"), half),
        "reduce": _reduce(reading, asked, half),
        "masters": masters,
        "moments": masters if masters.value != torch.float16 else reading.always(torch.float32),
        "output": _output(reading, asked, half),
        "cast_inputs": reading.decided_by(
            "root" if getattr(asked, "cast_inputs", True) else "none", f"{TABLE}.cast_inputs"
        ),
        "scaling": _scaling(reading, asked),
        "fp8": reading.decided_by(
            FP8Recipe("current") if asked.use_fp8 else None, f"{TABLE}.use_fp8"
        ),
    }
    notes = (FP8_TRAVEL,) if asked.fp8_communication else ()
    if asked.precision != "fp16":
        notes += reading.idle_note(
            asked, SCALE, "without FP16, which alone has a loss scale", TABLE
        )
    if isinstance(asked, HybridParallelPlugin) and asked.zero_stage == 0:
        notes += reading.idle_note(
            asked, ("communication_dtype",), "without ZeRO, zero_stage 1 or 2", TABLE
        )
    return reading.resolved(decisions, _settings(reading, asked), notes)


def _masters(asked: Plugin) -> tuple[str, ...]:
    key = "master_weights" if "master_weights" in type(asked).model_fields else "precision"
    return (f"{TABLE}.{key}", f"{TABLE}.precision")


def _reduce(reading: Reading, asked: Plugin, half: Decision) -> Decision:
    """Return the dtype of gradient reduction: the model's dtype, or `communication_dtype` under
    ZeRO."""
    told = getattr(asked, "communication_dtype", None)
    if told is None or (isinstance(asked, HybridParallelPlugin) and asked.zero_stage == 0):
        return half
    return reading.decided_by(told, f"{TABLE}.communication_dtype")


def _output(reading: Reading, asked: Plugin, half: Decision) -> Decision:
    if isinstance(asked, GeminiPlugin):
        wide = torch.float32 if asked.force_outputs_fp32 else half.value
        return reading.decided_by(wide, f"{TABLE}.force_outputs_fp32", f"{TABLE}.precision")
    return reading.always(torch.float32)


def _scaling(reading: Reading, asked: Plugin) -> Decision:
    if asked.precision != "fp16":
        return reading.decided_by(LossScaling(), f"{TABLE}.precision")
    steps = (asked.growth_factor, asked.backoff_factor, asked.growth_interval, asked.hysteresis)
    scaling = LossScaling(
        "dynamic", asked.initial_scale, asked.min_scale, *steps, cap(asked.max_scale)
    )
    return reading.decided_by(scaling, *(f"{TABLE}.{key}" for key in SCALE))


def _settings(reading: Reading, asked: Plugin) -> dict[str, Decision]:
    settings = {"optimizer.clip": reading.decided_by(asked.max_norm, f"{TABLE}.max_norm")}
    if isinstance(asked, HybridParallelPlugin):
        settings["parallel.zero"] = reading.decided_by(asked.zero_stage > 0, f"{TABLE}.zero_stage")
    elif isinstance(asked, LowLevelZeroPlugin):
        settings["parallel.zero"] = reading.decided_by(True, f"{TABLE}.stage")
    else:
        settings["parallel.zero"] = reading.always(True)
    for key, name in (("tp_size", "parallel.tensor"), ("pp_size", "parallel.pipeline")):
        if getattr(asked, key, None) is not None:
            settings[name] = reading.decided_by(getattr(asked, key), f"{TABLE}.{key}")
    return settings


def _contradictions(reading: Reading, asked: Plugin) -> None:
    if not asked.min_scale <= asked.initial_scale <= asked.max_scale:
        why = f"must lie between min_scale {asked.min_scale:g} and max_scale {asked.max_scale:g}"
        reading.refuse(f"{TABLE}.initial_scale", asked.initial_scale, why)
    sharded = getattr(asked, "zero_stage", 0)
    if asked.precision == "fp32" and (sharded or isinstance(asked, GeminiPlugin)):
        reading.refuse(
            f"{TABLE}.precision", "fp32", 'this plugin or ZeRO stage needs "fp16" or "bf16"'
        )
    if sharded == 2 and (getattr(asked, "pp_size", None) or 1) > 1:
        why = (
            "Colossal-AI has stages 0 and 1 alone with pipeline parallelism, pp_size above 1: use 1"
        )
        reading.refuse(f"{TABLE}.zero_stage", 2, why)


def express_plugin(values: Mapping[str, Any], half: str, sharded: bool) -> dict[str, Any]:
    """Return HybridParallelPlugin's keys for a precision, with `values` of its scale and
    clipping."""
    stage = 1 if sharded and half != "fp32" else 0
    scale = {key: value for key, value in values.items() if half == "fp16" or key == "max_norm"}
    return {
        "plugin": {"kind": "HybridParallelPlugin", "precision": half, "zero_stage": stage} | scale
    }
