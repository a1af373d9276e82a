"""The sliding window of attention in a config.json, and the layers that have it."""

from collections.abc import Sequence
from typing import Any

from megaprec.errors import UserError
from models.config import ModelConfig
from tools.convert.hf.keys import ConfigKeys, Entry, Fields, Json, require

# Types of layers in layer_types, and whether they have the window.
LAYER_TYPES = {"full_attention": False, "attention": False, "sliding_attention": True}


def by_layer_type(pattern: int | str, unused_window: int) -> Entry:
    """Return the entry of a window in the layers that layer_types names, otherwise in all but every
    `pattern`th.

    pattern: a number, or the key that has it.
    unused_window: sliding_window of a model without any such layer; not null, for the classes of
        gpt-oss and Gemma 2 take numbers alone.
    """

    def read(config: ConfigKeys) -> Fields:
        """Return which layers have the window, by their list or by the period of a pattern."""
        period = config[pattern] if isinstance(pattern, str) else pattern
        has_window = _layers_by_list_or_period(config, period)
        return _required_fields(has_window, _window(config))

    def write(model: ModelConfig) -> Json:
        return {
            "sliding_window": model.window or unused_window,
            "layer_types": _layer_types(model),
        }

    return Entry(read, write)


def _read_of_all(config: ConfigKeys) -> Fields:
    """Return the window of a family in which all layers have the same."""
    window = _window(config)
    # transformers does not read it in these families
    if config.has("use_sliding_window"):
        require(config.stated["use_sliding_window"], "use_sliding_window", (window > 0,))
        config.mark_read("use_sliding_window")
    require_layers_alike(config, window, config["num_hidden_layers"])
    return {"window": window}


def _read_qwen(config: ConfigKeys) -> Fields:
    """Return Qwen's window and its layers: those of layer_types, otherwise those from a certain one
    on."""
    window = _window(config) if config["use_sliding_window"] else 0
    config.mark_read("sliding_window")
    layers = config["num_hidden_layers"]
    # Layers before it see all tokens.
    first = config["max_window_layers"]
    types = config["layer_types"]
    if types is None:
        return window_fields([number >= first for number in range(layers)], window)
    return _required_fields(_layers_with_window(types, layers), window)


def _read_dots1(config: ConfigKeys) -> Fields:
    """Return the window of dots.llm1, whose class takes it for layers from a certain one on if
    sliding_window is not null."""
    window = _window(config)
    layers = config["num_hidden_layers"]
    first = config["max_window_layers"]
    types = config["layer_types"]
    if types is None:
        fields = window_fields([number >= first for number in range(layers)], window)
    else:
        fields = _required_fields(_layers_with_window(types, layers), window)
    # transformers does not read it in this family
    if config.has("use_sliding_window"):
        uses_window = fields["window"] > 0
        require(config.stated["use_sliding_window"], "use_sliding_window", (uses_window,))
        config.mark_read("use_sliding_window")
    return fields


def _read_smollm3(config: ConfigKeys) -> Fields:
    """Return the window of SmolLM3, which by default layers without rotary positions have."""
    uses_window = config["use_sliding_window"]
    window = _window(config) if uses_window else 0
    # Published files have the second, which its class does not read.
    config.mark_read("sliding_window", "max_window_layers")
    layers = config["num_hidden_layers"]
    types = config["layer_types"]
    if types is not None:
        return _required_fields(_layers_with_window(types, layers), window)
    if not window:
        return window_fields([], 0)
    turns = config["no_rope_layers"]
    interval = config["no_rope_layer_interval"]
    if turns is None:
        turns = [(number + 1) % interval > 0 for number in range(layers)]
    return window_fields([not turn for turn in turns], window)


