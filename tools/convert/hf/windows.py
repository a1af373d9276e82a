"""The sliding window of attention in a config.json, and the layers that have it."""

from typing import Any

from megaprec.errors import UserError
from tools.convert.hf.keys import Keys, require

LAYER_TYPES = {"full_attention": False, "attention": False, "sliding_attention": True}


def window_of(keys: Keys) -> Any:
    """Return sliding_window; null there is 0 here."""
    window = keys["sliding_window"]
    if window == 0:
        raise UserError.of("convert.hf_window_zero")
    # transformers does not read it in these families
    if keys.has("use_sliding_window") and keys.kind in ("mistral", "mixtral"):
        require(keys.stated["use_sliding_window"], "use_sliding_window", (window is not None,))
        keys.mark_read("use_sliding_window")
    return window or 0


def windows_of(keys: Keys) -> dict[str, Any]:
    """Return Qwen's window and its layers: those of layer_types, otherwise those from a certain one
    on."""
    window = window_of(keys) if keys["use_sliding_window"] else 0
    layers = keys["num_hidden_layers"]
    keys.mark_read("sliding_window")
    first = keys["max_window_layers"]
    types = keys["layer_types"]
    if types is None:
        return _fields([number >= first for number in range(layers)], window)
    return _fields(_layers_with_window(types, layers), window, required=True)


def windows_by_type(keys: Keys, pattern: Any) -> dict[str, Any]:
    """Return the window and its layers: those of layer_types, otherwise all but every
    `pattern`th."""
    layers = keys["num_hidden_layers"]
    types = keys["layer_types"]
    if types is not None:
        has_window = _layers_with_window(types, layers)
    elif isinstance(pattern, int) and pattern > 0:
        has_window = [bool((number + 1) % pattern) for number in range(layers)]
    else:
        raise UserError.of("convert.hf_window_pattern", pattern=pattern)
    return _fields(has_window, window_of(keys), required=True)


def _fields(has_window: list[bool], window: int, required: bool = False) -> dict[str, Any]:
    """Return the fields of layers of which some have the window. required: these layers must have
    one."""
    if required and any(has_window) and not window:
        raise UserError.of("convert.hf_window_missing")
    chosen = tuple(number for number, has in enumerate(has_window) if has) if window else ()
    if not chosen:
        return {"window": 0, "window_layers": ()}
    # No layers in particular are all layers.
    return {"window": window, "window_layers": () if all(has_window) else chosen}


def _layers_with_window(types: Any, layers: int) -> list[bool]:
    """Return of each layer whether it has the window."""
    if not isinstance(types, list) or len(types) != layers:
        raise UserError.of("convert.hf_layer_types", num_types=len(types), layers=layers)
    allowed = tuple(LAYER_TYPES)
    return [LAYER_TYPES[require(name, "layer_types", allowed)] for name in types]


def require_layers_alike(keys: Keys, window: Any, layers: int) -> None:
    """Check families whose layers transformers treats alike, whatever layer_types says."""
    types = keys["layer_types"]
    if types is not None and set(_layers_with_window(types, layers)) - {window > 0}:
        expected = "sliding_attention" if window else "full_attention"
        raise UserError.of("convert.hf_layers_alike", kind=keys.kind, expected=expected)
