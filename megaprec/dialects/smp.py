"""Dialect of SageMaker model parallelism (SMP) v2: FSDP's mixed precision, with Transformer
Engine's FP8 on top.

FSDP keeps the parameters as the model was built, in FP32, and casts the gathered parameters. So
masters and moments are FP32, weights and products are in `param_dtype`, gradients are reduced in
`reduce_dtype` and accumulated in FP32, unless `keep_low_precision_grads` is set. Layers without FP8
follow the mixed-precision policy.

    [precision.smp]
    max_grad_norm = 1.0                  argument of clip_grad_norm_; the run file's optimizer.clip
                                         if it is not given, no clipping if it is 0
    [precision.smp.mixed_precision]      MixedPrecision, argument `mixed_precision` of FSDP; or
    param_dtype = "bfloat16"             default: float32, as the model was built
    reduce_dtype = "float32"             default: param_dtype
    buffer_dtype = "float32"             default: float32, as the model was built
    [precision.smp.mp_policy]            MixedPrecisionPolicy, argument `mp_policy` of fully_shard
    [precision.smp.grad_scaler]          ShardedGradScaler, for float16; none if the table is not
                                         there
    [precision.smp.fp8_autocast]         fp8_autocast of Transformer Engine
    [precision.smp.fp8_autocast.fp8_recipe]
    recipe = "DelayedScaling"            the default; or Float8CurrentScaling, Float8BlockScaling,
                                         MXFP8BlockScaling
    amax_history_len = 32

In Python the same classes are arguments: `resolve({"mixed_precision":
MixedPrecision(param_dtype=torch.bfloat16)})`.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from pydantic import BeforeValidator, Field

from megaprec.dialects.reading import (
    NO_MARGIN,
    Decision,
    Dtype,
    Keys,
    Reading,
    Resolved,
    all_of,
    member,
    name_of,
)
from megaprec.dialects.scaling import (
    TORCH_SCALER_KEYS,
    TorchGradScaler,
    express_torch_scaling,
    torch_scaling,
)
from megaprec.errors import did_you_mean
from megaprec.precision.fp8_recipe import LARGEST_MARGIN, FP8Recipe, Kind
from megaprec.precision.plan import PrecisionPlan

SYSTEM = "SageMaker SMP"
PREFIX = "precision.smp"
# (cast_forward_inputs, cast_root_forward_inputs) -> PrecisionPlan.cast_inputs
CAST = {(False, False): "none", (False, True): "root", (True, False): "inner", (True, True): "all"}


class MixedPrecision(Keys):
    """FSDP1's policy. None: FP32, as the model was built; for reduce_dtype: param_dtype.

    `_module_classes_to_ignore` is not read: norms compute in FP32 in any case.
    """

    param_dtype: Dtype | None = None
    reduce_dtype: Dtype | None = None
    buffer_dtype: Dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True


class MixedPrecisionPolicy(Keys):
    """FSDP2's policy. None means the same as in FSDP1; output_dtype None leaves outputs in the
    compute dtype."""

    param_dtype: Dtype | None = None
    reduce_dtype: Dtype | None = None
    output_dtype: Dtype | None = None
    cast_forward_inputs: bool = True


class Format(Enum):
    """Transformer Engine's FP8 formats: E4M3 for all tensors, or E4M3 forward and E5M2 for
    gradients."""

    E4M3 = "e4m3"
    HYBRID = "hybrid"


def _amax_algo(value: object) -> object:
    """Return the way to take an amax from a history: a name of Transformer Engine's, or a
    function."""
    if value in ("max", "most_recent") or callable(value):
        return value
    raise ValueError(
        'must be "max", "most_recent" or a function of a history [length, n] that returns '
        "amaxes [n]"
    )


def _scale_algo(value: object) -> object:
    """Return a function that computes a scale, or None for Transformer Engine's."""
    if value is None or callable(value):
        return value
    raise ValueError("must be a function of amax, scale, fp8_max and recipe that returns a scale")


