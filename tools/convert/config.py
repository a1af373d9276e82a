"""What a model is, in our words and in those of Hugging Face's config.json.

What one side says and the other cannot is an error, never dropped. Of dropout, GPT-2's three probabilities become our
two: that of the residual branches stands for the embeddings too.
"""

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from megaprec.errors import UserError
from models.config import ModelConfig
from models.rope import ORIGINAL, PARAMETERS

TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
Json = Mapping[str, Any]


def make_model(fields: Json, origin: str) -> ModelConfig:
    """The model with these fields. UserError that names `origin` if they do not make one."""
    try:
        return ModelConfig(**fields)
    except ValidationError as error:
        found = error.errors(include_url=False)
        raise UserError(
            *(f"{origin}: {' '.join((*map(str, e['loc']), e['msg'].removeprefix('Value error, ')))}" for e in found)
        ) from error


def from_hugging_face(config: Json) -> ModelConfig:
    """The model that a config.json describes. UserError for an architecture or a switch that is not known."""
    kind = config.get("model_type")
    if kind not in _READERS:
        raise UserError(f"model_type {kind!r} is not known: there are {', '.join(_READERS)}")
    try:
        fields = _READERS[kind](config)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise UserError(f"config.json of a {kind} model lacks or misstates {error}") from error
    return make_model({"init_std": config.get("initializer_range", 0.02), **fields}, "config.json")


def _gpt2(c: Json) -> dict[str, Any]:
    _require(c, activation_function=TANH_GELU, scale_attn_weights=(True,), scale_attn_by_inverse_layer_idx=(False,))
    return {
        "family": "gpt2",
        "layers": c["n_layer"],
        "hidden": c["n_embd"],
        "heads": c["n_head"],
        "ffn": c.get("n_inner") or 4 * c["n_embd"],
        "vocab": c["vocab_size"],
        "max_positions": c["n_positions"],
        "norm_eps": c.get("layer_norm_epsilon", 1e-5),
        "tied": c.get("tie_word_embeddings", True),
        "dropout": c.get("resid_pdrop", 0.1),
        "attention_dropout": c.get("attn_pdrop", 0.1),
    }


def _common(c: Json) -> dict[str, Any]:
    """What all families with rotary positions say alike."""
    rope = {**(c.get("rope_scaling") or {}), **(c.get("rope_parameters") or {})}
    return {
        "family": c["model_type"],
        "layers": c["num_hidden_layers"],
        "hidden": c["hidden_size"],
        "heads": c["num_attention_heads"],
        "kv_heads": c.get("num_key_value_heads") or c["num_attention_heads"],
        "head_dim": c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"],
        "ffn": c["intermediate_size"],
        "vocab": c["vocab_size"],
        "max_positions": c["max_position_embeddings"],
        "norm_eps": c.get("rms_norm_eps", 1e-6),
        "rope_base": float(rope.get("rope_theta", c.get("rope_theta", 10000.0))),
        "rope_scaling": _scaling(rope, c["max_position_embeddings"]),
        "tied": c.get("tie_word_embeddings", False),
        "attention_dropout": c.get("attention_dropout", 0.0),
    }


