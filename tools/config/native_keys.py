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
from tools.config.precision_settings import FP8, PLAN_ONLY, Precision, default_of_plan_only
from tools.config.settings import Parallel
from tools.console.toml import Setting, toml

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
NATIVE_ONLY = ("precision.patience", "precision.on_nonfinite", "fp8.backend", "fp8.history")
"""Native keys that no dialect has words for."""
# not functions, which no file has
FP8_KEYS = tuple(field.name for field in fields(FP8Recipe) if field.name in FP8.model_fields)
_UNLIKE_THEIR_NAME: Mapping[str, tuple[str, ...]] = {
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
_WIDENED = ("scores", "buffers", "output")  # of which "fp32" means FP64 in a run in FP64
_PLAIN = ("keep_fp32", "rounding", "cast_inputs", "on_nonfinite", "masters_in_checkpoint", "tf32")


def loss_scaling(precision: Precision) -> LossScaling:
    """Return the loss scaling of [precision]."""
    chosen = {field: getattr(precision, key) for key, field in SCALING.items()}
    # a plan has one first scale, and None for no upper bound
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
    # "fp32" means the widest dtype of the run
    widest = "fp64" if precision.compute == "fp64" else "fp32"

    def widened(name: str) -> str:
        return widest if name == "fp32" else name

    return plan(
        precision.compute,
        loss_scaling(precision),
        precision.on_nonfinite,
        parameters=precision.parameters,
        gradients=precision.gradients,
        reduce=widened(precision.reduce),
        masters=precision.masters,
        moments=precision.moments,
        residual=DTYPES[precision.residual],
        pipeline=DTYPES[precision.pipeline],
        attention=DTYPES[precision.attention],
        **{key: DTYPES[widened(getattr(precision, key))] for key in _WIDENED},
        keep_fp32=precision.keep_fp32,
        rounding=precision.rounding,
        cast_inputs=precision.cast_inputs,
        masters_in_checkpoint=precision.masters_in_checkpoint,
        tf32=precision.tf32,
        fp8=recipe_of(fp8),
    )


def with_origins(plan: PrecisionPlan, origins: Mapping[str, str]) -> PrecisionPlan:
    """Return `plan` with the key that decided each field. origins: of the native keys that were
    given."""
    deciders = {}
    for name in KEYS:
        # the field whose value this one has, as long as no key of its own is given
        source = name
        while source in FOLLOWS and not any(key in origins for key in KEYS[source]):
            source = FOLLOWS[source]
        keys = [key for key in dict.fromkeys(KEYS[source]) if key in origins]
        names = [_decider(key, origins[key]) for key in keys]
        deciders[name] = ", ".join(dict.fromkeys(names)) or "default"
    return replace(plan, origin=deciders)


def _decider(key: str, origin: str) -> str:
    """Return the key that decided a native key: itself with its origin, or the key of a dialect."""
    if origin == "command line" or origin.startswith("file "):
        return f"{key} ({origin})"
    return origin


def native_keys_of(plan: PrecisionPlan) -> dict[str, Any]:
    """Return the native keys that describe a plan completely."""
    widest = torch.float64 if plan.compute == torch.float64 else torch.float32
    precision: dict[str, Any] = {key: getattr(plan, key) for key in _PLAIN}
    for key in _DTYPES:
        precision[key] = dtype_name(getattr(plan, key))
    for key in ("gradients", "reduce", "moments", *_WIDENED):
        dtype = getattr(plan, key)
        precision[key] = "fp32" if dtype == widest else dtype_name(dtype)
    precision["masters"] = "fp32" if plan.masters == widest else "none"
    if plan.remainders:
        precision["masters"] = "split"
    precision |= _scaling_keys(plan.scaling)
    fp8: dict[str, Any] = {"kind": "none"}
    if plan.fp8:
        fp8 = {name: getattr(plan.fp8, name) for name in FP8_KEYS}
    keys = {f"precision.{key}": value for key, value in precision.items()}
    return keys | {f"fp8.{key}": value for key, value in fp8.items()}


def _scaling_keys(scaling: LossScaling) -> dict[str, Any]:
    """Return the keys of [precision] that describe loss scaling."""
    keys = {key: getattr(scaling, field) for key, field in SCALING.items()}
    keys["max_scale"] = scaling.maximum or 0.0
    if scaling.kind == "constant":
        # the first scale of dynamic scaling is then of no use
        keys["loss_scale"] = scaling.initial
        keys["initial_scale"] = LossScaling().initial
    return keys


def take_plan_only(settings: dict[str, Setting]) -> tuple[tuple[str, ...], list[str]]:
    """Remove the keys of `PLAN_ONLY` from `settings`. Returns notes on those with their default,
    problems of others."""
    notes = list[str]()
    problems = list[str]()
    for key, reason in PLAN_ONLY.items():
        setting = settings.pop(key, None)
        if setting is None:
            continue
        line = f"{key} = {toml(setting.value)} ({setting.origin})"
        # 0 and 1 are not the false and true that they equal
        if type(setting.value) is type(
            default_of_plan_only(key)
        ) and setting.value == default_of_plan_only(key):
            notes.append(f"{line}: this key has no effect, for {reason}; remove it")
        else:
            problems.append(f"{line}: {reason}; remove this key")
    return tuple(notes), problems


def take_renamed(settings: dict[str, Setting]) -> tuple[str, ...]:
    """Replace log.tensorboard, which runs of earlier versions have saved, by log.to in `settings`.
    Returns notes."""
    setting = settings.get("log.tensorboard")
    if setting is None or not isinstance(setting.value, bool):
        return ()
    del settings["log.tensorboard"]
    line = f"log.tensorboard = {toml(setting.value)} ({setting.origin})"
    if "log.to" in settings:
        return (f"{line}: this key has no effect beside log.to; remove it",)
    trackers = ["tensorboard"] if setting.value else []
    settings["log.to"] = Setting(trackers, setting.origin)
    return (
        f"{line}: read as log.to = {toml(trackers)}, which names all trackers; write that instead",
    )


def resolve_dialect(
    settings: dict[str, Setting], known_keys: frozenset[str] | None
) -> tuple[tuple[str, ...], list[str]]:
    """Replace the tables of a dialect in `settings` by native keys.

    known_keys: all keys of a run file; a decision without such a key is then a problem. Returns
        notes on how the dialect was understood, and problems.
    """
    dialects = dict[str, dict[str, Setting]]()
    for name in DIALECTS:
        leaves = _take_dialect(settings, name)
        if leaves is not None:
            dialects[name] = leaves
    if not dialects:
        return (), []
    # an empty table counts too: it may decide all by its defaults
    if len(dialects) > 1:
        tables = " and ".join(f"[precision.{name}]" for name in dialects)
        return (), [f"{tables}: a run has one precision; keep one of them"]
    ((name, leaves),) = dialects.items()

    problems = list(_native_conflicts(settings, name))
    _add_zero_of_nxd(settings, name, leaves)
    # the path "" is the table itself
    origins = {f"precision.{name}.{path}": leaf.origin for path, leaf in leaves.items() if path}
    try:
        resolved = DIALECTS[name].resolve(_unflatten(leaves), origins)
    except UserError as error:
        return (), problems + list(error.problems)
    if "model.layers" in resolved.settings and (preset := settings.get("model.preset")):
        remedy = f"[precision.{name}] describes the model; keep one of them"
        problems.append(f"model.preset = {toml(preset.value)} ({preset.origin}): {remedy}")
    for key, decision in resolved.settings.items():
        decided = Setting(decision.value, decision.origin)
        problems += _settle(settings, key, decided, decision.given, known_keys)
    _add_native(settings, resolved.plan)
    return resolved.notes, problems


def _add_native(settings: dict[str, Setting], plan: PrecisionPlan) -> None:
    """Add the native keys of a plan, each with the origin of the first field that it decides."""
    origins: dict[str, str] = {}
    for field, keys in KEYS.items():
        for key in keys:
            origins.setdefault(key, plan.origin[field])
    for key, value in native_keys_of(plan).items():
        settings.setdefault(key, Setting(value, origins[key]))


def _take_dialect(settings: dict[str, Setting], name: str) -> dict[str, Setting] | None:
    """Remove the keys of [precision.<name>] from `settings` and return them by dotted path; None if
    there are none."""
    table = f"precision.{name}"
    leaves = dict[str, Setting]()
    keys = [key for key in settings if key == table or key.startswith(f"{table}.")]
    for key in keys:
        setting = settings.pop(key)
        path = key.removeprefix(table).lstrip(".")
        leaves |= _flatten(path, setting.value, setting.origin)
    return leaves if keys else None


def _flatten(path: str, value: Any, origin: str) -> dict[str, Setting]:
    """Return the tree `value` at `path` by dotted paths; a table has an entry of its own, {}."""
    if not isinstance(value, dict):
        return {path: Setting(value, origin)}
    leaves: dict[str, Setting] = {path: Setting({}, origin)}
    for key, inner in value.items():
        leaves |= _flatten(f"{path}.{key}" if path else key, inner, origin)
    return leaves


def _unflatten(leaves: Mapping[str, Setting]) -> Any:
    """Return the tree of dotted paths; a later path replaces an earlier one that is in its way."""
    tree: dict[str, Any] = {"": {}}
    for path, leaf in leaves.items():
        *tables, last = ["", *path.split(".")] if path else [""]
        node = tree
        for table in tables:
            if not isinstance(node.get(table), dict):
                node[table] = {}
            node = node[table]
        # a table is there already if one of its keys came before it
        if not (leaf.value == {} and isinstance(node.get(last), dict)):
            node[last] = leaf.value
    return tree[""]


def _native_conflicts(settings: Mapping[str, Setting], name: str) -> Iterator[str]:
    """Yield a problem for each native key beside a dialect, which decides it."""
    native_keys = {key for keys in KEYS.values() for key in keys} - set(NATIVE_ONLY)
    for key, setting in settings.items():
        if key in native_keys:
            yield (
                f"{key} = {toml(setting.value)} ({setting.origin}): [precision.{name}] decides it; "
                "keep one of them"
            )


def _add_zero_of_nxd(
    settings: Mapping[str, Setting], name: str, leaves: dict[str, Setting]
) -> None:
    """Add parallel.zero to the keys of NxD, whose defaults depend on ZeRO-1."""
    path = "optimizer_config.zero_one_enabled"
    if name != "nxd" or path in leaves:
        return
    # a dialect that is no table is refused as it is
    if leaves.get("", Setting({}, "")).value == {}:
        zero = settings.get("parallel.zero", Setting(Parallel().zero, "default"))
        leaves[path] = Setting(zero.value, f"parallel.zero, {zero.origin}")


def _settle(
    settings: dict[str, Setting],
    key: str,
    decided: Setting,
    explicit: bool,
    known_keys: frozenset[str] | None,
) -> Iterator[str]:
    """Add a dialect's decision on a run-file key to `settings`; only a key that the dialect's user
    has written can contradict it.
    """
    written = settings.get(key)
    if known_keys is not None and key not in known_keys:
        yield f"{decided.origin} = {toml(decided.value)}: not supported yet"
    elif written is None:
        settings[key] = decided
    elif explicit and written.value != decided.value:
        yield (
            f"{key} = {toml(written.value)} ({written.origin}) contradicts {decided.origin}, which "
            f"says {toml(decided.value)}: keep one of them"
        )