def _wide_products(value: object) -> object:
    """Return which products are not in FP8: of the forward pass, input gradients and weight
    gradients. Transformer Engine allows the last alone."""
    flags = tuple(value) if isinstance(value, list | tuple) else ()
    if len(flags) != 3 or not all(isinstance(flag, bool) for flag in flags):
        raise ValueError(
            "must be three of true and false: whether the products of the forward pass, input "
            "gradients and weight gradients are not in FP8"
        )
    if flags[0] or flags[1]:
        raise ValueError("only the last, of weight gradients, may be true in Transformer Engine")
    return flags


def _group(value: object) -> object:
    """Return "world" for a process group of all ranks or a name of it; any other value as it is.
    Raises ValueError for a group of some ranks."""
    # a name is what a run file can give; a group is for Python
    if isinstance(value, dist.ProcessGroup):
        if dist.get_world_size(value) == dist.get_world_size():
            return "world"
        raise ValueError(
            f"a group of {dist.get_world_size(value)} ranks: must be the world's, as amaxes "
            "have one scale"
        )
    if isinstance(value, str) and value.endswith("world_process_group"):
        return "world"
    return value


class DelayedScaling(Keys):
    """Transformer Engine's recipe with scales from amaxes of earlier passes. interval: only in
    older releases, 1."""

    recipe: Literal["DelayedScaling"] = "DelayedScaling"
    margin: int = Field(default=0, ge=-LARGEST_MARGIN, le=LARGEST_MARGIN)
    interval: Literal[1] = 1
    fp8_format: Annotated[Format, member(Format)] = Format.HYBRID
    amax_history_len: int = Field(default=1024, ge=1)
    amax_compute_algo: Annotated[Any, BeforeValidator(_amax_algo)] = "max"
    scaling_factor_compute_algo: Annotated[Any, BeforeValidator(_scale_algo)] = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    override_linear_precision: Annotated[
        tuple[bool, bool, bool], BeforeValidator(_wide_products)
    ] = (False, False, False)


class Float8CurrentScaling(Keys):
    """Transformer Engine's recipe with scales from the tensor itself."""

    recipe: Literal["Float8CurrentScaling"] = "Float8CurrentScaling"
    fp8_format: Annotated[Format, member(Format)] = Format.HYBRID
    use_power_2_scales: bool = False
    fp8_dpa: bool = False
    fp8_mha: bool = False


class Float8BlockScaling(Keys):
    """Transformer Engine's recipe with a scale per block of 128 and E4M3 for all tensors."""

    recipe: Literal["Float8BlockScaling"] = "Float8BlockScaling"
    fp8_format: Annotated[Format, member(Format)] = Format.E4M3
    use_f32_scales: bool = False
    fp8_dpa: bool = False
    fp8_mha: bool = False


class MXFP8BlockScaling(Keys):
    """Transformer Engine's recipe with a power of two as the scale of 32 elements."""

    recipe: Literal["MXFP8BlockScaling"] = "MXFP8BlockScaling"
    margin: int = 0
    fp8_format: Annotated[Format, member(Format)] = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False


RECIPES: Mapping[str, type[Keys]] = {
    "DelayedScaling": DelayedScaling,
    "Float8CurrentScaling": Float8CurrentScaling,
    "Float8BlockScaling": Float8BlockScaling,
    "MXFP8BlockScaling": MXFP8BlockScaling,
}
KINDS: Mapping[str, Kind] = {
    "DelayedScaling": "delayed",
    "Float8CurrentScaling": "current",
    "Float8BlockScaling": "blockwise",
    "MXFP8BlockScaling": "mx",
}


class Fp8Autocast(Keys):
    """Arguments of `fp8_autocast`. fp8_group None is the world, the only group that is
    supported."""

    enabled: bool = True
    calibrating: bool = False
    fp8_recipe: Any = None
    fp8_group: Annotated[Literal["world"] | None, BeforeValidator(_group)] = None


class Smp(Keys):
    """The tables of [precision.smp]."""

    mixed_precision: Any = None
    mp_policy: Any = None
    grad_scaler: Any = None
    fp8_autocast: Any = None
    max_grad_norm: float | None = Field(default=None, ge=0)


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Any = None,
    fp8_group: Any = None,
) -> Fp8Autocast:
    """Return the arguments of Transformer Engine's function of this name, in its order, as a value
    for `resolve`."""
    return Fp8Autocast(
        enabled=enabled,
        calibrating=calibrating,
        fp8_recipe=fp8_recipe,
        fp8_group=fp8_group,
    )  # pyright: ignore[reportArgumentType]


