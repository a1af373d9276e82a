"""Rotary positions in a config.json: rope_parameters, or rope_scaling beside rope_theta in older
ones.

What two keys say differently is refused: transformers lets one of them win, which one depends on
its version. rope_theta, rope_scaling and rope_local_base_freq are written for transformers 4, vLLM
and llama.cpp; families in which transformers 5 takes these keys otherwise get its rope_parameters
besides.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megaprec.errors import UserError
from models.config import ModelConfig
from models.rope_scaling import ORIGINAL, PARAMETERS
from tools.convert.hf.keys import ConfigKeys, Entry, Fields, Json, require, wrong_value
from tools.convert.hf.windows import require_count

_REQUIRED = {"llama3": ("low_freq_factor", "high_freq_factor")}  # besides a factor
DEFAULT = {"rope_type": "default"}
LAYER_TYPES = ("full_attention", "sliding_attention")
_PROPORTIONAL = "proportional"  # in Gemma 4 alone
ROPE_TYPES = tuple(name for name in PARAMETERS if name not in ("none", _PROPORTIONAL))
_TYPE_KEYS = ("rope_type", "type")  # names of the same key; the second is that of older files
# model_type of families that turn layers with the window in their own way
BY_LAYER = ("olmo3", "gemma3_text", "gemma4_text", "gemma4_unified_text")
# Which pairs turn by the time, the height or the width of a place in an image. Of a token of text
# the three are one number, so that it does not matter which pair turns by which.
KEYS_OF_IMAGES = ("mrope_section", "mrope_interleaved")
# Types for which transformers reads an original length beside the rope parameters.
TYPES_WITH_ORIGINAL = ("llama3", "yarn")
# model_type of families whose class has an original length also where nothing is scaled by it
WITH_ORIGINAL = ("phi3",)
# Types in transformers 4's OLMo 2, whose rope_scaling has `type` and `factor` and nothing else.
OLMO2_TYPES = ("linear", "dynamic")
GPT_OSS_PARAMETERS = {  # of a config.json that says nothing
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    ORIGINAL: 4096,
}
APERTUS_PARAMETERS = {  # likewise
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    ORIGINAL: 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
CWM_PARAMETERS = APERTUS_PARAMETERS | {"rope_theta": 1_000_000.0, "factor": 16.0}  # likewise
_BETA = "llama_4_scaling_beta"
MINISTRAL3_PARAMETERS = {  # likewise
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    ORIGINAL: 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    _BETA: 0.1,
}


GEMMA4_PARAMETERS = {  # likewise
    "full_attention": {
        "rope_type": _PROPORTIONAL,
        "partial_rotary_factor": 0.25,
        "rope_theta": 1_000_000.0,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}


def _read_all_features(config: ConfigKeys) -> Fields:
    """Return the fields of rotary positions. Raises UserError unless all features turn."""
    rotary = _fields(_parameters(config), config, config["rope_theta"])
    require(rotary["rotary_fraction"], "partial_rotary_factor", (1.0,))
    require(config["partial_rotary_factor"], "partial_rotary_factor", (1, 1.0, None))
    return rotary


def _read_some_features(config: ConfigKeys) -> Fields:
    """Return the fields of rotary positions where partial_rotary_factor may have any value."""
    return _fields_of_part(_parameters(config), config)


def _read_phi3(config: ConfigKeys) -> Fields:
    """Return the fields of rotary positions of Phi-3. Raises UserError for scaled ones, all of
    which are long ropes to its class, whatever their rope_type: a factor for each wavelength."""
    parameters = _parameters(config)
    require(parameters["rope_type"], "rope_type", (DEFAULT["rope_type"],))
    return _fields_of_part(parameters, config)


def _read_minimax(config: ConfigKeys) -> Fields:
    """Return the fields of MiniMax-M2, whose published files say how many features of a head turn,
    not which part of them."""
    turning = config["rotary_dim"]
    stated_fraction = config["partial_rotary_factor"]
    parameters = _parameters(config)
    fraction = 1.0 if stated_fraction is None else stated_fraction
    is_unsaid = stated_fraction is None and "partial_rotary_factor" not in parameters
    if turning is not None and is_unsaid:
        usual_width = config["hidden_size"] // config["num_attention_heads"]
        fraction = turning / (config["head_dim"] or usual_width)
    return _fields(parameters, config, config["rope_theta"], fraction)


def _read_nope_layers(config: ConfigKeys) -> Fields:
    """Return the layers without rotary positions: those with 0 in no_rope_layers, otherwise the
    last one of each interval."""
    layers = config["num_hidden_layers"]
    interval = config.above_zero("no_rope_layer_interval")
    turns = config["no_rope_layers"]
    key = "no_rope_layer_interval" if turns is None else "no_rope_layers"
    if turns is None:
        turns = [int((number + 1) % interval > 0) for number in range(layers)]
    require_count(turns, layers, "no_rope_layers")
    for turn in turns:
        require(turn, "no_rope_layers", (0, 1))
    if not any(turns):
        raise UserError.of("convert.hf_no_layer_turns", key=key)
    return {"nope_layers": tuple(number for number, turn in enumerate(turns) if not turn)}


def _fields_of_part(parameters: dict[str, Any], config: ConfigKeys) -> Fields:
    """Return the fields of rope parameters where partial_rotary_factor may have any value."""
    fraction = config["partial_rotary_factor"]
    fraction = 1.0 if fraction is None else fraction
    return _fields(parameters, config, config["rope_theta"], fraction)


def _read_qwen3_5(config: ConfigKeys) -> Fields:
    """Return the fields of Qwen3.5, whose positions are also those of images."""
    parameters = _parameters(config)
    for key in KEYS_OF_IMAGES:
        parameters.pop(key, None)
    return _fields_of_part(parameters, config)


def _read_ministral3(config: ConfigKeys) -> Fields:
    """Return the fields of Ministral 3, whose queries grow with their position. Raises UserError
    without an original length, for which its class has no factors."""
    _fill_in(config, MINISTRAL3_PARAMETERS)
    parameters = _parameters(config)
    beta = parameters.pop(_BETA, None)
    longest = config["max_position_embeddings"]
    stated_longest = parameters.pop("max_position_embeddings", None)
    require(stated_longest, "max_position_embeddings", (longest, None))
    require(parameters["rope_type"], "rope_type", TYPES_WITH_ORIGINAL)
    if beta is None:
        raise UserError.of("convert.rope_key_missing", key=_BETA, kind=parameters["rope_type"])
    rotary = _fields(parameters, config, config["rope_theta"])
    require(rotary["rotary_fraction"], "partial_rotary_factor", (1.0,))
    require(config["partial_rotary_factor"], "partial_rotary_factor", (1, 1.0, None))
    rotary["rope_scaling"]["query_beta"] = float(beta)
    return rotary


def _write_ministral3(model: ModelConfig) -> Json:
    """Return the keys of transformers 5 alone, for no older one has the family."""
    beta = {_BETA: model.rope_scaling.query_beta}
    return {"rope_parameters": {**_newer_parameters(model), **beta}}


def _fill_in(config: ConfigKeys, parameters: Json) -> None:
    """State the rope parameters that a class has where the file says nothing."""
    if not config.has("rope_scaling") and config.stated.get("rope_parameters") is None:
        config.stated["rope_parameters"] = dict(parameters)


def _scaled_unless_said(parameters: Json) -> Entry:
    """Return the entry of a family whose class has these parameters where the file says
    nothing."""

    def read(config: ConfigKeys) -> Fields:
        _fill_in(config, parameters)
        return _read_all_features(config)

    return Entry(read, lambda model: {**_write(model), "rope_parameters": _newer_parameters(model)})


def _read_gpt_neox(config: ConfigKeys) -> Fields:
    """Return the fields of GPT-NeoX, of which transformers goes by rotary_emb_base and
    rotary_pct."""
    base = config["rotary_emb_base"]
    parameters = _parameters(config, base_key="rotary_emb_base")
    rotary = _fields(parameters, config, base, config["rotary_pct"], base_key="rotary_emb_base")
    require(config["rope_theta"], "rope_theta", (rotary["rope_base"], None))
    rotary_fraction = rotary["rotary_fraction"]
    require(config["partial_rotary_factor"], "partial_rotary_factor", (rotary_fraction, None))
    return rotary


def _read_nanochat(config: ConfigKeys) -> Fields:
    """Return the fields of NanoChat, whose norms of queries and keys follow the rotation. Raises
    UserError for a factor of rotated features, which they undo."""
    rotary = _read_all_features(config)
    scaling = rotary["rope_scaling"]
    if scaling.get("kind") == "yarn" and scaling.get("attention_factor") != 1:
        raise UserError.of("convert.rope_factor_undone", kind=config.model_type)
    return rotary


def _read_gpt_oss(config: ConfigKeys) -> Fields:
    """Return the fields of gpt-oss, whose class has YaRN where the file says nothing."""
    _fill_in(config, GPT_OSS_PARAMETERS)
    rotary = _read_all_features(config)
    # transformers ignores it
    original_length = rotary["rope_scaling"].get(ORIGINAL)
    require(config["initial_context_length"], "initial_context_length", (original_length, None))
    return rotary


def _write(model: ModelConfig) -> Json:
    """Return the keys of positions that transformers 4 reads."""
    config = {"rope_theta": model.rope_base, "rope_scaling": _scaling_keys(model)}
    return {**config, **_longest(model)}


def _longest(model: ModelConfig) -> Json:
    """Return the longest length if it is not that of the model: with dynamic scaling transformers
    takes its key for the original one."""
    if model.rope_scaling.kind == "dynamic":
        return {"max_position_embeddings": getattr(model.rope_scaling, ORIGINAL)}
    return {}


def _scaling_keys(model: ModelConfig) -> Fields | None:
    """Return a model's rope_scaling; None if its positions are not scaled."""
    scaling = model.rope_scaling
    parameters: Fields = {}
    for key in PARAMETERS[scaling.kind]:
        # It has another name there, in one family.
        if key == "query_beta":
            continue
        name = "partial_rotary_factor" if key == "fraction" else key
        # 0 is not given; max_position_embeddings says the original length of dynamic ones.
        value = getattr(scaling, key)
        is_elsewhere = key == ORIGINAL and scaling.kind == "dynamic"
        says_nothing = scaling.kind == _PROPORTIONAL and value == 1
        if value and not is_elsewhere and not says_nothing:
            parameters[name] = value
    if not scaling.truncate:
        parameters["truncate"] = False
    # proportional positions have a rope_type even where nothing else differs from the default
    if not parameters and scaling.kind != _PROPORTIONAL:
        return None
    return {"rope_type": scaling.kind, **parameters}


