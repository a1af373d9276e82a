"""The tables [precision] and [fp8] of a run file as a precision plan, and a plan as their keys.

The tables are what a run computes with: they are saved, and a changed copy of a run is a copy with
other tables. A plan has a few fields more, which other systems' configurations set (`PLAN_ONLY`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import torch

from megaprec.errors import UserError
from megaprec.precision.fp8_recipe import FP8Recipe
from megaprec.precision.plan import DTYPES, FIELDS, LossScaling, PrecisionPlan, dtype_name
from tools.config.tables.precision_settings import FP8, PLAN_ONLY, Precision
from tools.console.toml import Setting

# key of [precision] -> field of LossScaling
SCALING = {
    "scaling": "kind",
    "initial_scale": "initial",
    "min_scale": "minimum",
    "max_scale": "maximum",
    "growth_factor": "growth_factor",
    "backoff_factor": "backoff_factor",
    "growth_interval": "growth_interval",
    "hysteresis": "hysteresis",
    "hysteresis_refill": "hysteresis_refill",
}
# not functions, which no file has
FP8_KEYS = tuple(field.name for field in fields(FP8Recipe) if field.name in FP8.model_fields)
_UNLIKE_THEIR_NAME: Mapping[str, tuple[str, ...]] = {
    "remainders": ("precision.masters",),
    "sensitive": (),
    "cast_inputs": (),
    "scaling": (
        "precision.scaling",
        "precision.loss_scale",
        *(f"precision.{key}" for key in SCALING),
    ),
    "fp8": tuple(f"fp8.{name}" for name in FP8_KEYS),
}
KEYS: Mapping[str, tuple[str, ...]] = {
    name: _UNLIKE_THEIR_NAME.get(name, (f"precision.{name}",)) for name in FIELDS
}
"""The native keys that decide each field of a plan."""
FOLLOWS = {
    "parameters": "compute",
    "residual": "compute",
    "pipeline": "residual",
    "attention": "compute",
    "reduce": "gradients",
    "scaling": "compute",
}
"""Fields that follow another where none of their keys is given."""
# fields by the way in which a key is made of them
_DTYPES = ("compute", "parameters", "residual", "pipeline", "attention")
# in a run in FP64, "fp32" means FP64 for these
_WIDENED = ("gradients", "reduce", "moments", "scores", "buffers", "output")
_PLAIN = ("keep_fp32", "rounding", "on_nonfinite", "masters_in_checkpoint", "tf32")


def loss_scaling(precision: Precision) -> LossScaling:
    """Return the loss scaling of [precision]."""
    chosen = {field: getattr(precision, key) for key, field in SCALING.items()}
    # a plan has one first scale, and None for no upper bound
    chosen |= {
        "initial": precision.loss_scale or precision.initial_scale,
        "maximum": precision.max_scale or None,
    }
    return LossScaling(**chosen)


def recipe_of(fp8: FP8, dialect: FP8Recipe | None = None) -> FP8Recipe | None:
    """Return the recipe that [fp8] asks for; None without FP8.

    dialect: the recipe of another system's table, from which fields come that [fp8] has no key for.
    Raises UserError, whose problems name keys of [fp8].
    """
    if fp8.kind == "none":
        return None
    stated = {name: getattr(fp8, name) for name in FP8_KEYS}
    if dialect is None:
        return FP8Recipe(**stated)
    return replace(dialect, **stated)


def plan_of(precision: Precision, fp8: FP8, dialect: PrecisionPlan | None = None) -> PrecisionPlan:
    """Return the plan of both tables, without origins (`with_origins` adds them).

    dialect: the plan of another system's table, from which fields come that no key has. Raises
    UserError.
    """
    widest = torch.float64 if precision.compute == "fp64" else torch.float32
    values: dict[str, Any] = {name: getattr(precision, name) for name in _PLAIN}
    for name in _DTYPES:
        values[name] = DTYPES[getattr(precision, name)]
    for name in _WIDENED:
        dtype = DTYPES[getattr(precision, name)]
        values[name] = widest if dtype == torch.float32 else dtype
    if dialect is not None:
        values["cast_inputs"] = dialect.cast_inputs
    # split masters are FP32 in parts: the bf16 weight and 16 bits more
    masters = {"fp32": widest, "split": torch.float32, "none": values["parameters"]}
    dialect_recipe = dialect.fp8 if dialect is not None else None
    return PrecisionPlan(
        **values,
        masters=masters[precision.masters],
        remainders=precision.masters == "split",
        sensitive=widest,
        scaling=loss_scaling(precision),
        fp8=recipe_of(fp8, dialect_recipe),
    )


def recipe_or_none(fp8: FP8) -> FP8Recipe | None:
    """Return the recipe that [fp8] asks for; None also if it makes none, which a rule of its own
    reports."""
    try:
        return recipe_of(fp8)
    except UserError:
        return None


def plan_or_none(precision: Precision, fp8: FP8) -> PrecisionPlan | None:
    """Return the plan of both tables; None if they make none, which a rule of its own reports."""
    try:
        return plan_of(precision, fp8)
    except UserError:
        return None


def with_origins(plan: PrecisionPlan, origins: Mapping[str, str]) -> PrecisionPlan:
    """Return `plan` with the key that decided each field. origins: see `origins_of`."""
    deciders: dict[str, str] = {}
    for name, keys in KEYS.items():
        if not keys:
            # only a dialect decides it
            deciders[name] = origins.get(name, "default")
            continue
        # the field whose value this one has, as long as no key of its own is given
        source = name
        while source in FOLLOWS and not any(key in origins for key in KEYS[source]):
            source = FOLLOWS[source]
        given_keys = [key for key in dict.fromkeys(KEYS[source]) if key in origins]
        deciding_keys = [_decider(key, origins[key]) for key in given_keys]
        deciders[name] = ", ".join(dict.fromkeys(deciding_keys)) or "default"
    return replace(plan, origin=deciders)


def _decider(key: str, origin: str) -> str:
    """Return the key that decided a native key: itself with its origin, or the key of a dialect."""
    if origin == "command line" or origin.startswith("file "):
        return f"{key} ({origin})"
    return origin


def origins_of(settings: Mapping[str, Setting], dialect: PrecisionPlan | None) -> dict[str, str]:
    """Return the origin of each key that is given; beside a dialect's plan also of each field that
    has no native key."""
    origins = {key: setting.origin for key, setting in settings.items()}
    if dialect is not None:
        without_key = [name for name, keys in KEYS.items() if not keys]
        origins |= {name: dialect.origin[name] for name in without_key}
    return origins


def native_settings(plan: PrecisionPlan) -> dict[str, Setting]:
    """Return the native keys of a dialect's plan, each with the origin of the first field that it
    decides."""
    origins: dict[str, str] = {}
    for field, keys in KEYS.items():
        for key in keys:
            origins.setdefault(key, plan.origin[field])
    native_keys = native_keys_of(plan)
    return {key: Setting(value, origins[key]) for key, value in native_keys.items()}


def native_keys_of(plan: PrecisionPlan) -> dict[str, Any]:
    """Return the native keys that say all of a plan that a run computes with."""
    widest = torch.float64 if plan.compute == torch.float64 else torch.float32
    precision: dict[str, Any] = {name: getattr(plan, name) for name in _PLAIN}
    for name in _DTYPES:
        precision[name] = dtype_name(getattr(plan, name))
    for name in _WIDENED:
        dtype = getattr(plan, name)
        precision[name] = "fp32" if dtype == widest else dtype_name(dtype)
    precision["masters"] = "fp32" if plan.masters == widest else "none"
    if plan.remainders:
        precision["masters"] = "split"
    precision |= _scaling_keys(plan.scaling)
    fp8: dict[str, Any] = {"kind": "none"}
    if plan.fp8:
        fp8 = {name: getattr(plan.fp8, name) for name in FP8_KEYS}
    native_keys = {f"precision.{name}": value for name, value in precision.items()}
    return native_keys | {f"fp8.{name}": value for name, value in fp8.items()}


def _scaling_keys(scaling: LossScaling) -> dict[str, Any]:
    """Return the keys of [precision] that describe loss scaling."""
    keys = {key: getattr(scaling, field) for key, field in SCALING.items()}
    keys["max_scale"] = scaling.maximum or 0.0
    if scaling.kind == "constant":
        # the first scale of dynamic scaling is then of no use
        keys["loss_scale"] = scaling.initial
        keys["initial_scale"] = LossScaling().initial
    return keys


def fields_without_key(plan: PrecisionPlan) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of the fields of a plan that no run computes with, where they are
    not at their defaults."""
    for key in PLAN_ONLY:
        table, _, name = key.partition(".")
        owner = plan if table == "precision" else plan.fp8
        if owner is None:
            continue
        value = getattr(owner, name)
        default = next(field.default for field in fields(owner) if field.name == name)
        if value != default:
            yield key, value
