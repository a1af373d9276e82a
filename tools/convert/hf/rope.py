"""Rotary positions as a config.json says them: rope_parameters, or rope_scaling beside rope_theta
in older ones.

What two keys say differently is refused: transformers lets one of them win, which one depends on
its version.
"""

from collections.abc import Mapping
from typing import Any

from megaprec.errors import UserError
from models.rope import ORIGINAL, PARAMETERS
from tools.convert.hf.keys import Keys, require

REQUIRED = {"llama3": ("low_freq_factor", "high_freq_factor")}  # besides a factor
DEFAULT = {"rope_type": "default"}
LAYER_TYPES = ("full_attention", "sliding_attention")
KINDS = tuple(kind for kind in PARAMETERS if kind != "none")
# model_type of families that turn layers with the window in their own way
BY_LAYER = (
    "olmo3",
    "gemma3_text",
)
STRETCHED = ("llama3", "yarn")  # kinds by which a top-level original length is read


def rope(
    c: Keys, base: float, fraction: float = 1.0, base_key: str = "rope_theta"
) -> dict[str, Any]:
    """Our fields. base, fraction: the family's, or what its other keys say; base_key: the name of
    that key."""
    return _fields(_given(c), c, base, fraction, base_key)


def rope_by_layer(
    c: Keys, base: float, window_base: float, windows: Mapping[str, Any]
) -> dict[str, Any]:
    """Our fields for families whose layers with the window have rotary positions of their own.

    windows: the window and its layers, as fields. rope_parameters has a table for each type of
    layer; rope_scaling and rope_theta in older files are those of the layers without the window.
    """
    tables = c["rope_parameters"] or {}
    if not isinstance(tables, Mapping) or set(tables) - set(LAYER_TYPES):
        raise UserError(
            f"config.json has rope_parameters = {tables!r}: they must be by "
            f"{' and '.join(LAYER_TYPES)}"
        )
    full, windowed = (
        _normal(tables.get(kind) or {}, f"rope_parameters.{kind}") for kind in LAYER_TYPES
    )
    older = _table(c, "rope_scaling")
    if older and "rope_type" not in c["rope_scaling"]:
        raise UserError(
            "config.json has rope_scaling without rope_type: transformers ignores it in a "
            f"{c.kind} model"
        )
    for table in (full, windowed, older):
        # transformers 5 does not look for it by layer, which `notes` says
        table.pop("truncate", None)
    _require_alike(older, full, c)
    fields = _fields(full or older or dict(DEFAULT), c, base, 1.0, "rope_theta")
    beside = _fields(windowed or dict(DEFAULT), c, window_base, 1.0, "rope_local_base_freq")
    for each in (fields, beside):
        require(each.pop("rotary_fraction"), "partial_rotary_factor", (1.0,))
    if not windows["window"] or fields == beside:
        return fields
    if beside["rope_scaling"]:
        raise UserError(
            "config.json scales rotary positions in layers with sliding_attention: only in "
            "others can it"
        )
    return {**fields, "window_rope_base": beside["rope_base"]}


def _fields(
    given: dict[str, Any], c: Keys, base: float, fraction: float, base_key: str
) -> dict[str, Any]:
    said = given.pop("rope_theta", None)
    if said is not None and c.has(base_key) and said != base:
        raise UserError(
            f"config.json has {base_key} = {base}, but rope_theta = {said} in its rope_parameters"
        )
    turning = given.pop("partial_rotary_factor", None)
    if turning is not None and c.has("rotary_pct") and turning != fraction:
        raise UserError(
            f"config.json has rotary_pct = {fraction}, but partial_rotary_factor = {turning}"
        )
    return {
        "rope_base": float(base if said is None else said),
        "rotary_fraction": float(fraction if turning is None else turning),
        "rope_scaling": _scaling(given, c),
    }


