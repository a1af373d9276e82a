"""The config.json of a model of ours: in the words of its own family, or of another that can say
all of it.

What no family can say is an error. Numbers that only training goes by, such as dropout in families
that have none, are left out, and `unsaid` names them.
"""

from collections.abc import Callable, Iterator
from typing import Any

from megaprec.errors import UserError
from models.computed import TRAINING, as_computed
from models.config import ModelConfig
from models.family_defaults import default_attention_scalar, default_embedding_scale
from models.rope import ORIGINAL, PARAMETERS
from models.router import PLAIN
from tools.convert.hf.config import from_hugging_face
from tools.convert.hf.defaults import DEFAULTS
from tools.convert.hf.rope import BY_LAYER
from tools.convert.hf.write_parts import (
    layer_types,
    qwen_experts,
    softcaps,
    unlike_its_family,
    would_do,
)


def _is_plain(model: ModelConfig) -> bool:
    """Return True if the model has what the families after Llama have in common, and routers as
    Mixtral's."""
    return _routes_plainly(model) and not model.shared_experts


def _routes_plainly(model: ModelConfig) -> bool:
    return model.rotary_fraction == 1 and _is_gated(model) and model.router == PLAIN


def _is_gated(model: ModelConfig) -> bool:
    return (
        _turns(model)
        and model.mlp == "swiglu"
        and model.norm_at == "before"
        and not _is_unusual(model)
    )


def _is_rotary(model: ModelConfig) -> bool:
    return _turns(model) and model.rotary_fraction == 1


def _turns(model: ModelConfig) -> bool:
    return model.positions == "rope" and model.norm == "rms" and not model.parallel_residual


def _is_glm4_moe(model: ModelConfig) -> bool:
    leading = model.dense_layers == tuple(range(len(model.dense_layers)))
    routed = (
        model.router.score == "sigmoid" and model.router.correction and model.router.group_best == 2
    )
    experts = (
        model.experts > 0 and model.shared_experts > 0 and model.shared_experts % model.ffn == 0
    )
    biases = not (model.output_bias or model.mlp_bias or model.shared_gate)
    return _is_gated(model) and routed and experts and leading and biases and not model.window


def _is_unusual(model: ModelConfig) -> bool:
    """Return True if the model has what only OLMo, Gemma, DeepSeek or gpt-oss has."""
    of_layers = (
        model.latent
        or model.norm_unit_offset
        or model.window_rope_base
        or (model.qk_norm and model.qk_norm_over == "all")
    )
    return (
        bool(of_layers)
        or model.embedding_scale != 1
        or model.attention_scalar != model.head_dim
        or _is_capped(model)
        or _is_oss(model)
    )


def _is_capped(model: ModelConfig) -> bool:
    return model.attention_softcap > 0 or model.final_softcap > 0


def _is_oss(model: ModelConfig) -> bool:
    """Return True if the model has what only gpt-oss has."""
    return (
        model.attention_sinks
        or model.expert_bias
        or model.router_bias
        or model.mlp == "swiglu_clamped"
    )


def _is_olmo(model: ModelConfig) -> bool:
    norms = (model.norm_at, model.qk_norm, model.qk_norm_over, model.norm_unit_offset) == (
        "after",
        True,
        "all",
        False,
    )
    plain = (
        _is_rotary(model)
        and model.mlp == "swiglu"
        and model.embedding_scale == 1
        and model.attention_scalar == model.head_dim
    )
    plain = plain and not (_is_capped(model) or _is_oss(model))
    return (
        norms
        and plain
        and model.qkv_bias == model.output_bias
        and not (model.mlp_bias or model.experts)
    )


def _is_gemma(model: ModelConfig, qk_norm: bool) -> bool:
    norms = (model.norm_at, model.qk_norm, model.norm_unit_offset) == ("around", qk_norm, True)
    norms = norms and model.qk_norm_over == "head" and not _is_oss(model)
    sizes = _divides(model) and model.attention_scalar == int(model.attention_scalar)
    scaled = model.embedding_scale == default_embedding_scale(
        {"family": "gemma3", "hidden": model.hidden}
    )
    plain = _is_rotary(model) and model.mlp == "geglu" and sizes and scaled
    return (
        norms
        and plain
        and model.qkv_bias == model.output_bias
        and not (model.mlp_bias or model.experts)
    )


