"""The FP8 lines that a run prints first, and checks of FP8 that need the model or the device."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import torch

from megaprec.comm.axis import Axis
from megaprec.comm.layout import layout_of
from megaprec.errors import Problem, UserError
from megaprec.fp8 import transformer_engine
from megaprec.fp8.eligibility import Eligibility, unsupported_settings
from megaprec.fp8.matmul import describe_kernels
from megaprec.fp8.state import FP8State
from megaprec.precision.fp8_recipe import FP8Recipe
from megaprec.precision.plan import PrecisionPlan
from models.config import ModelConfig
from models.decoder.cutting import cuts
from models.decoder.stages import Stage
from models.estimate.storage import simulated_experts
from parallel.context import Context
from tools.config.precision_modules import layer_spans
from tools.config.run_file import RunConfig
from tools.config.tables.precision_settings import FP8

# dialect -> field of the recipe -> key of the dialect
DIALECT_KEYS = {
    "nemo": {
        "parameters": "fp8_param_gather",
        "dot_product_attention": "fp8_dot_product_attention",
        "multi_head_attention": "fp8_multi_head_attention",
    },
    "smp": {
        "dot_product_attention": "fp8_autocast.fp8_recipe.fp8_dpa",
        "multi_head_attention": "fp8_autocast.fp8_recipe.fp8_mha",
    },
}


def check_fp8(config: RunConfig) -> None:
    """Raise UserError if FP8 settings are not computed, name no weight, or have no backend."""
    recipe = config.plan.fp8
    if recipe is None:
        return
    problems = list(_not_computed(config, recipe))
    if recipe.backend == "transformer_engine":
        problems += _backend_problems(config.train.device)
    if recipe.wide:
        stage = _whole_model_of_rank(config, config.sized_model, recipe)
        problems += _unused_patterns(recipe.wide, stage)
    if problems:
        raise UserError(*problems)


def require_fp8_computed(config: RunConfig) -> None:
    """Raise UserError if FP8 settings are not computed on any machine."""
    recipe = config.plan.fp8
    problems = list(_not_computed(config, recipe)) if recipe else []
    if problems:
        raise UserError(*problems)


def _not_computed(config: RunConfig, recipe: FP8Recipe) -> Iterator[Problem]:
    """Yield a problem for each setting that is not computed."""
    for field, reason in unsupported_settings(recipe).items():
        origin = config.origin(f"fp8.{field}")
        # a field that [fp8] has no key for is of another system's table
        if field not in FP8.model_fields:
            origin = config.plan.origin["fp8"]
        key = _key_of_origin(field, origin)
        yield Problem.of(
            "training.fp8_not_computed", field=field, origin=origin, reason=reason, key=key
        )


def _key_of_origin(field: str, origin: str) -> str:
    """Return the key to change for a field of the recipe: that of the dialect it comes from, or
    that of [fp8].
    """
    for dialect, keys in DIALECT_KEYS.items():
        if origin.startswith(f"precision.{dialect}."):
            return f"precision.{dialect}.{keys[field]}"
    return f"fp8.{field}"


def _backend_problems(device: str) -> Iterator[Problem]:
    """Yield a problem if Transformer Engine cannot compute the products on this device."""
    try:
        transformer_engine.require()
    except UserError as error:
        yield from error.problems
        return
    if device == "cpu":
        reason = f'train.device is "{device}"'
    elif not torch.cuda.is_available():
        reason = "torch sees none"
    else:
        return
    yield Problem.of("training.fp8_backend_device", reason=reason)


def _unused_patterns(patterns: Sequence[str], whole_model: Stage) -> Iterator[Problem]:
    """Yield a problem for each pattern of fp8.wide that matches no weight of the model."""
    weight_names = list[str]()
    for parameter in whole_model.parameters():
        weight_names += [part.name for part in layout_of(parameter).parts]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in weight_names):
            # A name of a layer, for those are what fp8.wide is about.
            example = next(name for name in weight_names if "layers." in name)
            yield Problem.of("training.fp8_wide_unused", pattern=pattern, example=example)


def fp8_lines(config: RunConfig, model: ModelConfig, device: str) -> Iterator[str]:
    """Yield lines on the recipe, on the kernels of a device, and on the weights whose products are
    not in FP8, grouped by reason.
    """
    recipe = config.plan.fp8
    if recipe is None:
        return
    weights = weight_eligibility(config, model, recipe)
    in_fp8 = [weight for weight in weights if not weight.fallback_reason]
    recipe_text = _describe_recipe(recipe)
    yield f"fp8        {recipe_text}: products of {len(in_fp8)} of {len(weights)} weights"
    yield f"           {_describe_kernels(config.plan, device)}"
    if not in_fp8:
        yield f"           none: the run trains in {config.precision.compute} alone"

    weights_by_reason = defaultdict[str, list[Eligibility]](list)
    for weight in weights:
        if weight.fallback_reason:
            weights_by_reason[weight.fallback_reason].append(weight)
    for reason, affected in weights_by_reason.items():
        names = ", ".join(_join_layers(affected))
        yield f"           {names}: in {config.precision.compute}, for {reason}"


def weight_eligibility(
    config: RunConfig, model: ModelConfig, recipe: FP8Recipe
) -> list[Eligibility]:
    """Return the eligibility of each weight of the layers, as the run's tensor ranks hold it."""
    return _whole_model_of_rank(config, model, recipe).context.fp8.registered


