"""Rotary positions as a config.json says them: rope_parameters, or rope_scaling beside rope_theta
in older ones.

What two keys say differently is refused: transformers lets one of them win, which one depends on
its version.
"""

from collections.abc import Mapping
from typing import Any

from megaprec.errors import UserError
from models.rope_scaling import ORIGINAL, PARAMETERS
from tools.convert.hf.keys import Keys, require

REQUIRED = {"llama3": ("low_freq_factor", "high_freq_factor")}  # besides a factor
DEFAULT = {"rope_type": "default"}
LAYER_TYPES = ("full_attention", "sliding_attention")
KINDS = tuple(kind for kind in PARAMETERS if kind != "none")
TYPE_KEYS = ("rope_type", "type")
# model_type of families that turn layers with the window in their own way
BY_LAYER = ("olmo3", "gemma3_text")
STRETCHED = ("llama3", "yarn")  # kinds by which a top-level original length is read


def rope(
    keys: Keys, base: float, fraction: float = 1.0, base_key: str = "rope_theta"
) -> dict[str, Any]:
    """Return our fields of rotary positions.

    base, fraction: the family's, or what its other keys say.
    base_key: the name of the key of `base`.
    """
    return _fields(_parameters(keys), keys, base, fraction, base_key)


def rope_by_layer(
    keys: Keys, base: float, window_base: float, windows: Mapping[str, Any]
) -> dict[str, Any]:
    """Return our fields for families whose layers with the window have rotary positions of their
    own.

    windows: the window and its layers, as fields. rope_parameters has a table for each type of
        layer; rope_scaling and rope_theta in older files are those of the layers without the
        window.
    """
    full, windowed = _tables_by_layer(keys)
    older = _table(keys, "rope_scaling")
    if older and "rope_type" not in keys["rope_scaling"]:
        raise UserError.of("convert.rope_scaling_type", kind=keys.kind)
    for table in (full, windowed, older):
        # transformers 5 does not look for it by layer, which `notes` says
        table.pop("truncate", None)
    _require_same(older, full, keys)
    fields = _fields(full or older or dict(DEFAULT), keys, base, 1.0, "rope_theta")
    window_fields = _fields(
        windowed or dict(DEFAULT), keys, window_base, 1.0, "rope_local_base_freq"
    )
    for each in (fields, window_fields):
        require(each.pop("rotary_fraction"), "partial_rotary_factor", (1.0,))
    # Without such layers, or where all turn alike, one set of fields says all.
    if not windows["window"] or fields == window_fields:
        return fields
    if window_fields["rope_scaling"]:
        raise UserError.of("convert.rope_sliding_scaled")
    return {**fields, "window_rope_base": window_fields["rope_base"]}


def _tables_by_layer(keys: Keys) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the rope parameters of layers without the window, and of those with it; empty where
    the file does not say them."""
    tables = keys["rope_parameters"] or {}
    if not isinstance(tables, Mapping) or set(tables) - set(LAYER_TYPES):
        raise UserError.of(
            "convert.rope_by_layer", tables=tables, layer_types=" and ".join(LAYER_TYPES)
        )
    full, windowed = (
        _with_rope_type(tables.get(layer_type) or {}, f"rope_parameters.{layer_type}")
        for layer_type in LAYER_TYPES
    )
    return full, windowed


def _fields(
    parameters: dict[str, Any], keys: Keys, base: float, fraction: float, base_key: str
) -> dict[str, Any]:
    """Return our fields of rope parameters, which may say base and fraction too."""
    stated_base = parameters.pop("rope_theta", None)
    if stated_base is not None and keys.has(base_key) and stated_base != base:
        raise UserError.of(
            "convert.rope_theta_differs", base_key=base_key, base=base, stated_base=stated_base
        )
    stated_fraction = parameters.pop("partial_rotary_factor", None)
    if stated_fraction is not None and keys.has("rotary_pct") and stated_fraction != fraction:
        raise UserError.of(
            "convert.rotary_pct_differs", fraction=fraction, stated_fraction=stated_fraction
        )
    return {
        "rope_base": float(base if stated_base is None else stated_base),
        "rotary_fraction": float(fraction if stated_fraction is None else stated_fraction),
        "rope_scaling": _scaling(parameters, keys),
    }


def _parameters(keys: Keys) -> dict[str, Any]:
    """Return the rope parameters, their kind as rope_type."""
    older = _table(keys, "rope_scaling")
    newer = _table(keys, "rope_parameters")
    _require_same(older, newer, keys)
    return newer or older or dict(DEFAULT)


def _require_same(older: Mapping[str, Any], newer: Mapping[str, Any], keys: Keys) -> None:
    """Check rope_scaling (`older`) against rope_parameters (`newer`): the base of the first may
    stand beside it."""
    stated = dict(older)
    if keys.has("rope_theta") and "rope_theta" in newer:
        stated.setdefault("rope_theta", keys.stated["rope_theta"])
    if older and newer and stated != newer:
        raise UserError.of("convert.rope_tables_differ")


def _table(keys: Keys, key: str) -> dict[str, Any]:
    """Return the rope parameters under a key; empty if there are none."""
    table = keys[key] or {}
    if not isinstance(table, Mapping):
        raise UserError.of("convert.rope_not_object", key=key, table=table)
    return _with_rope_type(table, key)


def _with_rope_type(table: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the parameters in `table`, their kind as rope_type."""
    nested = [name for name, value in table.items() if isinstance(value, Mapping)]
    if nested:
        raise UserError.of("convert.rope_partial", key=key, nested=nested[0])
    kinds = {str(table[name]) for name in TYPE_KEYS if table.get(name) is not None}
    if len(kinds) > 1:
        raise UserError.of(
            "convert.rope_two_types", key=key, rope_type=table["rope_type"], type=table["type"]
        )
    if not table:
        return {}
    parameters = {name: value for name, value in table.items() if name not in TYPE_KEYS}
    return {"rope_type": kinds.pop() if kinds else "default", **parameters}


