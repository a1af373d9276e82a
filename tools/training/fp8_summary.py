"""The FP8 lines that a run prints before it starts, and the checks of FP8 settings that need the
model or the device.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import torch

from megaprec.comm.axis import Axis
from megaprec.comm.layout import layout_of
from megaprec.errors import UserError
from megaprec.fp8 import transformer_engine
from megaprec.fp8.eligibility import Eligibility, not_computed
from megaprec.fp8.matmul import ways
from megaprec.fp8.state import FP8State
from megaprec.precision.fp8_recipe import FP8Recipe
from megaprec.precision.plan import PrecisionPlan
from models.config import ModelConfig
from models.cutting import cuts
from models.estimate.storage import lone_experts
from models.stages import Stage
from parallel.context import Context
from tools.config.precision_modules import spans
from tools.config.run_file import RunConfig

INSTEAD = {  # dialect -> field of the recipe -> key of the dialect
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
    """Raise UserError if FP8 settings cannot be carried out: not computed, no such weights, or no
    backend."""
    recipe = config.plan.fp8
    if recipe is None:
        return
    problems = []
    for key, why in not_computed(recipe).items():
        origin = config.origin(f"fp8.{key}")
        dialect = next((name for name in INSTEAD if origin.startswith(f"precision.{name}.")), "")
        instead = f"precision.{dialect}.{INSTEAD[dialect][key]}" if dialect else f"fp8.{key}"
        problems.append(f"fp8.{key} = true ({origin}): {why}; set {instead} = false")
    if recipe.backend == "transformer_engine":
        problems += _backend(config.train.device)
    if recipe.wide:
        problems += _unused(recipe.wide, _stage(config, config.sized_model, recipe))
    if problems:
        raise UserError(*problems)


def _backend(device: str) -> Iterator[str]:
    try:
        transformer_engine.require()
    except UserError as error:
        yield from error.problems
        return
    if device == "cpu" or not torch.cuda.is_available():
        there = f'train.device is "{device}"' if device == "cpu" else "torch sees none"
        yield f'fp8.backend = "transformer_engine": it needs a CUDA device, and {there}; use "torch"'


def _unused(patterns: Sequence[str], stage: Stage) -> Iterator[str]:
    names = [part.name for parameter in stage.parameters() for part in layout_of(parameter).parts]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            likely = next(name for name in names if "layers." in name)
            yield f'fp8.wide has "{pattern}", but no weight has such a name; names are like {likely}'


def fp8_lines(config: RunConfig, model: ModelConfig, device: str) -> Iterator[str]:
    """Yield lines on the recipe, on the kernels of a device, and on the weights whose products are
    not in FP8, by reason.
    """
    recipe = config.plan.fp8
    if recipe is None:
        return
    reached = reaches(config, model, recipe)
    narrow = [one for one in reached if not one.fallback_reason]
    yield f"fp8        {_recipe(recipe)}: products of {len(narrow)} of {len(reached)} weights"
    yield f"           {_ways(config.plan, device)}"
    reasons = defaultdict[str, list[Eligibility]](list)
    for one in reached:
        reasons[one.fallback_reason].append(one)
    for why, some in reasons.items():
        if why:
            yield f"           {', '.join(_names(some))}: in {config.precision.compute}, for {why}"


def reaches(config: RunConfig, model: ModelConfig, recipe: FP8Recipe) -> list[Eligibility]:
    """Return the eligibility of each weight of the layers, as the tensor-parallel ranks of the run
    hold it."""
    return _stage(config, model, recipe).context.fp8.reached


def _stage(config: RunConfig, model: ModelConfig, recipe: FP8Recipe) -> Stage:
    """Return the whole model as one tensor-parallel rank of the run holds it, on the meta
    device."""
    plan = replace(config.plan, fp8=recipe)
    tp = Axis("tp", 0, config.parallel.tensor)
    experts = lone_experts(tp.size, config.parallel.expert, config.parallel.expert_tensor)
    context = Context(plan, tp, fp8=FP8State(recipe, model.layers, tp), experts=experts)
    with torch.device("meta"):
        return Stage(model.undrawn, context, cuts(model, 1, config.train.seq_length)[0])


def _recipe(recipe: FP8Recipe) -> str:
    passes = " micro-batches" if recipe.history == "te" else ""
    history = f", history {recipe.history_length}{passes}" if recipe.kind == "delayed" else ""
    calibrated = "".join(
        [
            ", only recorded" if recipe.calibrating else "",
            f", only recorded in {recipe.calibrate} steps" if recipe.calibrate else "",
            "" if recipe.weight_gradients else ", weight gradients wide",
        ]
    )
    return f"{recipe.kind}, {recipe.format}{history}{calibrated}"


def _ways(plan: PrecisionPlan, device: str) -> str:
    """Return how the products are computed, grouped by kernel."""
    assert plan.fp8 is not None
    alike = defaultdict[str, list[str]](list)
    for name, way in ways(plan.fp8, torch.device(device), plan.compute, plan.gradients).items():
        alike[way].append(name)
    if len(alike) == 1:
        return next(iter(alike))
    return "; ".join(f"{' and '.join(names)} by {way}" for way, names in alike.items())


def _names(reached: list[Eligibility]) -> Iterator[str]:
    """Yield the names of the weights, those of all layers and experts together:
    "layers.0-3.mlp.down.weight"."""
    alike = defaultdict[str, dict[int, int]](dict)
    for one in reached:
        name = re.sub(r"\.experts\.\d+\.", ".experts.*.", one.name)
        found = re.match(r"layers\.(\d+)\.", name)
        alike[re.sub(r"^layers\.\d+\.", "layers.%.", name)][int(found[1]) if found else 0] = 1
    for name, layers in alike.items():
        yield from (name.replace("%", span) for span, _ in spans(layers))
