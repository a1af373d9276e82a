"""Small odd models of every family, as transformers and as megaprec describe them, and one step of
ours on any mesh.

Apart from test_families.py, so that ranks need not import transformers.
"""

import pickle
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.layout import layout_of
from megaprec.optim.rules.update_rules import AdamW
from megaprec.precision.plan import plan
from models.attention.packing import Packing
from models.config import ModelConfig
from models.decoder.stages import Stage
from models.engine.engine import Engine, build_stages
from models.engine.options import EngineOptions
from parallel.activation_checkpoint import KEEP, Recompute
from parallel.pipeline.kinds import schedule
from tests.layouts import Fragment, Recording, assemble, fragments, share_of
from tests.ranks import run_ranks

BATCH = 2
LENGTH = 12
# Steps so small, and an eps so large, that drawn models stay within their rounding: weights that
# differ by 1e-15 have losses that differ by 1e-8 after three steps of 1e-2 with 1e-6, for some.
ADAM_LR = 1e-4
ADAM_EPS = 1e-3


@dataclass(frozen=True)
class Case:
    """kind: model_type of transformers. theirs, ours: what differs from THEIRS and OURS."""

    kind: str
    theirs: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)


THEIRS: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "vocab_size": 97,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,  # the embedding of a padding token gets no gradient there
}
OURS: dict[str, Any] = {
    "layers": 2,
    "hidden": 24,
    "heads": 4,
    "vocab": 97,
    "max_positions": 16,
    "norm_eps": 1e-5,
    "kv_heads": 2,
    "ffn": 40,
}
GPT2: dict[str, Any] = {
    "n_inner": 40,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "layer_norm_epsilon": 1e-5,
}
EXPERTS = {"experts": 4, "router_aux_loss": 0.0}
MIXTRAL = {**EXPERTS, "rope_base": 1e6}  # their default


def _rope(kind: str, theta: float, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **parameters}}


