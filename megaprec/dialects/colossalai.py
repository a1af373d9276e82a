"""Dialect of Colossal-AI: `fp16 = dict(mode=AMP_TYPE..., ...)`, its modes of half precision, and
the Booster's plugins.

TORCH     FP32 parameters under torch's autocast to FP16, with torch's gradient scaler.
APEX      NVIDIA apex's optimization levels. O0 is FP32, O1 autocast as above, O2 FP16 parameters
          with FP32 masters, O3 FP16 alone; each other key changes one property of its level.
PARALLEL  FP16 parameters with FP32 masters, Megatron's scaler with a maximal scale, clipping and
          zero count.
NAIVE     the later name of PARALLEL, with other defaults: no maximal or minimal scale, or a
          constant scale.

    [precision.colossalai]
    clip_grad_norm = 1.0                default: 0, no clipping
    mixed_precision = "fp16"            the Booster's; means mode TORCH
    [precision.colossalai.fp16]
    mode = "PARALLEL"
    initial_scale = 65536.0
    [precision.colossalai.plugin]       see megaprec.dialects.colossalai_plugins

Colossal-AI forbids TORCH and APEX with tensor and pipeline parallelism. Here all modes work with
both, because overflow detection is reduced over the whole world. apex's `keep_batchnorm_fp32`
applies to all norms of a model, of any kind.
"""

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field

from megaprec.dialects.colossalai_plugins import (
    FP8_COMMUNICATION_NOTE,
    PRECISION_DTYPES,
    Plugin,
    express_plugin,
    plugin_class,
    resolve_plugin,
)
from megaprec.dialects.reading import Decision, Dtype, Keys, Reading, Resolved, all_of, name_of
from megaprec.dialects.scaling import (
    CEILING,
    FLOOR,
    HYSTERESIS_SCALER_KEYS,
    TORCH_SCALER_KEYS,
    LossScale,
    TorchGradScaler,
    cap,
    express_torch_scaling,
    hysteresis_scaling,
    refuse_outside,
    torch_scaling,
)
from megaprec.errors import Problem, did_you_mean
from megaprec.precision.patterns import NORMS
from megaprec.precision.plan import LossScaling, PrecisionPlan

SYSTEM = "Colossal-AI"
PREFIX = "precision.colossalai"


class AMP_TYPE(Enum):
    """The implementation of mixed precision."""

    APEX = "apex"
    TORCH = "torch"
    PARALLEL = "parallel"
    NAIVE = "naive"


class Torch(TorchGradScaler):
    """Keys of AMP_TYPE.TORCH, which are those of torch's scaler."""

    # here and below Any: `_mode` has read it before the class is chosen
    mode: Any = AMP_TYPE.TORCH


def _number_or_dynamic(value: object) -> object:
    """Return a loss scale as a number, or as "dynamic"; apex also takes a number as text
    (apex/amp/frontend.py)."""
    if not isinstance(value, str) or value == "dynamic":
        return value
    try:
        return float(value)
    except ValueError as error:
        raise ValueError('must be a number or "dynamic"') from error


def _boolean_of_text(value: object) -> object:
    """Return the texts "True" and "False", which apex too reads (apex/amp/frontend.py), as
    booleans."""
    if isinstance(value, str):
        return {"True": True, "False": False}.get(value, value)
    return value


class Apex(Keys):
    """Keys of AMP_TYPE.APEX, arguments of apex.amp.initialize. None: the value of the level."""

    mode: Any = AMP_TYPE.APEX
    enabled: bool = True
    opt_level: Literal["O0", "O1", "O2", "O3"] = "O1"
    cast_model_type: Dtype | None = None
    patch_torch_functions: bool | None = None
    keep_batchnorm_fp32: Annotated[bool | None, BeforeValidator(_boolean_of_text)] = None
    master_weights: bool | None = None
    loss_scale: Annotated[LossScale | str | None, BeforeValidator(_number_or_dynamic)] = None
    cast_model_outputs: Dtype | None = None
    num_losses: int = Field(default=1, ge=1)
    verbosity: int = Field(default=1, ge=0)
    min_loss_scale: LossScale | None = None
    max_loss_scale: LossScale = 2.0**24


