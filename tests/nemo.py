"""The context/ of NeMo 2's checkpoints: all fields of a GPTConfig as
nemo/lightning/io/mixin.py:io_dump puts them."""

from pathlib import Path
from typing import Any

import yaml

from models.config import ModelConfig

SILU = {"_target_": "torch.nn.functional.silu", "_call_": False}
GELU = {"_target_": "torch._C._nn.gelu", "_call_": False}
# As NeMo 2 dumps them: fields of ModelParallelConfig, TransformerConfig and GPTConfig that are not
# the model's own.
OTHERS: dict[str, Any] = {
    "_target_": "nemo.collections.llm.gpt.model.llama.Llama3Config8B",
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 1,
    "sequence_parallel": True,
    "bf16": True,
    "params_dtype": {"_target_": "torch.bfloat16", "_call_": False},
    "fp8": None,
    "fp8_margin": 0,
    "recompute_granularity": "selective",
    "moe_router_topk": 2,
    "num_moe_experts": None,
    "window_size": None,
    "softmax_scale": None,
    "layernorm_zero_centered_gamma": False,
    "apply_rope_fusion": True,
    "masked_softmax_fusion": True,
    "init_method": None,
    "parallel_output": True,
    "make_vocab_size_divisible_by": 128,
    "transformer_layer_spec": {
        "_target_": "nemo.collections.llm.gpt.model.base.default_layer_spec",
        "_call_": False,
    },
    "forward_step_fn": {
        "_target_": "nemo.collections.llm.gpt.model.base.gpt_forward_step",
        "_call_": False,
    },
    "generation_config": None,
    "cuda_graph_scope": "full",
    "attention_backend": {
        "_target_": "megatron.core.transformer.enums.AttnBackend",
        "_call_": True,
    },
}


def config_of(model: ModelConfig) -> dict[str, Any]:
    """What NeMo's configuration of a model says. The vocabulary is left to the tokenizer."""
    scaling = model.rope_scaling
    said = {
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_query_groups": model.kv_heads,
        "kv_channels": model.head_dim,
        "ffn_hidden_size": model.ffn,
        "normalization": "RMSNorm" if model.norm == "rms" else "LayerNorm",
        "layernorm_epsilon": model.norm_eps,
        "add_bias_linear": model.output_bias,
        "add_qkv_bias": model.qkv_bias,
        "gated_linear_unit": model.mlp == "swiglu",
        "activation_func": SILU if model.mlp == "swiglu" else GELU,
        "bias_activation_fusion": model.mlp == "gelu",
        "qk_layernorm": model.qk_norm,
        "position_embedding_type": "rope" if model.positions == "rope" else "learned_absolute",
        "rotary_base": int(model.rope_base),
        "rotary_percent": model.rotary_fraction,
        "rotary_interleaved": False,
        "seq_length": model.max_positions,
        "share_embeddings_and_output_weights": model.tied,
        "vocab_size": None,
        "hidden_dropout": model.dropout,
        "attention_dropout": model.attention_dropout,
        "init_method_std": model.init_std,
    }
    if scaling.kind == "llama3":
        said |= {"scale_factor": scaling.factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        said |= {"old_context_len": scaling.original_max_position_embeddings}
    return OTHERS | said


def write_context(folder: Path, config: dict[str, Any]) -> None:
    """The context/ of a checkpoint."""
    (folder / "context").mkdir(parents=True, exist_ok=True)
    model = {
        "_target_": "nemo.collections.llm.gpt.model.llama.LlamaModel",
        "config": config,
        "model_transform": None,
    }
    (folder / "context/model.yaml").write_text(yaml.safe_dump(model))
    (folder / "context/io.json").write_text("{}")
