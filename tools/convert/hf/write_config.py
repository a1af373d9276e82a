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


def _is_plain(m: ModelConfig) -> bool:
    """Return True if the model has what the families after Llama have in common, and routers as
    Mixtral's."""
    return _routes_plainly(m) and not m.shared_experts


def _routes_plainly(m: ModelConfig) -> bool:
    return m.rotary_fraction == 1 and _is_gated(m) and m.router == PLAIN


def _is_gated(m: ModelConfig) -> bool:
    return _turns(m) and m.mlp == "swiglu" and m.norm_at == "before" and not _is_unusual(m)


def _is_rotary(m: ModelConfig) -> bool:
    return _turns(m) and m.rotary_fraction == 1


def _turns(m: ModelConfig) -> bool:
    return m.positions == "rope" and m.norm == "rms" and not m.parallel_residual


def _is_glm4_moe(m: ModelConfig) -> bool:
    leading = m.dense_layers == tuple(range(len(m.dense_layers)))
    routed = m.router.score == "sigmoid" and m.router.correction and m.router.group_best == 2
    experts = m.experts > 0 and m.shared_experts > 0 and m.shared_experts % m.ffn == 0
    biases = not (m.output_bias or m.mlp_bias or m.shared_gate)
    return _is_gated(m) and routed and experts and leading and biases and not m.window


def _is_unusual(m: ModelConfig) -> bool:
    """Return True if the model has what only OLMo, Gemma, DeepSeek or gpt-oss has."""
    of_layers = (
        m.latent
        or m.norm_unit_offset
        or m.window_rope_base
        or (m.qk_norm and m.qk_norm_over == "all")
    )
    return (
        bool(of_layers)
        or m.embedding_scale != 1
        or m.attention_scalar != m.head_dim
        or _is_capped(m)
        or _is_oss(m)
    )


def _is_capped(m: ModelConfig) -> bool:
    return m.attention_softcap > 0 or m.final_softcap > 0


def _is_oss(m: ModelConfig) -> bool:
    """Return True if the model has what only gpt-oss has."""
    return m.attention_sinks or m.expert_bias or m.router_bias or m.mlp == "swiglu_clamped"


def _is_olmo(m: ModelConfig) -> bool:
    norms = (m.norm_at, m.qk_norm, m.qk_norm_over, m.norm_unit_offset) == (
        "after",
        True,
        "all",
        False,
    )
    plain = (
        _is_rotary(m)
        and m.mlp == "swiglu"
        and m.embedding_scale == 1
        and m.attention_scalar == m.head_dim
    )
    plain = plain and not (_is_capped(m) or _is_oss(m))
    return norms and plain and m.qkv_bias == m.output_bias and not (m.mlp_bias or m.experts)


def _is_gemma(m: ModelConfig, qk_norm: bool) -> bool:
    norms = (m.norm_at, m.qk_norm, m.norm_unit_offset) == ("around", qk_norm, True)
    norms = norms and m.qk_norm_over == "head" and not _is_oss(m)
    sizes = _divides(m) and m.attention_scalar == int(m.attention_scalar)
    scaled = m.embedding_scale == default_embedding_scale({"family": "gemma3", "hidden": m.hidden})
    plain = _is_rotary(m) and m.mlp == "geglu" and sizes and scaled
    return norms and plain and m.qkv_bias == m.output_bias and not (m.mlp_bias or m.experts)


def _is_deepseek(m: ModelConfig) -> bool:
    usual = default_attention_scalar(m.model_dump() | {"rope_scaling": m.rope_scaling})
    plain = _is_rotary(m) and m.mlp == "swiglu" and m.norm_at == "before" and m.embedding_scale == 1
    sizes = bool(m.latent) and m.latent.norm_eps == LATENT_EPS and m.attention_scalar == usual
    leading = m.dense_layers == tuple(range(len(m.dense_layers)))
    experts = not m.experts or (leading and m.shared_experts > 0 and m.shared_experts % m.ffn == 0)
    experts = experts and not m.shared_gate
    return (
        plain
        and sizes
        and experts
        and m.qkv_bias == m.output_bias
        and not (m.window or m.window_rope_base)
    )