def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    recipe: Any = None,
    amax_reduction_group: Any = None,
) -> Fp8Autocast:
    """Return what `fp8_autocast` returns, from the arguments of `autocast`, which is its name in
    newer versions of Transformer Engine. It is no context manager: `resolve` takes the value."""
    return fp8_autocast(enabled, calibrating, recipe, amax_reduction_group)


def resolve(config: Mapping[str, Any] | None, sources: Mapping[str, str] | None = None) -> Resolved:
    """Return the plan and settings of `config`, a mapping of the tables above. Raises UserError.

    sources: full dotted key -> where it was set: a file or the command line.
    """
    reading = Reading(SYSTEM, PREFIX, sources)
    tables = reading.read(Smp, config)
    if tables.mixed_precision is not None and tables.mp_policy is not None:
        reading.refuse(
            "mp_policy", "{...}", "mixed_precision is there too: FSDP1 and FSDP2 exclude each other"
        )
    notes: tuple[str, ...] = ()
    if tables.mp_policy is not None:
        decisions, notes = _policy(reading, tables)
    else:
        decisions = _mixed_precision(reading, tables)
    # FSDP adds no scaler by itself
    if tables.grad_scaler is not None:
        scaler = reading.read(TorchGradScaler, tables.grad_scaler, "grad_scaler")
        decisions["scaling"] = reading.decided_by(
            torch_scaling(scaler), *(f"grad_scaler.{key}" for key in TORCH_SCALER_KEYS)
        )
    if tables.fp8_autocast is not None:
        decisions["fp8"], fp8_notes = _fp8(reading, tables.fp8_autocast)
        notes += fp8_notes
    reading.raise_problems()
    settings: dict[str, Decision] = {}
    if tables.max_grad_norm is not None:
        settings["optimizer.clip"] = reading.decided_by(tables.max_grad_norm, "max_grad_norm")
    if tables.max_grad_norm == 0:
        notes += (
            "max_grad_norm = 0: no clipping, as for transformers' Trainer; FSDP's "
            "clip_grad_norm_(0) erases gradients",
        )
    return reading.resolved(decisions, settings, notes)


def _mixed_precision(reading: Reading, tables: Smp) -> dict[str, Decision]:
    """Return the decisions of FSDP1's policy."""
    table = "mixed_precision"
    policy = reading.read(MixedPrecision, tables.mixed_precision, table)
    decisions = _common(reading, table, policy.param_dtype, policy.reduce_dtype)
    reduce: torch.dtype = decisions["reduce"].value
    # gradients that are reduced in FP32 are kept in FP32 anyway
    keeps_narrow = policy.keep_low_precision_grads and reduce != torch.float32
    if keeps_narrow and reduce != decisions["parameters"].value:
        reading.refuse(
            f"{table}.keep_low_precision_grads", True, "needs reduce_dtype to be param_dtype"
        )
    decisions |= {
        "gradients": reading.decided_by(
            reduce if keeps_narrow else torch.float32, f"{table}.keep_low_precision_grads"
        ),
        "buffers": reading.decided_by(
            policy.buffer_dtype or torch.float32, f"{table}.buffer_dtype"
        ),
        "output": reading.decided_by(decisions["compute"].value, f"{table}.param_dtype"),
        "cast_inputs": reading.decided_by(
            CAST[policy.cast_forward_inputs, policy.cast_root_forward_inputs],
            f"{table}.cast_forward_inputs",
            f"{table}.cast_root_forward_inputs",
        ),
    }
    return decisions