def _read_exaone4(config: ConfigKeys) -> Fields:
    """Return the window of EXAONE 4 and its layers. If there is one, the other layers have no
    rotary positions."""
    window = _window(config)
    period = config["sliding_window_pattern"]
    if config["layer_types"] is None and not window:
        has_window = [False] * config["num_hidden_layers"]
    else:
        has_window = _layers_by_list_or_period(config, period)
    fields = _required_fields(has_window, window)
    if not window:
        return {**fields, "nope_layers": ()}
    if not any(has_window):
        raise UserError.of("convert.hf_no_positions", window=window)
    return {**fields, "nope_layers": _layers_without(has_window)}


def _read_cohere2(config: ConfigKeys) -> Fields:
    """Return the window of Cohere 2 and its layers, which alone have rotary positions."""
    window = _window(config)
    has_window = _layers_by_list_or_period(config, config["sliding_window_pattern"])
    # null leaves them without a window, and so without positions
    if not window or not any(has_window):
        raise UserError.of("convert.hf_no_positions_at_all", window=window or "null")
    return {**window_fields(has_window, window), "nope_layers": _layers_without(has_window)}


def _read_ministral(config: ConfigKeys) -> Fields:
    """Return the window of Ministral and its layers: those of layer_types, otherwise all."""
    window = _window(config)
    layers = config["num_hidden_layers"]
    types = config["layer_types"]
    if types is None:
        return window_fields([True] * layers, window)
    return _required_fields(_layers_with_window(types, layers), window)


def _read_cwm(config: ConfigKeys) -> Fields:
    """Return the window of CWM and its layers: those of layer_types, otherwise all but each
    fourth, from the first one on."""
    window = _window(config)
    layers = config["num_hidden_layers"]
    types = config["layer_types"]
    if types is None:
        has_window = [number % 4 > 0 for number in range(layers)]
    else:
        has_window = _layers_with_window(types, layers)
    return _required_fields(has_window, window)


def _layers_without(has_window: Sequence[bool]) -> tuple[int, ...]:
    """Return the numbers of the layers without the window."""
    return tuple(number for number, has in enumerate(has_window) if not has)


def _write_by_type(model: ModelConfig) -> Json:
    return {"sliding_window": model.window or None, "layer_types": _layer_types(model)}


def _write_cwm(model: ModelConfig) -> Json:
    # its class takes numbers alone, also where no layer has the window
    return {**_write_by_type(model), "sliding_window": model.window or 8192}


def _write_smollm3(model: ModelConfig) -> Json:
    return {**_write_optional(model), "layer_types": _layer_types(model)}


def _write_dots1(model: ModelConfig) -> Json:
    """Return the keys of a window that the layers from one on have."""
    if not model.window:
        return {"sliding_window": None, "max_window_layers": model.layers}
    first = min(model.window_layers, default=0)
    return {
        "sliding_window": model.window,
        "max_window_layers": first,
        "layer_types": _layer_types(model),
    }


def _read_qwen2_moe(config: ConfigKeys) -> Fields:
    # versions of transformers differ in what that means
    if config["use_sliding_window"] and config["layer_types"] is None:
        raise UserError.of("convert.hf_qwen2_moe_window")
    return _read_qwen(config)


def _read_qwen3_moe(config: ConfigKeys) -> Fields:
    """Return the window, which all layers have if it is switched on."""
    window = _window(config) if config["use_sliding_window"] else 0
    config.mark_read("sliding_window", "max_window_layers")
    require_layers_alike(config, window, config["num_hidden_layers"])
    if window:
        # transformers gives the window to all layers
        require(config["max_window_layers"], "max_window_layers", (0, None))
    return {"window": window}


def _write_optional(model: ModelConfig) -> Json:
    return {"use_sliding_window": model.window > 0, "sliding_window": model.window or None}


def _write_qwen(model: ModelConfig) -> Json:
    first = min(model.window_layers, default=0)
    # From layer 0 on these are all layers, which needs no list.
    config = {**_write_optional(model), "max_window_layers": first}
    if model.window_layers:
        return {**config, "layer_types": _layer_types(model)}
    return config


def _write_qwen2_moe(model: ModelConfig) -> Json:
    config = _write_optional(model)
    # Without a window there is none to tell the layers apart.
    if not model.window:
        return config
    return {**config, "layer_types": _layer_types(model)}