def _given(c: Keys) -> dict[str, Any]:
    """The rope parameters, their kind as rope_type."""
    older = _table(c, "rope_scaling")
    newer = _table(c, "rope_parameters")
    _require_alike(older, newer, c)
    return newer or older or dict(DEFAULT)


def _require_alike(older: Mapping[str, Any], newer: Mapping[str, Any], c: Keys) -> None:
    """Check rope_scaling (`older`) against rope_parameters (`newer`): the base of the first may
    stand beside it."""
    if c.has("rope_theta") and "rope_theta" in newer:
        beside = {"rope_theta": c.given["rope_theta"]}
    else:
        beside = {}
    if older and newer and {**beside, **older} != newer:
        raise UserError(
            "config.json has rope_scaling and rope_parameters that say different things: "
            "leave one out"
        )


def _table(c: Keys, key: str) -> dict[str, Any]:
    table = c[key] or {}
    if not isinstance(table, Mapping):
        raise UserError(f"config.json has {key} = {table!r}: it must be an object")
    return _normal(table, key)


def _normal(table: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the parameters in `table`, their kind as rope_type."""
    if nested := [name for name, value in table.items() if isinstance(value, Mapping)]:
        raise UserError(
            f"config.json has {key} with parameters for {nested[0]} alone: all layers must "
            "turn alike"
        )
    kinds = {str(table[name]) for name in ("rope_type", "type") if table.get(name) is not None}
    if len(kinds) > 1:
        raise UserError(
            f"config.json has {key} with rope_type {table['rope_type']!r} and type "
            f"{table['type']!r}"
        )
    kept = {name: value for name, value in table.items() if name not in ("rope_type", "type")}
    if table:
        return {"rope_type": kinds.pop() if kinds else "default", **kept}
    return {}


def _scaling(said: dict[str, Any], c: Keys) -> dict[str, Any]:
    """Our rope_scaling. Where an original length is not given, theirs is that of the model."""
    kind = said.pop("rope_type")
    given = {key: value for key, value in said.items() if value is not None}
    original = c[ORIGINAL]
    longest = c["max_position_embeddings"]
    if original is not None and kind not in STRETCHED:
        raise UserError(
            f"config.json has {ORIGINAL} = {original}, which rope_type {kind!r} does not read"
        )
    if kind == "default":
        _require_nothing_else(given)
        return {}
    if kind not in PARAMETERS or kind == "none":
        raise UserError(
            f"config.json has rope_type = {kind!r}, which is not known: default, "
            f"{', '.join(KINDS)} are"
        )
    if ORIGINAL in PARAMETERS[kind]:
        given[ORIGINAL] = _original(given.get(ORIGINAL), original, longest, kind)
    if kind == "yarn" and "factor" in said:
        given.setdefault("factor", longest / given[ORIGINAL])
    if kind == "yarn" and "truncate" in said:
        given["truncate"] = bool(said["truncate"])  # null is false to transformers
    if lacks := [key for key in ("factor", *REQUIRED.get(kind, ())) if key not in given]:
        raise UserError(f"config.json lacks {lacks[0]}, which rope_type {kind!r} needs")
    if given.get("attention_factor") == 0:
        raise UserError(
            "config.json has attention_factor = 0, with which queries and keys would be nothing"
        )
    return {"kind": kind, **given}


def _require_nothing_else(given: dict[str, Any]) -> None:
    for key, value in given.items():
        raise UserError(
            f"config.json has {key} = {value!r} in rope parameters without a rope_type that "
            "reads it"
        )


def _original(within: Any, beside: Any, longest: int, kind: str) -> Any:
    if within is not None and beside is not None and within != beside:
        raise UserError(
            f"config.json has {ORIGINAL} = {beside}, but {within} in its rope parameters"
        )
    found = next((value for value in (within, beside) if value is not None), longest)
    if kind == "dynamic" and found != longest:
        raise UserError(
            f"config.json has {ORIGINAL} = {found} in dynamic rope parameters, but "
            "transformers goes by "
            f"max_position_embeddings = {longest}: leave it out"
        )
    return found
