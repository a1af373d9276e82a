"""Rules on precision and FP8."""

from collections.abc import Callable, Iterator

from megaprec.errors import Problem
from megaprec.optim.decision.scaler import make_scaler
from models.config import ModelConfig
from tools.config.rules.checking import problems_of, unmatched
from tools.config.tables.native_keys import (
    loss_scaling,
    plan_of,
    recipe_of,
    recipe_or_none,
)
from tools.config.tables.precision_settings import FP8, Precision
from tools.config.tables.settings import Parallel
from tools.parts import optional_parts


def _fp32_patterns(precision: Precision, model: ModelConfig) -> Iterator[str]:
    yield from unmatched("precision.keep_fp32", precision.keep_fp32, model)


def scales_advance(fp8: FP8) -> bool:
    """Return True if a pass that is computed again would find other FP8 scales
    (`FP8Recipe.repeatable`)."""
    recipe = recipe_or_none(fp8)
    return recipe is not None and not recipe.repeatable


def _recipe(fp8: FP8) -> Iterator[str]:
    yield from problems_of(recipe_of, fp8)


def _nvfp4(model: ModelConfig, parallel: Parallel, fp8: FP8) -> Iterator[str]:
    """Yield a problem for each part of model and layout that products in NVFP4 do not know."""
    if not fp8.four_bits:
        return
    yield from optional_parts.nvfp4_problems(model)
    if parallel.context > 1:
        yield Problem.of("parallel.nvfp4_context", size=parallel.context)
    for key in ("kv_heads", "global_kv_heads"):
        count = getattr(model, key)
        # global_kv_heads is 0 if layers without the window have as many heads as the others
        if not count or parallel.tensor <= count:
            continue
        copies = parallel.tensor // count
        heads = f"model.{key} = {count}"
        yield Problem.of("parallel.nvfp4_copies", name=heads, copies=copies)


def _plan(precision: Precision, fp8: FP8) -> Iterator[str]:
    # `_recipe` reports the problems of [fp8]; those of the plan name fields without their table
    if problems_of(recipe_of, fp8):
        return
    for problem in problems_of(plan_of, precision, fp8):
        yield problem.within("precision.")


def _shadow(fp8: FP8) -> Iterator[str]:
    if fp8.shadow_every and fp8.kind == "none":
        yield Problem.of("config.shadow_without_fp8", shadow_every=fp8.shadow_every)
    if fp8.shadow_every and scales_advance(fp8):
        yield Problem.of("config.history_shadow", shadow_every=fp8.shadow_every)


def _kind_of_scale(precision: Precision) -> Iterator[str]:
    # a constant scale and a loss_scale go together, or neither is there
    if (precision.scaling == "constant") != (precision.loss_scale > 0):
        yield Problem.of(
            "config.loss_scale_kind", scaling=precision.scaling, loss_scale=precision.loss_scale
        )


def _scale(precision: Precision) -> Iterator[str]:
    """Yield a problem if the first loss scale is outside of its limits."""
    if precision.min_scale > precision.initial_scale:
        yield Problem.of(
            "config.low_first_scale",
            min_scale=precision.min_scale,
            initial_scale=precision.initial_scale,
        )
        return
    # the scaler knows the other limits of its first scale
    key = "loss_scale" if precision.loss_scale else "initial_scale"
    for problem in problems_of(make_scaler, loss_scaling(precision)):
        yield problem.within(f"precision.{key} = {getattr(precision, key):g}: ")


CHECKS: tuple[Callable[..., Iterator[str]], ...] = (
    _recipe,
    _nvfp4,
    _plan,
    _shadow,
    _kind_of_scale,
    _scale,
    _fp32_patterns,
)