def _newer_parameters(model: ModelConfig) -> Fields:
    """Return rope_parameters, as transformers 5 reads them, of layers without the window."""
    return {**(_scaling_keys(model) or DEFAULT), "rope_theta": model.rope_base}


def _write_gpt_neox(model: ModelConfig) -> Json:
    return {
        **_write(model),
        "rotary_pct": model.rotary_fraction,
        "rotary_emb_base": model.rope_base,
    }


def _write_olmo2(model: ModelConfig) -> Json:
    config = _write(model)
    scaling = model.rope_scaling
    if scaling.kind in OLMO2_TYPES:
        return {**config, "rope_scaling": {"type": scaling.kind, "factor": scaling.factor}}
    return config


def _write_qwen3_5(model: ModelConfig) -> Json:
    """Return the keys of transformers 5 alone, for no older one has the family."""
    parameters = {
        **_newer_parameters(model),
        "partial_rotary_factor": model.rotary_fraction,
    }
    return {"rope_parameters": parameters, **_longest(model)}


ROPE = Entry(_read_all_features, _write)
ROPE_OF_SOME_FEATURES = Entry(
    _read_some_features,
    lambda model: {**_write(model), "partial_rotary_factor": model.rotary_fraction},
)
NOPE_LAYERS = Entry(
    _read_nope_layers,
    lambda model: {
        "no_rope_layers": [int(n not in model.nope_layers) for n in range(model.layers)]
    },
)
ROPE_OF_PHI3 = Entry(
    _read_phi3,
    lambda model: {**_write(model), "partial_rotary_factor": model.rotary_fraction},
)
ROPE_OF_MINISTRAL3 = Entry(_read_ministral3, _write_ministral3)
ROPE_OF_NANOCHAT = Entry(_read_nanochat, _write)
ROPE_OF_APERTUS = _scaled_unless_said(APERTUS_PARAMETERS)
ROPE_OF_CWM = _scaled_unless_said(CWM_PARAMETERS)
ROPE_OF_MINIMAX = Entry(
    _read_minimax,
    lambda model: {
        **_write(model),
        "rotary_dim": int(model.head_dim * model.rotary_fraction),
        "partial_rotary_factor": model.rotary_fraction,
    },
)
ROPE_OF_QWEN3_5 = Entry(_read_qwen3_5, _write_qwen3_5)
ROPE_OF_GPT_NEOX = Entry(_read_gpt_neox, _write_gpt_neox)
ROPE_OF_OLMO2 = Entry(_read_all_features, _write_olmo2)
ROPE_OF_GPT_OSS = Entry(
    _read_gpt_oss,
    lambda model: {**_write(model), "rope_parameters": _newer_parameters(model)},
)


