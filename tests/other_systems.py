"""Small models of other systems: configurations of every family, folders of random weights, a
training file."""

import json
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tools.convert.core.names import HUGGING_FACE
from tools.convert.core.rules import matches
from tools.convert.hf.config import from_hugging_face

MEGATRON = [  # modules of megatron-core that its models and optimizer need
    f"megatron.core.{module}"
    for module in (
        "models.gpt.gpt_layer_specs",
        "optimizer",
        "distributed",
        "dist_checkpointing",
        "transformer.module",
    )
]
NEEDS_MEGATRON = (
    pytest.mark.skipif(  # looked for and not imported, which takes seconds; ranks import it
        not (find_spec("megatron") and find_spec("megatron.core")),
        reason="needs the package megatron-core (pip install megatron-core einops)",
    )
)
_SIZES = {
    "vocab_size": 131,
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 48,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
_LLAMA = {
    **_SIZES,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "head_dim": 10,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 24}
_GEMMA4 = {
    **{key: value for key, value in _LLAMA.items() if key != "hidden_act"},
    # its root is exact: transformers rounds it to the default dtype, whatever that is in a test
    "hidden_size": 36,
    "head_dim": 6,
    "global_head_dim": 10,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 9,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"],
    "final_logit_softcapping": 2.5,
}
_LATENT = {
    **{key: value for key, value in _LLAMA.items() if key != "head_dim"},
    "num_key_value_heads": 4,
    "q_lora_rank": 9,
    "kv_lora_rank": 14,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 4,
    "v_head_dim": 5,
    "moe_intermediate_size": 20,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
}
_DENSE_LATENT = {
    key: value for key, value in _LATENT.items() if "expert" not in key and "moe" not in key
}
del _DENSE_LATENT["routed_scaling_factor"]
_DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 7,
    "linear_conv_kernel_dim": 3,
}
_LATENT_OF_KIMI = {
    **_DENSE_LATENT,
    "q_lora_rank": None,
    "moe_intermediate_size": 20,
    "tie_word_embeddings": False,
    "linear_num_heads": 2,
    "linear_head_dim": 5,
    "linear_conv_kernel_dim": 3,
}
GPT2 = {
    "model_type": "gpt2",
    "n_layer": 4,
    "n_embd": 24,
    "n_head": 4,
    "n_positions": 48,
    "vocab_size": 131,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}