def _policy(reading: Reading, tables: Smp) -> tuple[dict[str, Decision], tuple[str, ...]]:
    """Return the decisions of FSDP2's policy, and notes."""
    table = "mp_policy"
    policy = reading.read(MixedPrecisionPolicy, tables.mp_policy, table)
    decisions = _common(reading, table, policy.param_dtype, policy.reduce_dtype)
    # FSDP2 leaves outputs as the last module computes them
    output = policy.output_dtype or decisions["compute"].value
    inputs = "all" if policy.cast_forward_inputs else "none"
    decisions |= {
        "output": reading.decided_by(output, f"{table}.output_dtype"),
        "cast_inputs": reading.decided_by(inputs, f"{table}.cast_forward_inputs"),
    }
    notes: tuple[str, ...] = ()
    if policy.param_dtype not in (None, torch.float32) and policy.reduce_dtype is None:
        notes = (
            "mp_policy.reduce_dtype is not given: releases of PyTorch differ, here it is "
            "param_dtype; better give it",
        )
    return decisions, notes


def _common(
    reading: Reading,
    table: str,
    param: torch.dtype | None,
    reduce: torch.dtype | None,
) -> dict[str, Decision]:
    """Return the decisions that are common to FSDP1 and FSDP2."""
    parameters = reading.decided_by(param or torch.float32, f"{table}.param_dtype")
    return {
        **all_of(("compute", "pipeline", "parameters"), parameters),
        **all_of(("masters", "moments", "gradients"), reading.always(torch.float32)),
        "reduce": reading.decided_by(reduce, f"{table}.reduce_dtype") if reduce else parameters,
    }


def _fp8(reading: Reading, values: Any) -> tuple[Decision, tuple[str, ...]]:
    """Return the FP8 recipe of `fp8_autocast`, None if it neither computes in FP8 nor calibrates;
    and notes."""
    arguments = reading.read(Fp8Autocast, values, "fp8_autocast")
    table = "fp8_autocast.fp8_recipe"
    recipe_values = {} if arguments.fp8_recipe is None else arguments.fp8_recipe
    if isinstance(recipe_values, str):
        recipe_values = {"recipe": recipe_values}
    # a table names its class, an instance is of it
    if isinstance(recipe_values, Mapping):
        name = recipe_values.get("recipe", "DelayedScaling")
    elif isinstance(recipe_values, tuple(RECIPES.values())):
        name = type(recipe_values).__name__
    else:
        reading.refuse(table, recipe_values, "must be a table of keys, or the name of a recipe")
        return reading.always(None), ()
    if name not in RECIPES:
        hint = did_you_mean(str(name), RECIPES)
        why = f"no such recipe; there are {', '.join(RECIPES)}{hint}"
        reading.refuse(f"{table}.recipe", name, why)
        return reading.always(None), ()
    recipe_keys = reading.read(RECIPES[name], recipe_values, table)
    recipe = None
    if arguments.enabled or arguments.calibrating:
        # calibration alone records amaxes, as with `enabled` off in Transformer Engine
        recipe = _recipe(name, dict(recipe_keys), calibrating=not arguments.enabled)
    notes = _idle_notes(reading, arguments, recipe_keys, table)
    keys = [f"fp8_autocast.{key}" for key in ("enabled", "calibrating", "fp8_recipe")]
    keys += [f"{table}.{key}" for key in RECIPES[name].model_fields]
    return reading.decided_by(recipe, *keys), notes


def _idle_notes(
    reading: Reading, arguments: Fp8Autocast, recipe_keys: Keys, table: str
) -> tuple[str, ...]:
    """Return notes on keys of FP8 that are set and change nothing beside the others.

    table: of `recipe_keys`.
    """
    if not arguments.enabled and not arguments.calibrating:
        keys = type(recipe_keys).model_fields
        return reading.idle_note(recipe_keys, keys, "with fp8_autocast.enabled = false", table)
    notes: tuple[str, ...] = ()
    if arguments.enabled:
        why = "with enabled = true: products in FP8 record their amaxes anyway"
        notes += reading.idle_note(arguments, ("calibrating",), why, "fp8_autocast")
    if isinstance(recipe_keys, MXFP8BlockScaling) and recipe_keys.margin:
        name = type(recipe_keys).__name__
        notes += (f"{table}.margin = {recipe_keys.margin} of {name}: {NO_MARGIN}",)
    if isinstance(recipe_keys, DelayedScaling) and recipe_keys.amax_compute_algo == "most_recent":
        why = 'with amax_compute_algo = "most_recent"'
        notes += reading.idle_note(recipe_keys, ("amax_history_len",), why, table)
    return notes