def rope_by_layer(
    windows: Entry, window_base_key: str = "", is_proportional: bool = False
) -> Entry:
    """Return the entry of a window and of the rotary positions of families whose layers with the
    window have positions of their own.

    windows: of the window, and of the layers that have it.
    window_base_key: the key of the base of these layers; "": it is the default of the family.
    is_proportional: other layers may have proportional positions, as in Gemma 4, whose class reads
        rope_parameters alone and has them where the file says nothing.
    """

    def read(config: ConfigKeys) -> Fields:
        """Return the fields of windows and of rotary positions. Layers with the window may have a
        base of their own."""
        fields = windows.read(config)
        if window_base_key:
            window_base = config[window_base_key]
        elif is_proportional:
            window_base = GEMMA4_PARAMETERS["sliding_attention"]["rope_theta"]
            # which its class would take for tables of all layers
            require(config["rope_scaling"], "rope_scaling", (None,))
            if config["rope_parameters"] is None:
                config.stated["rope_parameters"] = dict(GEMMA4_PARAMETERS)
        else:
            # transformers takes rope_theta for the layers without the window only
            window_base = config.family.defaults["rope_theta"]
        has_window = fields["window"] > 0
        rotary = _read_by_layer(config, window_base, has_window, is_proportional)
        require(config["partial_rotary_factor"], "partial_rotary_factor", (1, 1.0, None))
        return fields | rotary

    def write(model: ModelConfig) -> Json:
        """Return the keys of windows and of rotary positions, by the type of layer."""
        full = _newer_parameters(model)
        windowed = full
        # Of proportional ones the class makes no table for layers with the window.
        if model.window_rope_base or is_proportional:
            windowed = {**DEFAULT, "rope_theta": model.window_rope_base or model.rope_base}
        config = {**windows.write(model), **_write(model)}
        if is_proportional:
            # no keys of its class
            config = dict(windows.write(model))
        if window_base_key:
            config[window_base_key] = windowed["rope_theta"]
        config["rope_parameters"] = {"full_attention": full, "sliding_attention": windowed}
        return config

    return Entry(read, write)