def _is_deepseek(model: ModelConfig) -> bool:
    usual = default_attention_scalar(model.model_dump() | {"rope_scaling": model.rope_scaling})
    plain = (
        _is_rotary(model)
        and model.mlp == "swiglu"
        and model.norm_at == "before"
        and model.embedding_scale == 1
    )
    sizes = (
        bool(model.latent)
        and model.latent.norm_eps == LATENT_EPS
        and model.attention_scalar == usual
    )
    leading = model.dense_layers == tuple(range(len(model.dense_layers)))
    experts = not model.experts or (
        leading and model.shared_experts > 0 and model.shared_experts % model.ffn == 0
    )
    experts = experts and not model.shared_gate
    return (
        plain
        and sizes
        and experts
        and model.qkv_bias == model.output_bias
        and not (model.window or model.window_rope_base)
    )


def _routes(model: ModelConfig, score: str, correction: bool, group_best: int) -> bool:
    """Return True if the model has no experts, or chooses them in this way."""
    best = group_best if model.router.limits else model.router.group_best
    return not model.experts or (
        model.router.score,
        model.router.correction,
        model.router.group_best,
    ) == (
        score,
        correction,
        best,
    )


def _own_heads(model: ModelConfig) -> bool:
    return model.kv_heads == model.heads and model.heads * model.head_dim == model.hidden


def _divides(model: ModelConfig) -> bool:
    """Return True if the heads divide the features, which some classes of transformers require
    without using it."""
    return model.hidden % model.heads == 0


def _no_extras(model: ModelConfig) -> bool:
    return not (model.experts or model.qk_norm or model.window)


def _biases(model: ModelConfig) -> tuple[bool, bool, bool]:
    return model.qkv_bias, model.output_bias, model.mlp_bias


LATENT_EPS = 1e-6  # of the norms of latents, whatever the others have
NONE = (False, False, False)
ALL = (True, True, True)
# Names that say nothing by themselves; max_positions is the size of nothing where positions turn.
NAMES = ("family", "bias")
_SIZES = ("layers", "hidden", "heads", "ffn", "vocab", "max_positions")
# that a refusal may name
_KEYS = [key for key in ModelConfig.model_fields if key not in (*TRAINING, *NAMES, *_SIZES)]
# of rope_scaling in transformers 4's OLMo 2, which takes only `type` and `factor`
TWO_FIELDS = (
    "linear",
    "dynamic",
)
# swiglu_alpha and swiglu_limit of gpt-oss, which transformers 4 has in its code
PUBLISHED_CLAMP = (
    1.702,
    7.0,
)
TYPES = {"gemma3": "gemma3_text"}  # model_type of a family, if it differs
# Whether a model_type can say all of a model.
_SAYS: dict[str, Callable[[ModelConfig], bool]] = {
    "gpt2": lambda model: (
        (model.positions, model.norm, _biases(model)) == ("learned", "layer", ALL)
        and not model.gated
        and not model.parallel_residual
        and model.norm_at == "before"
        and not _is_unusual(model)
        and _own_heads(model)
        and _no_extras(model)
    ),
    "gpt_neox": lambda model: (
        (model.positions, model.norm, model.qkv_bias, model.mlp_bias)
        == ("rope", "layer", model.output_bias, True)
        and not model.gated
        and model.norm_at == "before"
        and not _is_unusual(model)
        and _own_heads(model)
        and _no_extras(model)
    ),
    "llama": lambda model: (
        _is_plain(model)
        and model.qkv_bias == model.output_bias
        and _no_extras(model)
        and _divides(model)
    ),
    "qwen2": lambda model: (
        _is_plain(model)
        and _biases(model) == (True, False, False)
        and not (model.experts or model.qk_norm)
    ),
    "qwen2_moe": lambda model: (
        _routes_plainly(model)
        and model.shared_gate
        and not (model.output_bias or model.mlp_bias or model.qk_norm)
    ),
    "qwen3": lambda model: (
        _is_plain(model)
        and model.qk_norm
        and model.qkv_bias == model.output_bias
        and not (model.mlp_bias or model.experts)
    ),
    "qwen3_moe": lambda model: (
        _is_plain(model)
        and model.qk_norm
        and model.qkv_bias == model.output_bias
        and model.experts > 0
        and not model.window_layers
    ),
    "deepseek_v2": lambda model: (
        _is_deepseek(model)
        and _divides(model)
        and _routes(model, "softmax", False, 1)
        and not (model.experts and model.norm_topk)
    ),
    "deepseek_v3": lambda model: (
        _is_deepseek(model) and _routes(model, "sigmoid", True, 2) and not model.mlp_bias
    ),
    "olmo2": lambda model: _is_olmo(model) and not model.window,
    "olmo3": _is_olmo,
    "gemma2": lambda model: _is_gemma(model, qk_norm=False) and not model.window_rope_base,
    "gemma3_text": lambda model: _is_gemma(model, qk_norm=True) and not _is_capped(model),
    "glm4_moe": _is_glm4_moe,
    "gpt_oss": lambda model: (
        (_is_rotary(model), model.norm_at, model.mlp, model.attention_sinks)
        == (True, "before", "swiglu_clamped", True)
        and (model.expert_bias, model.router_bias, model.norm_topk, model.qk_norm)
        == (True, True, True, False)
        and model.qkv_bias == model.output_bias
        and not (_is_capped(model) or model.norm_unit_offset or model.window_rope_base)
        and (model.embedding_scale, model.attention_scalar) == (1, model.head_dim)
    ),
    "mistral": lambda model: (
        _is_plain(model)
        and _biases(model) == NONE
        and not (model.experts or model.qk_norm or model.window_layers)
    ),
    "mixtral": lambda model: (
        _is_plain(model)
        and _biases(model) == NONE
        and model.experts > 0
        and model.norm_topk
        and not (model.qk_norm or model.window_layers or model.dense_layers)
    ),
}
ARCHITECTURES = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}