class ColossalParallel(Keys):
    """Keys of AMP_TYPE.PARALLEL. max_scale is in Colossal-AI's code, though not in its
    documentation."""

    mode: Any = AMP_TYPE.PARALLEL
    clip_grad: float = Field(default=0, ge=0)
    log_num_zeros_in_grad: bool = False
    initial_scale: LossScale = 2.0**32
    min_scale: LossScale = 1
    growth_factor: float = Field(default=2, gt=1)
    backoff_factor: float = Field(default=0.5, gt=0, lt=1)
    growth_interval: int = Field(default=1000, gt=0)
    hysteresis: int = Field(default=2, gt=0)
    max_scale: LossScale = 2.0**32


class Naive(Keys):
    """Keys of AMP_TYPE.NAIVE (legacy/amp/naive_amp). min_scale, max_scale None: no limit."""

    mode: Any = AMP_TYPE.NAIVE
    dynamic_grad_scale: bool = True
    initial_scale: LossScale = 2.0**16
    min_scale: LossScale | None = None
    growth_factor: float = Field(default=2, gt=1)
    backoff_factor: float = Field(default=0.5, gt=0, lt=1)
    growth_interval: int = Field(default=1000, gt=0)
    hysteresis: int = Field(default=2, gt=0)
    max_scale: LossScale | None = None
    verbose: bool = False


class Config(Keys):
    """The keys of [precision.colossalai]. clip_grad_norm None: no clipping."""

    fp16: Any = None
    plugin: Any = None
    mixed_precision: Literal["fp16", "fp16_apex", "fp16_naive", "bf16", "fp8"] | None = None
    clip_grad_norm: float | None = Field(default=None, ge=0)


LEVELS: Mapping[str, Mapping[str, Any]] = {
    "O0": {
        "cast_model_type": torch.float32,
        "patch_torch_functions": False,
        "keep_batchnorm_fp32": None,
        "master_weights": False,
        "loss_scale": 1.0,  # none
    },
    "O1": {
        "cast_model_type": None,
        "patch_torch_functions": True,
        "keep_batchnorm_fp32": None,
        "master_weights": None,
        "loss_scale": "dynamic",
    },
    "O2": {
        "cast_model_type": torch.float16,
        "patch_torch_functions": False,
        "keep_batchnorm_fp32": True,
        "master_weights": True,
        "loss_scale": "dynamic",
    },
    "O3": {
        "cast_model_type": torch.float16,
        "patch_torch_functions": False,
        "keep_batchnorm_fp32": False,
        "master_weights": False,
        "loss_scale": 1.0,
    },
}
"""Level of apex -> its values of the keys (apex/amp/frontend.py)."""
UNMIXED = ("compute", "pipeline", "parameters")
"""Fields of a plan whose dtype is that of the model, if nothing mixes precision."""
# keys without a value in O1, which apex refuses beside it
O1_LEAVES_OPEN = ("cast_model_type", "keep_batchnorm_fp32", "master_weights")