# Odd on purpose: sizes that nothing divides, fewer key/value heads, heads wider than hidden /
# heads.
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt2-untied": {**GPT2, "tie_word_embeddings": False},
    "llama": {"model_type": "llama", **_LLAMA},
    "llama-tied": {
        "model_type": "llama",
        **_LLAMA,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
    "llama-biased": {
        "model_type": "llama",
        **_LLAMA,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_theta": 5e5,
    },
    "gpt_neox": {
        "model_type": "gpt_neox",
        **_SIZES,
        "rotary_pct": 0.7,
        "hidden_act": "gelu",
        "hidden_dropout": 0.0,
    },
    "mistral": {"model_type": "mistral", **_LLAMA, "sliding_window": 16},
    "qwen2": {"model_type": "qwen2", **_LLAMA, "head_dim": 6, "tie_word_embeddings": True},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        **_LLAMA,
        "head_dim": 6,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    },
    "qwen3": {"model_type": "qwen3", **_LLAMA},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **_LLAMA,
        "moe_intermediate_size": 40,
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "qwen3_moe-dense-layers": {
        "model_type": "qwen3_moe",
        **_LLAMA,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        **_LLAMA,
        "head_dim": 16,  # a quarter of whose features are two pairs
        **_DELTA_NET,
        "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2],
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [2],
    },
    "qwen3_5_text": {
        "model_type": "qwen3_5_text",
        **_LLAMA,
        "head_dim": 16,
        **_DELTA_NET,
        "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"],
    },
    "qwen3_5_moe_text": {
        "model_type": "qwen3_5_moe_text",
        **{key: value for key, value in _LLAMA.items() if key != "intermediate_size"},
        "head_dim": 16,
        **_DELTA_NET,
        "full_attention_interval": 3,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.5,
            "mrope_interleaved": True,
            "mrope_section": [1, 1, 1],
        },
    },
    "nemotron_h": {
        "model_type": "nemotron_h",
        "vocab_size": 131,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 4,
        "hybrid_override_pattern": "M*-M",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "max_position_embeddings": 64,
        "mamba_num_heads": 6,
        "mamba_head_dim": 5,
        "ssm_state_size": 7,
        "n_groups": 2,
        "conv_kernel": 3,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
    },
    "nemotron_h-experts": {
        "model_type": "nemotron_h",
        "vocab_size": 131,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 4,
        "hybrid_override_pattern": "ME*-",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "max_position_embeddings": 64,
        "mamba_num_heads": 4,
        "mamba_head_dim": 5,
        "ssm_state_size": 7,
        "n_groups": 2,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "moe_shared_expert_intermediate_size": 36,
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
    },
    "glm4_moe": {
        "model_type": "glm4_moe",
        **_LLAMA,
        "hidden_size": 32,  # of a head of 8 features half are an even number
        "head_dim": 8,
        "attention_bias": True,
        "use_qk_norm": True,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
    },
    "mixtral": {
        "model_type": "mixtral",
        **_LLAMA,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
    },
    "llama-stretched": {"model_type": "llama", **_LLAMA, "rope_theta": 5e5, "rope_scaling": LLAMA3},
    "llama-yarn": {"model_type": "llama", **_LLAMA, "rope_scaling": YARN},
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        **_LATENT,
        "topk_method": "group_limited_greedy",
        "n_group": 3,
        "topk_group": 2,
    },
    "deepseek_v2-dense": {
        "model_type": "deepseek_v2",
        **_LATENT,
        "first_k_dense_replace": 4,
        "mlp_bias": True,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "num_nextn_predict_layers": 0,
        **_LATENT,
        "q_lora_rank": None,
        "first_k_dense_replace": 1,
        "n_group": 3,
        "topk_group": 2,
        "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    },
    "olmo2": {"model_type": "olmo2", **_LLAMA, "rope_theta": 5e5},
    "olmo3": {"model_type": "olmo3", **_LLAMA, "sliding_window": 9, "rope_scaling": YARN},
    "gemma2": {
        "model_type": "gemma2",
        **{key: value for key, value in _LLAMA.items() if key != "hidden_act"},
        "hidden_size": 36,
        "head_dim": 6,
        "query_pre_attn_scalar": 7,
        "sliding_window": 9,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 2.5,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        **_LLAMA,
        "sliding_window": 9,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "swiglu_limit": 0.75,
        "rope_parameters": {**YARN, "truncate": False, "rope_theta": 150.0},
    },
    "gemma3_text": {
        "model_type": "gemma3_text",
        **{key: value for key, value in _LLAMA.items() if key != "hidden_act"},
        # its root is exact: transformers rounds it to the default dtype, whatever that is in a test
        "hidden_size": 36,
        "head_dim": 6,
        "query_pre_attn_scalar": 7,
        "sliding_window": 9,
        "sliding_window_pattern": 2,
        "rope_theta": 5e5,
    },
    "gemma4_text": {"model_type": "gemma4_text", **_GEMMA4},
    # of other layers than in turn, whose keys are no values
    "gemma4_unified_text": {
        "model_type": "gemma4_unified_text",
        **_GEMMA4,
        "attention_k_eq_v": False,
        "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    "iquestcoder": {"model_type": "iquestcoder", **_LLAMA, "rope_theta": 5e5},
    "internlm3": {"model_type": "internlm3", **_LLAMA, "tie_word_embeddings": True},
    "seed_oss": {
        "model_type": "seed_oss",
        **_LLAMA,
        "attention_bias": True,
        "attention_out_bias": True,
        "attention_dropout": 0.0,
        "residual_dropout": 0.0,
    },
    "smollm3": {
        "model_type": "smollm3",
        **_LLAMA,
        "no_rope_layers": [1, 0, 1, 0],
        "use_sliding_window": True,
        "sliding_window": 9,
    },
    "granite": {
        "model_type": "granite",
        **_LLAMA,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.37,
        "residual_multiplier": 0.22,
        "logits_scaling": 1.7,
    },
    "granitemoe": {
        "model_type": "granitemoe",
        **_LLAMA,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.25,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
    "exaone4": {
        "model_type": "exaone4",
        **_LLAMA,
        "sliding_window": 9,
        "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention"],
    },
    "ernie4_5": {"model_type": "ernie4_5", **_LLAMA, "use_bias": True},
    "phi3": {
        "model_type": "phi3",
        **_LLAMA,
        "head_dim": 8,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 48,
    },
    "cohere2": {
        "model_type": "cohere2",
        **{k: v for k, v in _LLAMA.items() if k not in ("head_dim", "rms_norm_eps")},
        "layer_norm_eps": 1e-3,
        "logit_scale": 0.3,
        "sliding_window": 9,
        "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention"],
    },
    "nanochat": {
        "model_type": "nanochat",
        **_LLAMA,
        "hidden_act": "relu2",
        "final_logit_softcapping": 1.5,
        "attention_bias": True,
    },
    "apertus": {"model_type": "apertus", **_LLAMA, "hidden_act": "xielu"},
    "ministral3": {
        "model_type": "ministral3",
        **_LLAMA,
        "sliding_window": 21,
        "rope_parameters": {
            **YARN,
            "rope_theta": 5e5,
            "original_max_position_embeddings": 11,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "arcee": {"model_type": "arcee", **_LLAMA, "hidden_act": "relu2"},
    "gemma": {
        "model_type": "gemma",
        **_LLAMA,
        "hidden_act": "gelu",
        "hidden_size": 36,
        "head_dim": 6,
        "tie_word_embeddings": False,
    },
    "vaultgemma": {
        "model_type": "vaultgemma",
        **{key: value for key, value in _LLAMA.items() if key != "hidden_act"},
        "hidden_size": 36,
        "head_dim": 6,
        "query_pre_attn_scalar": 7,
        "sliding_window": 9,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 2.5,
    },
    "cohere": {
        "model_type": "cohere",
        **{k: v for k, v in _LLAMA.items() if k not in ("head_dim", "rms_norm_eps")},
        "layer_norm_eps": 1e-3,
        "logit_scale": 0.3,
        "attention_bias": True,
    },
    "glm4": {"model_type": "glm4", **_LLAMA, "head_dim": 8},
    "glm": {
        "model_type": "glm",
        **_LLAMA,
        "head_dim": 16,
        "partial_rotary_factor": 0.25,
    },
    "ministral": {
        "model_type": "ministral",
        **_LLAMA,
        "sliding_window": 9,
        "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
    },
    "cwm": {"model_type": "cwm", **_LLAMA, "sliding_window": 9, "mlp_bias": True},
    "hyperclovax": {
        "model_type": "hyperclovax",
        **_LLAMA,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.37,
        "residual_multiplier": 0.22,
        "logits_scaling": 1.7,
    },
    "starcoder2": {
        "model_type": "starcoder2",
        **{k: v for k, v in _LLAMA.items() if k not in ("hidden_act", "rms_norm_eps")},
        "norm_epsilon": 1e-3,
        "sliding_window": 9,
    },
    "stablelm": {
        "model_type": "stablelm",
        **{k: v for k, v in _LLAMA.items() if k not in ("head_dim", "rms_norm_eps")},
        "layer_norm_eps": 1e-3,
        "hidden_size": 32,
        "use_qkv_bias": True,
        "partial_rotary_factor": 0.5,
    },
    "jais2": {
        "model_type": "jais2",
        **{key: value for key, value in _LLAMA.items() if key != "rms_norm_eps"},
        "layer_norm_eps": 1e-3,
        "hidden_act": "relu2",
    },
    "olmoe": {
        "model_type": "olmoe",
        **{key: value for key, value in _LLAMA.items() if key != "head_dim"},
        "num_experts": 5,
        "num_experts_per_tok": 3,
    },
    "minimax_m2": {
        "model_type": "minimax_m2",
        **_LLAMA,
        "head_dim": 8,
        "rotary_dim": 4,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
    },
    "dots1": {
        "model_type": "dots1",
        **_LLAMA,
        "moe_intermediate_size": 20,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "sliding_window": 9,
        "max_window_layers": 2,
    },
    "solar_open": {
        "model_type": "solar_open",
        **{key: value for key, value in _LLAMA.items() if key != "intermediate_size"},
        "attention_bias": True,
        "moe_intermediate_size": 20,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
    },
    "glm4_moe_lite": {
        "model_type": "glm4_moe_lite",
        **_LATENT,
        "n_group": 3,
        "topk_group": 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "youtu": {
        "model_type": "youtu",
        **_DENSE_LATENT,
        "tie_word_embeddings": False,
    },
    "kimi_linear": {
        "model_type": "kimi_linear",
        **_LATENT_OF_KIMI,
        "num_expert_group": 3,
        "topk_group": 2,
        "num_experts": 6,
        "num_experts_per_token": 3,
        "num_shared_experts": 2,
        "routed_scaling_factor": 2.5,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2],
    },
    "kimi_linear-dense": {
        "model_type": "kimi_linear",
        **_LATENT_OF_KIMI,
        "q_lora_rank": 9,
        "attention_bias": True,
        "first_k_dense_replace": 4,
        "linear_attn_config": {
            "num_heads": 2,
            "head_dim": 6,
            "short_conv_kernel_size": 2,
            "kda_layers": [2, 3],
            "full_attn_layers": [1, 4],
        },
    },
}
# Numbers of a model of transformers that stand in buffers, by the ends of their names.
BUFFERS = ("e_score_correction_bias", "layer_scalar")
# Parallel residual, norms after branches, soft caps, weights of norms that begin at 0, decays of
# each feature of a key.
WITHOUT_MEGATRON = {
    "gpt_neox",
    "olmo2",
    "olmo3",
    "gemma2",
    "gemma3_text",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "nemotron_h-experts",
    "seed_oss",
    "olmoe",
    "minimax_m2",
    "smollm3",
    "exaone4",
    "granite",
    "granitemoe",
    "kimi_linear",
    "kimi_linear-dense",
    "cohere2",
    "nanochat",
    "apertus",
    "ministral3",
    "gemma4_text",
    "gemma4_unified_text",
    "gemma",
    "vaultgemma",
    "cohere",
    "glm4",
    "cwm",
    "hyperclovax",
}
# What makes them models that Megatron has: one epsilon for all norms, latents and groups of heads
# that ranks can cut, groups compared by as many experts as it takes, convolutions over 4 tokens.
FOR_MEGATRON: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"rms_norm_eps": 1e-6, "q_lora_rank": 8},
    "deepseek_v2-dense": {"rms_norm_eps": 1e-6, "q_lora_rank": 8, "mlp_bias": False},
    "deepseek_v3": {"rms_norm_eps": 1e-6, "num_experts_per_tok": 4},
    "glm4_moe": {"num_experts_per_tok": 2},
    "dots1": {"num_experts_per_tok": 4, "sliding_window": None},
    "solar_open": {"num_experts_per_tok": 2},
    "glm4_moe_lite": {"rms_norm_eps": 1e-6, "num_experts_per_tok": 4, "q_lora_rank": 8},
    "youtu": {"rms_norm_eps": 1e-6, "q_lora_rank": 8},
    "nemotron_h": {
        "mamba_num_heads": 8,
        "n_groups": 4,
        "conv_kernel": 4,
        "time_step_min": 1e-9,
    },
}
WITHOUT_MEGATRON |= FOR_MEGATRON.keys()
IN_MEGATRON = (CONFIGS.keys() - WITHOUT_MEGATRON) | FOR_MEGATRON.keys()
# Megatron's files do not say the family. These come back as the first that computes the same.
OTHERS_FROM_MEGATRON = {"ernie4_5": "llama", "ministral": "smollm3"}
BACK_FROM_MEGATRON = IN_MEGATRON - OTHERS_FROM_MEGATRON.keys()


