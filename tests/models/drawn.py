"""Small models with keys of [model] drawn at random: any family, with whatever of other families
fits."""

import random
from typing import Any, get_args

from pydantic import ValidationError

from models.config import ModelConfig

FAMILIES = get_args(ModelConfig.model_fields["family"].annotation)
LENGTH = 12  # crosses windows and the original lengths of scaled positions
SHORT = {"original_max_position_embeddings": 8}
CHOICES: dict[str, tuple[Any, ...]] = {  # of a key that is given
    "kv_heads": (4, 2),
    "head_dim": (4, 6, 10),
    "mlp": ("swiglu", "geglu", "swiglu_clamped", "gelu", "gelu_exact", "relu2", "xielu"),
    "swiglu_alpha": (1.3,),
    "swiglu_limit": (0.6,),
    "norm": ("rms", "layer"),
    "norm_eps": (1e-3, 1e-6),
    "norm_at": ("before", "after", "around"),
    "norm_unit_offset": (True, False),
    "qk_norm": (True, False),
    "value_norm": (True, False),
    "layer_scalar": (True, False),
    "global_head_dim": (0, 8),
    "global_kv_heads": (0, 1, 4),
    "global_key_as_value": (True, False),
    "qk_norm_over": ("head", "all"),
    "parallel_residual": (True, False),
    "shared_norm": (True, False),
    "norm_weight": (True, False),
    "embedding_norm": (True, False),
    "positions": ("rope", "learned", "none"),
    "rope_base": (50.0, 7.0),
    "rotary_fraction": (1.0, 0.5),
    "window_rope_base": (0.0, 5.0),
    "nope_layers": ((), (0,), (1, 2)),
    "attention_scalar": (7.0, 4.0),
    "attention_sinks": (True, False),
    "attention_gate": (True, False),
    "attention_softcap": (0.0, 1.5),
    "branch_scale": (1.0, 0.4),
    "logit_divisor": (1.0, 3.0),
    "final_softcap": (0.0, 2.5),
    "window": (0, 3, 5),
    "window_layers": ((), (0,), (1,), (0, 2), (0, 1, 2)),
    "bias": (True, False),
    "qkv_bias": (True, False),
    "output_bias": (True, False),
    "mlp_bias": (True, False),
    "tied": (True, False),
    "experts_per_token": (1, 2, 3),
    "expert_bias": (True, False),
    "router_bias": (True, False),
    "norm_topk": (True, False),
    "dense_layers": ((), (0,), (1,), (0, 1), (2,)),
    "dense_ffn": (40,),
    "shared_experts": (0, 24, 32, 48),
    "shared_gate": (True, False),
    "embedding_scale": (1.0, 3.0),
    "embedding_grad_scale": (1.0, 0.5),
    "head_grad_scale": (1.0, 0.5),
    "mtp_layers": (0, 1, 2),
    "norm_bias": (True, False),
}
# Drawn by themselves, below.
OF_THEIR_OWN = """
family layers hidden heads ffn vocab max_positions experts latent delta_net delta_layers mamba hybrid_pattern
rope_scaling router
"""
# Keys that change no logits: losses, dropout, initial weights and their learning rates, and whole models.
UNDRAWN = """
dropout dropout_at embedding_dropout attention_dropout init_std init router_aux_loss router_z_loss
router_correction_speed z_loss mtp_loss_weight mup_base_hidden mup_base_head_dim factory
"""
SCALINGS: tuple[dict[str, Any], ...] = (
    {"kind": "linear", "factor": 2.5},
    {"kind": "dynamic", "factor": 3.0, **SHORT},
    {"kind": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **SHORT},
    {"kind": "yarn", "factor": 2.0, **SHORT},
    {
        "kind": "yarn",
        "factor": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "truncate": False,
        **SHORT,
    },
    {"kind": "yarn", "factor": 2.0, "beta_slow": 0.5, "attention_factor": 1.3, **SHORT},
    {"kind": "yarn", "factor": 2.0, "query_beta": 0.7, **SHORT},
    {"kind": "proportional", "factor": 2.0, "fraction": 0.5},
)


# In place of defaults that experts, or so few of them, do not take.
WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "apertus": {"mlp": "swiglu"},
    "gpt2": {"mlp_bias": False},
    "gpt_neox": {"mlp_bias": False},
    "minimax_m2": {"experts_per_token": 2},
    "olmoe": {"experts_per_token": 2},
}