def resolve(config: Mapping[str, Any] | None, sources: Mapping[str, str] | None = None) -> Resolved:
    """Return the plan and settings of `config`, a mapping with Colossal-AI's field `fp16`. Raises
    UserError.

    sources: full dotted key -> where it was set: a file or the command line.
    """
    reading = Reading(SYSTEM, PREFIX, sources)
    tables = reading.read(Config, config)
    if tables.plugin is not None:
        return _resolve_with_plugin(reading, tables)
    _refuse_stub(reading, tables)
    by_booster = tables.fp16 is None and tables.mixed_precision is not None
    # the Booster's "fp16" is mode TORCH
    fp16: Any = {"mode": "TORCH"} if by_booster else tables.fp16
    if not isinstance(fp16, Mapping):
        reading.refuse("fp16", fp16, "must be a table of keys with a mode")
        reading.raise_problems()
    mode = _mode(reading, fp16)
    if mode == AMP_TYPE.PARALLEL and tables.clip_grad_norm is not None and "clip_grad" in fp16:
        reading.refuse(
            "clip_grad_norm", tables.clip_grad_norm, "fp16.clip_grad is there too: keep one of them"
        )
    # the mode decides which keys the table may have
    resolve_mode = {
        AMP_TYPE.TORCH: _resolve_torch,
        AMP_TYPE.APEX: _resolve_apex,
        AMP_TYPE.PARALLEL: _resolve_parallel,
        AMP_TYPE.NAIVE: _resolve_naive,
    }[mode]
    resolved = resolve_mode(reading, fp16)
    if "optimizer.clip" in resolved.settings:
        return resolved
    # the engine's clipping, which is off if its key is not set
    clip = reading.decided_by(tables.clip_grad_norm or 0.0, "clip_grad_norm")
    return replace(resolved, settings={**resolved.settings, "optimizer.clip": clip})


def _refuse_stub(reading: Reading, tables: Config) -> None:
    """Record a problem if the Booster's `mixed_precision` is one that it cannot train in."""
    if tables.mixed_precision not in (None, "fp16"):
        why = 'Colossal-AI itself has only a stub of it: use "fp16", or a plugin with a precision'
        reading.refuse("mixed_precision", tables.mixed_precision, why)


def _resolve_with_plugin(reading: Reading, tables: Config) -> Resolved:
    """Return a plugin's plan. The Booster's `mixed_precision` is used only if the plugin does not
    decide precision."""
    plugin = reading.read(plugin_class(reading, tables.plugin), tables.plugin, "plugin")
    if isinstance(plugin, Plugin):
        return _resolve_deciding_plugin(reading, tables, plugin)
    notes: tuple[str, ...] = ()
    if getattr(plugin, "fp8_communication", False):
        notes += (FP8_COMMUNICATION_NOTE,)
    notes += reading.idle_note(
        tables, ("clip_grad_norm",), "beside a plugin; which here clips nothing"
    )
    _refuse_stub(reading, tables)
    # this plugin does not look at the engine's clipping
    unclipped = {"optimizer.clip": reading.always(0.0)}
    if tables.fp16 is None and tables.mixed_precision is None:
        reading.raise_problems()
        fp32 = reading.decided_by(torch.float32, "mixed_precision")
        return reading.resolved(all_of(UNMIXED, fp32), unclipped, notes)
    resolved = _resolve_torch(reading, tables.fp16 or {"mode": "TORCH"})
    settings = {**resolved.settings, **unclipped}
    return replace(resolved, settings=settings, notes=(*resolved.notes, *notes))


def _resolve_deciding_plugin(reading: Reading, tables: Config, plugin: Plugin) -> Resolved:
    """Return the plan of a plugin that decides precision, with notes on what it overrides."""
    clipping = reading.idle_note(
        tables, ("clip_grad_norm",), "beside a plugin; max_norm is its key"
    )
    if tables.fp16 is not None:
        reading.refuse(
            "fp16", "{...}", "plugin is there too and decides precision: keep the one that is meant"
        )
    resolved = resolve_plugin(reading, plugin)
    notes = resolved.notes
    if tables.mixed_precision:
        notes += (
            "mixed_precision: the Booster ignores it beside a plugin that decides precision itself",
        )
    return replace(resolved, notes=notes + clipping)