def _routes(m: ModelConfig, score: str, correction: bool, group_best: int) -> bool:
    """Return True if the model has no experts, or chooses them in this way."""
    best = group_best if m.router.limits else m.router.group_best
    return not m.experts or (m.router.score, m.router.correction, m.router.group_best) == (
        score,
        correction,
        best,
    )


def _own_heads(m: ModelConfig) -> bool:
    return m.kv_heads == m.heads and m.heads * m.head_dim == m.hidden


def _divides(m: ModelConfig) -> bool:
    """Return True if the heads divide the features, which some classes of transformers require
    without using it."""
    return m.hidden % m.heads == 0


def _no_extras(m: ModelConfig) -> bool:
    return not (m.experts or m.qk_norm or m.window)


def _biases(m: ModelConfig) -> tuple[bool, bool, bool]:
    return m.qkv_bias, m.output_bias, m.mlp_bias


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
    "gpt2": lambda m: (
        (m.positions, m.norm, _biases(m)) == ("learned", "layer", ALL)
        and not m.gated
        and not m.parallel_residual
        and m.norm_at == "before"
        and not _is_unusual(m)
        and _own_heads(m)
        and _no_extras(m)
    ),
    "gpt_neox": lambda m: (
        (m.positions, m.norm, m.qkv_bias, m.mlp_bias) == ("rope", "layer", m.output_bias, True)
        and not m.gated
        and m.norm_at == "before"
        and not _is_unusual(m)
        and _own_heads(m)
        and _no_extras(m)
    ),
    "llama": lambda m: (
        _is_plain(m) and m.qkv_bias == m.output_bias and _no_extras(m) and _divides(m)
    ),
    "qwen2": lambda m: (
        _is_plain(m) and _biases(m) == (True, False, False) and not (m.experts or m.qk_norm)
    ),
    "qwen2_moe": lambda m: (
        _routes_plainly(m) and m.shared_gate and not (m.output_bias or m.mlp_bias or m.qk_norm)
    ),
    "qwen3": lambda m: (
        _is_plain(m) and m.qk_norm and m.qkv_bias == m.output_bias and not (m.mlp_bias or m.experts)
    ),
    "qwen3_moe": lambda m: (
        _is_plain(m)
        and m.qk_norm
        and m.qkv_bias == m.output_bias
        and m.experts > 0
        and not m.window_layers
    ),
    "deepseek_v2": lambda m: (
        _is_deepseek(m)
        and _divides(m)
        and _routes(m, "softmax", False, 1)
        and not (m.experts and m.norm_topk)
    ),
    "deepseek_v3": lambda m: _is_deepseek(m) and _routes(m, "sigmoid", True, 2) and not m.mlp_bias,
    "olmo2": lambda m: _is_olmo(m) and not m.window,
    "olmo3": _is_olmo,
    "gemma2": lambda m: _is_gemma(m, qk_norm=False) and not m.window_rope_base,
    "gemma3_text": lambda m: _is_gemma(m, qk_norm=True) and not _is_capped(m),
    "glm4_moe": _is_glm4_moe,
    "gpt_oss": lambda m: (
        (_is_rotary(m), m.norm_at, m.mlp, m.attention_sinks)
        == (True, "before", "swiglu_clamped", True)
        and (m.expert_bias, m.router_bias, m.norm_topk, m.qk_norm) == (True, True, True, False)
        and m.qkv_bias == m.output_bias
        and not (_is_capped(m) or m.norm_unit_offset or m.window_rope_base)
        and (m.embedding_scale, m.attention_scalar) == (1, m.head_dim)
    ),
    "mistral": lambda m: (
        _is_plain(m) and _biases(m) == NONE and not (m.experts or m.qk_norm or m.window_layers)
    ),
    "mixtral": lambda m: (
        _is_plain(m)
        and _biases(m) == NONE
        and m.experts > 0
        and m.norm_topk
        and not (m.qk_norm or m.window_layers or m.dense_layers)
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
        "max_position_embeddings": said.pop(ORIGINAL)
        if scaling.kind == "dynamic"
        else m.max_positions,
        **_rope(m, kind, {"rope_type": scaling.kind, **said} if said else None),
        "attention_dropout": m.attention_dropout,
    }
    if m.latent:
        return common | _deepseek_config(m, kind)
    return common | (_neox_config(m) if kind == "gpt_neox" else _llama_config(m, kind))