def drawn(seed: int) -> dict[str, Any]:
    """The valid table of a seed: keys in any order, each with the value that was drawn if it fits
    those before it."""
    dice = random.Random(seed)
    family = dice.choice(FAMILIES)
    rate = dice.choice((0.1, 0.3, 0.6))
    table: dict[str, Any] = {
        "family": family,
        "layers": 3,
        "hidden": dice.choice((24, 32)),
        "heads": 4,
        "ffn": 24,
    }
    table |= {
        "vocab": dice.choice((53, 64)),
        "max_positions": 16,
        "experts": dice.choice((0, 4, 6)),
    }
    if family in ("gpt_neox", "glm4", "glm4_moe", "minimax_m2", "qwen3_next", "qwen3_5"):
        table["rotary_fraction"] = 1.0  # a part of heads so small does not turn
    offered = {key: dice.choice(values) for key, values in CHOICES.items() if dice.random() < rate}
    has_latents = family.startswith("deepseek") or family == "kimi_linear"
    if dice.random() < (0.8 if has_latents else 0.1):
        sizes = {"kv_rank": 7, "query_rank": dice.choice((0, 9)), "rope_dim": 4, "nope_dim": 6}
        table["latent"] = sizes | {
            "value_dim": dice.choice((5, 10, 17)),
            "norm_eps": dice.choice((1e-6, 1e-3)),
        }
    has_delta_nets = family in ("qwen3_next", "qwen3_5", "kimi_linear")
    if dice.random() < (0.8 if has_delta_nets else 0.1):
        offered["delta_net"] = _delta_net(dice, 0.9 if family == "kimi_linear" else 0.2)
        offered["delta_layers"] = dice.choice(((0,), (1,), (0, 1), (1, 2), (0, 1, 2)))
    if dice.random() < (0.8 if family == "nemotron_h" else 0.1):
        groups = dice.choice((2, 4))
        offered["mamba"] = {
            "heads": groups * dice.choice((1, 2)),
            "head_dim": dice.choice((3, 8)),
            "state_dim": dice.choice((4, 7)),
            "groups": groups,
            "kernel": dice.choice((1, 2, 4)),
            "least_step": dice.choice((1e-9, 0.3)),
        }
        with_experts = ("ME*", "*EM", "-EM", "MEE")
        without = ("M*-", "MM-", "*-M", "-M*", "MMM")
        offered["hybrid_pattern"] = dice.choice(with_experts if table["experts"] else without)
    if dice.random() < rate:
        offered["rope_scaling"] = dice.choice(SCALINGS)
    if dice.random() < 0.5:
        groups = {
            "groups": 2,
            "groups_per_token": dice.choice((1, 2)),
            "group_best": dice.choice((1, 2)),
        }
        offered["router"] = {
            "score": dice.choice(("softmax", "sigmoid")),
            "scale": dice.choice((1.0, 2.5)),
        }
        offered["router"] |= {"correction": dice.random() < 0.5, **dice.choice(({}, groups))}
    if table["experts"]:
        table |= WITH_EXPERTS.get(family, {})
    if not fits(table):
        del table["latent"]
    # Both together, or neither would fit.
    for keys in (("delta_net", "delta_layers"), ("mamba", "hybrid_pattern")):
        pair = {key: offered.pop(key) for key in keys if key in offered}
        if fits(table | pair):
            table |= pair
    for key in dice.sample(sorted(offered), len(offered)):
        table |= {key: offered[key]} if fits(table | {key: offered[key]}) else {}
    return table


def _delta_net(dice: random.Random, rate: float) -> dict[str, Any]:
    """The sizes of a delta net. rate: of those whose features of keys have decays of their own."""
    key_heads = dice.choice((2, 4))
    sizes = {
        "key_heads": key_heads,
        "value_heads": key_heads * dice.choice((1, 2)),
        "key_dim": dice.choice((3, 5, 8)),
        "value_dim": dice.choice((4, 7)),
        "kernel": dice.choice((1, 2, 4)),
    }
    if dice.random() < rate:
        sizes |= {"value_heads": key_heads, "gate_rank": dice.choice((2, 5))}
    return sizes


def fits(table: dict[str, Any]) -> bool:
    """True if the table makes a model."""
    try:
        ModelConfig.model_validate(table)
    except ValidationError:
        return False
    return True