def _mode(reading: Reading, fp16: Mapping[str, Any]) -> AMP_TYPE:
    """Return the mode, a member or its name with or without the class. Raises UserError if there is
    none, or another problem."""
    mode = fp16.get("mode")
    modes = AMP_TYPE.__members__
    if isinstance(mode, AMP_TYPE):
        name = mode.name
    else:
        name = str(mode).rpartition(".")[2].upper()
    if mode is None:
        # DeepSpeed has a table of the same name
        hint = "; DeepSpeed's file is one for megaprec import-args" if "enabled" in fp16 else ""
        reading.problems.append(
            Problem.of(
                "dialect.mode_missing",
                key=f"{PREFIX}.fp16.mode",
                modes=", ".join(modes),
                hint=hint,
                system=SYSTEM,
            )
        )
    elif name not in modes:
        reading.refuse(
            "fp16.mode",
            mode,
            f"no such mode; there are {', '.join(modes)}{did_you_mean(name, modes)}",
        )
    reading.raise_problems()
    return modes[name]


def _resolve_torch(reading: Reading, fp16: Mapping[str, Any]) -> Resolved:
    """Return the plan of mode TORCH. fp16: the table, here and in the other modes. Raises
    UserError."""
    config = reading.read(Torch, fp16, "fp16")
    reading.raise_problems()
    scaling = reading.decided_by(
        torch_scaling(config), *(f"fp16.{key}" for key in TORCH_SCALER_KEYS)
    )
    return reading.resolved(_autocast(reading) | {"scaling": scaling}, {})


def _autocast(reading: Reading) -> dict[str, Decision]:
    """Return the decisions of autocast: FP32 parameters and activations between layers, matrix
    products in FP16."""
    fp32 = reading.decided_by(torch.float32, "fp16.mode")
    fp16 = reading.decided_by(torch.float16, "fp16.mode")
    # the residual stream begins with the embedding in FP32, so that sums with it are FP32
    in_fp32 = ("parameters", "residual", "pipeline", "masters", "moments", "gradients", "reduce")
    return all_of(in_fp32, fp32) | all_of(("compute", "output"), fp16)


def _resolve_parallel(reading: Reading, fp16: Mapping[str, Any]) -> Resolved:
    """Return the plan of mode PARALLEL, and its clipping. Raises UserError."""
    config = reading.read(ColossalParallel, fp16, "fp16")
    floor = config.min_scale
    ceiling = config.max_scale
    refuse_outside(reading, "fp16.initial_scale", config.initial_scale, floor, ceiling)
    reading.raise_problems()
    scaling = hysteresis_scaling(config, floor, ceiling)
    decisions = _fp16_with_masters(reading)
    scale_keys = [f"fp16.{key}" for key in HYSTERESIS_SCALER_KEYS]
    decisions["scaling"] = reading.decided_by(scaling, *scale_keys)
    settings: dict[str, Decision] = {}
    if f"{PREFIX}.clip_grad_norm" not in reading.set_keys:  # which decides it otherwise
        settings["optimizer.clip"] = reading.decided_by(config.clip_grad, "fp16.clip_grad")
    notes: tuple[str, ...] = ()
    if config.log_num_zeros_in_grad:
        notes = ("log_num_zeros_in_grad: here every step counts them",)
    return reading.resolved(decisions, settings, notes)


def _resolve_naive(reading: Reading, fp16: Mapping[str, Any]) -> Resolved:
    """Return the plan of mode NAIVE. Raises UserError."""
    config = reading.read(Naive, fp16, "fp16")
    # without min_scale and max_scale only FP32 limits the scale
    floor = config.min_scale or FLOOR
    ceiling = config.max_scale or CEILING
    refuse_outside(reading, "fp16.initial_scale", config.initial_scale, floor, ceiling)
    reading.raise_problems()
    if config.dynamic_grad_scale:
        scaling = hysteresis_scaling(config, floor, ceiling)
    else:
        scaling = LossScaling("constant", config.initial_scale)
    keys = [f"fp16.{key}" for key in ("dynamic_grad_scale", *HYSTERESIS_SCALER_KEYS)]
    decisions = _fp16_with_masters(reading)
    decisions["scaling"] = reading.decided_by(scaling, *keys)
    return reading.resolved(decisions, {})


