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
from megaprec.dialects.scaling import (
    HYSTERESIS_SCALER_KEYS,
    LossScale,
    hysteresis_scaling,
    refuse_outside,
)
from megaprec.errors import did_you_mean
from megaprec.precision.fp8_recipe import FP8Recipe
from megaprec.precision.plan import LossScaling

TABLE = "plugin"
FP8_COMMUNICATION_NOTE = (
    "plugin.fp8_communication: not supported here; gradients are communicated in precision.reduce"
)
# a plugin's name of a precision -> dtype
PRECISION_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class Plugin(Keys):
    """Keys common to the plugins that decide precision."""

    kind: str = ""
    precision: Literal["fp16", "bf16", "fp32"] = "fp16"
    initial_scale: LossScale = 2.0**16
    min_scale: LossScale = 1
    growth_factor: float = Field(default=2, gt=1)
    backoff_factor: float = Field(default=0.5, gt=0, lt=1)
    growth_interval: int = Field(default=1000, gt=0)
    hysteresis: int = Field(default=2, gt=0)
    max_scale: LossScale = 2.0**32
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
    initial_scale: LossScale = 2.0**32
    norm_type: Literal[2] = 2  # of clipping; others are not computed here
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
        hint = did_you_mean(str(kind), PLUGINS)
        why = f"no such plugin; there are {', '.join(PLUGINS)}{hint}"
        reading.refuse(f"{TABLE}.kind", kind, why)
        reading.raise_problems()  # at once: without a class no other key can be read
    return PLUGINS[str(kind)]


def resolve_plugin(reading: Reading, plugin: Plugin) -> Resolved:
    """Return the plan of a plugin that decides precision."""
    _refuse_contradictions(reading, plugin)
    reading.raise_problems()
    precision = reading.decided_by(PRECISION_DTYPES[plugin.precision], f"{TABLE}.precision")
    # plugins without the key always have masters; so it is with the inputs below
    has_masters = getattr(plugin, "master_weights", True)
    masters_dtype = torch.float32 if has_masters else precision.value
    masters = reading.decided_by(masters_dtype, *_keys_of_masters(plugin))
    # FP16 has too little range for moments: without masters they are FP32 too
    moments = masters if masters.value != torch.float16 else reading.always(torch.float32)
    cast_inputs = "root" if getattr(plugin, "cast_inputs", True) else "none"
    # Colossal-AI's FP8 products scale by the tensor itself
    fp8 = FP8Recipe("current") if plugin.use_fp8 else None
    decisions = {
        **all_of(("compute", "pipeline", "parameters", "gradients"), precision),
        "reduce": _reduce(reading, plugin, precision),
        "masters": masters,
        "moments": moments,
        "output": _output(reading, plugin, precision),
        "cast_inputs": reading.decided_by(cast_inputs, f"{TABLE}.cast_inputs"),
        "scaling": _scaling(reading, plugin),
        "fp8": reading.decided_by(fp8, f"{TABLE}.use_fp8"),
    }
    notes = (FP8_COMMUNICATION_NOTE,) if plugin.fp8_communication else ()
    if plugin.precision != "fp16":
        why = "without FP16, which alone has a loss scale"
        notes += reading.idle_note(plugin, HYSTERESIS_SCALER_KEYS, why, TABLE)
    if isinstance(plugin, HybridParallelPlugin) and plugin.zero_stage == 0:
        why = "without ZeRO, zero_stage 1 or 2"
        notes += reading.idle_note(plugin, ("communication_dtype",), why, TABLE)
    return reading.resolved(decisions, _settings(reading, plugin), notes)


def _keys_of_masters(plugin: Plugin) -> tuple[str, ...]:
    """Return the keys that decide the dtype of masters."""
    key = "master_weights" if "master_weights" in type(plugin).model_fields else "precision"
    return (f"{TABLE}.{key}", f"{TABLE}.precision")


