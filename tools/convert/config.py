"""What a model is, in our words, Hugging Face's (config.json) and Megatron's (args).

In between stands a mapping with the keys of [model], all given (`tools.convert.rules.Model`). What one side says and
the other cannot is an error, never dropped.
"""

from collections.abc import Callable, Mapping
from typing import Any

from megaprec.errors import UserError
from models.config import ModelConfig
from tools.convert.rules import Model

NEUTRAL: dict[str, Any] = {  # values of switches that a model without them has
    "qkv_bias": False,
    "parallel_residual": False,
    "rotary_fraction": 1.0,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "window": 0,
    "qk_norm": False,
    "experts": 0,
    "experts_per_token": 0,
    "router_aux_loss": 0.0,
    "norm_topk": True,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
PARTIAL = 0.25  # what GPT-NeoX's configuration means when it does not say how much of a head is turned


def complete(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The model that a checkpoint of ours describes, with all keys given."""
    model = {**NEUTRAL, **saved}
    model["rope_theta"] = model.pop("rope_base", model["rope_theta"])
    model["rotary_fraction"] = model["rotary_fraction"] if model["positions"] == "rope" else 1.0
    return model


def model_fields(model: Model) -> dict[str, Any]:
    """The keys of [model] that this version knows. UserError if the model needs one that it does not know."""
    known = ModelConfig.model_fields
    renamed = dict(model) if "rope_theta" in known else {**model, "rope_base": model["rope_theta"]}
    unknown = {k: v for k, v in renamed.items() if k not in known and k != "rope_theta" and v != NEUTRAL.get(k)}
    if unknown:
        raise UserError(f"this version cannot train a model with {', '.join(f'{k} = {v}' for k, v in unknown.items())}")
    return {k: v for k, v in renamed.items() if k in known and not (v is None and k == "rope_scaling")}


def from_hugging_face(config: Mapping[str, Any]) -> dict[str, Any]:
    """The model that a config.json describes. UserError for an architecture or a switch that is not known."""
    kind = config.get("model_type")
    if kind not in _READERS:
        raise UserError(f"model_type {kind!r} is not known: there are {', '.join(_READERS)}")
    try:
        model = {**NEUTRAL, **_READERS[kind](config)}
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise UserError(f"config.json of a {kind} model lacks or misstates {error}") from error
    if bad := [k for k in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab") if not _size(model[k])]:
        raise UserError(*(f"config.json gives {model[k]!r} for {k}: it must be a whole number above 0" for k in bad))
    return model


def _size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _gpt2(c: Mapping[str, Any]) -> dict[str, Any]:
    _require(c, activation_function=TANH_GELU, scale_attn_weights=(True,), scale_attn_by_inverse_layer_idx=(False,))
    heads, hidden = c["n_head"], c["n_embd"]
    return {
        "family": "gpt2",
        "layers": c["n_layer"],
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": hidden // heads,
        "mlp": "gelu",
        "ffn": c.get("n_inner") or 4 * hidden,
        "vocab": c["vocab_size"],
        "max_positions": c["n_positions"],
        "norm": "layer",
        "norm_eps": c.get("layer_norm_epsilon", 1e-5),
        "positions": "learned",
        "bias": True,
        "tied": c.get("tie_word_embeddings", True),
        "dropout": c.get("resid_pdrop", 0.1),
        "attention_dropout": c.get("attn_pdrop", 0.1),
    }


def _common(c: Mapping[str, Any]) -> dict[str, Any]:
    """What all families with rotary positions say alike."""
    rope = {**(c.get("rope_scaling") or {}), **(c.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    scaling = {k: v for k, v in rope.items() if k not in ("rope_theta", "type", "partial_rotary_factor", "rope_type")}
    heads = c["num_attention_heads"]
    return {
        "layers": c["num_hidden_layers"],
        "hidden": c["hidden_size"],
        "heads": heads,
        "kv_heads": c.get("num_key_value_heads") or heads,
        "head_dim": c.get("head_dim") or c["hidden_size"] // heads,
        "ffn": c["intermediate_size"],
        "vocab": c["vocab_size"],
        "max_positions": c["max_position_embeddings"],
        "positions": "rope",
        "rope_theta": float(rope.get("rope_theta", c.get("rope_theta", 10000.0))),
        "rope_scaling": None if kind == "default" else {"rope_type": kind, **scaling},
        "tied": c.get("tie_word_embeddings", False),
        "attention_dropout": c.get("attention_dropout", 0.0),
    }


def _neox(c: Mapping[str, Any]) -> dict[str, Any]:
    _require(c, hidden_act=(*TANH_GELU, "gelu"), attention_bias=(True,))
    rope = c.get("rope_parameters") or {}
    return {
        **_common({**c, "rope_theta": c.get("rotary_emb_base", c.get("rope_theta", 10000.0))}),
        "family": "gpt_neox",
        "mlp": "gelu" if c.get("hidden_act") in TANH_GELU else "gelu_exact",
        "norm": "layer",
        "norm_eps": c.get("layer_norm_eps", 1e-5),
        "bias": True,
        "parallel_residual": c.get("use_parallel_residual", True),
        "rotary_fraction": rope.get("partial_rotary_factor", c.get("rotary_pct", PARTIAL)),
        "dropout": c.get("hidden_dropout", 0.0),
    }


def _llama(c: Mapping[str, Any]) -> dict[str, Any]:
    _require(c, hidden_act=("silu", "swish"))
    bias = c.get("attention_bias", False)
    if bias != c.get("mlp_bias", False) and c["model_type"] == "llama":
        raise UserError("config.json has biases in one of attention and feed-forward: they must have them both or none")
    return {
        **_common(c),
        "family": c["model_type"],
        "mlp": "swiglu",
        "norm": "rms",
        "norm_eps": c.get("rms_norm_eps", 1e-6),
        "bias": bias,
    }


def _mistral(c: Mapping[str, Any]) -> dict[str, Any]:
    return {**_llama(c), "window": c.get("sliding_window") or 0}


def _qwen2(c: Mapping[str, Any]) -> dict[str, Any]:
    _require(c, use_sliding_window=(False,))
    return {**_llama(c), "bias": False, "qkv_bias": True}


def _qwen3(c: Mapping[str, Any]) -> dict[str, Any]:
    _require(c, use_sliding_window=(False,), attention_bias=(False,))
    return {**_llama(c), "qk_norm": True}


def _mixtral(c: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_mistral(c),
        "experts": c["num_local_experts"],
        "experts_per_token": c["num_experts_per_tok"],
        "router_aux_loss": c.get("router_aux_loss_coef", 0.0),
        "norm_topk": True,
    }


_READERS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "gpt_neox": _neox,
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
}


def _require(config: Mapping[str, Any], **allowed: tuple[Any, ...]) -> None:
    for key, values in allowed.items():
        if key in config and config[key] not in values:
            would = " or ".join(map(repr, values))
            raise UserError(f"config.json has {key} = {config[key]!r}, of which only {would} is known")


# What a model must be for a model_type to say all of it; the first that fits is written.
_PLAIN = {"positions": "rope", "norm": "rms", "mlp": "swiglu", "parallel_residual": False, "rotary_fraction": 1.0}
_DENSE = {**_PLAIN, "experts": 0}
_LAYER_NORM = {"norm": "layer", "bias": True, "experts": 0, "qk_norm": False, "window": 0, "rope_scaling": None}
_FITS: dict[str, dict[str, Any]] = {
    "gpt2": {"positions": "learned", "mlp": "gelu", "parallel_residual": False, **_LAYER_NORM},
    "gpt_neox": {"positions": "rope", **_LAYER_NORM},
    "llama": {**_DENSE, "qk_norm": False, "qkv_bias": False, "window": 0},
    "qwen2": {**_DENSE, "qk_norm": False, "qkv_bias": True, "bias": False, "window": 0},
    "qwen3": {**_DENSE, "qk_norm": True, "qkv_bias": False, "bias": False, "window": 0},
    "mistral": {**_DENSE, "qk_norm": False, "qkv_bias": False, "bias": False},
    "mixtral": {**_PLAIN, "qk_norm": False, "qkv_bias": False, "bias": False, "norm_topk": True},
}
_ONE_HEAD_SIZE = ("gpt2", "gpt_neox")  # heads x head_dim is hidden, and each has its own key and value
ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
}


def model_type(model: Model) -> str:
    """The Hugging Face family that can say all of `model`. UserError if there is none."""
    own_heads = model["kv_heads"] == model["heads"] and model["heads"] * model["head_dim"] == model["hidden"]
    for kind, needed in _FITS.items():
        if all(model[k] == v for k, v in needed.items()) and (own_heads or kind not in _ONE_HEAD_SIZE):
            return kind
    keys = ("norm", "positions", "mlp", "bias", "qkv_bias", "kv_heads", "head_dim", "experts", "window")
    said = ", ".join(f"{k} = {model[k]}" for k in keys)
    raise UserError(f"no Hugging Face family that is known here has all of: {said}")


def to_hugging_face(model: Model, dtype: str) -> dict[str, Any]:
    """config.json of `model`, with weights in `dtype` (float32, bfloat16, ...)."""
    kind = model_type(model)
    shared = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "torch_dtype": dtype,
        "vocab_size": model["vocab"],
        "tie_word_embeddings": model["tied"],
    }
    return shared | (_gpt2_config(model) if kind == "gpt2" else _rotary_config(model, kind))


def _gpt2_config(model: Model) -> dict[str, Any]:
    return {
        "n_layer": model["layers"],
        "n_embd": model["hidden"],
        "n_head": model["heads"],
        "n_inner": model["ffn"],
        "n_positions": model["max_positions"],
        "activation_function": "gelu_new",
        "layer_norm_epsilon": model["norm_eps"],
        "resid_pdrop": model["dropout"],
        "embd_pdrop": model["dropout"],
        "attn_pdrop": model["attention_dropout"],
    }


def _rotary_config(model: Model, kind: str) -> dict[str, Any]:
    common = {
        "num_hidden_layers": model["layers"],
        "hidden_size": model["hidden"],
        "num_attention_heads": model["heads"],
        "intermediate_size": model["ffn"],
        "max_position_embeddings": model["max_positions"],
        "rope_theta": model["rope_theta"],
        "rope_scaling": model["rope_scaling"],
        "attention_dropout": model["attention_dropout"],
    }
    if kind == "gpt_neox":
        return common | {
            "hidden_act": "gelu" if model["mlp"] == "gelu_exact" else "gelu_new",
            "layer_norm_eps": model["norm_eps"],
            "use_parallel_residual": model["parallel_residual"],
            "rotary_pct": model["rotary_fraction"],
            "rotary_emb_base": model["rope_theta"],
            "attention_bias": True,
            "hidden_dropout": model["dropout"],
        }
    common |= {
        "num_key_value_heads": model["kv_heads"],
        "head_dim": model["head_dim"],
        "hidden_act": "silu",
        "rms_norm_eps": model["norm_eps"],
    }
    if kind == "llama":
        common |= {"attention_bias": model["bias"], "mlp_bias": model["bias"]}
    if kind in ("mistral", "mixtral"):
        common["sliding_window"] = model["window"] or None
    if kind == "mixtral":
        common |= {
            "num_local_experts": model["experts"],
            "num_experts_per_tok": model["experts_per_token"],
            "router_aux_loss_coef": model["router_aux_loss"],
        }
    return common
