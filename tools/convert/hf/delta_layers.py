"""Gated delta nets in a config.json, and the layers that have them: Qwen3-Next and Qwen3.5."""

from models.config import ModelConfig
from models.delta_net import DeltaNet
from tools.convert.hf.keys import ConfigKeys, Entry, Fields, Json, require
from tools.convert.hf.windows import require_count

# Types of layers in layer_types, and whether they have a gated delta net.
LAYER_TYPES = {"full_attention": False, "linear_attention": True}
# Our sizes by the keys of theirs.
_SIZES = {
    "linear_num_key_heads": "key_heads",
    "linear_num_value_heads": "value_heads",
    "linear_key_head_dim": "key_dim",
    "linear_value_head_dim": "value_dim",
    "linear_conv_kernel_dim": "kernel",
}
# Of Qwen3.5's published files, which its class does not read.
_WITHOUT_EFFECT = {
    "how the same is computed": "mamba_ssm_dtype",
    "of multi-token prediction, whose tensors are not read": (
        "mtp_num_hidden_layers mtp_use_dedicated_embeddings"
    ),
}


def _read(config: ConfigKeys) -> Fields:
    """Return the sizes of gated delta nets and their layers: those of layer_types, otherwise all
    but each full_attention_interval-th."""
    config.mark_read(*_SIZES)
    layers = config["num_hidden_layers"]
    types = config["layer_types"]
    # read by its class only if there are no types
    interval = config["full_attention_interval"]
    if types is None:
        delta_layers = [number for number in range(layers) if (number + 1) % interval]
    else:
        require_count(types, layers)
        delta_layers = []
        for number, layer_type in enumerate(types):
            require(layer_type, "layer_types", tuple(LAYER_TYPES))
            if LAYER_TYPES[layer_type]:
                delta_layers.append(number)
    # The sizes of what no layer has decide nothing.
    if not delta_layers:
        return {"delta_net": DeltaNet(), "delta_layers": ()}
    sizes = {ours: config.above_zero(theirs) for theirs, ours in _SIZES.items()}
    return {"delta_net": sizes, "delta_layers": tuple(delta_layers)}


def layer_types(model: ModelConfig) -> list[str]:
    """Return the type of each layer: with a gated delta net, or with attention."""
    types = []
    for number in range(model.layers):
        has_delta_net = number in model.delta_layers
        types.append("linear_attention" if has_delta_net else "full_attention")
    return types


def _write(model: ModelConfig) -> Json:
    config: Fields = {"layer_types": layer_types(model)}
    if model.delta_net:
        config |= {theirs: getattr(model.delta_net, ours) for theirs, ours in _SIZES.items()}
    return config


def _check_others(config: ConfigKeys) -> Fields:
    """Return no fields. Raises UserError for gates other than those of the class."""
    for keys in _WITHOUT_EFFECT.values():
        config.mark_read(*keys.split())
    require(config["attn_output_gate"], "attn_output_gate", (True, None))
    # of the outputs of gated delta nets
    require(config["output_gate_type"], "output_gate_type", ("swish", "silu", None))
    return {}


DELTA_LAYERS = Entry(_read, _write)
OTHER_KEYS_OF_QWEN3_5 = Entry(_check_others)
