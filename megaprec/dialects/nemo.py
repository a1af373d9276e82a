"""Dialect of NeMo: the fields of MegatronMixedPrecision, and the recipes that set them.

Parameters are dtype-precision copies of FP32 masters, refreshed after each step; moments are FP32.
The dtype of gradient accumulation and reduction follows from `grad_reduce_in_fp32`, which recipes
set: FP32 for BF16, FP16 for FP16. FP8 changes the products of linear layers, not the loss scale.

    [precision.nemo]
    recipe = "bf16_with_fp8_mixed"      or: precision = "bf16-mixed", with the plugin's own defaults
    fp8_amax_history_len = 32           any field of the plugin; overrides the recipe

    clip_grad = 1.0                     a field of OptimizerConfig, like use_distributed_optimizer
    [precision.nemo.v1]                 the YAML of NeMo 1: see megaprec.dialects.nemo_v1

In Python: `resolve(bf16_mixed(grad_reduce_in_fp32=False))`. `autocast_enabled` does what its name
says, although NeMo itself never uses it. FP4 is NVFP4 by the recipe of Transformer Engine's
defaults, which environment variables of it (NVTE_NVFP4_*) may change there.
"""

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field

from megaprec.dialects.nemo_v1 import resolve_v1
from megaprec.dialects.reading import (
    NO_MARGIN,
    Decision,
    Dtype,
    Keys,
    Reading,
    Resolved,
    all_of,
    name_of,
)
from megaprec.dialects.scaling import LossScale
from megaprec.errors import did_you_mean
from megaprec.precision.fp8_recipe import LARGEST_MARGIN, FP8Recipe, Kind
from megaprec.precision.plan import LossScaling, PrecisionPlan

SYSTEM = "NeMo"
PREFIX = "precision.nemo"
PRECISION_DTYPES = {
    **dict.fromkeys(("fp16", "fp16-mixed", "16", "16-mixed"), torch.float16),
    **dict.fromkeys(("bf16", "bf16-mixed"), torch.bfloat16),
    **dict.fromkeys(("fp32", "32"), torch.float32),
}
FP4_FORMAT = "e2m1"
NVFP4: Kind = "nvfp4"
KINDS: Mapping[str, Kind] = {
    "delayed": "delayed",
    "tensorwise": "current",
    "blockwise": "blockwise",
    "mxfp8": "mx",
}
# Layers in BF16, of FP8 and of FP4.
WIDE_KEYS = (
    "first_last_layers_bf16",
    "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16",
)
# Of FP8 alone.
FP8_KEYS = (
    "fp8_recipe",
    "fp8_margin",
    "fp8_amax_history_len",
    "fp8_amax_compute_algo",
    "fp8_wgrad",
    "fp8_dot_product_attention",
    "fp8_multi_head_attention",
    "fp8_params",
    "fp8_param_gather",
)
SCALE_KEYS = (
    "fp16_initial_loss_scale",
    "fp16_min_loss_scale",
    "fp16_loss_scale_window",
    "fp16_hysteresis",
)


def _precision(value: object) -> object:
    """Return a precision as text. Raises ValueError for a text that is none."""
    # YAML and TOML have 16 and 32 as numbers
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    name = str(value) if is_integer else value
    if isinstance(name, str) and name not in PRECISION_DTYPES:
        hint = did_you_mean(name, PRECISION_DTYPES)
        raise ValueError(f"no such precision: use one of {', '.join(PRECISION_DTYPES)}{hint}")
    return name


