"""Odd but valid configurations of every family of transformers, drawn by a seed."""

from random import Random
from typing import Any

from tools.convert.hf.families import FAMILIES

LONGEST = 40
GEMMA4 = ("gemma4_text", "gemma4_unified_text")
# families whose layers have a type
BY_TYPE = (
    "gemma2",
    "vaultgemma",
    "gemma3_text",
    "olmo3",
    "gpt_oss",
    "ministral",
    "cwm",
    *GEMMA4,
)
# whose norms are LayerNorms
OTHER_EPSILON = {
    "cohere2": "layer_norm_eps",
    "cohere": "layer_norm_eps",
    "stablelm": "layer_norm_eps",
    "jais2": "layer_norm_eps",
    "starcoder2": "norm_epsilon",
}
LAYERS_OF_QWEN = ("qwen2", "qwen3", "qwen2_moe")
GATED_BIASES = (
    "llama",
    "qwen3",
    "qwen3_moe",
    "olmo2",
    "olmo3",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "glm4_moe",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "iquestcoder",
    "seed_oss",
    "arcee",
    "olmoe",
    "dots1",
    "solar_open",
    "smollm3",
    "granite",
    "granitemoe",
    "cohere2",
    "nanochat",
    "apertus",
    "gemma",
    "vaultgemma",
    "cohere",
    "glm",
    "glm4",
    "hyperclovax",
    "jais2",
    *GEMMA4,
)
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu", "kimi_linear")
WITH_MLP_BIASES = (
    "llama",
    "iquestcoder",
    "seed_oss",
    "arcee",
    "smollm3",
    "granite",
    "cwm",
    "hyperclovax",
    "jais2",
)
WITH_DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
# of a head, whatever hidden_size is
OWN_WIDTH = (
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "qwen3",
    "mixtral",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "iquestcoder",
    "internlm3",
    "seed_oss",
    "minimax_m2",
    "solar_open",
    "exaone4",
    "ernie4_5",
    "phi3",
    "nanochat",
    "apertus",
    "ministral3",
    "gemma",
    "vaultgemma",
    "glm",
    "glm4",
    "ministral",
    "cwm",
    "hyperclovax",
    "starcoder2",
    "jais2",
    *GEMMA4,
)
# whose class requires hidden_size to be so by heads
DIVIDED = (
    "llama",
    "gemma2",
    "gemma3_text",
    "deepseek_v2",
    "iquestcoder",
    "internlm3",
    "arcee",
    "vaultgemma",
    "cwm",
    "hyperclovax",
    "jais2",
)


ORIGINAL = "original_max_position_embeddings"
MINISTRAL_YARN = {
    "rope_type": "yarn",
    "factor": 2.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    ORIGINAL: 8,
}


