"""The model of a Hugging Face config.json.

Every key of the file is read here, known not to matter, or refused by name (`keys`). A setting that
one side has and the other cannot express is an error, never dropped.
"""

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from megaprec.errors import UserError
from models.config import ModelConfig
from models.rope_scaling import ORIGINAL
from tools.convert.hf.defaults import DEFAULTS
from tools.convert.hf.experts import by_groups, experts, feed_forwards, qwen_experts
from tools.convert.hf.keys import Keys, require
from tools.convert.hf.kinds import IDS
from tools.convert.hf.quantized import require_readable
from tools.convert.hf.rope import rope, rope_by_layer
from tools.convert.hf.windows import require_layers_alike, window_of, windows_by_type, windows_of

GELU = {
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_python_tanh"), "gelu"),
    **dict.fromkeys(("gelu", "gelu_python"), "gelu_exact"),
}
SILU = ("silu", "swish")
GPT_OSS_ROPE = {  # of a config.json that says nothing
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    ORIGINAL: 4096,
}
Json = Mapping[str, Any]


def make_model(fields: Json, origin: str) -> ModelConfig:
    """Return the model with these fields. Raises UserError that names `origin` if they do not make
    one."""
    try:
        return ModelConfig(**fields)
    except ValidationError as error:
        problems = []
        for problem in error.errors(include_url=False):
            # A default that follows from a wrong field is no problem of its own.
            if problem["type"] == "default_factory_not_called":
                continue
            message = problem["msg"].removeprefix("Value error, ")
            problems.append(f"{origin}: {' '.join((*map(str, problem['loc']), message))}")
        raise UserError(*problems) from error