def _read_by_layer(
    config: ConfigKeys, window_base: float, has_window: bool, is_proportional: bool
) -> Fields:
    """Return the fields of rotary positions, of layers with the window too.

    rope_parameters has a table for each type of layer; rope_scaling and rope_theta in older files
    are those of the layers without the window.
    """
    full, windowed = _tables_by_layer(config)
    older = _table(config, "rope_scaling")
    if older and "rope_type" not in config["rope_scaling"]:
        raise UserError.of("convert.rope_scaling_type", kind=config.model_type)
    for table in (full, windowed, older):
        # transformers 5 does not look for it by layer, which `notes` says
        table.pop("truncate", None)
    _require_same(older, full, config)
    # Copies of DEFAULT, for `_fields` takes out what it has read.
    full = full or older or dict(DEFAULT)
    windowed = windowed or dict(DEFAULT)
    if is_proportional and full["rope_type"] == _PROPORTIONAL:
        fields = _proportional_fields(full)
    else:
        fields = _fields(full, config, config["rope_theta"])
    window_fields = _fields(windowed, config, window_base, base_key="rope_local_base_freq")
    for fields_of_type in (fields, window_fields):
        require(fields_of_type.pop("rotary_fraction"), "partial_rotary_factor", (1.0,))
    # Without such layers, or where all turn alike, one set of fields says all.
    if not has_window or fields == window_fields:
        return fields
    return {**fields, "window_rope_base": _base_of_windows(window_fields)}


def _base_of_windows(window_fields: Fields) -> float:
    """Return the base of layers with the window, the one field that they may have for
    themselves. Raises UserError."""
    base = window_fields["rope_base"]
    if not base > 1:
        key = "rope_parameters.sliding_attention.rope_theta"
        raise UserError(wrong_value(key, base, "above 1"))
    if window_fields["rope_scaling"]:
        raise UserError.of("convert.rope_sliding_scaled")
    return base