def model_type(model: ModelConfig) -> str:
    """The Hugging Face family that can say all of `model`, its own if that can. UserError if there
    is none."""
    computed = as_computed(model)
    own = TYPES.get(model.family, model.family)
    for kind in (own, *_SAYS):
        if _SAYS[kind](computed):
            return kind
    if would := would_do(computed, _KEYS, _SAYS[own]):
        raise UserError(f"Hugging Face's {own} cannot say {'; or '.join(would)}")
    said = ", ".join(unlike_its_family(computed, _KEYS))
    raise UserError(
        f"no Hugging Face family that is known here has all of: {said}, and what else {own} has"
    )


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
    """Return what a config.json of `model` omits, as key = value. Raises UserError if the model
    would compute otherwise.
    """
    said = from_hugging_face(to_hugging_face(model, "float32"))
    ours = as_computed(model)
    again = as_computed(said)
    differs = [key for key in type(model).model_fields if getattr(ours, key) != getattr(again, key)]
    sizeless = ("max_positions",) if model.positions == "rope" else ()
    if lost := [key for key in differs if key not in (*TRAINING, *NAMES, *sizeless)]:
        raise UserError(
            *(
                f"no config.json that is known here can say model.{key} = {getattr(model, key)}"
                for key in lost
            )
        )
    return [f"{key} = {getattr(model, key)}" for key in differs if key in TRAINING]


def _gpt2_config(model: ModelConfig) -> dict[str, Any]:
    return {
        "n_layer": model.layers,
        "n_embd": model.hidden,
        "n_head": model.heads,
        "n_inner": model.ffn,
        "n_positions": model.max_positions,
        "activation_function": _gelu(model),
        "layer_norm_epsilon": model.norm_eps,
        "resid_pdrop": model.dropout,
        "embd_pdrop": model.embedding_dropout,
        "attn_pdrop": model.attention_dropout,
    }


def _gelu(model: ModelConfig) -> str:
    return "gelu" if model.mlp == "gelu_exact" else "gelu_new"