def _fp16_with_masters(reading: Reading) -> dict[str, Decision]:
    """Return the decisions of an FP16 model with FP32 masters."""
    fp16 = reading.decided_by(torch.float16, "fp16.mode")
    fp32 = reading.always(torch.float32)
    in_fp16 = ("compute", "pipeline", "parameters", "gradients", "reduce")
    return all_of(in_fp16, fp16) | all_of(("masters", "moments", "output"), fp32)


def _resolve_apex(reading: Reading, fp16: Mapping[str, Any]) -> Resolved:
    """Return the plan of mode APEX: that of the level, with the properties that are set beside it.
    Raises UserError."""
    config = reading.read(Apex, fp16, "fp16")
    _refuse_apex_contradictions(reading, config)
    reading.raise_problems()
    if not config.enabled:  # apex.amp.initialize then changes nothing
        fp32 = reading.decided_by(torch.float32, "fp16.enabled")
        return reading.resolved(all_of(UNMIXED, fp32), {})
    level = dict(LEVELS[config.opt_level])
    for key, value in config:
        # what is set beside the level replaces its value
        if key in level and value is not None:
            level[key] = value
    scale_keys = [f"fp16.{key}" for key in ("opt_level", *_APEX_SCALE)]
    scaling = reading.decided_by(_apex_scaling(config, level["loss_scale"]), *scale_keys)
    if level["patch_torch_functions"]:  # apex casts the arguments of functions, as autocast does
        decisions = _autocast(reading)
        fp16_of_level = reading.decided_by(torch.float16, "fp16.opt_level")
        decisions |= all_of(("compute", "output"), fp16_of_level)
    else:
        decisions = _cast_model(reading, level)
    if config.cast_model_outputs is not None:
        decisions["output"] = reading.decided_by(
            config.cast_model_outputs, "fp16.cast_model_outputs"
        )
    notes: tuple[str, ...] = ()
    if config.num_losses > 1:
        notes += ("num_losses: a run has one loss, so one scaler",)
    if level["loss_scale"] != "dynamic":
        bounds = ("min_loss_scale", "max_loss_scale")
        notes += reading.idle_note(
            config, bounds, 'without loss_scale = "dynamic": a constant scale has no bounds', "fp16"
        )
    if config.verbosity == 0:  # for which apex says nothing
        notes = ()
    return reading.resolved(decisions | {"scaling": scaling}, {}, notes)


_APEX_SCALE = ("loss_scale", "min_loss_scale", "max_loss_scale")


def _cast_model(reading: Reading, level: Mapping[str, Any]) -> dict[str, Decision]:
    """Return the decisions of a model that is cast as a whole, except for its norms if they stay in
    FP32."""
    dtype: torch.dtype = level["cast_model_type"] or torch.float32
    parameters = reading.decided_by(dtype, "fp16.opt_level", "fp16.cast_model_type")
    # without masters apex updates the model's own weights
    masters = torch.float32 if level["master_weights"] else dtype
    # FP16 has too little range for moments: without masters they are FP32 too
    moments = masters if masters != torch.float16 else torch.float32
    keep_fp32 = NORMS if level["keep_batchnorm_fp32"] else ()
    keys_of_masters = ("fp16.opt_level", "fp16.master_weights")
    return {
        **all_of(("compute", "pipeline", "parameters", "reduce"), parameters),
        **all_of(("masters", "gradients"), reading.decided_by(masters, *keys_of_masters)),
        "moments": reading.decided_by(moments, *keys_of_masters),
        "keep_fp32": reading.decided_by(keep_fp32, "fp16.opt_level", "fp16.keep_batchnorm_fp32"),
        "output": reading.decided_by(torch.float32, "fp16.opt_level"),
    }