def _proportional_fields(parameters: dict[str, Any]) -> Fields:
    """Return our fields of proportional rope parameters, and take these out of `parameters`.

    Only the fastest pairs turn, as many as the scaling's fraction says. Their frequencies are those
    of a whole head: rotary_fraction, which would choose other frequencies, is 1.
    Raises UserError for parameters without rope_theta, or with others that are not known.
    """
    factor = parameters.pop("factor", None)
    fraction = parameters.pop("partial_rotary_factor", None)
    scaling = {
        "kind": _PROPORTIONAL,
        "factor": 1.0 if factor is None else float(factor),
        "fraction": 1.0 if fraction is None else float(fraction),
    }
    base = parameters.pop("rope_theta", None)
    if base is None:
        raise UserError.of("convert.rope_key_missing", key="rope_theta", kind=_PROPORTIONAL)
    del parameters["rope_type"]
    _require_nothing_else(parameters)
    return {"rope_base": float(base), "rotary_fraction": 1.0, "rope_scaling": scaling}


def olmo2_beyond_transformers_4(model: ModelConfig) -> Iterator[str]:
    """Yield what transformers 4 cannot do with the positions of an OLMo 2."""
    rope_type = model.rope_scaling.kind
    if rope_type not in ("none", *OLMO2_TYPES):
        yield f"scale the rotary positions of an olmo2 model by rope_type {rope_type!r}"


def by_layer_beyond_transformers_4(model_type: str) -> Callable[[ModelConfig], Iterator[str]]:
    """Return the function that yields what transformers 4 cannot do with the positions of layers
    with the window."""

    def yield_lines(model: ModelConfig) -> Iterator[str]:
        """Yield what the rotary positions of a family's windowed layers cannot be."""
        if not model.window:
            return
        if model.rope_scaling.kind != "none" and not model.window_rope_base:
            yield (
                "scale the rotary positions of layers with sliding_attention in a "
                f"{model_type} model"
            )
        elif model_type == "olmo3" and model.window_rope_base not in (0, model.rope_base):
            yield (
                "give the layers with sliding_attention of an olmo3 model a rope_theta of their "
                "own, as this one has"
            )

    return yield_lines


def _tables_by_layer(config: ConfigKeys) -> tuple[Fields, Fields]:
    """Return the rope parameters of layers without the window, and of those with it; empty where
    the file does not say them."""
    tables = config["rope_parameters"] or {}
    if set(tables) - set(LAYER_TYPES):
        raise UserError.of(
            "convert.rope_by_layer", tables=tables, layer_types=" and ".join(LAYER_TYPES)
        )
    by_type = []
    for layer_type in LAYER_TYPES:
        table = tables.get(layer_type) or {}
        key = f"rope_parameters.{layer_type}"
        if not isinstance(table, Mapping):
            raise UserError(wrong_value(key, table, "a table"))
        by_type.append(_with_rope_type(table, key))
    full, windowed = by_type
    return full, windowed


def _fields(
    parameters: dict[str, Any],
    config: ConfigKeys,
    base: float,
    fraction: float = 1.0,
    base_key: str = "rope_theta",
) -> Fields:
    """Return our fields of rope parameters, which may say base and fraction too; those that are
    read are taken out of `parameters`.

    base, fraction: what other keys of the file say, or the family.
    base_key: the name of the key of `base`.
    """
    stated_base = parameters.pop("rope_theta", None)
    if stated_base is not None and config.has(base_key) and stated_base != base:
        raise UserError.of(
            "convert.rope_theta_differs", base_key=base_key, base=base, stated_base=stated_base
        )
    stated_fraction = parameters.pop("partial_rotary_factor", None)
    if stated_fraction is not None and stated_fraction != fraction:
        for key in ("rotary_pct", "partial_rotary_factor"):
            if config.has(key):
                raise UserError.of(
                    "convert.rotary_fraction_differs",
                    key=key,
                    fraction=fraction,
                    stated_fraction=stated_fraction,
                )
    return {
        "rope_base": float(base if stated_base is None else stated_base),
        "rotary_fraction": float(fraction if stated_fraction is None else stated_fraction),
        "rope_scaling": _scaling(parameters, config),
    }