def usually(few: Iterable[Any], all_kinds: Iterable[Any] = CONFIGS) -> list[Any]:
    """Parameters of a test: the kinds in `few` always, the others of `all_kinds` only among the
    slow tests."""
    chosen = sorted(set(few))
    return [*chosen, *slow(*((kind,) for kind in sorted(all_kinds) if kind not in chosen))]


def slow(*parameters: tuple[Any, ...]) -> list[Any]:
    """Parameters of a test that are tried only among the slow tests."""
    return [pytest.param(*values, marks=pytest.mark.slow) for values in parameters]


def megatrons(kind: str) -> dict[str, Any]:
    """The configuration of a kind in `IN_MEGATRON`."""
    return {**CONFIGS[kind], **FOR_MEGATRON.get(kind, {})}


def write_folder(
    folder: Path, kind: str, dtype: torch.dtype = torch.float32, **changes: Any
) -> Path:
    """A Hugging Face folder of random weights, written without transformers."""
    config = {**CONFIGS[kind], **changes}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    dice = torch.Generator().manual_seed(5)
    tensors = {
        match.foreign: torch.randn(match.shape, generator=dice).mul_(0.3).to(dtype)
        for match in matches(HUGGING_FACE[config["model_type"]], from_hugging_face(config))
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def same_files(one: Path, other: Path) -> None:
    """The same names with the same bytes, all the way down."""
    first, second = (
        {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}
        for path in (one, other)
    )
    assert first.keys() == second.keys()
    assert not [name for name, content in first.items() if content != second[name]]