def _recipe_name(value: object) -> object:
    """Return the value of a member of megatron.core's Fp8Recipe, which is the plugin's name of the
    recipe."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str) and "Fp8Recipe." in value:
        return value.rpartition(".")[2]
    return value


class MegatronMixedPrecision(Keys):
    """The plugin's fields, and those of OptimizerConfig that matter.

    pipeline_dtype None: bfloat16 with BF16, float32 otherwise. autocast_dtype None: the dtype of
        `precision`.
    """

    recipe: str | None = None
    precision: Annotated[str, BeforeValidator(_precision)] | None = None
    params_dtype: Dtype | None = None
    pipeline_dtype: Dtype | None = None
    autocast_dtype: Dtype | None = None
    autocast_enabled: bool = False
    grad_reduce_in_fp32: bool = True
    fp8: Literal["hybrid", "e4m3"] | None = None
    fp8_recipe: Annotated[
        Literal["delayed", "tensorwise", "mxfp8", "blockwise"], BeforeValidator(_recipe_name)
    ] = "delayed"
    first_last_layers_bf16: bool = False
    num_layers_at_start_in_bf16: int = Field(default=0, ge=0)
    num_layers_at_end_in_bf16: int = Field(default=0, ge=0)
    fp8_margin: int = Field(default=0, ge=-LARGEST_MARGIN, le=LARGEST_MARGIN)
    fp8_amax_history_len: int = Field(default=1, ge=1)
    fp8_amax_compute_algo: Literal["max", "most_recent"] = "most_recent"
    fp8_wgrad: bool = True
    fp8_dot_product_attention: bool = False
    fp8_multi_head_attention: bool = False
    fp8_params: bool | None = None
    fp8_param_gather: bool | None = None
    fp4: str | None = None
    fp4_recipe: str = "nvfp4"
    fp4_param: bool | None = None
    fp4_param_gather: bool | None = None
    fp16_loss_scale: LossScale | None = None
    fp16_initial_loss_scale: LossScale = 2.0**32
    fp16_min_loss_scale: LossScale = 1.0
    fp16_loss_scale_window: int = Field(default=1000, gt=0)
    fp16_hysteresis: int = Field(default=2, gt=0)
    reuse_grad_buf_for_mxfp8_param_ag: bool = False
    clip_grad: float | None = Field(default=None, ge=0)
    use_distributed_optimizer: bool | None = None
    use_precision_aware_optimizer: bool = False
    main_grads_dtype: Dtype | None = None
    main_params_dtype: Dtype | None = None
    exp_avg_dtype: Dtype | None = None
    exp_avg_sq_dtype: Dtype | None = None
    v1: Any = None


# what recipes without FP8 set, by the first word of the recipe's name
_MIXED_FIELDS: Mapping[str, dict[str, Any]] = {
    "bf16": {
        "precision": "bf16-mixed",
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "autocast_enabled": False,
        "grad_reduce_in_fp32": True,
    },
    "fp16": {
        "precision": "16-mixed",
        "params_dtype": torch.float16,
        "pipeline_dtype": torch.float16,
        "autocast_enabled": False,
        "grad_reduce_in_fp32": False,
    },
}
# what recipes with FP8 set besides, by the words that name the scaling
_FP8_FIELDS: dict[str, dict[str, Any]] = {
    "fp8": {
        "fp8_recipe": "delayed",
        "fp8_margin": 0,
        "fp8_amax_history_len": 1024,
        "fp8_amax_compute_algo": "max",
        "fp8_param_gather": True,
    },
    "mxfp8": {"fp8_recipe": "mxfp8", "fp8_param_gather": True},
    "fp8_current_scaling": {
        "fp8_recipe": "tensorwise",
        "first_last_layers_bf16": True,
        "num_layers_at_start_in_bf16": 1,
        "num_layers_at_end_in_bf16": 1,
        "fp8_param_gather": True,
    },
    "fp8_subchannel_scaling": {"fp8_recipe": "blockwise", "fp8_param_gather": False},
}
_FP8_FIELDS["fp8_delayed_scaling"] = _FP8_FIELDS["fp8"]  # its name in Megatron-Bridge
# Megatron-Bridge's, whose weights are kept in FP4
_NVFP4 = {"fp4": "e2m1", "fp4_recipe": "nvfp4", "fp4_param_gather": True}
# recipes of single models, in which two layers at each end stay in BF16
_NEMOTRON_H = _MIXED_FIELDS["bf16"] | {"fp8": "hybrid"} | _FP8_FIELDS["fp8_current_scaling"]
_NEMOTRON_H |= {"num_layers_at_start_in_bf16": 2, "num_layers_at_end_in_bf16": 2}
# NeMo calls it a recipe of current scaling, though its scales are those of blocks
_NANO_V2 = _NEMOTRON_H | {"fp8_recipe": "blockwise"}


def _all_recipes() -> dict[str, dict[str, Any]]:
    """Return the fields that each of NeMo's recipes sets."""
    recipes: dict[str, dict[str, Any]] = {}
    for precision, fields in _MIXED_FIELDS.items():
        recipes[f"{precision}_mixed"] = fields
    for precision, fields in _MIXED_FIELDS.items():
        for scaling, fp8_fields in _FP8_FIELDS.items():
            recipes[f"{precision}_with_{scaling}_mixed"] = fields | {"fp8": "hybrid"} | fp8_fields
    recipes["nemotron_h_bf16_with_fp8_current_scaling_mixed"] = _NEMOTRON_H
    recipes["bf16_with_nvfp4_mixed"] = _MIXED_FIELDS["bf16"] | _NVFP4
    recipes["nemotron_3_super_bf16_with_nvfp4_mixed"] = recipes["bf16_with_nvfp4_mixed"] | {
        "first_last_layers_bf16": True,
        "num_layers_at_end_in_bf16": 14,
    }
    recipes["nanov2_bf16_with_fp8_current_scaling_mixed"] = _NANO_V2
    return recipes


