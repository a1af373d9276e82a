"""The sliding window of attention in a config.json, and the layers that have it."""

from typing import Any

from megaprec.errors import UserError
from tools.convert.hf.keys import Keys, require

LAYER_TYPES = {"full_attention": False, "attention": False, "sliding_attention": True}


def window_of(c: Keys) -> Any:
    """Return sliding_window; null there is 0 here."""
    window = c["sliding_window"]
    if window == 0:
        raise UserError(
            "config.json has sliding_window = 0, with which no token attends to anything: "
            "null is none"
        )
    if c.has("use_sliding_window") and c.kind in ("mistral", "mixtral"):
        require(c.given["use_sliding_window"], "use_sliding_window", (window is not None,))
        c.asked.add("use_sliding_window")
    return window or 0


def windows_of(c: Keys) -> dict[str, Any]:
    """Return Qwen's window and its layers: those of layer_types, otherwise those from a certain one
    on."""
    window = window_of(c) if c["use_sliding_window"] else 0
    layers = c["num_hidden_layers"]
    c.asked.add("sliding_window")
    first = c["max_window_layers"]
    types = c["layer_types"]
    if types is None:
        return _fields([number >= first for number in range(layers)], window)
    return _fields(_types(types, layers), window, required=True)


def windows_by_type(c: Keys, pattern: Any) -> dict[str, Any]:
    """Return the window and its layers: those of layer_types, otherwise all but every
    `pattern`th."""
    layers = c["num_hidden_layers"]
    types = c["layer_types"]
    if types is None and not (isinstance(pattern, int) and pattern > 0):
        raise UserError(
            f"config.json has sliding_window_pattern = {pattern!r}: it must be a number above 0"
        )
    if types is None:
        has = [bool((n + 1) % pattern) for n in range(layers)]
    else:
        has = _types(types, layers)
    return _fields(has, window_of(c), required=True)


def _fields(has: list[bool], window: int, required: bool = False) -> dict[str, Any]:
    """Return the fields of layers of which some have the window. required: these layers must have
    one."""
    layers = len(has)
    if required and any(has) and not window:
        raise UserError(
            "config.json has layer_types with sliding_attention, but no sliding_window that "
            "is in use"
        )
    chosen = tuple(number for number, one in enumerate(has) if one) if window else ()
    return {
        "window": window if chosen else 0,
        "window_layers": () if len(chosen) == layers else chosen,
    }


def _types(types: Any, layers: int) -> list[bool]:
    """Return the layers that have the window."""
    if not isinstance(types, list) or len(types) != layers:
        raise UserError(
            f"config.json has layer_types of {len(types)} layers, but num_hidden_layers = {layers}"
        )
    return [LAYER_TYPES[require(one, "layer_types", tuple(LAYER_TYPES))] for one in types]


def require_layers_alike(c: Keys, window: Any, layers: int) -> None:
    """Check families whose layers transformers treats alike, whatever layer_types says."""
    types = c["layer_types"]
    if types is not None and set(_types(types, layers)) - {window > 0}:
        alike = "sliding_attention" if window else "full_attention"
        raise UserError(
            f"config.json has layer_types, but transformers gives all layers of a {c.kind} "
            f"model {alike}"
        )
