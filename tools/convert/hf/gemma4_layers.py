"""The layers of Gemma 4 in a config.json: windows, positions, and heads that layers without the
window have for themselves.

Published files say these heads by `global_head_dim` and `num_global_key_value_heads`, transformers
writes them by `per_layer_config`. Parts of Gemma 4 that are not known here are refused by name.
"""

from collections.abc import Mapping
from typing import Any

from megaprec.errors import UserError
from models.config import ModelConfig
from tools.convert.hf.keys import ConfigKeys, Entry, Fields, Json, require, short, wrong_value
from tools.convert.hf.rope import rope_by_layer
from tools.convert.hf.windows import by_layer_type

_LAYERS = rope_by_layer(by_layer_type(pattern=6, unused_window=512), is_proportional=True)
_PER_LAYER = "per_layer_config"
_HEADS = ("head_dim", "num_key_value_heads")
# Keys of parts that are not known here: what they are, and the values of models without them.
_UNKNOWN_PARTS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "hidden_size_per_layer_input": ("embeddings that each layer reads besides", (0, None)),
    "num_kv_shared_layers": ("layers with the keys and values of earlier ones", (0, None)),
    "enable_moe_block": ("experts beside a dense feed-forward", (False, None)),
    # "vision" is of images: texts are read from the first token to the last.
    "use_bidirectional_attention": ("attention to later tokens", (None, "vision")),
}
# Keys that say nothing without these parts.
_OF_UNKNOWN_PARTS = (
    "vocab_size_per_layer_input",
    "use_double_wide_mlp",
    "num_experts",
    "top_k_experts",
    "moe_intermediate_size",
)


def _read(config: ConfigKeys) -> Fields:
    """Return the window, the positions and the heads of layers with and without the window."""
    fields = _LAYERS.read(config)
    layers = config["num_hidden_layers"]
    windowed = fields["window_layers"]
    if fields["window"] and not windowed:
        windowed = tuple(range(layers))
    # Its class gives the last layer no window, whatever the file says.
    if layers - 1 in windowed:
        raise UserError.of("convert.hf_gemma4_last_layer", layer=layers - 1)
    without_window = [layer for layer in range(layers) if layer not in windowed]
    head_dim, kv_heads = _global_heads(config, without_window)
    fields["global_key_as_value"] = config["attention_k_eq_v"]
    if not windowed:
        return fields | {"head_dim": head_dim, "kv_heads": kv_heads}
    if head_dim != config["head_dim"]:
        fields["global_head_dim"] = head_dim
    if kv_heads != config["num_key_value_heads"]:
        fields["global_kv_heads"] = kv_heads
    # Heads of other widths have rotary tables of their own, also where both turn alike.
    if fields.keys() & {"global_head_dim", "global_kv_heads"}:
        fields.setdefault("window_rope_base", fields["rope_base"])
    return fields


def _global_heads(config: ConfigKeys, layers: list[int]) -> tuple[int, int]:
    """Return the width of a head, and the number of key and value heads, of the layers without the
    window."""
    kv_heads = config["num_key_value_heads"]
    stated_kv_heads = config["num_global_key_value_heads"]
    by_layer = config[_PER_LAYER]
    if by_layer is None:
        # Its class reads their number only where values are keys.
        if config["attention_k_eq_v"] and stated_kv_heads is not None:
            kv_heads = stated_kv_heads
        return config["global_head_dim"], kv_heads
    own = _heads_of_layers(by_layer, layers)
    head_dim = own.get("head_dim", config["head_dim"])
    kv_heads = own.get("num_key_value_heads", kv_heads)
    # per_layer_config wins in its class, and other programs read the other keys.
    if config.has("global_head_dim"):
        require(config["global_head_dim"], "global_head_dim", (head_dim,))
    return head_dim, kv_heads


def _heads_of_layers(by_layer: Any, layers: list[int]) -> Mapping[str, int]:
    """Return what per_layer_config says of each of the layers without the window, which may be
    nothing. Raises UserError unless it says the same of all of them, and nothing of others."""
    names = [str(layer) for layer in layers]
    tables = [by_layer.get(name, {}) for name in names]
    are_alike = all(table == tables[0] for table in tables)
    if set(by_layer) - set(names) or not are_alike or set(tables[0]) - set(_HEADS):
        raise UserError.of("convert.hf_gemma4_per_layer", layers=layers, value=short(by_layer))
    for key, value in tables[0].items():
        if type(value) is not int or value < 1:
            raise UserError(wrong_value(f"{_PER_LAYER}.{key}", value, "a whole number above 0"))
    return tables[0]


def _write(model: ModelConfig) -> Json:
    """Return the keys of the layers with and without the window, which have other heads."""
    head_dim = model.global_head_dim or model.head_dim
    kv_heads = model.global_kv_heads or model.kv_heads
    config: Fields = {
        **_LAYERS.write(model),
        "attention_k_eq_v": model.global_key_as_value,
        "global_head_dim": head_dim,
        "num_global_key_value_heads": kv_heads,
    }
    # Its class reads the number only where values are keys.
    if kv_heads != model.kv_heads and not model.global_key_as_value:
        own = {"head_dim": head_dim, "num_key_value_heads": kv_heads}
        without_window = [n for n in range(model.layers) if n not in model.window_layers]
        config[_PER_LAYER] = {str(layer): own for layer in without_window}
    return config


def _refuse_unknown_parts(config: ConfigKeys) -> Fields:
    """Return no fields. Raises UserError for parts of Gemma 4 that are not known here."""
    config.mark_read(*_OF_UNKNOWN_PARTS)
    for key, (part, values) in _UNKNOWN_PARTS.items():
        value = config[key]
        if value not in values:
            raise UserError.of(
                "convert.hf_gemma4_part",
                key=key,
                value=short(value),
                part=part,
                without=values[0],
            )
    return {}


GEMMA4_LAYERS = Entry(_read, _write)
# Before all others: what else such a file says may be wrong for want of these parts.
GEMMA4_PARTS = Entry(
    _refuse_unknown_parts,
    lambda model: {key: values[0] for key, (_, values) in _UNKNOWN_PARTS.items()},
)
