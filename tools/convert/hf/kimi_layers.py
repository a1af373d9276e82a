"""The layers of Kimi Linear in a config.json: Kimi Delta Attention, attention, and experts.

Published files say the first two in a table, linear_attn_config, with layers counted from 1;
transformers writes linear_... keys and layer_types. Both are read, and both are written.
"""

from typing import Any

from megaprec.errors import UserError
from models.config import ModelConfig
from models.delta_net import DeltaNet
from tools.convert.hf.delta_layers import LAYER_TYPES, layer_types
from tools.convert.hf.experts import (
    read_after_leading_dense,
    write_glm4_lite,
)
from tools.convert.hf.keys import ConfigKeys, Entry, Fields, Json, require, wrong_value
from tools.convert.hf.windows import require_count

TABLE = "linear_attn_config"
# Keys of the table by those of transformers' class.
_SIZES = {
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
_ATTENTION_LAYERS = "full_attn_layers"
_DELTA_LAYERS = "kda_layers"
_KEYS_OF_TABLE = (*_SIZES.values(), _ATTENTION_LAYERS, _DELTA_LAYERS)
# Each layer of so many, but the first, has attention if nothing says which do.
_INTERVAL = 4
# Published names of keys by those of the experts' entry.
_PUBLISHED = {
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
}
ALIASES = {
    **{theirs: ours for ours, theirs in _PUBLISHED.items()},
    "num_local_experts": "n_routed_experts",
    "model_max_length": "max_position_embeddings",
    "num_nextn_predict_layers": "num_mtp_layers",
}
# What published files say of their own code, which has one way.
ALLOWED: dict[str, tuple[Any, ...]] = {
    "mla_use_nope": (True, None),
    "moe_router_activation_func": ("sigmoid", None),
    "use_grouped_topk": (True, None),
    "moe_layer_freq": (1, None),
    # without positions nothing is rotated
    "rope_scaling": (None,),
    "rope_parameters": (None,),
}


def _read(config: ConfigKeys) -> Fields:
    """Return the sizes of Kimi Delta Attention and the layers that have it."""
    table = config[TABLE] or {}
    for key in table:
        if key not in _KEYS_OF_TABLE:
            raise UserError.of("convert.hf_kimi_table", table=TABLE, key=key)
    config.mark_read(*_SIZES)
    delta_layers = _delta_layers(config, table)
    # The sizes of what no layer has decide nothing.
    if not delta_layers:
        return {"delta_net": DeltaNet(), "delta_layers": ()}
    width, heads, kernel = (_size(config, table, key) for key in _SIZES)
    sizes = {
        "key_heads": heads,
        "value_heads": heads,
        "key_dim": width,
        "value_dim": width,
        "gate_rank": width,
        "kernel": kernel,
    }
    return {"delta_net": sizes, "delta_layers": tuple(delta_layers)}


def _size(config: ConfigKeys, table: Json, key: str) -> int:
    """Return a size from the table, in which transformers looks first, or from its own key. Raises
    UserError if it is no whole number above 0."""
    key_of_table = _SIZES[key]
    if key_of_table not in table:
        return config.above_zero(key)
    size = table[key_of_table]
    if type(size) is not int or size <= 0:
        raise UserError(wrong_value(f"{TABLE}.{key_of_table}", size, "a whole number above 0"))
    return size


def _delta_layers(config: ConfigKeys, table: Json) -> list[int]:
    """Return the numbers of the layers with Kimi Delta Attention, from 0: those of layer_types,
    otherwise of the table, otherwise all but each fourth. Raises UserError if the two differ."""
    layers = config["num_hidden_layers"]
    of_table = _delta_layers_of_table(table, layers)
    types = config["layer_types"]
    if types is None:
        if of_table is not None:
            return of_table
        return [layer for layer in range(layers) if not layer or layer % _INTERVAL]
    require_count(types, layers)
    of_types = []
    for layer, layer_type in enumerate(types):
        require(layer_type, "layer_types", tuple(LAYER_TYPES))
        if LAYER_TYPES[layer_type]:
            of_types.append(layer)
    if of_table not in (None, of_types):
        raise UserError.of("convert.hf_kimi_layers_differ", table=TABLE)
    return of_types


def _delta_layers_of_table(table: Json, layers: int) -> list[int] | None:
    """Return what the table says; None if it says nothing, as transformers sees it. Raises
    UserError unless it names each layer once."""
    attention = table.get(_ATTENTION_LAYERS)
    delta = table.get(_DELTA_LAYERS)
    if attention is None or delta is None:
        return None
    if sorted([*attention, *delta]) != [*range(1, layers + 1)]:
        raise UserError.of("convert.hf_kimi_layers", table=TABLE, layers=layers)
    return sorted(layer - 1 for layer in delta)


def _write(model: ModelConfig) -> Json:
    """Return the keys of layers with attention and with delta nets, which are counted from 1."""
    is_delta = [layer in model.delta_layers for layer in range(model.layers)]
    table: Fields = {
        _ATTENTION_LAYERS: [layer + 1 for layer, delta in enumerate(is_delta) if not delta],
        _DELTA_LAYERS: [layer + 1 for layer, delta in enumerate(is_delta) if delta],
    }
    config: Fields = {"layer_types": layer_types(model), TABLE: table}
    if sizes := model.delta_net:
        widths = (sizes.key_dim, sizes.value_heads, sizes.kernel)
        config |= zip(_SIZES, widths, strict=True)
        table |= zip(_SIZES.values(), widths, strict=True)
    return config


def _write_experts(model: ModelConfig) -> Json:
    """Return the keys of experts, by the names of published files."""
    written = dict(write_glm4_lite(model))
    dense = model.dense_layers if model.experts else (*range(model.layers),)
    # Read by the code of published folders, which knows no mlp_layer_types.
    if dense == (*range(len(dense)),):
        written["first_k_dense_replace"] = len(dense)
    return {_PUBLISHED.get(key, key): value for key, value in written.items()}


def _check_others(config: ConfigKeys) -> Fields:
    """Return no fields. Raises UserError for modules of multi-token prediction."""
    # Of heads without a width of their own, and of positions that nothing has.
    config.mark_read("head_dim", "rope_theta")
    require(config["num_mtp_layers"], "num_nextn_predict_layers", (0, None))
    return {}


KIMI_LAYERS = Entry(_read, _write)
EXPERTS_OF_KIMI = Entry(read_after_leading_dense, _write_experts)
OTHER_KEYS_OF_KIMI = Entry(
    _check_others, lambda model: {"model_max_length": model.max_positions, "mla_use_nope": True}
)