def _rope(m: ModelConfig, kind: str, scaling: dict[str, Any] | None) -> dict[str, Any]:
    """Return the keys of rotary positions. scaling: rope_scaling of layers without the window.

    rope_theta, rope_scaling and rope_local_base_freq are what transformers 4 reads, and vLLM and
    llama.cpp after it. Families with another meaning of these keys in transformers 5 have its
    rope_parameters besides.
    """
    older = {"rope_theta": m.rope_base, "rope_scaling": scaling}
    if kind == "olmo2" and scaling and m.rope_scaling.kind in TWO_FIELDS:
        older["rope_scaling"] = {"type": m.rope_scaling.kind, "factor": m.rope_scaling.factor}
    full = {**(scaling or {"rope_type": "default"}), "rope_theta": m.rope_base}
    if kind == "gpt_oss":
        return older | {"rope_parameters": full}
    if kind not in BY_LAYER:
        return older
    if m.window_rope_base:
        windowed = {"rope_type": "default", "rope_theta": m.window_rope_base}
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


def _not_in_older(m: ModelConfig) -> Iterator[str]:
    kind = model_type(m)
    scaling = m.rope_scaling.kind
    if kind == "olmo2" and scaling not in ("none", *TWO_FIELDS):
        yield f"scale the rotary positions of an olmo2 model by rope_type {scaling!r}"
    if kind == "qwen2_moe" and not _divides(m):
        yield (
            f"make a qwen2_moe model whose hidden_size = {m.hidden} is no multiple of its "
            f"{m.heads} heads"
        )
    if kind == "gpt_oss" and (m.swiglu_alpha, m.swiglu_limit) != PUBLISHED_CLAMP:
        yield (
            f"use swiglu_alpha = {m.swiglu_alpha:g} and swiglu_limit = {m.swiglu_limit:g}, but "
            "1.702 and 7 alone"
        )
    if kind not in BY_LAYER or not m.window:
        return
    if scaling != "none" and not m.window_rope_base:
        yield f"scale the rotary positions of layers with sliding_attention in a {kind} model"
    elif kind == "olmo3" and m.window_rope_base not in (0, m.rope_base):
        yield (
            "give the layers with sliding_attention of an olmo3 model a rope_theta of their own, "
            "as this one has"
        )


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


def _deepseek_config(m: ModelConfig, kind: str) -> dict[str, Any]:
    sizes = m.latent
    return {
        "hidden_act": "silu",
        "rms_norm_eps": m.norm_eps,
        "num_key_value_heads": m.heads,
        "attention_bias": m.output_bias,
        "q_lora_rank": sizes.query_rank or None,
        "kv_lora_rank": sizes.kv_rank,
        "qk_rope_head_dim": sizes.rope_dim,
        "qk_nope_head_dim": sizes.nope_dim,
        "v_head_dim": sizes.value_dim,
        "num_nextn_predict_layers": m.mtp_layers if kind == "deepseek_v3" else 0,
        **({"rope_interleave": True} if kind == "deepseek_v3" else {"mlp_bias": m.mlp_bias}),
        **(_deepseek_experts(m, kind) if m.experts else {"first_k_dense_replace": m.layers}),
    }


