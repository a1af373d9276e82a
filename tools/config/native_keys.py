"""The native keys of [precision] and [fp8] to and from a plan, and other systems' tables to native
keys.

A run file states its precision natively or in one dialect, such as `[precision.nxd]`. A dialect is
resolved when the file is read and stored as native keys, each with the dialect's key as its origin;
later code sees native keys only.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import torch

from megaprec.dialects.translate import DIALECTS, FIELDS
from megaprec.errors import UserError
from megaprec.precision.fp8_recipe import FP8Recipe
from megaprec.precision.plan import DTYPES, LossScaling, PrecisionPlan, dtype_name, plan
from tools.config.precision_settings import FP8, PLAN_ONLY, Precision, idle
from tools.config.settings import Parallel
from tools.console.toml import Given, toml

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
BESIDE = ("precision.patience", "precision.on_nonfinite", "fp8.backend", "fp8.history")
"""Native keys that no dialect has words for."""
# not functions, which no file has
FP8_KEYS = tuple(f.name for f in fields(FP8Recipe) if f.name in FP8.model_fields)
_DEVIANT: Mapping[str, tuple[str, ...]] = {
    "remainders": ("precision.masters",),
    "sensitive": (),
    "scaling": (
        "precision.scaling",
        "precision.loss_scale",
        *(f"precision.{key}" for key in SCALING),
    ),
    "fp8": tuple(f"fp8.{name}" for name in FP8_KEYS),
}
KEYS: Mapping[str, tuple[str, ...]] = {
    name: _DEVIANT.get(name, (f"precision.{name}",)) for name in FIELDS
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


def loss_scaling(precision: Precision) -> LossScaling:
    """Return the loss scaling of [precision]."""
    chosen = {field: getattr(precision, key) for key, field in SCALING.items()}
    chosen |= {
        "initial": precision.loss_scale or precision.initial_scale,
        "maximum": precision.max_scale or None,
    }
    return LossScaling(**chosen)


def recipe_of(fp8: FP8) -> FP8Recipe | None:
    """Return the recipe that [fp8] asks for; None without FP8. Raises UserError, whose problems
    name keys of [fp8]."""
    if fp8.kind == "none":
        return None
    return FP8Recipe(**{name: getattr(fp8, name) for name in FP8_KEYS})


def plan_of(precision: Precision, fp8: FP8) -> PrecisionPlan:
    """Return the plan of both tables, without origins (`with_origins` adds them). Raises
    UserError."""
    p = precision
    wide = "fp64" if precision.compute == "fp64" else "fp32"
    held = {
        name: DTYPES[wide if getattr(p, name) == "fp32" else getattr(p, name)] for name in _WIDENED
    }
    return plan(
        p.compute,
        loss_scaling(p),
        p.on_nonfinite,
        parameters=p.parameters,
        gradients=p.gradients,
        reduce=wide if p.reduce == "fp32" else p.reduce,
        masters=p.masters,
        moments=p.moments,
        residual=DTYPES[p.residual],
        pipeline=DTYPES[p.pipeline],
        attention=DTYPES[p.attention],
        **held,
        keep_fp32=p.keep_fp32,
        rounding=p.rounding,
        cast_inputs=p.cast_inputs,
        masters_in_checkpoint=p.masters_in_checkpoint,
        tf32=p.tf32,
        fp8=recipe_of(fp8),
    )


def with_origins(plan: PrecisionPlan, places: Mapping[str, str]) -> PrecisionPlan:
    """Return `plan` with the key that decided each field. places: origins of the native keys that
    were given."""
    origin = {}
    for name in KEYS:
        decider = name
        while decider in FOLLOWS and not any(key in places for key in KEYS[decider]):
            decider = FOLLOWS[decider]
        said = [_origin(key, places[key]) for key in dict.fromkeys(KEYS[decider]) if key in places]
        origin[name] = ", ".join(dict.fromkeys(said)) or "default"
    return replace(plan, origin=origin)


def _origin(key: str, place: str) -> str:
    """Return the key that decided a native key: itself with its origin, or the key of a dialect."""
    if place == "command line" or place.startswith("file "):
        return f"{key} ({place})"
    return place


def native(plan: PrecisionPlan) -> dict[str, Any]:
    """Return the native keys that describe a plan completely."""
    wide = torch.float64 if plan.compute == torch.float64 else torch.float32

    def name(dtype: torch.dtype) -> str:
        return "fp32" if dtype == wide else dtype_name(dtype)

    keys: dict[str, Any] = {key: getattr(plan, key) for key in _PLAIN}
    keys |= {key: dtype_name(getattr(plan, key)) for key in _NAMED}
    keys |= {key: name(getattr(plan, key)) for key in ("gradients", "reduce", "moments", *_WIDENED)}
    if plan.remainders:
        keys["masters"] = "split"
    elif plan.masters == wide:
        keys["masters"] = "fp32"
    else:
        keys["masters"] = "none"
    keys |= {key: getattr(plan.scaling, field) for key, field in SCALING.items()}
    keys |= {"max_scale": plan.scaling.maximum or 0.0}
    if plan.scaling.kind == "constant":
        keys |= {"loss_scale": plan.scaling.initial, "initial_scale": LossScaling().initial}
    fp8 = {name: getattr(plan.fp8, name) for name in FP8_KEYS} if plan.fp8 else {"kind": "none"}
    return {f"precision.{k}": v for k, v in keys.items()} | {f"fp8.{k}": v for k, v in fp8.items()}


_NAMED = ("compute", "parameters", "residual", "pipeline", "attention")
_WIDENED = ("scores", "buffers", "output")  # of which "fp32" means FP64 in a run in FP64
_PLAIN = ("keep_fp32", "rounding", "cast_inputs", "on_nonfinite", "masters_in_checkpoint", "tf32")


def take_plan_only(given: dict[str, Given]) -> tuple[tuple[str, ...], list[str]]:
    """Remove the keys of `PLAN_ONLY` from `given`. Returns notes on those with their default,
    problems of others."""
    notes = list[str]()
    problems = list[str]()
    for key, why in PLAN_ONLY.items():
        entry = given.pop(key, None)
        if entry is None:
            continue
        said = f"{key} = {toml(entry.value)} ({entry.origin})"
        if type(entry.value) is type(idle(key)) and entry.value == idle(key):
            notes.append(f"{said}: this key has no effect, for {why}; remove it")
        else:
            problems.append(f"{said}: {why}; remove this key")
    return tuple(notes), problems


def take_renamed(given: dict[str, Given]) -> tuple[str, ...]:
    """Replace log.tensorboard, which runs of earlier versions have saved, by log.to in `given`.
    Returns notes."""
    entry = given.get("log.tensorboard")
    if entry is None or not isinstance(entry.value, bool):
        return ()
    del given["log.tensorboard"]
    said = f"log.tensorboard = {toml(entry.value)} ({entry.origin})"
    if "log.to" in given:
        return (f"{said}: this key has no effect beside log.to; remove it",)
    given["log.to"] = Given(["tensorboard"] if entry.value else [], entry.origin)
    return (
        (
            f"{said}: read as log.to = {toml(given['log.to'].value)}, which names all trackers; "
            "write that instead"
        ),
    )


def resolve_dialect(
    given: dict[str, Given], known: frozenset[str] | None
) -> tuple[tuple[str, ...], list[str]]:
    """Replace the tables of a dialect in `given` by native keys.

    known: all keys of a run file; a decision without such a key is then a problem. Returns notes on
    how the dialect was understood, and problems.
    """
    found = {name: _take(given, name) for name in DIALECTS}
    found = {name: leaves for name, leaves in found.items() if leaves is not None}
    if not found:
        return (), []
    if len(found) > 1:
        tables = " and ".join(f"[precision.{name}]" for name in found)
        return (), [f"{tables}: a run has one precision; keep one of them"]
    ((name, leaves),) = found.items()
    problems = list(_native_beside(given, name))
    _add_zero(given, name, leaves)
    places = {f"precision.{name}.{path}": entry.origin for path, entry in leaves.items() if path}
    try:
        resolved = DIALECTS[name].resolve(_nested(leaves), places)
    except UserError as error:
        return (), problems + list(error.problems)
    if "model.layers" in resolved.settings and (preset := given.get("model.preset")):
        whole = f"[precision.{name}] describes the model; keep one of them"
        problems.append(f"model.preset = {toml(preset.value)} ({preset.origin}): {whole}")
    for key, decision in resolved.settings.items():
        problems += _settle(
            given, key, Given(decision.value, decision.origin), decision.given, known
        )
    origins: dict[str, str] = {}
    for field, keys in KEYS.items():
        for key in keys:
            origins.setdefault(key, resolved.plan.origin[field])
    for key, value in native(resolved.plan).items():
        given.setdefault(key, Given(value, origins[key]))
    return resolved.notes, problems


def _take(given: dict[str, Given], name: str) -> dict[str, Given] | None:
    """Remove the keys of [precision.<name>] from `given` and return them by dotted path; None if
    there are none."""
    table = f"precision.{name}"
    leaves = dict[str, Given]()
    keys = [key for key in given if key == table or key.startswith(f"{table}.")]
    for key in keys:
        entry = given.pop(key)
        leaves |= _leaves(key.removeprefix(table).lstrip("."), entry.value, entry.origin)
    return leaves if keys else None


def _leaves(path: str, value: Any, origin: str) -> dict[str, Given]:
    if not isinstance(value, dict):
        return {path: Given(value, origin)}
    leaves: dict[str, Given] = {path: Given({}, origin)}
    for key, inner in value.items():
        leaves |= _leaves(f"{path}.{key}" if path else key, inner, origin)
    return leaves


def _nested(leaves: Mapping[str, Given]) -> Any:
    """Return the tree of dotted paths; a later path replaces an earlier one that is in its way."""
    tree: dict[str, Any] = {"": {}}
    for path, entry in leaves.items():
        *tables, last = ["", *path.split(".")] if path else [""]
        place = tree
        for table in tables:
            if not isinstance(place.get(table), dict):
                place[table] = {}
            place = place[table]
        if not (entry.value == {} and isinstance(place.get(last), dict)):
            place[last] = entry.value
    return tree[""]


def _native_beside(given: Mapping[str, Given], name: str) -> Iterator[str]:
    native_keys = {key for keys in KEYS.values() for key in keys} - set(BESIDE)
    for key, entry in given.items():
        if key in native_keys:
            yield (
                f"{key} = {toml(entry.value)} ({entry.origin}): [precision.{name}] decides it; "
                "keep one of them"
            )


def _add_zero(given: Mapping[str, Given], name: str, leaves: dict[str, Given]) -> None:
    """Add parallel.zero to the keys of NxD, whose defaults depend on ZeRO-1."""
    path = "optimizer_config.zero_one_enabled"
    if name == "nxd" and path not in leaves and leaves.get("", Given({}, "")).value == {}:
        zero = given.get("parallel.zero", Given(Parallel().zero, "default"))
        leaves[path] = Given(zero.value, f"parallel.zero, {zero.origin}")


def _settle(
    given: dict[str, Given], key: str, said: Given, explicit: bool, known: frozenset[str] | None
) -> Iterator[str]:
    """Add a dialect's decision on a run-file key to `given`; only a key that the dialect's user has
    written can contradict it.
    """
    own = given.get(key)
    if known is not None and key not in known:
        yield f"{said.origin} = {toml(said.value)}: not supported yet"
    elif own is None:
        given[key] = said
    elif explicit and own.value != said.value:
        yield (
            f"{key} = {toml(own.value)} ({own.origin}) contradicts {said.origin}, which says "
            f"{toml(said.value)}: keep one of them"
        )