def _scaling(rope: Json, length: int) -> dict[str, Any]:
    """Our rope_scaling. Where a length is not given, theirs is that of the model."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {}
    other = ("rope_theta", "rope_type", "type", "partial_rotary_factor")
    given = {key: value for key, value in rope.items() if key not in other and value is not None}
    if ORIGINAL in PARAMETERS.get(kind, ()):
        given.setdefault(ORIGINAL, length)
    return {"kind": kind, **given}


def _neox(c: Json) -> dict[str, Any]:
    _require(c, hidden_act=(*TANH_GELU, "gelu"))
    rope, bias = c.get("rope_parameters") or {}, c.get("attention_bias", True)
    return {
        **_common({**c, "rope_theta": c.get("rotary_emb_base", c.get("rope_theta", 10000.0))}),
        "mlp": "gelu" if c.get("hidden_act") in TANH_GELU else "gelu_exact",
        "norm_eps": c.get("layer_norm_eps", 1e-5),
        "qkv_bias": bias,
        "output_bias": bias,
        "parallel_residual": c.get("use_parallel_residual", True),
        "rotary_fraction": rope.get("partial_rotary_factor", c.get("rotary_pct", 0.25)),
        "dropout": c.get("hidden_dropout", 0.0),
    }


def _llama(c: Json) -> dict[str, Any]:
    _require(c, hidden_act=("silu", "swish"))
    bias = c.get("attention_bias", False)
    return {**_common(c), "qkv_bias": bias, "output_bias": bias, "mlp_bias": c.get("mlp_bias", False)}


def _mistral(c: Json) -> dict[str, Any]:
    _require(c, hidden_act=("silu", "swish"))
    return {**_common(c), "window": c.get("sliding_window") or 0}


def _qwen2(c: Json) -> dict[str, Any]:
    _require(c, hidden_act=("silu", "swish"))
    return {**_common(c), "qkv_bias": True, "window": _window_of_all_layers(c)}


def _qwen3(c: Json) -> dict[str, Any]:
    return {**_llama(c), "family": "qwen3", "window": _window_of_all_layers(c)}


def _qwen3_moe(c: Json) -> dict[str, Any]:
    _require(c, decoder_sparse_step=(1,), mlp_only_layers=([], None))
    return {
        **_qwen3({**c, "intermediate_size": c["moe_intermediate_size"]}),
        "experts": c.get("num_experts") or c["num_local_experts"],
        "experts_per_token": c["num_experts_per_tok"],
        "router_aux_loss": c.get("router_aux_loss_coef", 0.001),
        "norm_topk": c.get("norm_topk_prob", False),
    }


def _mixtral(c: Json) -> dict[str, Any]:
    return {
        **_mistral(c),
        "experts": c["num_local_experts"],
        "experts_per_token": c["num_experts_per_tok"],
        "router_aux_loss": c.get("router_aux_loss_coef", 0.001),
    }


def _window_of_all_layers(c: Json) -> int:
    """Qwen's window, which it can give to the layers from one on. UserError if only some have it."""
    if not c.get("use_sliding_window") or not c.get("sliding_window"):
        return 0
    first = c.get("max_window_layers", 28)
    if 0 < first < c["num_hidden_layers"]:
        raise UserError(f"config.json gives a window to the layers from {first} on; all must have it, or none")
    return 0 if first else c["sliding_window"]


_READERS: dict[str, Callable[[Json], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "gpt_neox": _neox,
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
}


def _require(config: Json, **allowed: tuple[Any, ...]) -> None:
    for key, values in allowed.items():
        if key in config and config[key] not in values:
            would = " or ".join(map(repr, values))
            raise UserError(f"config.json has {key} = {config[key]!r}, of which only {would} is known")


def _is_plain(m: ModelConfig) -> bool:
    """What the families after Llama have in common."""
    common = m.positions == "rope" and m.norm == "rms" and m.mlp == "swiglu" and not m.parallel_residual
    return common and m.rotary_fraction == 1


def _own_heads(m: ModelConfig) -> bool:
    return m.kv_heads == m.heads and m.heads * m.head_dim == m.hidden


def _no_extras(m: ModelConfig) -> bool:
    return not (m.experts or m.qk_norm or m.window)


def _biases(m: ModelConfig) -> tuple[bool, bool, bool]:
    return m.qkv_bias, m.output_bias, m.mlp_bias


NONE, ALL = (False, False, False), (True, True, True)
# Whether a model_type can say all of a model.
_SAYS: dict[str, Callable[[ModelConfig], bool]] = {
    "gpt2": lambda m: (
        (m.positions, m.norm, m.mlp, _biases(m)) == ("learned", "layer", "gelu", ALL)
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
    "qwen3_moe": lambda m: _is_plain(m) and m.qk_norm and m.qkv_bias == m.output_bias and m.experts > 0,
    "mistral": lambda m: _is_plain(m) and _biases(m) == NONE and not (m.experts or m.qk_norm),
    "mixtral": lambda m: _is_plain(m) and _biases(m) == NONE and m.experts > 0 and m.norm_topk and not m.qk_norm,
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
    keys = "norm positions mlp qkv_bias output_bias mlp_bias kv_heads head_dim qk_norm experts window"
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


def _gpt2_config(m: ModelConfig) -> dict[str, Any]:
    return {
        "n_layer": m.layers,
        "n_embd": m.hidden,
        "n_head": m.heads,
        "n_inner": m.ffn,
        "n_positions": m.max_positions,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": m.norm_eps,
        "resid_pdrop": m.dropout,
        "embd_pdrop": m.dropout,
        "attn_pdrop": m.attention_dropout,
    }


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
        "hidden_act": "gelu" if m.mlp == "gelu_exact" else "gelu_new",
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
    qwen = {"use_sliding_window": m.window > 0, "sliding_window": m.window or None, "max_window_layers": 0}
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
            **qwen,
        },
    }
    return shared | own[kind]
