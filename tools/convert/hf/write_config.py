"""The config.json of a model of ours: in the words of its own family, or of another that can say
all of it.

What no family can say is an error. Numbers that only training goes by, such as dropout in families
that have none, are left out, and `omitted_settings` names them.
"""

from collections.abc import Callable, Iterator
from typing import Any

from megaprec.errors import UserError
from models.config import ModelConfig
from models.equivalence import TRAINING, as_computed
from models.model_fields import default_attention_scalar, default_embedding_scale
from models.rope_scaling import ORIGINAL, PARAMETERS
from models.router_settings import PLAIN
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
    router = model.router
    routes = router.score == "sigmoid" and router.correction and router.group_best == 2
    has_experts = model.experts > 0 and model.shared_experts > 0
    has_biases = model.output_bias or model.mlp_bias or model.shared_gate
    return (
        _is_gated(model)
        and routes
        and has_experts
        and model.shared_experts % model.ffn == 0
        and _dense_layers_lead(model)
        and not has_biases
        and not model.window
    )


def _dense_layers_lead(model: ModelConfig) -> bool:
    """Return True if the layers without experts are the first ones."""
    return model.dense_layers == tuple(range(len(model.dense_layers)))


def _is_unusual(model: ModelConfig) -> bool:
    """Return True if the model has what only OLMo, Gemma, DeepSeek or gpt-oss has."""
    norms_all_heads = model.qk_norm and model.qk_norm_over == "all"
    return (
        bool(model.latent or model.norm_unit_offset or model.window_rope_base or norms_all_heads)
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
    norms = (model.norm_at, model.qk_norm, model.qk_norm_over, model.norm_unit_offset)
    return (
        norms == ("after", True, "all", False)
        and _is_rotary(model)
        and model.mlp == "swiglu"
        and model.embedding_scale == 1
        and model.attention_scalar == model.head_dim
        and not (_is_capped(model) or _is_oss(model))
        and model.qkv_bias == model.output_bias
        and not (model.mlp_bias or model.experts)
    )


def _is_gemma(model: ModelConfig, qk_norm: bool) -> bool:
    scale = default_embedding_scale({"family": "gemma3", "hidden": model.hidden})
    norms = (model.norm_at, model.qk_norm, model.norm_unit_offset, model.qk_norm_over)
    return (
        norms == ("around", qk_norm, True, "head")
        and not _is_oss(model)
        and _divides(model)
        and model.attention_scalar == int(model.attention_scalar)
        and model.embedding_scale == scale
        and _is_rotary(model)
        and model.mlp == "geglu"
        and model.qkv_bias == model.output_bias
        and not (model.mlp_bias or model.experts)
    )


def _is_deepseek(model: ModelConfig) -> bool:
    scalar = default_attention_scalar(model.model_dump() | {"rope_scaling": model.rope_scaling})
    return (
        _is_rotary(model)
        and model.mlp == "swiglu"
        and model.norm_at == "before"
        and model.embedding_scale == 1
        and bool(model.latent)
        and model.latent.norm_eps == LATENT_EPS
        and model.attention_scalar == scalar
        and _has_deepseek_experts(model)
        and model.qkv_bias == model.output_bias
        and not (model.window or model.window_rope_base)
    )


def _has_deepseek_experts(model: ModelConfig) -> bool:
    """Return True if a model has no experts, or as DeepSeek: with shared ones, after dense
    layers."""
    if model.shared_gate:
        return False
    if not model.experts:
        return True
    if not _dense_layers_lead(model):
        return False
    return model.shared_experts > 0 and model.shared_experts % model.ffn == 0


def _routes(model: ModelConfig, score: str, correction: bool, group_best: int) -> bool:
    """Return True if the model has no experts, or chooses them in this way."""
    router = model.router
    if not model.experts:
        return True
    if router.limits and router.group_best != group_best:
        return False
    return (router.score, router.correction) == (score, correction)


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
TWO_FIELDS = ("linear", "dynamic")
# swiglu_alpha and swiglu_limit of gpt-oss, which transformers 4 has in its code
PUBLISHED_CLAMP = (1.702, 7.0)
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
    """Return the Hugging Face family that can say all of `model`, its own if that can. UserError if
    there is none."""
    computed = as_computed(model)
    own_kind = TYPES.get(model.family, model.family)
    for kind in (own_kind, *_SAYS):
        if _SAYS[kind](computed):
            return kind
    if remedies := would_do(computed, _KEYS, _SAYS[own_kind]):
        raise UserError.of(
            "convert.hf_not_expressible", own_kind=own_kind, remedies="; or ".join(remedies)
        )
    settings = ", ".join(unlike_its_family(computed, _KEYS))
    raise UserError.of("convert.hf_no_family", settings=settings, own_kind=own_kind)


def config_of(model: ModelConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json of `model`, with weights in `dtype` (float32, bfloat16, ...)."""
    kind = model_type(model)
    shared = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "torch_dtype": dtype,
        "vocab_size": model.vocab,
        "tie_word_embeddings": model.tied,
        "initializer_range": model.init_std,
    }
    if kind == "gpt2":
        return shared | _gpt2_config(model)
    return shared | _rotary_config(model, kind)


def omitted_settings(model: ModelConfig) -> list[str]:
    """Return what a config.json of `model` omits, as key = value. Raises UserError if the model
    would compute otherwise.
    """
    ours = as_computed(model)
    theirs = as_computed(from_hugging_face(config_of(model, "float32")))
    keys = type(model).model_fields
    differing = [key for key in keys if getattr(ours, key) != getattr(theirs, key)]
    permitted = [*TRAINING, *NAMES]
    if model.positions == "rope":
        permitted.append("max_positions")  # the size of nothing
    lost = [key for key in differing if key not in permitted]
    if lost:
        raise UserError(
            *(
                f"no config.json that is known here can say model.{key} = {getattr(model, key)}"
                for key in lost
            )
        )
    return [f"{key} = {getattr(model, key)}" for key in differing if key in TRAINING]


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
    """Return the keys of families with rotary positions, but for those of all families."""
    scaling = model.rope_scaling
    parameters: dict[str, Any] = {}
    for key in PARAMETERS[scaling.kind]:
        if value := getattr(scaling, key):
            parameters[key] = value
    if not scaling.truncate:
        parameters["truncate"] = False
    max_positions = model.max_positions
    if scaling.kind == "dynamic":
        max_positions = parameters.pop(ORIGINAL)  # transformers takes it for the original length
    rope_scaling = {"rope_type": scaling.kind, **parameters} if parameters else None
    common = {
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "intermediate_size": model.ffn,
        "max_position_embeddings": max_positions,
        **_rope(model, kind, rope_scaling),
        "attention_dropout": model.attention_dropout,
    }
    if model.latent:
        return common | _deepseek_config(model, kind)
    if kind == "gpt_neox":
        return common | _neox_config(model)
    return common | _llama_config(model, kind)


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


def notes_on_older_transformers(model: ModelConfig) -> list[str]:
    """Return a note for each thing in the config.json of `model` that transformers 4 refuses or
    computes otherwise."""
    readers = "transformers 4, and what goes by its keys, such as vLLM and llama.cpp"
    return [
        f"config.json needs transformers 5 or newer: {readers}, cannot {what}"
        for what in _not_in_older(model)
    ]


def _not_in_older(model: ModelConfig) -> Iterator[str]:
    """Yield what transformers 4 cannot do that a config.json of `model` asks for."""
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
            f"use swiglu_alpha = {model.swiglu_alpha:g} and swiglu_limit = "
            f"{model.swiglu_limit:g}, but 1.702 and 7 alone"
        )
    if kind in BY_LAYER and model.window:
        yield from _window_not_in_older(model, kind)


def _window_not_in_older(model: ModelConfig, kind: str) -> Iterator[str]:
    """Yield what transformers 4 cannot do with the positions of layers with the window."""
    if model.rope_scaling.kind != "none" and not model.window_rope_base:
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
    config: dict[str, Any] = {
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
    }
    if kind == "deepseek_v3":
        config["rope_interleave"] = True
    else:
        config["mlp_bias"] = model.mlp_bias
    if model.experts:
        return config | _deepseek_experts(model, kind)
    return config | {"first_k_dense_replace": model.layers}


def _deepseek_experts(model: ModelConfig, kind: str) -> dict[str, Any]:
    method = "group_limited_greedy" if model.router.limits else "greedy"
    if kind == "deepseek_v3":
        method = "noaux_tc"
    return {
        **_first_layers_and_experts(model),
        "scoring_func": model.router.score,
        "topk_method": method,
        "aux_loss_alpha": model.router_aux_loss,
        "seq_aux": True,
    }


def _llama_config(model: ModelConfig, kind: str) -> dict[str, Any]:
    """Return the keys of the families after Llama, of which each has some of its own."""
    shared: dict[str, Any] = {"num_key_value_heads": model.kv_heads, "head_dim": model.head_dim}
    if not kind.startswith("gemma"):
        shared["hidden_act"] = "silu"
    shared["rms_norm_eps"] = model.norm_eps
    return shared | _OF_FAMILY[kind](model)


def _llama_keys(model: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": model.output_bias, "mlp_bias": model.mlp_bias}


def _mistral_keys(model: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": model.window or None}


def _mixtral_keys(model: ModelConfig) -> dict[str, Any]:
    return {
        "sliding_window": model.window or None,
        "num_local_experts": model.experts,
        **_experts_per_token(model),
    }


def _olmo2_keys(model: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": model.output_bias}


def _olmo3_keys(model: ModelConfig) -> dict[str, Any]:
    return _keys_by_layer_type(model, "olmo3")


def _gemma2_keys(model: ModelConfig) -> dict[str, Any]:
    return {
        **_keys_by_layer_type(model, "gemma2"),
        **_gemma_keys(model),
        **softcaps(model),
    }


def _gemma3_keys(model: ModelConfig) -> dict[str, Any]:
    return {**_keys_by_layer_type(model, "gemma3_text"), **_gemma_keys(model)}


def _gpt_oss_keys(model: ModelConfig) -> dict[str, Any]:
    return {
        **_keys_by_layer_type(model, "gpt_oss"),
        **_experts_per_token(model),
        "num_local_experts": model.experts,
        "swiglu_alpha": model.swiglu_alpha,
        "swiglu_limit": model.swiglu_limit,
    }


def _qwen2_keys(model: ModelConfig) -> dict[str, Any]:
    return {
        **_optional_window(model),
        "max_window_layers": min(model.window_layers, default=0),
        **layer_types(model),
    }


def _qwen2_moe_keys(model: ModelConfig) -> dict[str, Any]:
    return {
        "qkv_bias": model.qkv_bias,
        "shared_expert_intermediate_size": model.shared_experts,
        **qwen_experts(model),
        **_experts_per_token(model),
        **_optional_window(model),
        **layer_types(model, always=model.window > 0),
    }


def _qwen3_keys(model: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": model.output_bias, **_qwen2_keys(model)}


def _qwen3_moe_keys(model: ModelConfig) -> dict[str, Any]:
    return {
        "attention_bias": model.output_bias,
        **qwen_experts(model),
        **_experts_per_token(model),
        **_optional_window(model),
        "max_window_layers": 0,
    }


def _experts_per_token(model: ModelConfig) -> dict[str, Any]:
    return {
        "num_experts_per_tok": model.experts_per_token,
        "router_aux_loss_coef": model.router_aux_loss,
    }


def _optional_window(model: ModelConfig) -> dict[str, Any]:
    """Return Qwen's keys of the window."""
    return {"use_sliding_window": model.window > 0, "sliding_window": model.window or None}


def _keys_by_layer_type(model: ModelConfig, kind: str) -> dict[str, Any]:
    """Return the keys of families that say of each layer whether it has the window."""
    # Not null where no layer has the window: the class of gpt-oss and Gemma 2 takes numbers alone.
    default_window = DEFAULTS[kind].get("sliding_window")
    return {
        "attention_bias": model.output_bias,
        "sliding_window": model.window or default_window,
        **layer_types(model, always=True),
    }


def _gemma_keys(model: ModelConfig) -> dict[str, Any]:
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": int(model.attention_scalar),
    }


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


_OF_FAMILY: dict[str, Callable[[ModelConfig], dict[str, Any]]] = {
    "llama": _llama_keys,
    "mistral": _mistral_keys,
    "mixtral": _mixtral_keys,
    "olmo2": _olmo2_keys,
    "olmo3": _olmo3_keys,
    "gemma2": _gemma2_keys,
    "gemma3_text": _gemma3_keys,
    "glm4_moe": _glm4_moe_config,
    "gpt_oss": _gpt_oss_keys,
    "qwen2": _qwen2_keys,
    "qwen2_moe": _qwen2_moe_keys,
    "qwen3": _qwen3_keys,
    "qwen3_moe": _qwen3_moe_keys,
}