def _rotary_config(model: ModelConfig, kind: str) -> dict[str, Any]:
    scaling = model.rope_scaling
    said = {key: getattr(scaling, key) for key in PARAMETERS[scaling.kind] if getattr(scaling, key)}
    said |= {} if scaling.truncate else {"truncate": False}
    common = {
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "intermediate_size": model.ffn,
        "max_position_embeddings": said.pop(ORIGINAL)
        if scaling.kind == "dynamic"
        else model.max_positions,
        **_rope(model, kind, {"rope_type": scaling.kind, **said} if said else None),
        "attention_dropout": model.attention_dropout,
    }
    if model.latent:
        return common | _deepseek_config(model, kind)
    return common | (_neox_config(model) if kind == "gpt_neox" else _llama_config(model, kind))


def _rope(model: ModelConfig, kind: str, scaling: dict[str, Any] | None) -> dict[str, Any]:
    """Return the keys of rotary positions. scaling: rope_scaling of layers without the window.

    rope_theta, rope_scaling and rope_local_base_freq are what transformers 4 reads, and vLLM and
    llama.cpp after it. Families with another meaning of these keys in transformers 5 have its
    rope_parameters besides.
    """
    older = {"rope_theta": model.rope_base, "rope_scaling": scaling}
    if kind == "olmo2" and scaling and model.rope_scaling.kind in TWO_FIELDS:
        older["rope_scaling"] = {
            "type": model.rope_scaling.kind,
            "factor": model.rope_scaling.factor,
        }
    full = {**(scaling or {"rope_type": "default"}), "rope_theta": model.rope_base}
    if kind == "gpt_oss":
        return older | {"rope_parameters": full}
    if kind not in BY_LAYER:
        return older
    if model.window_rope_base:
        windowed = {"rope_type": "default", "rope_theta": model.window_rope_base}
    else:
        windowed = full
    if kind == "gemma3_text":
        older["rope_local_base_freq"] = windowed["rope_theta"]
    return older | {"rope_parameters": {"full_attention": full, "sliding_attention": windowed}}


def newer_only(model: ModelConfig) -> list[str]:
    """Return a note for each thing in the config.json of `model` that transformers 4 refuses or
    computes otherwise."""
    readers = "transformers 4, and what goes by its keys, such as vLLM and llama.cpp"
    return [
        f"config.json needs transformers 5 or newer: {readers}, cannot {what}"
        for what in _not_in_older(model)
    ]


def _not_in_older(model: ModelConfig) -> Iterator[str]:
    kind = model_type(model)
    scaling = model.rope_scaling.kind
    if kind == "olmo2" and scaling not in ("none", *TWO_FIELDS):
        yield f"scale the rotary positions of an olmo2 model by rope_type {scaling!r}"
    if kind == "qwen2_moe" and not _divides(model):
        yield (
            f"make a qwen2_moe model whose hidden_size = {model.hidden} is no multiple of its "
            f"{model.heads} heads"
        )
    if kind == "gpt_oss" and (model.swiglu_alpha, model.swiglu_limit) != PUBLISHED_CLAMP:
        yield (
            f"use swiglu_alpha = {model.swiglu_alpha:g} and swiglu_limit = {model.swiglu_limit:g}, but "
            "1.702 and 7 alone"
        )
    if kind not in BY_LAYER or not model.window:
        return
    if scaling != "none" and not model.window_rope_base:
        yield f"scale the rotary positions of layers with sliding_attention in a {kind} model"
    elif kind == "olmo3" and model.window_rope_base not in (0, model.rope_base):
        yield (
            "give the layers with sliding_attention of an olmo3 model a rope_theta of their own, "
            "as this one has"
        )


def _neox_config(model: ModelConfig) -> dict[str, Any]:
    return {
        "hidden_act": _gelu(model),
        "layer_norm_eps": model.norm_eps,
        "use_parallel_residual": model.parallel_residual,
        "rotary_pct": model.rotary_fraction,
        "rotary_emb_base": model.rope_base,
        "attention_bias": model.output_bias,
        "hidden_dropout": model.dropout,
    }