def _apex_scaling(config: Apex, scale: float | str) -> LossScaling:
    """Return apex's loss scaling. scale: of the level or of the key: a number, or "dynamic"."""
    if scale == "dynamic":
        return LossScaling(
            "dynamic",
            initial=_apex_initial_scale(config),
            minimum=config.min_loss_scale or FLOOR,
            growth_interval=2000,
            hysteresis=1,
            maximum=cap(config.max_loss_scale),
        )
    if scale == 1.0:  # which changes no gradient
        return LossScaling()
    return LossScaling("constant", float(scale))


def _apex_initial_scale(config: Apex) -> float:
    """Return the first dynamic scale: apex has no key for it (apex/amp/scaler.py: LossScaler)."""
    return min(2.0**16, config.max_loss_scale)


def _refuse_apex_contradictions(reading: Reading, config: Apex) -> None:
    """Record the contradictions between a level and the properties set beside it, which apex
    refuses."""
    if config.opt_level == "O1":
        for key in O1_LEAVES_OPEN:
            value = getattr(config, key)
            if value is not None and value != torch.float32:
                why = "O1 casts functions, not the model: leave it out, or use opt_level O2 or O3"
                reading.refuse(f"fp16.{key}", value, why)
    elif config.patch_torch_functions:
        reading.refuse(
            "fp16.patch_torch_functions", True, f"belongs to opt_level O1, not {config.opt_level}"
        )
    minimum = config.min_loss_scale
    initial = _apex_initial_scale(config)
    if minimum is not None and minimum > initial:
        why = f"is more than the scale starts with, {initial:g}"
        reading.refuse("fp16.min_loss_scale", minimum, why)


def express(plan: PrecisionPlan, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return configurations that approximate a plan, one for each mode and level."""
    scaling = plan.scaling
    clip = settings.get("optimizer.clip", 0.0)
    scaler_keys = {
        "initial_scale": scaling.initial,
        "min_scale": scaling.minimum,
        "growth_factor": scaling.growth_factor,
        "backoff_factor": scaling.backoff_factor,
        "growth_interval": scaling.growth_interval,
        "hysteresis": scaling.hysteresis,
        "max_scale": scaling.maximum or CEILING,
    }
    parallel = {"mode": "PARALLEL", "clip_grad": clip} | scaler_keys
    apex_scale = _express_apex_scaling(scaling)
    level_1 = {"mode": "APEX", "opt_level": "O1"} | apex_scale
    level_2 = {"mode": "APEX", "opt_level": "O2", "cast_model_type": name_of(plan.parameters)}
    level_2 |= apex_scale
    level_2 |= {
        "keep_batchnorm_fp32": bool(plan.keep_fp32),
        "master_weights": plan.masters == torch.float32,
        "cast_model_outputs": name_of(plan.output),
    }
    # candidates, of which `translate` takes the nearest
    modes = [
        {"mode": "TORCH"} | express_torch_scaling(scaling),
        level_1,
        level_1 | {"cast_model_outputs": name_of(plan.output)},
        level_1 | {"patch_torch_functions": False},
        level_2,
    ]
    # of the engine; PARALLEL has a key of its own
    clipping = {"clip_grad_norm": clip} if "optimizer.clip" in settings else {}
    sharded = bool(settings.get("parallel.zero", False))
    plugin_keys = scaler_keys | {"max_norm": clip}
    configs: list[dict[str, Any]] = [{"fp16": parallel}]
    configs += [{"fp16": mode} | clipping for mode in modes]
    configs += [express_plugin(plugin_keys, name, sharded) for name in PRECISION_DTYPES]
    return configs


def _express_apex_scaling(scaling: LossScaling) -> dict[str, Any]:
    """Return apex's keys nearest to a loss scaling."""
    if scaling.kind == "none":
        return {"loss_scale": 1.0}
    if scaling.kind == "constant":
        return {"loss_scale": scaling.initial}
    keys: dict[str, Any] = {"loss_scale": "dynamic", "max_loss_scale": scaling.maximum or CEILING}
    if scaling.minimum != FLOOR:
        keys["min_loss_scale"] = scaling.minimum
    return keys