def from_hugging_face(config: Json) -> ModelConfig:
    """Return the model of a config.json. Raises UserError for an unknown architecture, key or
    value."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _READERS:
        raise UserError.of("convert.hf_model_type", kind=kind, readers=", ".join(_READERS))
    keys = Keys(config, kind)
    try:
        require_readable(keys)
        fields = _READERS[kind](keys) | {"init_std": keys["initializer_range"]}
        for key in IDS:
            keys.mark_read(key)  # `special_ids` has them
        if unread := list(keys.unread()):
            raise UserError(*unread)
        return make_model(fields, "config.json")
    except UserError as error:
        # A null that was read explains what else went wrong.
        raise UserError(*(keys.nulls() or error.problems)) from error
    except (TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        problems = keys.nulls() or [f"config.json of a {kind} model misstates something: {error}"]
        raise UserError(*problems) from error


def special_ids(config: Json) -> dict[str, Any]:
    """Return the ids of the tokens that begin and end a text, and of padding, from config.json or
    its family."""
    keys = Keys(config, config["model_type"])
    return {key: keys[key] for key in IDS}


def _gpt2(keys: Keys) -> dict[str, Any]:
    require_layers_alike(keys, 0, keys["n_layer"])
    _require_own_heads(keys, keys["n_embd"] // keys["n_head"])
    return {
        "family": "gpt2",
        "layers": keys["n_layer"],
        "hidden": keys["n_embd"],
        "heads": keys["n_head"],
        "mlp": GELU[require(keys["activation_function"], "activation_function", tuple(GELU))],
        "ffn": 4 * keys["n_embd"] if keys["n_inner"] is None else keys["n_inner"],
        "vocab": keys["vocab_size"],
        "max_positions": keys["n_positions"],
        "norm_eps": keys["layer_norm_epsilon"],
        "tied": keys["tie_word_embeddings"],
        "dropout": keys["resid_pdrop"],
        "embedding_dropout": keys["embd_pdrop"],
        "attention_dropout": keys["attn_pdrop"],
    }


def _common(keys: Keys) -> dict[str, Any]:
    """Return the fields that all families with rotary positions share, except for positions."""
    return {
        "family": keys.kind.removesuffix("_moe").removesuffix("_text"),
        "layers": keys["num_hidden_layers"],
        "hidden": keys["hidden_size"],
        "heads": keys["num_attention_heads"],
        "ffn": keys["intermediate_size"],
        "vocab": keys["vocab_size"],
        "max_positions": keys["max_position_embeddings"],
        "tied": keys["tie_word_embeddings"],
        "attention_dropout": keys["attention_dropout"],
    }


def _neox(keys: Keys) -> dict[str, Any]:
    require_layers_alike(keys, 0, keys["num_hidden_layers"])
    _require_own_heads(keys, keys["hidden_size"] // keys["num_attention_heads"])
    base = keys["rotary_emb_base"]
    fraction = keys["rotary_pct"]
    bias = keys["attention_bias"]
    rotary = rope(keys, base, fraction, "rotary_emb_base")
    # transformers goes by rotary_emb_base and rotary_pct
    require(keys["rope_theta"], "rope_theta", (rotary["rope_base"], None))
    rotary_fraction = rotary["rotary_fraction"]
    require(keys["partial_rotary_factor"], "partial_rotary_factor", (rotary_fraction, None))
    return {
        **_common(keys),
        **rotary,
        "mlp": GELU[require(keys["hidden_act"], "hidden_act", tuple(GELU))],
        "norm_eps": keys["layer_norm_eps"],
        "qkv_bias": bias,
        "output_bias": bias,
        "parallel_residual": keys["use_parallel_residual"],
        "dropout": keys["hidden_dropout"],
    }


def _rms(keys: Keys) -> dict[str, Any]:
    """Return the fields that the families after Llama share."""
    require(keys["hidden_act"], "hidden_act", SILU)
    return {**_rotary_of_all_features(keys), **_rms_sizes(keys)}


def _rotary_of_all_features(keys: Keys) -> dict[str, Any]:
    """Return the fields of rotary positions. Raises UserError unless all features turn."""
    rotary = rope(keys, keys["rope_theta"])
    require(rotary["rotary_fraction"], "partial_rotary_factor", (1.0,))
    return rotary


def _rms_sizes(keys: Keys) -> dict[str, Any]:
    """Return the fields of families that turn all features of a head, except for positions and
    activation function."""
    require(keys["partial_rotary_factor"], "partial_rotary_factor", (1, 1.0, None))
    return _sizes(keys)


def _sizes(keys: Keys) -> dict[str, Any]:
    """Return the fields that the families after Llama share, except for positions and activation
    function."""
    heads = keys["num_attention_heads"]
    kv_heads = keys["num_key_value_heads"]
    head_dim = keys["head_dim"]
    return {
        **_common(keys),
        "kv_heads": heads if kv_heads is None else kv_heads,
        "head_dim": keys["hidden_size"] // heads if head_dim is None else head_dim,
        "norm_eps": keys["rms_norm_eps"],
    }


def _llama(keys: Keys) -> dict[str, Any]:
    require_layers_alike(keys, 0, keys["num_hidden_layers"])
    bias = keys["attention_bias"]
    return {**_rms(keys), "qkv_bias": bias, "output_bias": bias, "mlp_bias": keys["mlp_bias"]}


def _mistral(keys: Keys) -> dict[str, Any]:
    window = window_of(keys)
    require_layers_alike(keys, window, keys["num_hidden_layers"])
    return {**_rms(keys), "window": window}


def _qwen2(keys: Keys) -> dict[str, Any]:
    return {**_rms(keys), "qkv_bias": True, **windows_of(keys)}


def _qwen3(keys: Keys) -> dict[str, Any]:
    bias = keys["attention_bias"]
    return {**_rms(keys), "qkv_bias": bias, "output_bias": bias, **windows_of(keys)}


def _qwen3_moe(keys: Keys) -> dict[str, Any]:
    window = window_of(keys) if keys["use_sliding_window"] else 0
    require_layers_alike(keys, window, keys["num_hidden_layers"])
    if keys["sliding_window"] is not None and window:
        # transformers gives the window to all layers
        require(keys["max_window_layers"], "max_window_layers", (0, None))
    keys.mark_read("max_window_layers")
    return {**_rms(keys), **_attention_biases(keys), "window": window, **qwen_experts(keys)}


def _qwen2_moe(keys: Keys) -> dict[str, Any]:
    # versions of transformers differ in what that means
    if keys["use_sliding_window"] and keys["layer_types"] is None:
        raise UserError.of("convert.hf_qwen2_moe_window")
    return {
        **_rms(keys),
        **windows_of(keys),
        "qkv_bias": keys["qkv_bias"],
        **qwen_experts(keys, shared=True),
    }


def _glm4_moe(keys: Keys) -> dict[str, Any]:
    """Return the fields of GLM-4.5; layers for multi-token prediction are not read, which a note
    says."""
    require(keys["hidden_act"], "hidden_act", SILU)
    require_layers_alike(keys, 0, keys["num_hidden_layers"])
    fraction = keys["partial_rotary_factor"]
    layers = keys["num_hidden_layers"]
    first = keys["first_k_dense_replace"]
    # Several shared experts compute what one of their widths together does.
    shared = keys["n_shared_experts"] * keys["moe_intermediate_size"]
    if first >= layers:
        raise UserError.of("convert.hf_glm4_dense_layers", first=first, layers=layers)
    if not shared > 0:
        raise UserError.of("convert.hf_shared_experts", n_shared_experts=keys["n_shared_experts"])
    router = {"score": "sigmoid", "correction": True}
    return {
        **_sizes(keys),
        **rope(keys, keys["rope_theta"], 1.0 if fraction is None else fraction),
        "family": "glm4_moe",
        "mtp_layers": keys["num_mtp_layers"] or 0,
        "qkv_bias": keys["attention_bias"],
        "output_bias": False,
        "qk_norm": keys["use_qk_norm"],
        "experts": keys["n_routed_experts"],
        "experts_per_token": keys["num_experts_per_tok"],
        "norm_topk": keys["norm_topk_prob"],
        "shared_experts": shared,
        "router_aux_loss": 0.0,
        **feed_forwards(keys, list(range(first))),
        "router": {**router, **by_groups(keys), "scale": float(keys["routed_scaling_factor"])},
    }


def _olmo2(keys: Keys) -> dict[str, Any]:
    require_layers_alike(keys, 0, keys["num_hidden_layers"])
    return {**_rms(keys), **_attention_biases(keys)}


def _olmo3(keys: Keys) -> dict[str, Any]:
    require(keys["hidden_act"], "hidden_act", SILU)
    windows = windows_by_type(keys, 4)
    # transformers takes rope_theta for the layers without the window only
    default_base = DEFAULTS[keys.kind]["rope_theta"]
    rotary = rope_by_layer(keys, keys["rope_theta"], default_base, windows)
    return {**_rms_sizes(keys), **rotary, **windows, **_attention_biases(keys)}


def _gemma3(keys: Keys) -> dict[str, Any]:
    """Return the fields of Gemma 3's text model; the norms and the scale of embeddings follow from
    the family."""
    require(GELU.get(keys["hidden_activation"]), "hidden_activation", ("gelu",))
    windows = windows_by_type(keys, keys["sliding_window_pattern"])
    rotary = rope_by_layer(keys, keys["rope_theta"], keys["rope_local_base_freq"], windows)
    return {
        "attention_scalar": float(keys["query_pre_attn_scalar"]),
        **_rms_sizes(keys),
        **rotary,
        **windows,
        **_attention_biases(keys),
    }


def _deepseek(keys: Keys) -> dict[str, Any]:
    """Return the fields of DeepSeek-V2 and V3; the norms of latents have their own epsilon, that of
    the class."""
    _require_latent_sizes(keys)
    heads = keys["num_attention_heads"]
    rope_dim = keys["qk_rope_head_dim"]
    nope_dim = keys["qk_nope_head_dim"]
    require(keys["num_key_value_heads"], "num_key_value_heads", (heads, None))
    # their classes put the width that turns there
    require(keys["head_dim"], "head_dim", (rope_dim, None))
    require(keys["qk_head_dim"], "qk_head_dim", (rope_dim + nope_dim, None))
    require(keys["hidden_act"], "hidden_act", SILU)
    require(keys["partial_rotary_factor"], "partial_rotary_factor", (1, 1.0, None))
    rotary = _rotary_of_all_features(keys)
    latent = {
        "kv_rank": keys["kv_lora_rank"],
        "query_rank": keys["q_lora_rank"] or 0,
        "rope_dim": rope_dim,
        "nope_dim": nope_dim,
        "value_dim": keys["v_head_dim"],
    }
    keys.mark_read("num_mtp_layers")  # of DeepSeek-V3; `notes` says that V2 has none
    return {
        **_common(keys),
        **rotary,
        **_attention_biases(keys),
        "latent": latent,
        "norm_eps": keys["rms_norm_eps"],
    }


def _require_latent_sizes(keys: Keys) -> None:
    """Raise UserError for sizes with which there is no latent attention."""
    for key in (
        "q_lora_rank",
        "kv_lora_rank",
        "qk_rope_head_dim",
        "qk_nope_head_dim",
        "v_head_dim",
    ):
        # Queries may have no latent.
        if keys[key] == 0 or (keys[key] is None and key != "q_lora_rank"):
            raise UserError.of("convert.hf_no_latent", key=key, keys=keys[key])
    if keys["qk_rope_head_dim"] % 2:
        raise UserError.of("convert.hf_rotary_odd", qk_rope_head_dim=keys["qk_rope_head_dim"])


def _deepseek_v2(keys: Keys) -> dict[str, Any]:
    """Return the fields of DeepSeek-V2, whose weights of a token's experts transformers never
    normalizes."""
    fields = {**_deepseek(keys), "mlp_bias": keys["mlp_bias"]}
    method = keys["topk_method"]
    normalized = keys["norm_topk_prob"]
    experts_fields = _deepseek_experts(keys)
    groups = keys["n_group"]
    chosen_groups = keys["topk_group"]
    if not experts_fields["experts"]:
        return {**fields, **experts_fields}
    require(normalized, "norm_topk_prob", (False, None))
    router: dict[str, Any] = {"score": "softmax", "scale": float(keys["routed_scaling_factor"])}
    if require(method, "topk_method", ("greedy", "group_limited_greedy")) != "greedy":
        _require_groups(groups, chosen_groups)
        router |= by_groups(keys, 1)
    return {**fields, **experts_fields, "router": router}


def _deepseek_v3(keys: Keys) -> dict[str, Any]:
    # the order of rows, by which they are read
    require(keys["rope_interleave"], "rope_interleave", (True, False))
    fields = _deepseek(keys)
    experts_fields = _deepseek_experts(keys)
    normalized = keys["norm_topk_prob"]
    fields["mtp_layers"] = keys["num_mtp_layers"] or 0
    scale = keys["routed_scaling_factor"]
    groups = keys["n_group"]
    chosen_groups = keys["topk_group"]
    if not experts_fields["experts"]:
        return {**fields, **experts_fields}
    # The class of V3 always chooses among groups.
    _require_groups(groups, chosen_groups)
    router = {"score": "sigmoid", "correction": True, "scale": float(scale), **by_groups(keys)}
    return {**fields, **experts_fields, "norm_topk": bool(normalized), "router": router}


def _require_groups(groups: Any, chosen: Any) -> None:
    if not all(type(number) is int for number in (groups, chosen)):
        raise UserError.of("convert.hf_groups_not_numbers", groups=groups, chosen=chosen)


def _deepseek_experts(keys: Keys) -> dict[str, Any]:
    """Return the fields of experts and feed-forwards; of a model none of whose layers has experts,
    experts = 0."""
    shared = keys["n_shared_experts"]
    dense = keys["first_k_dense_replace"]
    scale = keys["routed_scaling_factor"]
    routed = {**experts(keys, keys["n_routed_experts"], keys["aux_loss_alpha"]), "norm_topk": False}
    fields = feed_forwards(keys, list(range(min(dense, keys["num_hidden_layers"]))))
    if "experts" in fields:
        return fields
    if not shared or not scale:
        raise UserError.of("convert.hf_deepseek_experts", shared=shared, scale=scale)
    return {**routed, **fields, "shared_experts": shared * keys["moe_intermediate_size"]}


def _gemma2(keys: Keys) -> dict[str, Any]:
    """Return the fields of Gemma 2; the norms and the scale of embeddings follow from the
    family."""
    require(GELU.get(keys["hidden_activation"]), "hidden_activation", ("gelu",))
    return {
        **_rotary_of_all_features(keys),
        **_rms_sizes(keys),
        **windows_by_type(keys, 2),
        **_attention_biases(keys),
        "attention_scalar": float(keys["query_pre_attn_scalar"]),
        "attention_softcap": _softcap(keys, "attn_logit_softcapping"),
        "final_softcap": _softcap(keys, "final_logit_softcapping"),
    }


def _softcap(keys: Keys, key: str) -> float:
    """Return a soft cap; null there is 0 here."""
    cap = keys[key]
    if cap is not None and not cap > 0:
        raise UserError.of("convert.hf_softcap_zero", key=key, cap=cap)
    return float(cap or 0)


def _gpt_oss(keys: Keys) -> dict[str, Any]:
    """Return the fields of gpt-oss; sinks, activation and biases of experts follow from the
    family."""
    # transformers' class has YaRN where the file says nothing.
    if keys.stated.get("rope_scaling") is None and keys.stated.get("rope_parameters") is None:
        keys.stated["rope_parameters"] = dict(GPT_OSS_ROPE)
    fields = {
        **_rms(keys),
        **windows_by_type(keys, 2),
        **_attention_biases(keys),
        **experts(keys, keys["num_local_experts"], keys["router_aux_loss_coef"]),
    }
    # transformers ignores these two
    original_length = fields["rope_scaling"].get(ORIGINAL)
    require(keys["initial_context_length"], "initial_context_length", (original_length, None))
    require(keys["experts_per_token"], "experts_per_token", (fields["experts_per_token"], None))
    return {
        **fields,
        "swiglu_alpha": float(keys["swiglu_alpha"]),
        "swiglu_limit": float(keys["swiglu_limit"]),
    }


def _attention_biases(keys: Keys) -> dict[str, Any]:
    return dict.fromkeys(("qkv_bias", "output_bias"), keys["attention_bias"])


def _mixtral(keys: Keys) -> dict[str, Any]:
    return {
        **_mistral(keys),
        **experts(keys, keys["num_local_experts"], keys["router_aux_loss_coef"]),
    }


def _require_own_heads(keys: Keys, width: int) -> None:
    """Check families that do not read head_dim."""
    keys.mark_read("head_dim")
    require(keys.stated.get("head_dim"), "head_dim", (width, None))


_READERS: dict[str, Callable[[Keys], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "gpt_neox": _neox,
    "llama": _llama,
    "mistral": _mistral,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
}