RECIPES: Mapping[str, Mapping[str, Any]] = _all_recipes()


def _recipe(name: str) -> Callable[..., MegatronMixedPrecision]:
    """Return a function of NeMo's name for a recipe."""

    def make(**fields: Any) -> MegatronMixedPrecision:
        return MegatronMixedPrecision(recipe=name, **fields)

    make.__name__ = name
    make.__doc__ = f"NeMo's recipe `{name}`, with some fields of the plugin changed."
    return make


bf16_mixed = _recipe("bf16_mixed")
fp16_mixed = _recipe("fp16_mixed")
bf16_with_fp8_mixed = _recipe("bf16_with_fp8_mixed")
fp16_with_fp8_mixed = _recipe("fp16_with_fp8_mixed")


def resolve(
    config: Mapping[str, Any] | MegatronMixedPrecision | None,
    sources: Mapping[str, str] | None = None,
) -> Resolved:
    """Return the plan and settings of `config`: the plugin's fields, or a recipe with changes.
    Raises UserError.

    sources: full dotted key -> where it was set: a file or the command line.
    """
    reading = Reading(SYSTEM, PREFIX, sources)
    set_fields = reading.read(MegatronMixedPrecision, config)
    if set_fields.v1 is not None:
        for key in sorted(set_fields.model_fields_set - {"v1"}):
            reading.refuse(
                key,
                getattr(set_fields, key),
                "v1, NeMo 1's YAML, is there too: keep the one that is meant",
            )
        return resolve_v1(reading, set_fields.v1)
    plugin = _fill_recipe(reading, set_fields)
    # without a precision, which is a problem by now, any dtype lets the other checks go on
    dtype = PRECISION_DTYPES[plugin.precision or "32"]
    _refuse_contradictions(reading, plugin, dtype)
    reading.raise_problems()
    # the plugin's default, which a recipe replaces
    default_pipeline = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    pipeline = plugin.pipeline_dtype or default_pipeline
    parameters = reading.decided_by(dtype, "precision", "recipe")
    compute = parameters
    if plugin.autocast_enabled:
        compute = reading.decided_by(
            plugin.autocast_dtype or dtype, "autocast_enabled", "autocast_dtype"
        )
        parameters = reading.decided_by(
            plugin.params_dtype or torch.float32, "params_dtype", "autocast_enabled"
        )
    # autocast leaves sums as wide as their widest operand, a branch or the embedding
    sum_dtype = torch.promote_types(parameters.value, compute.value)
    gradients = torch.float32 if plugin.grad_reduce_in_fp32 else parameters.value
    decisions = {
        "compute": compute,
        "parameters": parameters,
        "residual": parameters if sum_dtype == parameters.value else compute,
        "pipeline": reading.decided_by(pipeline, "pipeline_dtype", "recipe"),
        **all_of(
            ("gradients", "reduce"), reading.decided_by(gradients, "grad_reduce_in_fp32", "recipe")
        ),
        **_state_dtypes(reading, plugin),
        "scaling": _scaling(reading, plugin, dtype),
        "fp8": reading.decided_by(
            _fp8(plugin), "fp8", "fp4", "recipe", *FP8_KEYS, *WIDE_KEYS, "fp4_recipe"
        ),
    }
    notes = (*_notes(reading, plugin), *_idle_notes(reading, plugin, dtype))
    return reading.resolved(decisions, _settings(reading, plugin), notes)