def _recipe(name: str, keys: Mapping[str, Any], calibrating: bool) -> FP8Recipe:
    """Return megaprec's recipe for Transformer Engine's recipe of this name. keys: of its class."""
    # Each class has some of the keys; the others have the values that its scaling implies, or that
    # FP8Recipe has by default.
    power_2_scales = keys.get("use_power_2_scales", False)
    if name == "Float8BlockScaling":  # whose key is the opposite one
        power_2_scales = not keys["use_f32_scales"]
    # (forward, input gradient, weight gradient): Transformer Engine allows the last alone
    *_, wide_weight_gradients = keys.get("override_linear_precision", (False,))
    return FP8Recipe(
        kind=KINDS[name],
        format=keys["fp8_format"].value,
        margin=keys["margin"] if name == "DelayedScaling" else 0,
        history_length=keys.get("amax_history_len", 1024),
        amax_algo=keys.get("amax_compute_algo", "max"),
        scale_algo=keys.get("scaling_factor_compute_algo"),
        reduce_amax=keys.get("reduce_amax", True),
        power_2_scales=power_2_scales,
        weight_gradients=not wide_weight_gradients,
        dot_product_attention=keys["fp8_dpa"],
        multi_head_attention=keys["fp8_mha"],
        calibrating=calibrating,
    )


def express(plan: PrecisionPlan, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return two configurations that approximate a plan and the run-file keys in `settings`: for
    FSDP1 and FSDP2."""
    dtypes = {"param_dtype": name_of(plan.parameters), "reduce_dtype": name_of(plan.reduce)}
    flags = {cast_inputs: flags for flags, cast_inputs in CAST.items()}
    inner, root = flags[plan.cast_inputs]
    fsdp1 = dtypes | {
        "buffer_dtype": name_of(plan.buffers),
        "keep_low_precision_grads": (
            plan.gradients != torch.float32 and plan.gradients == plan.reduce
        ),
        "cast_forward_inputs": inner,
        "cast_root_forward_inputs": root,
    }
    fsdp2 = dtypes | {"output_dtype": name_of(plan.output), "cast_forward_inputs": inner}
    common: dict[str, Any] = {}
    if settings.get("optimizer.clip"):
        common["max_grad_norm"] = settings["optimizer.clip"]
    if plan.scaling.kind != "none":
        common["grad_scaler"] = express_torch_scaling(plan.scaling)
    if plan.fp8 is not None:
        common["fp8_autocast"] = _express_fp8(plan.fp8)
    return [{"mixed_precision": fsdp1} | common, {"mp_policy": fsdp2} | common]


def _express_fp8(recipe: FP8Recipe) -> dict[str, Any]:
    """Return the nearest arguments of `fp8_autocast`."""
    names = {kind: name for name, kind in KINDS.items()}
    # Transformer Engine has no scale per row: a scale per tensor is the nearest
    name = names.get(recipe.kind, "Float8CurrentScaling")
    values = {
        # of several names for one setting, each recipe's class has those that are its own
        "margin": recipe.margin,
        "fp8_format": recipe.format.upper(),
        "amax_history_len": recipe.history_length,
        "amax_compute_algo": recipe.amax_algo,
        "scaling_factor_compute_algo": recipe.scale_algo,
        "reduce_amax": recipe.reduce_amax,
        "use_power_2_scales": recipe.power_2_scales,
        "use_f32_scales": not recipe.power_2_scales,
        "fp8_dpa": recipe.dot_product_attention,
        "fp8_mha": recipe.multi_head_attention,
        "override_linear_precision": [False, False, not recipe.weight_gradients],
    }
    fields_of_recipe = RECIPES[name].model_fields
    keys = {
        key: value for key, value in values.items() if key in fields_of_recipe and value is not None
    }
    arguments: dict[str, Any] = {"enabled": True}
    if recipe.calibrating:
        arguments = {"enabled": False, "calibrating": True}
    return arguments | {"fp8_recipe": {"recipe": name} | keys}
