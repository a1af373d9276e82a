"""The config.json of a model of ours: in the words of its own family, or of another that can say all of it.

What no family can say is an error. Numbers that only training goes by, such as dropout in families that have none, are
left out, and `unsaid` names them.
"""

from collections.abc import Callable
from typing import Any

from megaprec.errors import UserError
from models.config import ModelConfig
from models.rope import ORIGINAL, PARAMETERS
from tools.convert.hf.config import from_hugging_face


def _is_plain(m: ModelConfig) -> bool:
    """Return True if the model has what the families after Llama have in common."""
    common = m.positions == "rope" and m.norm == "rms" and m.mlp == "swiglu" and not m.parallel_residual
    return common and m.rotary_fraction == 1


def _own_heads(m: ModelConfig) -> bool:
    return m.kv_heads == m.heads and m.heads * m.head_dim == m.hidden


def _no_extras(m: ModelConfig) -> bool:
    return not (m.experts or m.qk_norm or m.window)


def _biases(m: ModelConfig) -> tuple[bool, bool, bool]:
    return m.qkv_bias, m.output_bias, m.mlp_bias


NONE, ALL = (False, False, False), (True, True, True)
# Numbers that only training goes by.
TRAINING = ("dropout", "embedding_dropout", "attention_dropout", "router_aux_loss", "router_z_loss")
TRAINING += ("embedding_grad_scale",)
# Names that say nothing by themselves; max_positions is the size of nothing where positions turn.
NAMES = ("family", "bias")
# Whether a model_type can say all of a model.
_SAYS: dict[str, Callable[[ModelConfig], bool]] = {
    "gpt2": lambda m: (
        (m.positions, m.norm, _biases(m)) == ("learned", "layer", ALL)
        and m.mlp != "swiglu"
        and not m.parallel_residual
        and _own_heads(m)
        and _no_extras(m)
    ),
    "gpt_neox": lambda m: (
        (m.positions, m.norm, m.qkv_bias, m.mlp_bias) == ("rope", "layer", m.output_bias, True)
        and m.mlp != "swiglu"
        and _own_heads(m)
        and _no_extras(m)
    ),
    "llama": lambda m: _is_plain(m) and m.qkv_bias == m.output_bias and _no_extras(m),
    "qwen2": lambda m: _is_plain(m) and _biases(m) == (True, False, False) and not (m.experts or m.qk_norm),
    "qwen3": lambda m: _is_plain(m) and m.qk_norm and m.qkv_bias == m.output_bias and not (m.mlp_bias or m.experts),
    "qwen3_moe": lambda m: (
        _is_plain(m) and m.qk_norm and m.qkv_bias == m.output_bias and m.experts > 0 and not m.window_layers
    ),
    "mistral": lambda m: _is_plain(m) and _biases(m) == NONE and not (m.experts or m.qk_norm or m.window_layers),
    "mixtral": lambda m: (
        _is_plain(m) and _biases(m) == NONE and m.experts > 0 and m.norm_topk and not (m.qk_norm or m.window_layers)
    ),
}
ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
}


def model_type(model: ModelConfig) -> str:
    """The Hugging Face family that can say all of `model`, its own if that can. UserError if there is none."""
    for kind in (model.family, *_SAYS):
        if _SAYS[kind](model):
            return kind
    keys = "norm positions mlp qkv_bias output_bias mlp_bias kv_heads head_dim qk_norm experts window window_layers"
    said = ", ".join(f"{key} = {getattr(model, key)}" for key in keys.split())
    raise UserError(f"no Hugging Face family that is known here has all of: {said}")


def to_hugging_face(model: ModelConfig, dtype: str) -> dict[str, Any]:
    """config.json of `model`, with weights in `dtype` (float32, bfloat16, ...)."""
    kind = model_type(model)
    shared = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "torch_dtype": dtype,
        "vocab_size": model.vocab,
        "tie_word_embeddings": model.tied,
        "initializer_range": model.init_std,
    }
    return shared | (_gpt2_config(model) if kind == "gpt2" else _rotary_config(model, kind))