WINDOW_OF_ALL_LAYERS = Entry(_read_of_all, lambda model: {"sliding_window": model.window or None})
NO_WINDOW = Entry(
    lambda config: require_layers_alike(config, window=0, layers=config["num_hidden_layers"])
)
WINDOWS_OF_DOTS1 = Entry(_read_dots1, _write_dots1)
WINDOWS_OF_EXAONE4 = Entry(_read_exaone4, _write_by_type)
WINDOWS_OF_COHERE2 = Entry(_read_cohere2, _write_by_type)
WINDOWS_OF_MINISTRAL = Entry(_read_ministral, _write_by_type)
WINDOWS_OF_CWM = Entry(_read_cwm, _write_cwm)
WINDOWS_OF_SMOLLM3 = Entry(_read_smollm3, _write_smollm3)
WINDOWS_OF_QWEN = Entry(_read_qwen, _write_qwen)
WINDOWS_OF_QWEN2_MOE = Entry(_read_qwen2_moe, _write_qwen2_moe)
WINDOW_OF_QWEN3_MOE = Entry(
    _read_qwen3_moe, lambda model: {**_write_optional(model), "max_window_layers": 0}
)


def _window(config: ConfigKeys) -> Any:
    """Return sliding_window; null there is 0 here."""
    window = config["sliding_window"]
    if window == 0:
        raise UserError.of("convert.hf_window_zero")
    return window or 0


def _required_fields(has_window: list[bool], window: int) -> Fields:
    """Return the fields of layers of which some have the window. UserError if these have none."""
    if any(has_window) and not window:
        raise UserError.of("convert.hf_window_missing")
    return window_fields(has_window, window)


def window_fields(has_window: list[bool], window: int) -> Fields:
    """Return the fields of layers of which some have the window; 0: there is none."""
    if not window or not any(has_window):
        return {"window": 0, "window_layers": ()}
    # No layers in particular are all layers.
    if all(has_window):
        return {"window": window, "window_layers": ()}
    window_layers = tuple(number for number, has in enumerate(has_window) if has)
    return {"window": window, "window_layers": window_layers}


def _layers_by_list_or_period(config: ConfigKeys, period: Any) -> list[bool]:
    """Return for each layer whether it has the window. Newer files list the layers; in older ones
    the last layer of each period has none. Raises UserError."""
    layers = config["num_hidden_layers"]
    types = config["layer_types"]
    if types is not None:
        return _layers_with_window(types, layers)
    if not isinstance(period, int) or period < 1:
        raise UserError.of("convert.hf_window_pattern", pattern=period)
    return [(layer + 1) % period != 0 for layer in range(layers)]


def _layers_with_window(types: list[Any], layers: int) -> list[bool]:
    """Return of each layer whether it has the window."""
    require_count(types, layers)
    allowed = tuple(LAYER_TYPES)
    has_window = []
    for layer_type in types:
        require(layer_type, "layer_types", allowed)
        has_window.append(LAYER_TYPES[layer_type])
    return has_window


def require_count(types: Sequence[Any], layers: int, key: str = "layer_types") -> None:
    """Raise UserError unless `types`, which a key states, names so many layers."""
    if len(types) != layers:
        raise UserError.of("convert.hf_layer_types", key=key, num_types=len(types), layers=layers)


def _layer_types(model: ModelConfig) -> list[str]:
    types = []
    for layer in range(model.layers):
        has_window = model.of_layer(layer).window > 0
        types.append("sliding_attention" if has_window else "full_attention")
    return types


def require_layers_alike(config: ConfigKeys, window: int, layers: int) -> Fields:
    """Return no fields. Raises UserError if layer_types tells layers apart in a family whose layers
    transformers treats alike."""
    types = config["layer_types"]
    if types is None:
        return {}
    if set(_layers_with_window(types, layers)) - {window > 0}:
        expected = "sliding_attention" if window else "full_attention"
        raise UserError.of("convert.hf_layers_alike", kind=config.model_type, expected=expected)
    return {}