def _deepseek_config(model: ModelConfig, kind: str) -> dict[str, Any]:
    sizes = model.latent
    return {
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "num_key_value_heads": model.heads,
        "attention_bias": model.output_bias,
        "q_lora_rank": sizes.query_rank or None,
        "kv_lora_rank": sizes.kv_rank,
        "qk_rope_head_dim": sizes.rope_dim,
        "qk_nope_head_dim": sizes.nope_dim,
        "v_head_dim": sizes.value_dim,
        "num_nextn_predict_layers": model.mtp_layers if kind == "deepseek_v3" else 0,
        **({"rope_interleave": True} if kind == "deepseek_v3" else {"mlp_bias": model.mlp_bias}),
        **(
            _deepseek_experts(model, kind)
            if model.experts
            else {"first_k_dense_replace": model.layers}
        ),
    }


def _deepseek_experts(model: ModelConfig, kind: str) -> dict[str, Any]:
    v3 = kind == "deepseek_v3"
    return {
        **_first_layers_and_experts(model),
        "scoring_func": model.router.score,
        "topk_method": "noaux_tc"
        if v3
        else "group_limited_greedy"
        if model.router.limits
        else "greedy",
        "aux_loss_alpha": model.router_aux_loss,
        "seq_aux": True,
    }


def _llama_config(model: ModelConfig, kind: str) -> dict[str, Any]:
    """The families after Llama; each has some keys of its own."""
    shared = {
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        **({} if kind.startswith("gemma") else {"hidden_act": "silu"}),
        "rms_norm_eps": model.norm_eps,
    }
    experts = {
        "num_experts_per_tok": model.experts_per_token,
        "router_aux_loss_coef": model.router_aux_loss,
    }
    window = {"use_sliding_window": model.window > 0, "sliding_window": model.window or None}
    qwen = {
        **window,
        "max_window_layers": min(model.window_layers, default=0),
        **layer_types(model),
    }
    # Not null where no layer has the window: the class of gpt-oss and Gemma 2 takes numbers alone.
    usual_window = DEFAULTS[kind].get("sliding_window")
    by_type = {
        "attention_bias": model.output_bias,
        "sliding_window": model.window or usual_window,
        **layer_types(model, always=True),
    }
    gemma = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": int(model.attention_scalar),
    }
    own: dict[str, dict[str, Any]] = {
        "llama": {"attention_bias": model.output_bias, "mlp_bias": model.mlp_bias},
        "mistral": {"sliding_window": model.window or None},
        "mixtral": {
            "sliding_window": model.window or None,
            "num_local_experts": model.experts,
            **experts,
        },
        "olmo2": {"attention_bias": model.output_bias},
        "olmo3": by_type,
        "gemma2": {**by_type, **gemma, **softcaps(model)},
        "gemma3_text": {**by_type, **gemma},
        "gpt_oss": {
            **by_type,
            **experts,
            "num_local_experts": model.experts,
            "swiglu_alpha": model.swiglu_alpha,
            "swiglu_limit": model.swiglu_limit,
        },
        "qwen2": qwen,
        "qwen2_moe": {
            "qkv_bias": model.qkv_bias,
            "shared_expert_intermediate_size": model.shared_experts,
            **qwen_experts(model),
            **experts,
            **window,
            **layer_types(model, always=model.window > 0),
        },
        "qwen3": {"attention_bias": model.output_bias, **qwen},
        "qwen3_moe": {
            "attention_bias": model.output_bias,
            **qwen_experts(model),
            **experts,
            **window,
            "max_window_layers": 0,
        },
    }
    return shared | (_glm4_moe_config(model) if kind == "glm4_moe" else own[kind])


def _glm4_moe_config(model: ModelConfig) -> dict[str, Any]:
    return {
        "attention_bias": model.qkv_bias,
        "use_qk_norm": model.qk_norm,
        "partial_rotary_factor": model.rotary_fraction,
        **_first_layers_and_experts(model),
        "num_nextn_predict_layers": model.mtp_layers,
    }


def _first_layers_and_experts(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of experts, of those that are shared, and of the first layers, which have
    none."""
    return {
        "intermediate_size": model.dense_ffn,
        "moe_intermediate_size": model.ffn,
        "first_k_dense_replace": len(model.dense_layers),
        "n_routed_experts": model.experts,
        "n_shared_experts": model.shared_experts // model.ffn,
        "num_experts_per_tok": model.experts_per_token,
        "norm_topk_prob": model.norm_topk,
        "routed_scaling_factor": model.router.scale,
        "n_group": model.router.groups,
        "topk_group": model.router.groups_per_token,
    }