def _settings(reading: Reading, plugin: MegatronMixedPrecision) -> dict[str, Decision]:
    """Return the run-file keys that fields of OptimizerConfig decide, for the fields that are
    set."""
    settings: dict[str, Decision] = {}
    for name, key in _RUN_FILE_KEYS.items():
        value = getattr(plugin, key)
        if value is not None:
            settings[name] = reading.decided_by(value, key)
    return settings


# run-file key -> field of the same value
_RUN_FILE_KEYS = {
    "optimizer.clip": "clip_grad",
    "parallel.zero": "use_distributed_optimizer",
}


def _fill_recipe(reading: Reading, plugin: MegatronMixedPrecision) -> MegatronMixedPrecision:
    """Return `plugin` with the recipe's values for the fields that are not set."""
    if plugin.recipe is None:
        # a precision with a wrong value, which is left out, is a problem already
        is_refused = f"{PREFIX}.precision" in "".join(reading.problems)
        if plugin.precision is None and not is_refused:
            reading.refuse(
                "precision",
                None,
                f"must be given, one of {', '.join(PRECISION_DTYPES)}, or a recipe instead",
            )
        return plugin
    if plugin.recipe not in RECIPES:
        hint = did_you_mean(plugin.recipe, RECIPES)
        why = f"no such recipe; there are {', '.join(RECIPES)}{hint}"
        reading.refuse("recipe", plugin.recipe, why)
        return plugin
    set_fields = {name: getattr(plugin, name) for name in plugin.model_fields_set}
    recipe_fields = dict(RECIPES[plugin.recipe])
    # other names of the same fields
    for name, other in (("fp8_params", "fp8_param_gather"), ("fp4_param", "fp4_param_gather")):
        if set_fields.get(name) is not None:
            recipe_fields.pop(other, None)
    return MegatronMixedPrecision(**{**recipe_fields, **set_fields})


def _refuse_contradictions(
    reading: Reading, plugin: MegatronMixedPrecision, dtype: torch.dtype
) -> None:
    """Record a problem for each field whose value does not go with another one.

    dtype: of the plugin's precision.
    """
    for name in ("params_dtype", "pipeline_dtype", "autocast_dtype"):
        set_dtype = getattr(plugin, name)
        if set_dtype not in (None, torch.float32, dtype) and plugin.precision:
            usable = "float32" if dtype == torch.float32 else f"float32 or {name_of(dtype)}"
            why = f'contradicts precision = "{plugin.precision}": use {usable}'
            reading.refuse(name, set_dtype, why)
    compute = plugin.autocast_dtype if plugin.autocast_enabled else dtype
    _refuse_fp8_contradictions(reading, plugin, compute or dtype)
    _refuse_state_contradictions(reading, plugin)
    if plugin.fp16_min_loss_scale > plugin.fp16_initial_loss_scale:
        reading.refuse(
            "fp16_min_loss_scale",
            plugin.fp16_min_loss_scale,
            "is more than fp16_initial_loss_scale",
        )


def _refuse_fp8_contradictions(
    reading: Reading, plugin: MegatronMixedPrecision, compute: torch.dtype
) -> None:
    """Record a problem for each field of FP8 or FP4 that contradicts another one, or that there is
    not here.

    compute: the dtype of products without FP8.
    """
    names_differ = plugin.fp8_params != plugin.fp8_param_gather
    if names_differ and None not in (plugin.fp8_params, plugin.fp8_param_gather):
        reading.refuse(
            "fp8_params",
            plugin.fp8_params,
            "fp8_param_gather, its newer name, has the opposite value",
        )
    if plugin.fp4 is not None:
        _refuse_other_fp4(reading, plugin)
        if compute != torch.bfloat16 and plugin.precision:
            why = f"Transformer Engine's NVFP4 takes BF16 alone, not {name_of(compute)}: "
            reading.refuse("fp4", plugin.fp4, f'{why}use precision = "bf16-mixed"')
    if plugin.fp8 and plugin.fp8_recipe == "delayed" and plugin.first_last_layers_bf16:
        reading.refuse(
            "first_last_layers_bf16",
            True,
            'not with fp8_recipe = "delayed"; use "tensorwise" or another',
        )


