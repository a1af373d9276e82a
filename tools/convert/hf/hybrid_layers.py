"""Layers with one branch in a config.json, their Mamba-2 mixers and experts: Nemotron-H.

The kinds of the layers are the letters of `hybrid_override_pattern`, as published files have them,
or names in `layers_block_type`, as transformers 5 writes them.
"""

from math import inf
from typing import Any

from megaprec.errors import UserError
from models.config import ModelConfig
from tools.convert.hf.experts import corrected_router, numbers_of_experts
from tools.convert.hf.keys import ConfigKeys, Entry, Fields, Json, require
from tools.convert.hf.windows import require_count

# Names of kinds, those of older files among them, and their letters.
LETTERS = {
    "linear_attention": "M",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
    "mamba": "M",
    "attention": "*",
}
# Our sizes by the keys of theirs.
_SIZES = {
    "mamba_num_heads": "heads",
    "mamba_head_dim": "head_dim",
    "ssm_state_size": "state_dim",
    "n_groups": "groups",
    "conv_kernel": "kernel",
}
_KEYS_OF_EXPERTS = (
    "n_routed_experts",
    "num_experts_per_tok",
    "norm_topk_prob",
    "moe_intermediate_size",
    "moe_latent_size",
    "n_shared_experts",
    "moe_shared_expert_intermediate_size",
    "routed_scaling_factor",
    "n_group",
    "topk_group",
)
# No limit, as JSON's writers and as transformers 5 say it.
_UNLIMITED = ([0.0, inf], [0.0, {"__float__": "Infinity"}], None)
_WITHOUT_EFFECT = {
    "how initial weights are drawn": "time_step_max time_step_floor rescale_prenorm_residual",
    "how the same is computed": (
        "chunk_size use_mamba_kernels mamba_ssm_cache_dtype residual_in_fp32 num_logits_to_keep "
        "moe_shared_expert_overlap"
    ),
    "the class goes by mamba_num_heads and mamba_head_dim": "expand time_step_rank",
    "its attention has no rotary positions": "rope_theta partial_rotary_factor",
    "of multi-token prediction, which is refused": (
        "mtp_layers_block_type mtp_hybrid_override_pattern"
    ),
}


def _pattern(config: ConfigKeys) -> str:
    """Return the letters of the layers. Raises UserError for other letters, and if none are
    stated."""
    pattern = config["hybrid_override_pattern"]
    names = config["layers_block_type"]
    if names is not None:
        of_names = "".join(_letter(name) for name in names)
        # A file with both must say one thing; transformers goes by the names.
        require(pattern, "hybrid_override_pattern", (of_names, None))
        pattern = of_names
    if not pattern:
        raise UserError.of("convert.hf_no_hybrid_pattern")
    for letter in pattern:
        require(letter, "hybrid_override_pattern", ("M", "*", "-", "E"))
    return pattern


def _read_pattern(config: ConfigKeys) -> Fields:
    """Return the kinds of the layers, with the sizes of Mamba-2 mixers if there are any."""
    pattern = _pattern(config)
    layers = config["num_hidden_layers"]
    if layers is not None:
        names = config["layers_block_type"]
        key = "layers_block_type" if names else "hybrid_override_pattern"
        require_count(pattern, layers, key)
    config.mark_read(*_SIZES, "time_step_min")
    mamba: Fields = {}
    # The sizes of what no layer has decide nothing.
    if "M" in pattern:
        mamba = {ours: config.above_zero(theirs) for theirs, ours in _SIZES.items()}
        # transformers has the least initial time step for the least one of all.
        mamba["least_step"] = float(config["time_step_min"])
    return {"layers": len(pattern), "hybrid_pattern": pattern, "mamba": mamba}


def _letter(name: Any) -> str:
    """Return the letter of a name of layers_block_type."""
    require(name, "layers_block_type", tuple(LETTERS))
    return LETTERS[name]


def _write_pattern(model: ModelConfig) -> Json:
    """Return the keys of the pattern of layers, and of the Mamba-2 mixers in it."""
    config: Fields = {
        "hybrid_override_pattern": model.hybrid_pattern,
        "num_hidden_layers": model.layers,
    }
    if model.mamba:
        config |= {theirs: getattr(model.mamba, ours) for theirs, ours in _SIZES.items()}
        config["time_step_min"] = model.mamba.least_step
    return config


def _read_feed_forwards(config: ConfigKeys) -> Fields:
    """Return the widths of feed-forwards, and the experts if a layer has them."""
    config.mark_read(*_KEYS_OF_EXPERTS)
    pattern = _pattern(config)
    config.mark_read("intermediate_size")
    biased = config["mlp_bias"]
    if "E" not in pattern:
        return {"ffn": config["intermediate_size"], "mlp_bias": biased}
    # Its class gives biases to shared experts and none to the others.
    require(biased, "mlp_bias", (False, None))
    latent = config["moe_latent_size"]
    if latent is not None:
        raise UserError.of("convert.hf_latent_experts", size=latent)
    # transformers does not read their number, and vLLM multiplies their width by it.
    require(config["n_shared_experts"], "n_shared_experts", (1,))
    # Its class would take intermediate_size for 0.
    shared = config["moe_shared_expert_intermediate_size"]
    if not shared:
        raise UserError.of(
            "convert.hf_shared_expert_zero", key="moe_shared_expert_intermediate_size"
        )
    fields: Fields = {
        **numbers_of_experts(config, "n_routed_experts"),
        "norm_topk": config["norm_topk_prob"],
        "ffn": config["moe_intermediate_size"],
        "shared_experts": shared,
        "router_aux_loss": 0.0,
        "router": corrected_router(config),
    }
    # The width of a feed-forward that no layer has decides nothing.
    if "-" in pattern:
        fields["dense_ffn"] = config["intermediate_size"]
    return fields


def _write_feed_forwards(model: ModelConfig) -> Json:
    """Return the keys of feed-forwards, and of experts if there are some."""
    config: Fields = {"intermediate_size": model.dense_ffn, "mlp_bias": model.mlp_bias}
    if model.experts:
        config |= {
            "n_routed_experts": model.experts,
            "num_experts_per_tok": model.experts_per_token,
            "norm_topk_prob": model.norm_topk,
            "moe_intermediate_size": model.ffn,
            "n_shared_experts": 1,
            "moe_shared_expert_intermediate_size": model.shared_experts,
            "routed_scaling_factor": model.router.scale,
            "n_group": model.router.groups,
            "topk_group": model.router.groups_per_token,
        }
    return config


def _check_others(config: ConfigKeys) -> Fields:
    """Return no fields. Raises UserError for keys that repeat others and differ, and for limits of
    time steps."""
    for keys in _WITHOUT_EFFECT.values():
        config.mark_read(*keys.split())
    # Published files have them besides those that transformers reads.
    eps = config["layer_norm_epsilon"]
    for key in ("rms_norm_eps", "norm_eps"):
        require(config[key], key, (eps, None))
    require(config["attention_head_dim"], "attention_head_dim", (config["head_dim"], None))
    # transformers does not read them, and other programs do
    require(config["time_step_limit"], "time_step_limit", _UNLIMITED)
    return {}


HYBRID_LAYERS = Entry(_read_pattern, _write_pattern)
FEED_FORWARDS_OF_HYBRIDS = Entry(_read_feed_forwards, _write_feed_forwards)
OTHER_KEYS_OF_HYBRIDS = Entry(_check_others)