def _parameters(config: ConfigKeys, base_key: str = "rope_theta") -> dict[str, Any]:
    """Return the rope parameters, their type under rope_type."""
    older = _table(config, "rope_scaling")
    newer = _table(config, "rope_parameters")
    _require_same(older, newer, config, base_key)
    return newer or older or dict(DEFAULT)


def _require_same(
    older: Mapping[str, Any],
    newer: Mapping[str, Any],
    config: ConfigKeys,
    base_key: str = "rope_theta",
) -> None:
    """Check rope_scaling (`older`) against rope_parameters (`newer`): the base of the first may
    stand beside it, under the key that its class reads."""
    stated = dict(older)
    if config.has(base_key) and "rope_theta" in newer:
        stated.setdefault("rope_theta", config.stated[base_key])
    if older and newer and stated != newer:
        raise UserError.of("convert.rope_tables_differ")


def _table(config: ConfigKeys, config_key: str) -> dict[str, Any]:
    """Return the rope parameters under a key; empty if there are none."""
    return _with_rope_type(config[config_key] or {}, config_key)


def _with_rope_type(table: Mapping[str, Any], config_key: str) -> dict[str, Any]:
    """Return the parameters in `table`, their type under rope_type."""
    nested = [name for name, value in table.items() if isinstance(value, Mapping)]
    if nested:
        raise UserError.of("convert.rope_partial", key=config_key, nested=nested[0])
    stated_types = set()
    for type_key in _TYPE_KEYS:
        if table.get(type_key) is not None:
            stated_types.add(str(table[type_key]))
    if len(stated_types) > 1:
        raise UserError.of(
            "convert.rope_two_types",
            key=config_key,
            rope_type=table["rope_type"],
            type=table["type"],
        )
    if not table:
        return {}
    parameters = {name: value for name, value in table.items() if name not in _TYPE_KEYS}
    rope_type = stated_types.pop() if stated_types else "default"
    return {"rope_type": rope_type, **parameters}


def _scaling(parameters: dict[str, Any], config: ConfigKeys) -> dict[str, Any]:
    """Return our rope_scaling. Where an original length is not given, theirs is that of the
    model."""
    rope_type = parameters.pop("rope_type")
    stated = {key: value for key, value in parameters.items() if value is not None}
    original = config[ORIGINAL]
    longest = config["max_position_embeddings"]
    is_known = rope_type in TYPES_WITH_ORIGINAL or config.model_type in WITH_ORIGINAL
    if original is not None and not is_known:
        raise UserError.of("convert.rope_key_unread", key=ORIGINAL, value=original, kind=rope_type)
    if rope_type == "default":
        _require_nothing_else(stated)
        return {}
    # a name of ours, which says another thing than transformers' files
    if "query_beta" in stated:
        raise UserError.of(
            "convert.rope_key_unread",
            key="query_beta",
            value=stated["query_beta"],
            kind=rope_type,
        )
    if rope_type not in ROPE_TYPES:
        raise UserError.of("convert.rope_type_unknown", kind=rope_type, kinds=", ".join(ROPE_TYPES))
    # Where nothing says the length, the model was trained for its own.
    if ORIGINAL in PARAMETERS[rope_type]:
        stated[ORIGINAL] = _original_length(stated.get(ORIGINAL), original, longest, rope_type)
    if rope_type == "yarn":
        stated |= _yarn_defaults(parameters, stated, longest)
    _require_complete(rope_type, stated)
    return {"kind": rope_type, **stated}


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


def _require_complete(rope_type: str, stated: dict[str, Any]) -> None:
    """Raise UserError for parameters that a rope_type needs, and for a factor that leaves
    nothing."""
    for key in ("factor", *_REQUIRED.get(rope_type, ())):
        if key not in stated:
            raise UserError.of("convert.rope_key_missing", key=key, kind=rope_type)
    if stated.get("attention_factor") == 0:
        raise UserError.of("convert.rope_factor_zero")


def _require_nothing_else(parameters: dict[str, Any]) -> None:
    """Raise UserError for the first parameter of positions that are not scaled."""
    if parameters:
        key, value = next(iter(parameters.items()))
        raise UserError.of("convert.rope_key_without_type", key=key, value=value)


def _original_length(inside: Any, outside: Any, longest: int, rope_type: str) -> Any:
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
    if rope_type == "dynamic" and original != longest:
        raise UserError.of(
            "convert.rope_original_dynamic", key=ORIGINAL, value=original, longest=longest
        )
    return original