def _refuse_other_fp4(reading: Reading, plugin: MegatronMixedPrecision) -> None:
    """Record a problem for each field of FP4 that is not of the recipe that there is here."""
    if plugin.fp8:
        reading.refuse("fp4", plugin.fp4, "fp8 is given too: at most one of them")
    if plugin.fp4 != FP4_FORMAT:
        reading.refuse("fp4", plugin.fp4, f'the one format of FP4 is "{FP4_FORMAT}"')
    if plugin.fp4_recipe != NVFP4:
        reading.refuse("fp4_recipe", plugin.fp4_recipe, f'the one recipe here is "{NVFP4}"')
    for key in ("fp8_dot_product_attention", "fp8_multi_head_attention"):
        if getattr(plugin, key):
            reading.refuse(key, True, "not beside fp4: attention is in the compute dtype here")
    if plugin.fp4_param or plugin.fp4_param_gather:
        key = "fp4_param" if plugin.fp4_param else "fp4_param_gather"
        why = "weights are not kept in FP4 here, but cast for each product"
        if f"{PREFIX}.{key}" in reading.set_keys:
            reading.refuse(key, True, f"{why}; use false")
        else:
            reading.refuse("recipe", plugin.recipe, f"{why}: set {key} = false beside it")


def _refuse_state_contradictions(reading: Reading, plugin: MegatronMixedPrecision) -> None:
    """Record a problem for each dtype of the optimizer's state that megaprec does not have, or that
    needs the precision-aware optimizer."""
    keys = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    # Megatron's other optimizers have FP32 state only
    not_fp32 = [key for key in keys if getattr(plugin, key) not in (None, torch.float32)]
    if not_fp32 and not plugin.use_precision_aware_optimizer:
        key = not_fp32[0]
        reading.refuse(key, getattr(plugin, key), "needs use_precision_aware_optimizer = true")
    if plugin.main_params_dtype not in (None, torch.float32):
        reading.refuse("main_params_dtype", plugin.main_params_dtype, "masters are float32 here")
    first = plugin.exp_avg_dtype or torch.float32
    second = plugin.exp_avg_sq_dtype or torch.float32
    if first != second:
        why = f"both moments have one dtype here: make it that of exp_avg_dtype, {first}"
        reading.refuse("exp_avg_sq_dtype", second, why)


def _state_dtypes(reading: Reading, plugin: MegatronMixedPrecision) -> dict[str, Decision]:
    """Return the dtypes of masters, moments and gradients: FP32, unless set for the precision-aware
    optimizer."""
    decisions = all_of(("masters", "moments"), reading.always(torch.float32))
    if not plugin.use_precision_aware_optimizer:
        return decisions
    if plugin.exp_avg_dtype is not None:
        decisions["moments"] = reading.decided_by(
            plugin.exp_avg_dtype, "exp_avg_dtype", "exp_avg_sq_dtype"
        )
    if plugin.main_grads_dtype is not None:
        decisions["gradients"] = reading.decided_by(plugin.main_grads_dtype, "main_grads_dtype")
    return decisions


def _scaling(reading: Reading, plugin: MegatronMixedPrecision, dtype: torch.dtype) -> Decision:
    """Return the loss scale: constant, dynamic with FP16, or none."""
    # Megatron has a constant scale for BF16 too
    if plugin.fp16_loss_scale is not None and dtype != torch.float32:
        return reading.decided_by(
            LossScaling("constant", plugin.fp16_loss_scale), "fp16_loss_scale"
        )
    if dtype != torch.float16:
        return reading.decided_by(LossScaling(), "precision", "recipe")
    dynamic = LossScaling(
        "dynamic",
        plugin.fp16_initial_loss_scale,
        plugin.fp16_min_loss_scale,
        growth_interval=plugin.fp16_loss_scale_window,
        hysteresis=plugin.fp16_hysteresis,
    )
    return reading.decided_by(dynamic, "precision", "recipe", *SCALE_KEYS)


