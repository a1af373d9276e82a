"""Layers with one branch in a config.json, and their Mamba-2 mixers: Nemotron-H.

The kinds of the layers are the letters of `hybrid_override_pattern`, as published files have them,
or names in `layers_block_type`, as transformers 5 writes them.
"""

from math import inf
from typing import Any

from megaprec.errors import UserError
from models.config import ModelConfig
from tools.convert.hf.keys import ConfigKeys, Entry, Fields, Json, require
from tools.convert.hf.windows import require_count

# Names of kinds, those of older files among them, and their letters.
LETTERS = {
    "linear_attention": "M",
    "full_attention": "*",
    "mlp": "-",
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
# No limit, as JSON's writers and as transformers 5 say it.
_UNLIMITED = ([0.0, inf], [0.0, {"__float__": "Infinity"}], None)
_WITHOUT_EFFECT = {
    "how initial weights are drawn": "time_step_max time_step_floor rescale_prenorm_residual",
    "how the same is computed": (
        "chunk_size use_mamba_kernels mamba_ssm_cache_dtype residual_in_fp32 num_logits_to_keep"
    ),
    "the class goes by mamba_num_heads and mamba_head_dim": "expand time_step_rank",
    "its attention has no rotary positions": "rope_theta partial_rotary_factor",
    "of layers with experts, which are refused": (
        "n_routed_experts n_shared_experts moe_intermediate_size moe_latent_size "
        "moe_shared_expert_intermediate_size moe_shared_expert_overlap num_experts_per_tok "
        "routed_scaling_factor n_group topk_group norm_topk_prob"
    ),
    "of multi-token prediction, which is refused": (
        "mtp_layers_block_type mtp_hybrid_override_pattern"
    ),
}


def _read_pattern(config: ConfigKeys) -> Fields:
    """Return the kinds of the layers, with the sizes of Mamba-2 mixers if there are any."""
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
        require(letter, "hybrid_override_pattern", ("M", "*", "-"))
    layers = config["num_hidden_layers"]
    if layers is not None:
        require_count(list(pattern), layers)
    sizes = {ours: config[theirs] for theirs, ours in _SIZES.items()}
    # transformers has the least initial time step for the least one of all.
    sizes["least_step"] = float(config["time_step_min"])
    # The sizes of what no layer has decide nothing.
    mamba = sizes if "M" in pattern else {}
    return {"layers": len(pattern), "hybrid_pattern": pattern, "mamba": mamba}


def _letter(name: Any) -> str:
    """Return the letter of a name of layers_block_type."""
    require(name, "layers_block_type", tuple(LETTERS))
    return LETTERS[name]


def _write_pattern(model: ModelConfig) -> Json:
    config: Fields = {
        "hybrid_override_pattern": model.hybrid_pattern,
        "num_hidden_layers": model.layers,
    }
    if model.mamba:
        config |= {theirs: getattr(model.mamba, ours) for theirs, ours in _SIZES.items()}
        config["time_step_min"] = model.mamba.least_step
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
OTHER_KEYS_OF_HYBRIDS = Entry(_check_others)