def _whole_model_of_rank(config: RunConfig, model: ModelConfig, recipe: FP8Recipe) -> Stage:
    """Return the whole model as one tensor-parallel rank holds it, on the meta device."""
    plan = replace(config.plan, fp8=recipe)
    tensor_axis = Axis("tp", 0, config.parallel.tensor)
    experts = simulated_experts(
        tensor_axis.size, config.parallel.expert, config.parallel.expert_tensor
    )
    context = Context(
        plan, tensor_axis, fp8=FP8State(recipe, model.layers, tensor_axis), experts=experts
    )
    (whole_model,) = cuts(model, 1, config.train.seq_length)  # the only stage of one
    # Only shapes and names are asked for, which need no memory.
    with torch.device("meta"):
        return Stage(model.with_zero_weights, context, whole_model)


def _describe_recipe(recipe: FP8Recipe) -> str:
    """Return kind of scales, format of codes and what else is not usual, in words."""
    codes = "e2m1" if recipe.scales.four_bits else recipe.format
    description = f"{recipe.kind}, {codes}"
    if recipe.scales.keeps_history:
        # Transformer Engine's history has an entry for each micro-batch, others one for each step.
        unit = " micro-batches" if recipe.history == "te" else ""
        description += f", history {recipe.history_length}{unit}"
    if recipe.calibrating:
        description += ", only recorded"
    if recipe.calibrate:
        description += f", only recorded in {recipe.calibrate} steps"
    if not recipe.weight_gradients:
        description += ", weight gradients wide"
    return description


def _describe_kernels(plan: PrecisionPlan, device: str) -> str:
    """Return how the products are computed, grouped by kernel."""
    assert plan.fp8 is not None
    products_by_kernel = defaultdict[str, list[str]](list)
    kernels = describe_kernels(plan.fp8, torch.device(device), plan.compute, plan.gradients)
    for product, kernel in kernels.items():
        products_by_kernel[kernel].append(product)
    if len(products_by_kernel) == 1:
        return next(iter(products_by_kernel))
    return "; ".join(
        f"{' and '.join(products)} by {kernel}" for kernel, products in products_by_kernel.items()
    )


def _join_layers(weights: list[Eligibility]) -> Iterator[str]:
    """Yield the names of the weights, those of all layers and experts together, as
    "layers.0-3.mlp.down.weight".
    """
    layers_by_pattern = defaultdict[str, set[int]](set)
    for weight in weights:
        name = re.sub(r"\.experts\.\d+\.", ".experts.*.", weight.name)
        # Weights outside of the layers count as layer 0, whose number is not shown.
        in_layer = re.match(r"layers\.(\d+)\.", name)
        layer = int(in_layer[1]) if in_layer else 0
        pattern = re.sub(r"^layers\.\d+\.", "layers.%.", name)
        layers_by_pattern[pattern].add(layer)
    for pattern, layers in layers_by_pattern.items():
        counts = dict.fromkeys(layers, 1)  # layer_spans joins neighbours of equal counts
        for layer_range, _ in layer_spans(counts):
            yield pattern.replace("%", layer_range)