def _reduce(reading: Reading, plugin: Plugin, precision: Decision) -> Decision:
    """Return the dtype of gradient reduction: the model's dtype, or `communication_dtype` under
    ZeRO."""
    dtype = getattr(plugin, "communication_dtype", None)
    # the plugin ignores the key without ZeRO
    without_zero = isinstance(plugin, HybridParallelPlugin) and plugin.zero_stage == 0
    if dtype is None or without_zero:
        return precision
    return reading.decided_by(dtype, f"{TABLE}.communication_dtype")


def _output(reading: Reading, plugin: Plugin, precision: Decision) -> Decision:
    """Return the dtype of the model's output: FP32, but for Gemini's, which has a key for it."""
    if isinstance(plugin, GeminiPlugin):
        dtype = torch.float32 if plugin.force_outputs_fp32 else precision.value
        return reading.decided_by(dtype, f"{TABLE}.force_outputs_fp32", f"{TABLE}.precision")
    return reading.always(torch.float32)


def _scaling(reading: Reading, plugin: Plugin) -> Decision:
    """Return the loss scaling: dynamic with hysteresis for FP16, otherwise none."""
    if plugin.precision != "fp16":
        return reading.decided_by(LossScaling(), f"{TABLE}.precision")
    scaling = hysteresis_scaling(plugin, plugin.min_scale, plugin.max_scale)
    keys = [f"{TABLE}.{key}" for key in HYSTERESIS_SCALER_KEYS]
    return reading.decided_by(scaling, *keys)


def _settings(reading: Reading, plugin: Plugin) -> dict[str, Decision]:
    """Return clipping, ZeRO and sizes of the layout, by run-file key."""
    settings = {"optimizer.clip": reading.decided_by(plugin.max_norm, f"{TABLE}.max_norm")}
    if isinstance(plugin, HybridParallelPlugin):
        settings["parallel.zero"] = reading.decided_by(plugin.zero_stage > 0, f"{TABLE}.zero_stage")
    elif isinstance(plugin, LowLevelZeroPlugin):
        settings["parallel.zero"] = reading.decided_by(True, f"{TABLE}.stage")
    else:  # Gemini, whose chunks are ZeRO
        settings["parallel.zero"] = reading.always(True)
    run_file_keys = {"tp_size": "parallel.tensor", "pp_size": "parallel.pipeline"}
    for key, run_file_key in run_file_keys.items():
        size = getattr(plugin, key, None)
        if size is not None:
            settings[run_file_key] = reading.decided_by(size, f"{TABLE}.{key}")
    return settings


def _refuse_contradictions(reading: Reading, plugin: Plugin) -> None:
    """Record a problem for each key whose value does not go with another one."""
    initial_key = f"{TABLE}.initial_scale"
    refuse_outside(reading, initial_key, plugin.initial_scale, plugin.min_scale, plugin.max_scale)
    # LowLevelZeroPlugin's `stage` is another key, which goes with every precision
    stage = getattr(plugin, "zero_stage", 0)
    if plugin.precision == "fp32" and (stage or isinstance(plugin, GeminiPlugin)):
        reading.refuse(
            f"{TABLE}.precision", "fp32", 'this plugin or ZeRO stage needs "fp16" or "bf16"'
        )
    pipeline_size = getattr(plugin, "pp_size", None) or 1
    if stage == 2 and pipeline_size > 1:
        why = (
            "Colossal-AI has stages 0 and 1 alone with pipeline parallelism, pp_size above 1: use 1"
        )
        reading.refuse(f"{TABLE}.zero_stage", 2, why)


def express_plugin(values: Mapping[str, Any], precision: str, sharded: bool) -> dict[str, Any]:
    """Return HybridParallelPlugin's keys for a precision, with `values` of its scale and
    clipping."""
    # the plugin has no FP32 with ZeRO
    stage = 1 if sharded and precision != "fp32" else 0
    plugin = {"kind": "HybridParallelPlugin", "precision": precision, "zero_stage": stage}
    for key, value in values.items():
        # only FP16 has a loss scale
        if precision == "fp16" or key == "max_norm":
            plugin[key] = value
    return {"plugin": plugin}