def _fp8(plugin: MegatronMixedPrecision) -> FP8Recipe | None:
    """Return the recipe of FP8 or of NVFP4; None without either."""
    has_bf16_layers = plugin.first_last_layers_bf16  # else the counts have no effect
    first_layers = plugin.num_layers_at_start_in_bf16 if has_bf16_layers else 0
    last_layers = plugin.num_layers_at_end_in_bf16 if has_bf16_layers else 0
    if plugin.fp4 is not None:
        return FP8Recipe(
            kind=NVFP4, reduce_over="stage", first_layers=first_layers, last_layers=last_layers
        )
    if plugin.fp8 is None:
        return None
    return FP8Recipe(
        kind=KINDS[plugin.fp8_recipe],
        format=plugin.fp8,
        # other scales have no margin; see NO_MARGIN
        margin=plugin.fp8_margin if plugin.fp8_recipe == "delayed" else 0,
        history_length=plugin.fp8_amax_history_len,
        amax_algo=plugin.fp8_amax_compute_algo,
        # amaxes are reduced over the ranks of a pipeline stage
        reduce_over="stage",
        # Transformer Engine's default for blocks, which NeMo has no key for
        power_2_scales=plugin.fp8_recipe == "blockwise",
        parameters=bool(plugin.fp8_params or plugin.fp8_param_gather),
        weight_gradients=plugin.fp8_wgrad,
        dot_product_attention=plugin.fp8_dot_product_attention,
        multi_head_attention=plugin.fp8_multi_head_attention,
        first_layers=first_layers,
        last_layers=last_layers,
    )


def _notes(reading: Reading, plugin: MegatronMixedPrecision) -> tuple[str, ...]:
    """Return notes on FP8, and on keys that have another effect here than in NeMo."""
    notes: list[str] = []
    if plugin.fp8 is None:
        keys = FP8_KEYS if plugin.fp4 else (*FP8_KEYS, *WIDE_KEYS)
        idle = [key for key in keys if _is_changed(reading, plugin, key)]
        if idle:
            notes.append(f"{', '.join(idle)} without fp8: they change nothing")
    if plugin.fp8 and plugin.fp8_margin and plugin.fp8_recipe != "delayed":
        notes.append(
            f'fp8_margin = {plugin.fp8_margin} with fp8_recipe = "{plugin.fp8_recipe}": {NO_MARGIN}'
        )
    if plugin.autocast_enabled:
        notes.append("autocast_enabled: NeMo accepts it but never uses it; here it takes effect")
    if plugin.reuse_grad_buf_for_mxfp8_param_ag:
        notes.append(
            "reuse_grad_buf_for_mxfp8_param_ag is about memory: it changes no number and "
            "nothing here"
        )
    return tuple(notes)


def _is_changed(reading: Reading, plugin: MegatronMixedPrecision, key: str) -> bool:
    """Return True if the user set a field to a value that is neither off nor its default."""
    default = MegatronMixedPrecision.model_fields[key].default
    is_set = f"{PREFIX}.{key}" in reading.set_keys
    return is_set and getattr(plugin, key) not in (default, None, False)


def _idle_notes(
    reading: Reading, plugin: MegatronMixedPrecision, dtype: torch.dtype
) -> tuple[str, ...]:
    """Return notes on keys that are set and change nothing beside the others."""
    notes: tuple[str, ...] = ()
    if dtype != torch.float16:
        why = "without FP16, which alone has a dynamic loss scale"
        notes += reading.idle_note(plugin, SCALE_KEYS, why)
    elif plugin.fp16_loss_scale is not None:
        notes += reading.idle_note(plugin, SCALE_KEYS, "beside fp16_loss_scale, which is constant")
    if dtype == torch.float32:
        notes += reading.idle_note(plugin, ("fp16_loss_scale",), "in FP32")
    if not plugin.autocast_enabled:
        dtypes = ("params_dtype", "autocast_dtype")
        # the precision's own dtype is what takes effect, so that is no loss
        other_dtypes = [key for key in dtypes if getattr(plugin, key) not in (None, dtype)]
        why = "without autocast_enabled: parameters and products are in the precision's dtype"
        notes += reading.idle_note(plugin, other_dtypes, why)
    if (plugin.fp8 or plugin.fp4) and not plugin.first_last_layers_bf16:
        counts = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
        notes += reading.idle_note(plugin, counts, "without first_last_layers_bf16")
    if plugin.fp8:
        notes += _idle_history(reading, plugin)
    if plugin.fp4 is None:
        keys = ("fp4_recipe", "fp4_param", "fp4_param_gather")
        notes += reading.idle_note(plugin, keys, "without fp4")
    return notes