def _stretched(
    kind: str, theta: float, head_dim: int = 6, **parameters: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both descriptions of a stretched Llama."""
    theirs = _rope(kind, theta, **parameters) | {"head_dim": head_dim}
    return theirs, {
        "rope_base": theta,
        "rope_scaling": {"kind": kind, **parameters},
        "head_dim": head_dim,
    }


# of an original length so short that samples reach beyond it twice
LLAMA3 = {
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 5,
}
MINISTRAL_YARN = {
    "factor": 2.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 5,
}
# its root is exact: transformers rounds the factor of embeddings to its default dtype
THEIR_GEMMA4: dict[str, Any] = {
    "hidden_size": 36,
    "head_dim": 10,
    "global_head_dim": 16,
    "sliding_window": 3,
    "hidden_size_per_layer_input": 0,
    "tie_word_embeddings": True,
}
OUR_GEMMA4: dict[str, Any] = {"hidden": 36, "head_dim": 10}
PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.5}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 9, "kv_lora_rank": 14, "qk_rope_head_dim": 4}
# even where transformers views pairs as complex numbers
LATENT |= {
    "qk_nope_head_dim": 10,
    "v_head_dim": 3,
}
OUR_LATENT = {"query_rank": 9, "kv_rank": 14, "rope_dim": 4, "nope_dim": 10, "value_dim": 3}
THEIR_EXPERTS = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "n_group": 3,
}
THEIR_EXPERTS |= {
    "topk_group": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 20,
    "routed_scaling_factor": 1.5,
}
OUR_EXPERTS = {
    "experts": 6,
    "experts_per_token": 3,
    "shared_experts": 40,
    "ffn": 20,
    "dense_ffn": 40,
}
OUR_EXPERTS |= {"dense_layers": (0,), "router_aux_loss": 0.0}
SIGMOID_ROUTER = {
    "score": "sigmoid",
    "scale": 1.5,
    "correction": True,
    "groups": 3,
    "groups_per_token": 2,
}
DELTA_LAYERS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 3,
}
OUR_DELTA_NET = {"key_heads": 2, "value_heads": 4, "key_dim": 6, "value_dim": 5, "kernel": 3}
OUR_KIMI_DELTA = {
    "key_heads": 4,
    "value_heads": 4,
    "key_dim": 6,
    "value_dim": 6,
    "gate_rank": 6,
}
THEIR_EXPERTS_OF_KIMI = {
    "first_k_dense_replace": 1,
    "num_experts": 6,
    "num_experts_per_token": 3,
    "num_expert_group": 3,
    "topk_group": 2,
    "num_shared_experts": 2,
    "moe_intermediate_size": 20,
    "routed_scaling_factor": 1.5,
}
OF_QWEN3_5 = _rope(
    "default", 100.0, partial_rotary_factor=0.5, mrope_section=[2, 1, 1], mrope_interleaved=True
)
SHORT = {"original_max_position_embeddings": 8}
OUR_MAMBA = {"heads": 4, "head_dim": 6, "state_dim": 5, "groups": 2}
CASES: dict[str, Case] = {
    "llama": Case("llama", _rope("default", 100.0), {"rope_base": 100.0}),
    "llama tied biased kv1 linear": Case(
        "llama",
        {"num_key_value_heads": 1, "tie_word_embeddings": True, "attention_bias": True}
        | _rope("linear", 50.0, factor=2.5),
        {"kv_heads": 1, "tied": True, "qkv_bias": True, "output_bias": True, "rope_base": 50.0}
        | {"rope_scaling": {"kind": "linear", "factor": 2.5}},
    ),
    "llama mlp biased": Case("llama", {"mlp_bias": True}, {"mlp_bias": True}),
    "llama llama3": Case(
        "llama",
        *_stretched(
            "llama3", 5.0, 10, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, **SHORT
        ),
    ),
    "llama dynamic": Case(
        "llama",
        {
            **_rope("dynamic", 50.0, factor=3.0),
            "max_position_embeddings": 8,
        },  # so theirs calls the original length
        {"rope_base": 50.0, "rope_scaling": {"kind": "dynamic", "factor": 3.0, **SHORT}},
    ),
    "llama yarn": Case("llama", *_stretched("yarn", 5.0, 10, factor=2.0, **SHORT)),
    "llama yarn mscale": Case(
        "llama",
        *_stretched(
            "yarn",
            5.0,
            14,
            factor=2.0,
            beta_fast=2.0,
            mscale=0.7,
            mscale_all_dim=0.3,
            truncate=False,
            **SHORT,
        ),
    ),
    "llama yarn attention factor": Case(
        "llama",
        *_stretched("yarn", 7.0, 8, factor=2.0, beta_slow=0.5, attention_factor=1.3, **SHORT),
    ),
    "gpt2": Case("gpt2", {**GPT2, "tie_word_embeddings": True}, {"kv_heads": 4}),
    "gpt2 untied": Case("gpt2", GPT2, {"kv_heads": 4, "tied": False}),
    "gpt_neox": Case("gpt_neox", {"hidden_size": 32}, {"hidden": 32, "kv_heads": 4}),
    "gpt_neox sequential tied": Case(
        "gpt_neox",
        {
            "use_parallel_residual": False,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "hidden_act": "gelu_new",
        }
        | {"rotary_pct": 0.7},
        {
            "kv_heads": 4,
            "parallel_residual": False,
            "qkv_bias": False,
            "output_bias": False,
            "tied": True,
        }
        | {"mlp": "gelu", "rotary_fraction": 0.7},
    ),
    "mistral": Case(
        "mistral", {"sliding_window": 5, "head_dim": 10}, {"window": 5, "head_dim": 10}
    ),
    "mistral without window": Case("mistral", {"sliding_window": None}),
    "qwen2": Case("qwen2", {"tie_word_embeddings": True}, {"tied": True}),
    "qwen2 window": Case(
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0},
        {"window": 3},
    ),
    "qwen3": Case("qwen3", {"head_dim": 10}, {"head_dim": 10}),
    "qwen3 window of the last layer": Case(
        "qwen3",
        {"head_dim": 6, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
        {"head_dim": 6, "window": 3, "window_layers": (1,)},
    ),
    "qwen3 biased kv1": Case(
        "qwen3",
        {"head_dim": 4, "attention_bias": True, "num_key_value_heads": 1},
        {"head_dim": 4, "qkv_bias": True, "output_bias": True, "kv_heads": 1},
    ),
    "olmo2 kv1 biased": Case(
        "olmo2",
        {"num_key_value_heads": 1, "attention_bias": True},
        {"kv_heads": 1, "qkv_bias": True, "output_bias": True},
    ),
    "olmo3 yarn": Case(
        "olmo3",
        {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", "rope_theta": 5.0, "factor": 2.0, **SHORT},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5.0},
            }
        },
        {"window": 3, "window_layers": (0,), "rope_base": 5.0, "window_rope_base": 5.0}
        | {"rope_scaling": {"kind": "yarn", "factor": 2.0, **SHORT}},
    ),
    "gemma3": Case(
        "gemma3_text",
        {"hidden_size": 36, "head_dim": 10, "query_pre_attn_scalar": 7, "sliding_window": 3}
        | {"layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": True}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 50.0, "factor": 2.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 7.0},
            }
        },
        {"hidden": 36, "head_dim": 10, "attention_scalar": 7.0, "window": 3, "window_layers": (0,)}
        | {
            "rope_base": 50.0,
            "window_rope_base": 7.0,
            "rope_scaling": {"kind": "linear", "factor": 2.0},
        },
    ),
    "gemma4": Case(
        "gemma4_text",
        {**THEIR_GEMMA4, "layer_types": ["sliding_attention", "full_attention"]}
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
        | {"final_logit_softcapping": 1.5}
        | {
            "rope_parameters": {
                "full_attention": {**PROPORTIONAL, "rope_theta": 50.0, "factor": 2.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 7.0},
            }
        },
        {**OUR_GEMMA4, "window": 3, "window_layers": (0,), "global_head_dim": 16}
        | {"global_kv_heads": 1, "global_key_as_value": True, "final_softcap": 1.5}
        | {"rope_base": 50.0, "window_rope_base": 7.0}
        | {"rope_scaling": {"kind": "proportional", "factor": 2.0, "fraction": 0.5}},
    ),
    "gemma4 of whole layers, biased": Case(
        "gemma4_text",
        {**THEIR_GEMMA4, "layer_types": ["full_attention"] * 2, "attention_bias": True}
        | {"attention_k_eq_v": True, "num_key_value_heads": 4, "tie_word_embeddings": False}
        | {"rope_parameters": {"full_attention": {**PROPORTIONAL, "rope_theta": 50.0}}},
        {**OUR_GEMMA4, "head_dim": 16, "kv_heads": 4, "global_key_as_value": True}
        | {"qkv_bias": True, "output_bias": True, "rope_base": 50.0, "tied": False}
        | {"rope_scaling": {"kind": "proportional", "fraction": 0.5}},
    ),
    "deepseek_v2": Case(
        "deepseek_v2",
        {**LATENT, "qk_rope_head_dim": 6, "first_k_dense_replace": 2, "attention_bias": True}
        | {"rms_norm_eps": 1e-3},
        {
            "latent": {**OUR_LATENT, "rope_dim": 6},
            "kv_heads": 4,
            "qkv_bias": True,
            "output_bias": True,
        }
        | {"norm_eps": 1e-3},
    ),
    "deepseek_v2 without a query latent": Case(
        "deepseek_v2",
        {**LATENT, "q_lora_rank": None, "v_head_dim": 17, "first_k_dense_replace": 2},
        {"latent": {**OUR_LATENT, "query_rank": 0, "value_dim": 17}, "kv_heads": 4},
    ),
    "deepseek_v3 yarn": Case(
        "deepseek_v3",
        {**LATENT, "kv_lora_rank": 7, "qk_nope_head_dim": 5, **THEIR_EXPERTS}
        | _rope("yarn", 5.0, factor=2.0, mscale=0.7, mscale_all_dim=1.3, **SHORT),
        {
            "latent": {**OUR_LATENT, "kv_rank": 7, "nope_dim": 5},
            "kv_heads": 4,
            "rope_base": 5.0,
            **OUR_EXPERTS,
        }
        | {"router": SIGMOID_ROUTER}
        | {
            "rope_scaling": {
                "kind": "yarn",
                "factor": 2.0,
                "mscale": 0.7,
                "mscale_all_dim": 1.3,
                **SHORT,
            }
        },
    ),
    "gemma2": Case(
        "gemma2",
        {"hidden_size": 36, "head_dim": 10, "query_pre_attn_scalar": 7, "sliding_window": 3}
        | {
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.5,
            "tie_word_embeddings": True,
        },
        {"hidden": 36, "head_dim": 10, "attention_scalar": 7.0, "window": 3, "window_layers": (0,)}
        | {"attention_softcap": 1.5, "final_softcap": 2.5},
    ),
    "gpt_oss": Case(
        "gpt_oss",
        {"head_dim": 10, "num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 3}
        | {"swiglu_alpha": 1.3, "swiglu_limit": 0.6}
        | _rope("yarn", 5.0, factor=2.0, truncate=False, **SHORT),
        {
            **EXPERTS,
            "head_dim": 10,
            "experts": 5,
            "experts_per_token": 3,
            "window": 3,
            "window_layers": (0,),
        }
        | {"swiglu_alpha": 1.3, "swiglu_limit": 0.6, "rope_base": 5.0}
        | {"rope_scaling": {"kind": "yarn", "factor": 2.0, "truncate": False, **SHORT}},
    ),
    "gpt_oss unbiased kv1": Case(
        "gpt_oss",
        {"head_dim": 6, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 128}
        | {"num_key_value_heads": 1, "attention_bias": False}
        | _rope("default", 100.0),
        {**EXPERTS, "head_dim": 6, "experts_per_token": 2, "kv_heads": 1, "rope_base": 100.0}
        | {"qkv_bias": False, "output_bias": False, "window": 128, "window_layers": (0,)},
    ),
    "mixtral": Case("mixtral", {"num_local_experts": 4}, MIXTRAL),
    "mixtral window three of five": Case(
        "mixtral",
        {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 4},
        {**MIXTRAL, "experts": 5, "experts_per_token": 3, "window": 4},
    ),
    "qwen3_moe": Case(
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False}
        | {"moe_intermediate_size": 40, "head_dim": 8},
        {**EXPERTS, "norm_topk": False, "head_dim": 8},
    ),
    "qwen3_moe with a dense layer": Case(
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "attention_bias": True}
        | {"moe_intermediate_size": 24, "head_dim": 8, "mlp_only_layers": [0]},
        {**EXPERTS, "head_dim": 8, "qkv_bias": True, "output_bias": True}
        | {"ffn": 24, "dense_layers": (0,), "dense_ffn": 40},
    ),
    "qwen2_moe": Case(
        "qwen2_moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "moe_intermediate_size": 20,
        }
        | {"shared_expert_intermediate_size": 28, "mlp_only_layers": [0]},
        {
            **EXPERTS,
            "experts": 5,
            "experts_per_token": 3,
            "norm_topk": False,
            "ffn": 20,
            "shared_experts": 28,
        }
        | {"shared_gate": True, "dense_layers": (0,), "dense_ffn": 40},
    ),
    "qwen2_moe normalized without biases": Case(
        "qwen2_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "moe_intermediate_size": 40,
        }
        | {"shared_expert_intermediate_size": 8, "qkv_bias": False, "tie_word_embeddings": True},
        {
            **EXPERTS,
            "experts_per_token": 2,
            "shared_experts": 8,
            "shared_gate": True,
            "qkv_bias": False,
            "tied": True,
        },
    ),
    "nemotron_h": Case(
        "nemotron_h",
        {"hybrid_override_pattern": "M-*", "num_hidden_layers": 3, "head_dim": 8}
        | {"mamba_num_heads": 4, "mamba_head_dim": 6, "ssm_state_size": 5, "n_groups": 2}
        | {"layer_norm_epsilon": 1e-5, "time_step_min": 0.01, "mlp_bias": True},
        {"layers": 3, "head_dim": 8, "hybrid_pattern": "M-*", "mlp_bias": True}
        | {"mamba": {**OUR_MAMBA, "least_step": 0.01}},
    ),
    "nemotron_h attention first, kv1": Case(
        "nemotron_h",
        {"hybrid_override_pattern": "*MM-", "num_hidden_layers": 4, "head_dim": 4}
        | {"mamba_num_heads": 4, "mamba_head_dim": 6, "ssm_state_size": 5, "n_groups": 2}
        | {"layer_norm_epsilon": 1e-3, "conv_kernel": 2, "num_key_value_heads": 1},
        {"layers": 4, "head_dim": 4, "hybrid_pattern": "*MM-", "kv_heads": 1, "norm_eps": 1e-3}
        | {"mamba": {**OUR_MAMBA, "kernel": 2, "least_step": 0.001}},
    ),
    "nemotron_h with experts in groups beside a feed-forward": Case(
        "nemotron_h",
        {"hybrid_override_pattern": "ME*-", "num_hidden_layers": 4, "head_dim": 8}
        | {"mamba_num_heads": 4, "mamba_head_dim": 6, "ssm_state_size": 5, "n_groups": 2}
        | {"layer_norm_epsilon": 1e-5, "time_step_min": 0.001, "n_routed_experts": 6}
        | {"num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_group": 3, "topk_group": 2}
        | {"moe_shared_expert_intermediate_size": 28, "routed_scaling_factor": 2.5},
        {"layers": 4, "head_dim": 8, "hybrid_pattern": "ME*-", "experts": 6}
        | {"mamba": {**OUR_MAMBA, "least_step": 0.001}, "experts_per_token": 3, "ffn": 20}
        | {"dense_ffn": 40, "shared_experts": 28, "router_aux_loss": 0.0}
        | {
            "router": {
                "score": "sigmoid",
                "correction": True,
                "scale": 2.5,
                "groups": 3,
                "groups_per_token": 2,
            }
        },
    ),
    "qwen3_next": Case(
        "qwen3_next",
        {**DELTA_LAYERS, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
        | {"shared_expert_intermediate_size": 28}
        | _rope("default", 100.0, partial_rotary_factor=0.25),
        {**EXPERTS, "delta_net": OUR_DELTA_NET, "delta_layers": (0,), "head_dim": 16}
        | {"rope_base": 100.0, "ffn": 20, "shared_experts": 28, "shared_gate": True},
    ),
    "qwen3_next attention first, biased, kv1, dense": Case(
        "qwen3_next",
        {**DELTA_LAYERS, "head_dim": 8, "layer_types": ["full_attention", "linear_attention"]}
        | {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
        | {"linear_conv_kernel_dim": 2, "num_key_value_heads": 1, "attention_bias": True}
        | {"num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
        | {"shared_expert_intermediate_size": 8, "mlp_only_layers": [1], "norm_topk_prob": False}
        | {"tie_word_embeddings": True}
        | _rope("linear", 50.0, factor=2.5, partial_rotary_factor=0.5),
        {**EXPERTS, "delta_layers": (1,), "head_dim": 8, "kv_heads": 1, "tied": True}
        | {"delta_net": {**OUR_DELTA_NET, "key_heads": 4, "key_dim": 8, "kernel": 2}}
        | {"qkv_bias": True, "output_bias": True, "experts_per_token": 3, "norm_topk": False}
        | {"ffn": 24, "dense_layers": (1,), "dense_ffn": 40, "shared_experts": 8}
        | {"shared_gate": True, "rotary_fraction": 0.5, "rope_base": 50.0}
        | {"rope_scaling": {"kind": "linear", "factor": 2.5}},
    ),
    "qwen3_5": Case(
        "qwen3_5_text",
        {**DELTA_LAYERS, "head_dim": 8, "full_attention_interval": 2, **OF_QWEN3_5},
        {"delta_net": OUR_DELTA_NET, "delta_layers": (0,), "head_dim": 8}
        | {"rotary_fraction": 0.5, "rope_base": 100.0},
    ),
    "qwen3_5 with experts": Case(
        "qwen3_5_moe_text",
        {**DELTA_LAYERS, "head_dim": 8, "full_attention_interval": 2, **OF_QWEN3_5}
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
        | {"shared_expert_intermediate_size": 28},
        {**EXPERTS, "delta_net": OUR_DELTA_NET, "delta_layers": (0,), "head_dim": 8}
        | {"rotary_fraction": 0.5, "rope_base": 100.0, "ffn": 20}
        | {"shared_experts": 28, "shared_gate": True},
    ),
    "glm4_moe": Case(
        "glm4_moe",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "head_dim": 8,
        }
        | {
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "attention_bias": True,
            "use_qk_norm": True,
        }
        | {"n_shared_experts": 2, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
        {
            "experts": 8,
            "experts_per_token": 3,
            "ffn": 24,
            "head_dim": 8,
            "qkv_bias": True,
            "qk_norm": True,
        }
        | {"router_aux_loss": 0.0, "shared_experts": 48, "dense_layers": (0,), "dense_ffn": 40}
        | {
            "router": {
                "score": "sigmoid",
                "correction": True,
                "scale": 2.5,
                "groups": 4,
                "groups_per_token": 2,
            }
        },
    ),
    "glm4_moe without groups, normalization and norms": Case(
        "glm4_moe",
        {
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "head_dim": 12,
        }
        | {"norm_topk_prob": False, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0}
        | {"partial_rotary_factor": 0.7, "num_key_value_heads": 1, "tie_word_embeddings": True},
        {
            "experts": 5,
            "experts_per_token": 2,
            "head_dim": 12,
            "rotary_fraction": 0.7,
            "kv_heads": 1,
            "tied": True,
        }
        | {"router_aux_loss": 0.0, "shared_experts": 40, "norm_topk": False},
    ),
    "iquestcoder": Case(
        "iquestcoder",
        {"head_dim": 10, "attention_bias": True} | _rope("default", 50.0),
        {"head_dim": 10, "qkv_bias": True, "output_bias": True, "rope_base": 50.0},
    ),
    "internlm3": Case(
        "internlm3",
        {"head_dim": 10, "attention_bias": True, "mlp_bias": True},
        {"head_dim": 10, "bias": True},
    ),
    "seed_oss": Case(
        "seed_oss",
        {"head_dim": 10, "attention_out_bias": True, "mlp_bias": True}
        | {"attention_dropout": 0.0, "residual_dropout": 0.0},
        {"head_dim": 10, "output_bias": True, "mlp_bias": True},
    ),
    "smollm3": Case(
        "smollm3",
        {"head_dim": 10, "no_rope_layers": [0, 1], "use_sliding_window": True}
        | {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]}
        | {"tie_word_embeddings": True, **_rope("default", 50.0)},
        {"head_dim": 10, "nope_layers": (0,), "window": 5, "window_layers": (1,)}
        | {"rope_base": 50.0},
    ),
    "exaone4": Case(
        "exaone4",
        {"head_dim": 10, "sliding_window": 5, **_rope("default", 50.0)}
        | {"layer_types": ["sliding_attention", "full_attention"]},
        {"head_dim": 10, "window": 5, "window_layers": (0,), "nope_layers": (1,)}
        | {"rope_base": 50.0},
    ),
    "exaone4 without a window": Case(
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2}
        | {"tie_word_embeddings": True, "num_key_value_heads": 1},
        {"kv_heads": 1, "tied": True},
    ),
    "ernie4_5": Case(
        "ernie4_5",
        {"head_dim": 10, **_rope("default", 50.0)},
        {"head_dim": 10, "rope_base": 50.0, "tied": False},
    ),
    "ernie4_5 tied, with biases": Case(
        "ernie4_5",
        {"head_dim": 6, "use_bias": True, "tie_word_embeddings": True},
        {"rope_base": 500000.0, "bias": True, "tied": True},
    ),
    "phi3": Case(
        "phi3",
        {"head_dim": 10, "sliding_window": 5, **_rope("default", 50.0)},
        {"head_dim": 10, "window": 5, "rope_base": 50.0},
    ),
    "phi3 of some features, tied": Case(
        "phi3",
        {"head_dim": 8, "tie_word_embeddings": True, "num_key_value_heads": 1}
        | _rope("default", 10000.0, partial_rotary_factor=0.5),
        {"head_dim": 8, "tied": True, "kv_heads": 1, "rotary_fraction": 0.5},
    ),
    "cohere2": Case(
        "cohere2",
        {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
        | {"layer_norm_eps": 1e-3, "logit_scale": 0.3, **_rope("default", 50.0)},
        {"window": 5, "window_layers": (0,), "nope_layers": (1,), "norm_eps": 1e-3}
        | {"logit_divisor": 1 / 0.3, "rope_base": 50.0, "tied": False},
    ),
    "cohere2 tied, with biases": Case(
        "cohere2",
        {"sliding_window": 5, "layer_types": ["sliding_attention"] * 2, "attention_bias": True}
        | {"layer_norm_eps": 1e-5, "tie_word_embeddings": True, "num_key_value_heads": 1},
        {"window": 5, "qkv_bias": True, "output_bias": True, "logit_divisor": 16.0, "tied": True}
        | {"kv_heads": 1},
    ),
    "cohere": Case(
        "cohere",
        {"layer_norm_eps": 1e-3, "logit_scale": 0.3, "attention_bias": True}
        | _rope("default", 50.0),
        {"norm_eps": 1e-3, "logit_divisor": 1 / 0.3, "rope_base": 50.0, "tied": False}
        | {"qkv_bias": True, "output_bias": True},
    ),
    "glm4": Case(
        "glm4",
        {
            "head_dim": 8,
            "attention_bias": True,
            **_rope("default", 50.0, partial_rotary_factor=0.5),
        },
        {"head_dim": 8, "rope_base": 50.0},
    ),
    "glm4 tied, without biases, kv1": Case(
        "glm4",
        {"head_dim": 16, "tie_word_embeddings": True, "num_key_value_heads": 1}
        | {"attention_bias": False, **_rope("default", 100.0, partial_rotary_factor=0.25)},
        {"head_dim": 16, "rope_base": 100.0, "rotary_fraction": 0.25, "qkv_bias": False}
        | {"tied": True, "kv_heads": 1},
    ),
    "glm": Case(
        "glm",
        {
            "head_dim": 8,
            "attention_bias": True,
            **_rope("default", 50.0, partial_rotary_factor=0.5),
        },
        {"head_dim": 8, "rope_base": 50.0, "norm_at": "before"},
    ),
    "gemma": Case(
        "gemma",
        {"hidden_size": 36, "head_dim": 6, **_rope("default", 50.0)},
        {"hidden": 36, "head_dim": 6, "rope_base": 50.0, "norm_at": "before", "tied": False}
        | {"attention_softcap": 0.0, "final_softcap": 0.0, "window": 0},
    ),
    "vaultgemma": Case(
        "vaultgemma",
        {"hidden_size": 36, "head_dim": 6, "query_pre_attn_scalar": 7, "sliding_window": 5}
        | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.5}
        | _rope("default", 50.0),
        {"hidden": 36, "head_dim": 6, "attention_scalar": 7.0, "window": 5, "window_layers": (0,)}
        | {"attention_softcap": 1.5, "final_softcap": 2.5, "rope_base": 50.0}
        | {"norm_at": "before", "tied": False},
    ),
    "hyperclovax": Case(
        "hyperclovax",
        {"head_dim": 10, "embedding_multiplier": 3.0, "attention_multiplier": 0.5}
        | {"residual_multiplier": 0.22, "logits_scaling": 1.7},
        {"head_dim": 10, "embedding_scale": 3.0, "attention_scalar": 4.0, "norm_at": "around"}
        | {"branch_scale": 0.22, "logit_divisor": 1 / 1.7, "tied": False},
    ),
    "stablelm": Case(
        "stablelm",
        {"layer_norm_eps": 1e-3, "use_qkv_bias": True, "hidden_size": 32}
        | _rope("default", 50.0, partial_rotary_factor=0.5),
        {"norm_eps": 1e-3, "qkv_bias": True, "hidden": 32, "rotary_fraction": 0.5}
        | {"output_bias": False, "mlp_bias": False, "mlp": "swiglu", "rope_base": 50.0}
        | {"parallel_residual": False},
    ),
    "starcoder2": Case(
        "starcoder2",
        {
            "norm_epsilon": 1e-3,
            "sliding_window": 5,
            "hidden_act": "gelu_pytorch_tanh",
            **_rope("default", 50.0),
        },
        {"norm_eps": 1e-3, "window": 5, "mlp": "gelu", "rope_base": 50.0}
        | {"rotary_fraction": 1.0, "parallel_residual": False},
    ),
    "jais2": Case(
        "jais2",
        {"layer_norm_eps": 1e-3, "hidden_act": "relu2", **_rope("default", 50.0)},
        {"norm_eps": 1e-3, "mlp": "relu2", "rope_base": 50.0, "rotary_fraction": 1.0}
        | {"parallel_residual": False},
    ),
    "ministral": Case(
        "ministral",
        {"head_dim": 10, "sliding_window": 5, **_rope("default", 50.0)}
        | {"layer_types": ["full_attention", "sliding_attention"]},
        {"head_dim": 10, "window": 5, "window_layers": (1,), "rope_base": 50.0},
    ),
    "cwm": Case(
        "cwm",
        {"head_dim": 10, "sliding_window": 5, "mlp_bias": True, "bos_token_id": 1}
        | _rope("llama3", 50.0, **LLAMA3)
        | {"layer_types": ["full_attention", "sliding_attention"]},
        {"head_dim": 10, "window": 5, "window_layers": (1,), "mlp_bias": True}
        | {"rope_base": 50.0, "rope_scaling": {"kind": "llama3", **LLAMA3}},
    ),
    "nanochat": Case(
        "nanochat",
        {"head_dim": 10, "final_logit_softcapping": 1.5, **_rope("default", 50.0)},
        {"head_dim": 10, "final_softcap": 1.5, "rope_base": 50.0},
    ),
    "nanochat tied, with biases": Case(
        "nanochat",
        {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1}
        | {"final_logit_softcapping": None, "rms_norm_eps": 1e-2},
        {"qkv_bias": True, "output_bias": True, "tied": True, "kv_heads": 1, "norm_eps": 1e-2}
        | {"final_softcap": 0.0},
    ),
    "apertus": Case(
        "apertus",
        {"head_dim": 10, **_rope("default", 50.0)},
        {"head_dim": 10, "rope_base": 50.0},
    ),
    "apertus tied, with biases": Case(
        "apertus",
        {"head_dim": 6, "attention_bias": True, "tie_word_embeddings": True}
        | _rope("llama3", 50.0, **LLAMA3),
        {"rope_base": 50.0, "rope_scaling": {"kind": "llama3", **LLAMA3}}
        | {"qkv_bias": True, "output_bias": True, "tied": True},
    ),
    "ministral3": Case(
        "ministral3",
        {"head_dim": 10, **_rope("yarn", 50.0, llama_4_scaling_beta=0.7, **MINISTRAL_YARN)},
        {"head_dim": 10, "rope_base": 50.0}
        | {"rope_scaling": {"kind": "yarn", "query_beta": 0.7, **MINISTRAL_YARN}},
    ),
    "ministral3 with a window, tied": Case(
        "ministral3",
        {"head_dim": 6, "sliding_window": 7, "tie_word_embeddings": True}
        | _rope("llama3", 50.0, llama_4_scaling_beta=0.3, **LLAMA3),
        {"rope_base": 50.0, "window": 7, "tied": True}
        | {"rope_scaling": {"kind": "llama3", "query_beta": 0.3, **LLAMA3}},
    ),
    "granite": Case(
        "granite",
        {"head_dim": 10, "embedding_multiplier": 3.0, "attention_multiplier": 0.5}
        | {"residual_multiplier": 0.22, "logits_scaling": 1.7, "tie_word_embeddings": True},
        {"head_dim": 10, "embedding_scale": 3.0, "attention_scalar": 4.0, "tied": True}
        | {"branch_scale": 0.22, "logit_divisor": 1.7},
    ),
    "granitemoe": Case(
        "granitemoe",
        {"head_dim": 10, "embedding_multiplier": 3.0, "attention_multiplier": 0.5}
        | {"residual_multiplier": 0.22, "logits_scaling": 1.7, "attention_bias": True}
        | {"num_local_experts": 5, "num_experts_per_tok": 3},
        {"head_dim": 10, "embedding_scale": 3.0, "attention_scalar": 4.0, "qkv_bias": True}
        | {"branch_scale": 0.22, "logit_divisor": 1.7, "output_bias": True}
        | {"experts": 5, "experts_per_token": 3, "router_aux_loss": 0.0},
    ),
    "arcee": Case(
        "arcee",
        {"head_dim": 10, "mlp_bias": True, "tie_word_embeddings": True},
        {"head_dim": 10, "mlp_bias": True, "tied": True},
    ),
    "olmoe": Case(
        "olmoe",
        {"num_experts": 5, "num_experts_per_tok": 3, "attention_bias": True},
        {"experts": 5, "experts_per_token": 3, "norm_topk": False, "router_aux_loss": 0.0}
        | {"qkv_bias": True, "output_bias": True},
    ),
    "minimax_m2": Case(
        "minimax_m2",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 8}
        | _rope("default", 50.0, partial_rotary_factor=0.5),
        {"experts": 5, "experts_per_token": 2, "head_dim": 8, "router_aux_loss": 0.0}
        | {"rope_base": 50.0},
    ),
    "dots1": Case(
        "dots1",
        {**THEIR_EXPERTS, "head_dim": 10, "norm_topk_prob": True}
        | {"sliding_window": 5, "max_window_layers": 1},
        {**OUR_EXPERTS, "head_dim": 10, "window": 5, "window_layers": (1,)}
        | {"router": SIGMOID_ROUTER},
    ),
    "solar_open": Case(
        "solar_open",
        {key: value for key, value in THEIR_EXPERTS.items() if key != "first_k_dense_replace"}
        | {"head_dim": 10, "attention_bias": True, "norm_topk_prob": False}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
        {key: value for key, value in OUR_EXPERTS.items() if "dense" not in key}
        | {"head_dim": 10, "qkv_bias": True}
        | {"norm_topk": False, "rope_base": 50.0, "router": SIGMOID_ROUTER},
    ),
    "glm4_moe_lite": Case(
        "glm4_moe_lite",
        {key: value for key, value in THEIR_EXPERTS.items() if key != "first_k_dense_replace"}
        | {**LATENT, "mlp_layer_types": ["sparse", "dense"]},
        {**OUR_EXPERTS, "dense_layers": (1,), "latent": OUR_LATENT, "kv_heads": 4}
        | {"router": SIGMOID_ROUTER},
    ),
    "youtu": Case(
        "youtu",
        {**LATENT, "q_lora_rank": None, "attention_bias": True, "tie_word_embeddings": True},
        {"latent": {**OUR_LATENT, "query_rank": 0}, "kv_heads": 4, "qkv_bias": True}
        | {"output_bias": True},
    ),
    "kimi_linear": Case(
        "kimi_linear",
        {**THEIR_EXPERTS_OF_KIMI, **LATENT, "q_lora_rank": None}
        | {"linear_num_heads": 4, "linear_head_dim": 6, "linear_conv_kernel_dim": 3}
        | {"layer_types": ["linear_attention", "full_attention"]},
        {**OUR_EXPERTS, "latent": {**OUR_LATENT, "query_rank": 0}, "kv_heads": 4}
        | {"delta_net": {**OUR_KIMI_DELTA, "kernel": 3}, "delta_layers": (0,)}
        | {"router": SIGMOID_ROUTER},
    ),
    "kimi_linear attention first, biased, with latents of queries": Case(
        "kimi_linear",
        {**LATENT, "linear_num_heads": 4, "linear_head_dim": 6, "attention_bias": True}
        | {"layer_types": ["full_attention", "linear_attention"]}
        | {"mlp_layer_types": ["dense", "dense"], "rms_norm_eps": 1e-3},
        {"latent": OUR_LATENT, "kv_heads": 4, "qkv_bias": True, "output_bias": True}
        | {"delta_net": OUR_KIMI_DELTA, "delta_layers": (1,), "norm_eps": 1e-3},
    ),
}
# Of a family that is computed as another one is.
OURS_OF = {
    "iquestcoder": "llama",
    "internlm3": "llama",
    "granitemoe": "granite",
    "hyperclovax": "granite",
    "cohere": "cohere2",
    "glm": "glm4",
    "ministral": "mistral",
    "cwm": "mistral",
    "gemma": "gemma2",
    "vaultgemma": "gemma2",
    "stablelm": "gpt_neox",
    "starcoder2": "gpt_neox",
    "jais2": "gpt_neox",
}


def config_of(case: Case) -> ModelConfig:
    if case.kind in ("glm4_moe", *OURS_OF):
        family = OURS_OF.get(case.kind, case.kind)
    else:
        family = case.kind.removesuffix("_text").removesuffix("_moe")
    return ModelConfig(**{"family": family, **OURS, **case.ours})


@dataclass(frozen=True)
class Job:
    """Steps on one batch: our model, its logical weights, tokens and targets [b, s], what is made
    again, and the numbers of the tokens' documents [b, s] if there are several."""

    config: ModelConfig
    weights: dict[str, Tensor]
    tokens: Tensor
    targets: Tensor
    recompute: Recompute = KEEP
    documents: Tensor | None = None
    steps: int = 1
    lr: float = 0.0


@dataclass(frozen=True)
class Layout:
    """The ranks of each axis, and how experts, of models that have some, are shared out."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    sequence: bool = False
    expert: int = 1
    expert_tensor: int = 0
    kind: str = "1f1b"

    @property
    def axes(self) -> dict[str, int]:
        return {"pp": self.pp, "dp": self.dp, "tp": self.tp}


@dataclass(frozen=True)
class Answer:
    """The loss of each step; of the first one logits [b, s, vocab] (none on stages but the last)
    and gradients, and the weights after the last, of the parts that a rank has."""

    losses: list[float]
    logits: list[Fragment]
    grads: list[Fragment]
    weights: list[Fragment]


class Trained(NamedTuple):
    """What all ranks together have: gradients of the first step by logical name, with the logits
    among them, and the weights after the last."""

    losses: list[float]
    found: dict[str, Tensor]
    weights: dict[str, Tensor]


def step_all(
    jobs: list[Job], tp: int = 1, pp: int = 1, sequence: bool = False
) -> list[tuple[float, dict[str, Tensor]]]:
    """Loss, and gradients by logical name with the logits among them, of the first step of each
    job on tp * pp ranks."""
    trained = train_all(jobs, Layout(tp, pp, sequence=sequence))
    return [(each.losses[0], each.found) for each in trained]


def train_all(jobs: list[Job], layout: Layout) -> list[Trained]:
    """What each job comes to in a layout, by AdamW without clipping."""
    # as bytes: each tensor among a process's arguments costs an open file
    ranks = run_ranks(step_rank, layout.axes, jobs=pickle.dumps(jobs), layout=layout)
    together = []
    for answers in zip(*ranks, strict=True):
        assert all(answer.losses == answers[0].losses for answer in answers)
        found = assemble([[*answer.grads, *answer.logits] for answer in answers])
        weights = assemble([answer.weights for answer in answers])
        together.append(Trained(answers[0].losses, found, weights))
    return together


def step_rank(mesh: DeviceMesh, jobs: bytes, layout: Layout) -> list[Answer]:
    return [_step(mesh, job, layout) for job in pickle.loads(jobs)]


def _step(mesh: DeviceMesh, job: Job, layout: Layout) -> Answer:
    batch, length = job.tokens.shape
    own_batch = batch // layout.dp
    has_experts = job.config.experts > 0
    options = EngineOptions(
        micro_batch=1,
        seq_length=length,
        sequence=layout.sequence,
        recompute=job.recompute,
        expert=layout.expert if has_experts else 1,
        expert_tensor=layout.expert_tensor if has_experts else 0,
    )
    planned = schedule(layout.kind, layout.pp, own_batch)
    parts = build_stages(job.config, plan("fp64"), mesh, planned, options)
    for stage in parts.by_number.values():
        put(stage, job.weights)
    optimizer = parts.make_optimizer(Recording, clip=0.0, plant=None, rule=AdamW(eps=ADAM_EPS))
    engine = Engine(parts, optimizer)
    logits: list[Tensor] = []
    if engine.last_stage in engine.stages:
        engine.stages[engine.last_stage].register_forward_hook(
            lambda stage, given, made: logits.append(made.detach().clone())
        )
    share = share_of(mesh, (job.tokens, job.targets, None), Packing(job.documents))
    reports = [engine.step(share, lr=job.lr, number=number) for number in range(job.steps)]
    optimizer.wait()
    first_logits = _own_logits(engine, logits[:own_batch], share.first, batch)
    weights = fragments(optimizer.all_buffers(), lambda buffer: buffer.saved()["weight"])
    return Answer([report.loss for report in reports], first_logits, optimizer.seen[0], weights)


def put(stage: Stage, weights: dict[str, Tensor]) -> None:
    """Logical tensors into the parameters of a stage."""
    for parameter in stage.parameters():
        for part, first, last in layout_of(parameter).spans():
            parameter.data.view(-1)[first:last] = part.take(weights[part.name]).reshape(-1)


def _own_logits(engine: Engine, made: list[Tensor], first: int, batch: int) -> list[Fragment]:
    """This rank's logits, as part of a tensor [vocab, b * s] called "logits". made: of the samples
    from number `first` on, each of its own micro-batch."""
    if not made:
        return []
    part = layout_of(engine.stages[engine.last_stage].head).parts[0]
    own = torch.cat([x.transpose(0, 1).flatten(0, 1) for x in made]).t()[: part.local[0]]
    length = len(made[0])
    return [
        Fragment(
            "logits",
            (part.shape[0], batch * length),
            (part.start, first * length),
            tuple(own.shape),
            0,
            own.flatten(),
        )
    ]