def unsaid(model: ModelConfig) -> list[str]:
    """Return what a config.json of `model` omits, as key = value. Raises UserError if the model would compute
    otherwise.
    """
    again = from_hugging_face(to_hugging_face(model, "float32"))
    differs = [key for key in type(model).model_fields if getattr(model, key) != getattr(again, key)]
    sizeless = ("max_positions",) if model.positions == "rope" else ()
    if lost := [key for key in differs if key not in (*TRAINING, *NAMES, *sizeless)]:
        raise UserError(
            *(f"no config.json that is known here can say model.{key} = {getattr(model, key)}" for key in lost)
        )
    return [f"{key} = {getattr(model, key)}" for key in differs if key in TRAINING]


def _gpt2_config(m: ModelConfig) -> dict[str, Any]:
    return {
        "n_layer": m.layers,
        "n_embd": m.hidden,
        "n_head": m.heads,
        "n_inner": m.ffn,
        "n_positions": m.max_positions,
        "activation_function": _gelu(m),
        "layer_norm_epsilon": m.norm_eps,
        "resid_pdrop": m.dropout,
        "embd_pdrop": m.embedding_dropout,
        "attn_pdrop": m.attention_dropout,
    }


def _gelu(m: ModelConfig) -> str:
    return "gelu" if m.mlp == "gelu_exact" else "gelu_new"


def _rotary_config(m: ModelConfig, kind: str) -> dict[str, Any]:
    scaling = m.rope_scaling
    said = {key: getattr(scaling, key) for key in PARAMETERS[scaling.kind] if getattr(scaling, key)}
    said |= {} if scaling.truncate else {"truncate": False}
    common = {
        "num_hidden_layers": m.layers,
        "hidden_size": m.hidden,
        "num_attention_heads": m.heads,
        "intermediate_size": m.ffn,
        "max_position_embeddings": said.pop(ORIGINAL) if scaling.kind == "dynamic" else m.max_positions,
        "rope_theta": m.rope_base,
        "rope_scaling": {"rope_type": scaling.kind, **said} if said else None,
        "attention_dropout": m.attention_dropout,
    }
    return common | (_neox_config(m) if kind == "gpt_neox" else _llama_config(m, kind))


def _neox_config(m: ModelConfig) -> dict[str, Any]:
    return {
        "hidden_act": _gelu(m),
        "layer_norm_eps": m.norm_eps,
        "use_parallel_residual": m.parallel_residual,
        "rotary_pct": m.rotary_fraction,
        "rotary_emb_base": m.rope_base,
        "attention_bias": m.output_bias,
        "hidden_dropout": m.dropout,
    }


def _llama_config(m: ModelConfig, kind: str) -> dict[str, Any]:
    """The families after Llama; each has some keys of its own."""
    shared = {
        "num_key_value_heads": m.kv_heads,
        "head_dim": m.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": m.norm_eps,
    }
    experts = {"num_experts_per_tok": m.experts_per_token, "router_aux_loss_coef": m.router_aux_loss}
    window = {"use_sliding_window": m.window > 0, "sliding_window": m.window or None}
    qwen = {**window, "max_window_layers": min(m.window_layers, default=0), **_layer_types(m)}
    own: dict[str, dict[str, Any]] = {
        "llama": {"attention_bias": m.output_bias, "mlp_bias": m.mlp_bias},
        "mistral": {"sliding_window": m.window or None},
        "mixtral": {"sliding_window": m.window or None, "num_local_experts": m.experts, **experts},
        "qwen2": qwen,
        "qwen3": {"attention_bias": m.output_bias, **qwen},
        "qwen3_moe": {
            "attention_bias": m.output_bias,
            "num_experts": m.experts,
            "norm_topk_prob": m.norm_topk,
            "moe_intermediate_size": m.ffn,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            **experts,
            **window,
            "max_window_layers": 0,
        },
    }
    return shared | own[kind]


def _layer_types(m: ModelConfig) -> dict[str, list[str]]:
    """Return layer_types for a model in which only some layers have the window."""
    has = dict.fromkeys(m.window_layers, "sliding_attention")
    return {"layer_types": [has.get(n, "full_attention") for n in range(m.layers)]} if has else {}