def _scaling(parameters: dict[str, Any], keys: Keys) -> dict[str, Any]:
    """Return our rope_scaling. Where an original length is not given, theirs is that of the
    model."""
    kind = parameters.pop("rope_type")
    stated = {key: value for key, value in parameters.items() if value is not None}
    original = keys[ORIGINAL]
    longest = keys["max_position_embeddings"]
    if original is not None and kind not in STRETCHED:
        raise UserError.of("convert.rope_key_unread", key=ORIGINAL, value=original, kind=kind)
    if kind == "default":
        _require_nothing_else(stated)
        return {}
    if kind not in KINDS:
        raise UserError.of("convert.rope_type_unknown", kind=kind, kinds=", ".join(KINDS))
    # Where nothing says the length, the model was trained for its own.
    if ORIGINAL in PARAMETERS[kind]:
        stated[ORIGINAL] = _original_length(stated.get(ORIGINAL), original, longest, kind)
    if kind == "yarn":
        stated |= _yarn_defaults(parameters, stated, longest)
    _require_complete(kind, stated)
    return {"kind": kind, **stated}


def _yarn_defaults(
    parameters: dict[str, Any], stated: dict[str, Any], longest: int
) -> dict[str, Any]:
    """Return what transformers takes for YaRN's parameters that are null.

    parameters: all of them.
    stated: those that are not null.
    longest: the length of the model.
    """
    defaults = {}
    if "factor" in parameters:
        defaults["factor"] = stated.get("factor", longest / stated[ORIGINAL])
    if "truncate" in parameters:
        defaults["truncate"] = bool(parameters["truncate"])
    return defaults


def _require_complete(kind: str, stated: dict[str, Any]) -> None:
    """Raise UserError for parameters that a kind needs, and for a factor that leaves nothing."""
    for key in ("factor", *REQUIRED.get(kind, ())):
        if key not in stated:
            raise UserError.of("convert.rope_key_missing", key=key, kind=kind)
    if stated.get("attention_factor") == 0:
        raise UserError.of("convert.rope_factor_zero")


def _require_nothing_else(parameters: dict[str, Any]) -> None:
    """Raise UserError for the first parameter of positions that are not scaled."""
    for key, value in parameters.items():
        raise UserError.of("convert.rope_key_without_type", key=key, value=value)


def _original_length(inside: Any, outside: Any, longest: int, kind: str) -> Any:
    """Return the length that a model was trained for before its positions were stretched.

    inside, outside: what the rope parameters say, and the config.json beside them.
    """
    if inside is not None and outside is not None and inside != outside:
        raise UserError.of(
            "convert.rope_original_differs", original=ORIGINAL, outside=outside, inside=inside
        )
    original = longest
    if inside is not None:
        original = inside
    elif outside is not None:
        original = outside
    if kind == "dynamic" and original != longest:
        raise UserError.of(
            "convert.rope_original_dynamic", key=ORIGINAL, value=original, longest=longest
        )
    return original