def drawn(seed: int) -> dict[str, Any]:
    """Return a config.json. Families take turns, so that a run of seeds has all of them."""
    dice = Random(seed)
    kind = [*FAMILIES][seed % len(FAMILIES)]
    config = {"model_type": kind, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if kind == "cwm":
        config["bos_token_id"] = 0  # its class takes no null
    config["vocab_size"] = dice.randint(5, 70)
    config["tie_word_embeddings"] = dice.random() < 0.4
    if kind == "gpt2":
        return config | _gpt2(dice)
    config |= _sizes(dice, kind)
    if kind == "nemotron_h":
        return config | _hybrid(dice)
    if kind == "gpt_neox":
        return config | _neox(dice)
    epsilon = OTHER_EPSILON.get(kind, "rms_norm_eps")
    config[epsilon] = dice.choice((1e-6, 1e-5, 1e-2))
    if kind in GATED_BIASES or kind in LATENT:
        config["attention_bias"] = dice.random() < 0.5
    config |= _further_biases(dice, kind)
    if kind in LATENT:
        config |= _latent(dice, kind)
    config |= _windows(dice, kind, config["num_hidden_layers"])
    config |= _experts(dice, kind, config["num_hidden_layers"])
    config |= _factors(dice, kind)
    config |= _of_one_family(dice, kind, config)
    if kind in WITH_DELTA_NETS:
        config |= _delta_nets(dice, config["num_hidden_layers"])
    if kind == "kimi_linear":
        return config | _kimi_delta(dice, config["num_hidden_layers"])
    config |= _rope(dice, kind)
    if _divides_by_zero(config):
        del config["rope_scaling"]
    return config


def _of_one_family(dice: Random, kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return keys that no other family has."""
    if kind in ("gemma2", "vaultgemma"):
        return {
            "attn_logit_softcapping": dice.choice((None, 3.0)),
            "final_logit_softcapping": dice.choice((None, 2.0)),
        }
    if kind == "glm4_moe":
        return {
            "use_qk_norm": dice.random() < 0.5,
            "partial_rotary_factor": dice.choice((0.5, 1.0)),
        }
    if kind in ("cohere", "cohere2"):
        return {"logit_scale": dice.choice((0.0625, 0.3, 2.0))}
    if kind in ("glm", "glm4"):
        return {"partial_rotary_factor": dice.choice((0.5, 1.0))}
    if kind == "stablelm":
        return {
            "partial_rotary_factor": dice.choice((0.5, 1.0)),
            "use_qkv_bias": dice.random() < 0.5,
            "use_parallel_residual": dice.random() < 0.5,
        }
    if kind == "starcoder2":
        activation = dice.choice(("gelu_pytorch_tanh", "gelu"))
        return {"use_bias": dice.random() < 0.5, "hidden_act": activation}
    if kind == "hyperclovax":
        return {"use_post_norm": dice.random() < 0.5}
    if kind == "nanochat":
        return {"final_logit_softcapping": dice.choice((None, 15.0, 2.0))}
    if kind in GEMMA4:
        return _gemma4(dice, config)
    if kind == "minimax_m2":
        return {"rotary_dim": config["head_dim"] // dice.choice((1, 2))}
    return {}


def _gemma4(dice: Random, config: dict[str, Any]) -> dict[str, Any]:
    """Return parts that some models of Gemma 4 have, and heads of layers without the window."""
    keys = {
        "hidden_size_per_layer_input": dice.choice((0, 0, 0, 0, 0, 6)),
        "final_logit_softcapping": dice.choice((None, 2.0)),
        "attention_k_eq_v": dice.random() < 0.5,
        "num_global_key_value_heads": dice.choice((None, 1, config["num_key_value_heads"])),
        "global_head_dim": dice.choice((4, 8, 12, 16)),
        "use_bidirectional_attention": dice.choice((None, "vision")),
    }
    if config["model_type"] == "gemma4_unified_text":
        del keys["hidden_size_per_layer_input"]
    return keys


def _divides_by_zero(config: dict[str, Any]) -> bool:
    """Return whether transformers cannot make a model: its dynamic rope divides by the number of
    rotary features less 2."""
    scaling = config.get("rope_scaling") or {}
    head_dim = config.get("head_dim", 0)
    features = config.get("rotary_dim", head_dim * config.get("partial_rotary_factor", 1.0))
    return scaling.get("rope_type") == "dynamic" and features == 2


def _further_biases(dice: Random, kind: str) -> dict[str, Any]:
    """Return the biases that attention_bias does not decide."""
    biases: dict[str, Any] = {}
    if kind in WITH_MLP_BIASES:
        biases["mlp_bias"] = dice.random() < 0.5
    if kind == "internlm3":
        biases |= dict.fromkeys(("qkv_bias", "bias"), dice.random() < 0.5)
    if kind == "ernie4_5":
        biases["use_bias"] = dice.random() < 0.5
    if kind == "seed_oss":
        biases["attention_out_bias"] = dice.random() < 0.5
    return biases


def _factors(dice: Random, kind: str) -> dict[str, Any]:
    """Return factors of scores, and Granite's others."""
    if kind in ("gemma2", "vaultgemma", "gemma3_text"):
        return {"query_pre_attn_scalar": dice.randint(3, 20)}
    if not kind.startswith("granite") and kind != "hyperclovax":
        return {}
    parts = ("embedding", "attention", "residual")
    factors = {f"{part}_multiplier": dice.choice((0.3, 1.0, 2.5)) for part in parts}
    return {**factors, "logits_scaling": dice.choice((1.0, 3))}


def _gpt2(dice: Random) -> dict[str, Any]:
    heads = dice.randint(1, 4)
    return {
        "n_head": heads,
        "n_embd": heads * dice.choice((1, 3, 6)),
        "n_layer": dice.randint(1, 3),
        "n_positions": LONGEST,
        "n_inner": dice.choice((None, 7, 20)),
        "activation_function": dice.choice(("gelu_new", "gelu", "gelu_pytorch_tanh")),
        "layer_norm_epsilon": dice.choice((1e-5, 1e-2)),
    }


def _sizes(dice: Random, kind: str) -> dict[str, Any]:
    """Return sizes that nothing divides, where the family lets them be so."""
    kv_heads = dice.choice((1, 2, 3))
    heads = kv_heads * dice.choice((1, 2, 3))
    head_dim = dice.choice((4, 8, 12))
    own_heads = kind in ("gpt_neox", "olmoe", "cohere2", "cohere", "stablelm") or (
        dice.random() < 0.3 and kind not in LATENT
    )
    others = [heads * 5] if kind in DIVIDED else [heads * 5, dice.randint(6, 40)]
    hidden = heads * head_dim if own_heads else dice.choice(others)
    sizes = {
        "num_hidden_layers": dice.randint(1, 4),
        "num_attention_heads": heads,
        "hidden_size": hidden,
        "intermediate_size": dice.choice((9, 16, 31)),
        "max_position_embeddings": dice.choice((LONGEST, 24)),
    }
    if kind == "gpt_neox":
        return sizes
    sizes["num_key_value_heads"] = heads if kind in LATENT else kv_heads
    if kind not in LATENT and (not own_heads or kind in OWN_WIDTH):
        sizes["head_dim"] = head_dim
    return sizes


def _neox(dice: Random) -> dict[str, Any]:
    fraction = dice.choice((0.5, 1.0))
    return {
        "rotary_pct": fraction,
        "rotary_emb_base": dice.choice((10000, 50)),
        "use_parallel_residual": dice.random() < 0.5,
        "attention_bias": dice.random() < 0.5,
        "hidden_act": dice.choice(("gelu", "gelu_new")),
    }


def _hybrid(dice: Random) -> dict[str, Any]:
    """Return layers of one branch in any order, and sizes of all kinds of branches."""
    pattern = "".join(dice.choice("MME*-") for _ in range(dice.randint(1, 5)))
    groups = dice.choice((1, 2, 3))
    router_groups = dice.choice((1, 2, 4))
    of_group = dice.choice((2, 3))
    return {
        "hybrid_override_pattern": pattern,
        "num_hidden_layers": len(pattern),
        "tie_word_embeddings": False,  # its class ties nothing
        "layer_norm_epsilon": dice.choice((1e-6, 1e-5, 1e-2)),
        "mlp_bias": "E" not in pattern and dice.random() < 0.5,
        "mamba_num_heads": groups * dice.choice((1, 2)),
        "mamba_head_dim": dice.choice((3, 8)),
        "ssm_state_size": dice.choice((1, 5, 8)),
        "n_groups": groups,
        "conv_kernel": dice.choice((1, 2, 4)),
        "chunk_size": dice.choice((7, 128)),
        "time_step_min": dice.choice((1e-9, 0.2)),
        "n_routed_experts": router_groups * of_group,
        "n_group": router_groups,
        "topk_group": dice.randint(1, router_groups),
        "num_experts_per_tok": dice.choice((1, 2)),
        "norm_topk_prob": dice.random() < 0.5,
        "routed_scaling_factor": dice.choice((1.0, 2.5)),
        "moe_intermediate_size": dice.choice((7, 16)),
        "moe_shared_expert_intermediate_size": dice.choice((5, 12)),
    }


def _latent(dice: Random, kind: str) -> dict[str, Any]:
    """Return latents; DeepSeek-V2's class views pairs as complex numbers, for which widths before
    them must be even."""
    even = kind == "deepseek_v2"
    return {
        "q_lora_rank": dice.choice((None, 5, 9)),
        "kv_lora_rank": dice.choice((4, 14) if even else (3, 14)),
        "qk_rope_head_dim": dice.choice((4, 8)),
        "qk_nope_head_dim": dice.choice((2, 4) if even else (1, 4, 7)),
        "v_head_dim": dice.choice((3, 6)),
    }


def _delta_nets(dice: Random, layers: int) -> dict[str, Any]:
    """Return gated delta nets, in layers by their types or by their distance."""
    key_heads = dice.choice((1, 2, 3))
    types = [dice.choice(("full_attention", "linear_attention")) for _ in range(layers)]
    by_distance = {"full_attention_interval": dice.choice((1, 2, 3))}
    return {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * dice.choice((1, 2, 3)),
        "linear_key_head_dim": dice.choice((2, 5)),
        "linear_value_head_dim": dice.choice((3, 8)),
        "linear_conv_kernel_dim": dice.choice((1, 2, 4)),
        # of heads of 4, 8 or 12 features
        "partial_rotary_factor": dice.choice((0.5, 1.0)),
        **dice.choice(({"layer_types": types}, by_distance)),
    }


def _kimi_delta(dice: Random, layers: int) -> dict[str, Any]:
    """Return Kimi Delta Attention, in layers by their types or as published files say it; its head
    is never the embedding."""
    types = [dice.choice(("full_attention", "linear_attention")) for _ in range(layers)]
    width = dice.choice((2, 5))
    heads = dice.choice((1, 2, 3))
    kernel = dice.choice((1, 2, 4))
    by_types = {
        "linear_head_dim": width,
        "linear_num_heads": heads,
        "linear_conv_kernel_dim": kernel,
        "layer_types": types,
    }
    table = {
        "head_dim": width,
        "num_heads": heads,
        "short_conv_kernel_size": kernel,
        "kda_layers": [n for n, kind in enumerate(types, 1) if kind == "linear_attention"],
        "full_attn_layers": [n for n, kind in enumerate(types, 1) if kind == "full_attention"],
    }
    return {
        "tie_word_embeddings": False,
        **dice.choice((by_types, {"linear_attn_config": table})),
    }


def _windows(dice: Random, kind: str, layers: int) -> dict[str, Any]:
    window = dice.choice((3, 7, 17))
    types = [dice.choice(("full_attention", "sliding_attention")) for _ in range(layers)]
    if dice.random() < 0.3:
        types = [dice.choice(("full_attention", "sliding_attention"))] * layers
    if kind in GEMMA4:
        # Its class gives the last layer none, whatever the file says.
        types[-1] = "full_attention"
    if kind in BY_TYPE:
        return {"sliding_window": window, "layer_types": types}
    if kind in ("mistral", "mixtral", "phi3", "ministral3", "starcoder2"):
        return {"sliding_window": dice.choice((None, window))}
    if kind == "smollm3":
        turns = [dice.choice((0, 1)) for _ in range(layers - 1)]
        return {
            "no_rope_layers": [*turns, 1],
            "use_sliding_window": True,
            "sliding_window": window,
            **dice.choice(({}, {"layer_types": types})),
        }
    if kind == "exaone4":
        types[0] = "sliding_attention"
        with_window = {"sliding_window": window, "layer_types": types}
        without = {"sliding_window": None, "layer_types": ["full_attention"] * layers}
        return dice.choice((with_window, without))
    if kind == "cohere2":
        # Without a layer that has it there would be no positions at all.
        types[0] = "sliding_attention"
        by_distance = {"sliding_window_pattern": dice.choice((2, 3))}
        return {"sliding_window": window, **dice.choice(({"layer_types": types}, by_distance))}
    if kind == "dots1":
        return {"sliding_window": window, "max_window_layers": dice.randint(0, layers)}
    if kind in LAYERS_OF_QWEN and dice.random() < 0.5:
        return {"use_sliding_window": True, "sliding_window": window, "layer_types": types}
    if kind == "qwen3_moe" and dice.random() < 0.5:
        return {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    return {}


def _experts(dice: Random, kind: str, layers: int) -> dict[str, Any]:
    number = dice.choice((2, 3, 5))
    chosen = dice.choice((1, 2))
    if kind in ("mixtral", "gpt_oss", "minimax_m2", "granitemoe"):
        return {"num_local_experts": number, "num_experts_per_tok": chosen}
    if kind in ("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text"):
        if kind == "qwen3_moe":
            shared = {}
        else:
            shared = {"shared_expert_intermediate_size": dice.choice((5, 12))}
        routed = {
            "num_experts": number,
            "num_experts_per_tok": chosen,
            "moe_intermediate_size": dice.choice((7, 16)),
        }
        # Its class has experts in all layers.
        if kind == "qwen3_5_moe_text":
            return shared | routed
        return {
            **shared,
            **routed,
            "norm_topk_prob": dice.random() < 0.5,
            "decoder_sparse_step": dice.choice((1, 2)),
            "mlp_only_layers": dice.choice(([], [0])),
        }
    if kind == "olmoe":
        return {
            "num_experts": number,
            "num_experts_per_tok": chosen,
            "norm_topk_prob": dice.random() < 0.5,
        }
    if kind not in ("glm4_moe", "dots1", "solar_open", *LATENT) or kind == "youtu":
        return {}
    groups = dice.choice((1, 2, 4))
    compared = kind != "deepseek_v2"
    experts = {
        "n_routed_experts": groups * dice.choice((2, 3)),
        "n_group": groups,
        "topk_group": dice.randint(1, groups),
        "num_experts_per_tok": chosen,
        "n_shared_experts": dice.choice((1, 2)),
        "moe_intermediate_size": dice.choice((7, 16)),
        "first_k_dense_replace": (dice.choice((0, 1, layers)) if kind in (*LATENT, "dots1") else 0),
        "routed_scaling_factor": dice.choice((1.0, 2.5)),
        "norm_topk_prob": compared and dice.random() < 0.5,
    }
    if kind == "glm4_moe_lite":
        del experts["first_k_dense_replace"]
        experts["mlp_layer_types"] = [dice.choice(("dense", "sparse")) for _ in range(layers)]
    if kind == "solar_open":
        del experts["first_k_dense_replace"]
    if kind == "kimi_linear":
        names = {
            "n_routed_experts": "num_experts",
            "n_group": "num_expert_group",
            "num_experts_per_tok": "num_experts_per_token",
            "n_shared_experts": "num_shared_experts",
            "norm_topk_prob": "moe_renormalize",
        }
        experts = {names.get(key, key): value for key, value in experts.items()}
    if kind == "deepseek_v2":
        experts["topk_method"] = dice.choice(("greedy", "group_limited_greedy"))
    return experts


def _rope(dice: Random, kind: str) -> dict[str, Any]:
    """Return rotary positions, as older or newer versions of transformers write them."""
    base = dice.choice((50.0, 10000.0))
    scaling = _scaling(dice)
    if kind == "phi3":
        # Its class has no other scaling than a factor for each wavelength.
        return {"rope_theta": base, "partial_rotary_factor": dice.choice((0.5, 1.0))}
    if kind == "ministral3":
        # Its class has no factors of queries without an original length.
        scaled = scaling if scaling and ORIGINAL in scaling else MINISTRAL_YARN
        beta = {"llama_4_scaling_beta": dice.choice((0, 0.1, 0.8))}
        return dice.choice(({"rope_parameters": {"rope_theta": base, **scaled, **beta}}, {}))
    if kind in GEMMA4:
        part = {"partial_rotary_factor": dice.choice((0.25, 0.5, 1.0))}
        proportional = {"rope_type": "proportional", "rope_theta": base, **part}
        plain = {"rope_type": "default", "rope_theta": base}
        beside = {"rope_type": "default", "rope_theta": dice.choice((base, 30.0))}
        tables = {"full_attention": dice.choice((proportional, plain)), "sliding_attention": beside}
        return dice.choice(({"rope_parameters": tables}, {}))
    if kind in ("gemma3_text", "olmo3"):
        full = {"rope_theta": base, **(scaling or {"rope_type": "default"})}
        beside = {"rope_type": "default", "rope_theta": dice.choice((base, 30.0))}
        older = {"rope_theta": base} | ({"rope_scaling": scaling} if scaling else {})
        newer = {"rope_parameters": {"full_attention": full, "sliding_attention": beside}}
        return dice.choice((older, newer, {}))
    newer = {"rope_parameters": {"rope_theta": base, **(scaling or {"rope_type": "default"})}}
    older = {"rope_theta": base} | ({"rope_scaling": scaling} if scaling else {})
    return dice.choice((older, newer, {}))


def _scaling(dice: Random) -> dict[str, Any] | None:
    original = {"original_max_position_embeddings": dice.choice((8, 16))}
    linear = {"rope_type": "linear", "factor": 2.5}
    dynamic = {"rope_type": "dynamic", "factor": 3.0}
    llama3 = {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        **original,
    }
    yarn = {"rope_type": "yarn", "factor": 2.0, **original}
    options = {"beta_fast": 4.0, "beta_slow": 0.5, "attention_factor": 1.3, "truncate": False}
    odd_yarn = yarn | {key: options[key] for key in dice.sample(sorted(options), 2)}
    mscale = yarn | {"mscale": 0.7, "mscale_all_dim": dice.choice((0.4, 0.7))}
    return dice.choice((None, None, linear, dynamic, llama3, yarn, odd_yarn, mscale))