def _deepseek_experts(m: ModelConfig, kind: str) -> dict[str, Any]:
    v3 = kind == "deepseek_v3"
    return {
        **_first_layers_and_experts(m),
        "scoring_func": m.router.score,
        "topk_method": "noaux_tc"
        if v3
        else "group_limited_greedy"
        if m.router.limits
        else "greedy",
        "aux_loss_alpha": m.router_aux_loss,
        "seq_aux": True,
    }


def _llama_config(m: ModelConfig, kind: str) -> dict[str, Any]:
    """The families after Llama; each has some keys of its own."""
    shared = {
        "num_key_value_heads": m.kv_heads,
        "head_dim": m.head_dim,
        **({} if kind.startswith("gemma") else {"hidden_act": "silu"}),
        "rms_norm_eps": m.norm_eps,
    }
    experts = {
        "num_experts_per_tok": m.experts_per_token,
        "router_aux_loss_coef": m.router_aux_loss,
    }
    window = {"use_sliding_window": m.window > 0, "sliding_window": m.window or None}
    qwen = {**window, "max_window_layers": min(m.window_layers, default=0), **layer_types(m)}
    # Not null where no layer has the window: the class of gpt-oss and Gemma 2 takes numbers alone.
    usual_window = DEFAULTS[kind].get("sliding_window")
    by_type = {
        "attention_bias": m.output_bias,
        "sliding_window": m.window or usual_window,
        **layer_types(m, always=True),
    }
    gemma = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": int(m.attention_scalar),
    }
    own: dict[str, dict[str, Any]] = {
        "llama": {"attention_bias": m.output_bias, "mlp_bias": m.mlp_bias},
        "mistral": {"sliding_window": m.window or None},
        "mixtral": {"sliding_window": m.window or None, "num_local_experts": m.experts, **experts},
        "olmo2": {"attention_bias": m.output_bias},
        "olmo3": by_type,
        "gemma2": {**by_type, **gemma, **softcaps(m)},
        "gemma3_text": {**by_type, **gemma},
        "gpt_oss": {
            **by_type,
            **experts,
            "num_local_experts": m.experts,
            "swiglu_alpha": m.swiglu_alpha,
            "swiglu_limit": m.swiglu_limit,
        },
        "qwen2": qwen,
        "qwen2_moe": {
            "qkv_bias": m.qkv_bias,
            "shared_expert_intermediate_size": m.shared_experts,
            **qwen_experts(m),
            **experts,
            **window,
            **layer_types(m, always=m.window > 0),
        },
        "qwen3": {"attention_bias": m.output_bias, **qwen},
        "qwen3_moe": {
            "attention_bias": m.output_bias,
            **qwen_experts(m),
            **experts,
            **window,
            "max_window_layers": 0,
        },
    }
    return shared | (_glm4_moe_config(m) if kind == "glm4_moe" else own[kind])


def _glm4_moe_config(m: ModelConfig) -> dict[str, Any]:
    return {
        "attention_bias": m.qkv_bias,
        "use_qk_norm": m.qk_norm,
        "partial_rotary_factor": m.rotary_fraction,
        **_first_layers_and_experts(m),
        "num_nextn_predict_layers": m.mtp_layers,
    }


def _first_layers_and_experts(m: ModelConfig) -> dict[str, Any]:
    """Return the keys of experts, of those that are shared, and of the first layers, which have
    none."""
    return {
        "intermediate_size": m.dense_ffn,
        "moe_intermediate_size": m.ffn,
        "first_k_dense_replace": len(m.dense_layers),
        "n_routed_experts": m.experts,
        "n_shared_experts": m.shared_experts // m.ffn,
        "num_experts_per_tok": m.experts_per_token,
        "norm_topk_prob": m.norm_topk,
        "routed_scaling_factor": m.router.scale,
        "n_group": m.router.groups,
        "topk_group": m.router.groups_per_token,
    }