def _idle_history(reading: Reading, plugin: MegatronMixedPrecision) -> tuple[str, ...]:
    """Return a note on keys of the amax history that are set and change nothing."""
    if plugin.fp8_recipe != "delayed":
        keys = ("fp8_amax_history_len", "fp8_amax_compute_algo")
        why = f'with fp8_recipe = "{plugin.fp8_recipe}": only delayed scales have a history'
        return reading.idle_note(plugin, keys, why)
    if plugin.fp8_amax_compute_algo == "most_recent":
        why = 'with fp8_amax_compute_algo = "most_recent"'
        return reading.idle_note(plugin, ("fp8_amax_history_len",), why)
    return ()


def express(plan: PrecisionPlan, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return configurations that approximate a plan and run-file keys in `settings`: plain, and
    under autocast."""
    common: dict[str, Any] = {"pipeline_dtype": name_of(plan.pipeline)}
    common |= {key: settings[name] for name, key in _RUN_FILE_KEYS.items() if name in settings}
    common["grad_reduce_in_fp32"] = plan.gradients == torch.float32
    common |= _express_scaling(plan.scaling) | _express_fp8(plan.fp8)
    autocast = {
        "autocast_enabled": True,
        "autocast_dtype": name_of(plan.compute),
        "params_dtype": name_of(plan.parameters),
    }
    # which precision is the nearest is found by resolving each
    plain = [{"precision": precision} | common for precision in ("bf16-mixed", "16-mixed", "32")]
    return plain + [config | autocast for config in plain]


def _express_scaling(scaling: LossScaling) -> dict[str, Any]:
    """Return the plugin's fields of the loss scale."""
    if scaling.kind == "constant":
        return {"fp16_loss_scale": scaling.initial}
    if scaling.kind == "none":
        return {}
    values = (scaling.initial, scaling.minimum, scaling.growth_interval, scaling.hysteresis)
    return dict(zip(SCALE_KEYS, values, strict=True))


def _express_fp8(recipe: FP8Recipe | None) -> dict[str, Any]:
    """Return the nearest fields of FP8."""
    if recipe is None:
        return {}
    if recipe.kind == NVFP4:
        return {
            "fp4": FP4_FORMAT,
            "fp4_recipe": NVFP4,
            "first_last_layers_bf16": bool(recipe.first_layers or recipe.last_layers),
            "num_layers_at_start_in_bf16": recipe.first_layers,
            "num_layers_at_end_in_bf16": recipe.last_layers,
        }
    names = {kind: name for name, kind in KINDS.items()}
    fields: dict[str, Any] = {
        "fp8": recipe.format,
        # NeMo has no scale per row: a scale per tensor is the nearest
        "fp8_recipe": names.get(recipe.kind, "tensorwise"),
        "fp8_margin": recipe.margin,
        "fp8_amax_history_len": recipe.history_length,
        "fp8_amax_compute_algo": recipe.amax_algo,
        "fp8_wgrad": recipe.weight_gradients,
        "fp8_dot_product_attention": recipe.dot_product_attention,
        "fp8_multi_head_attention": recipe.multi_head_attention,
        "fp8_param_gather": recipe.parameters,
    }
    if recipe.first_layers or recipe.last_layers:
        fields |= {
            # the plugin refuses it with delayed scales
            "first_last_layers_bf16": recipe.kind != "delayed",
            "num_layers_at_start_in_bf16": recipe.first_layers,
            "num_layers_at_end_in_bf16": recipe.last_layers,
        }
    return fields
