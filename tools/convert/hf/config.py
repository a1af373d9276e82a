"""The model of a Hugging Face config.json.

Every key of the file is read here, known not to matter, or refused by name (`keys`). A setting that
one side has and the other cannot express is an error, never dropped.
"""

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from megaprec.errors import UserError
from models.config import ModelConfig
from models.rope import ORIGINAL
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
        found = [
            e for e in error.errors(include_url=False) if e["type"] != "default_factory_not_called"
        ]
        raise UserError(
            *(
                (
                    f"{origin}: "
                    f"{' '.join((*map(str, e['loc']), e['msg'].removeprefix('Value error, ')))}"
                )
                for e in found
            )
        ) from error


def from_hugging_face(config: Json) -> ModelConfig:
    """Return the model of a config.json. Raises UserError for an unknown architecture, key or
    value."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _READERS:
        raise UserError(f"model_type {kind!r} is not known: there are {', '.join(_READERS)}")
    keys = Keys(config, kind)
    try:
        require_readable(keys)
        fields = _READERS[kind](keys) | {"init_std": keys["initializer_range"]}
        for key in IDS:
            keys[key]  # `special_ids` has them
        if unread := list(keys.unread()):
            raise UserError(*unread)
        return make_model(fields, "config.json")
    except UserError as error:
        raise UserError(*(keys.nulls() or error.problems)) from error
    except (TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        stated = keys.nulls() or [f"config.json of a {kind} model misstates something: {error}"]
        raise UserError(*stated) from error


def special_ids(config: Json) -> dict[str, Any]:
    """Return the ids of the tokens that begin and end a text, and of padding, from config.json or
    its family."""
    keys = Keys(config, config["model_type"])
    return {key: keys[key] for key in IDS}


def _gpt2(c: Keys) -> dict[str, Any]:
    require_layers_alike(c, 0, c["n_layer"])
    _require_own_heads(c, c["n_embd"] // c["n_head"])
    return {
        "family": "gpt2",
        "layers": c["n_layer"],
        "hidden": c["n_embd"],
        "heads": c["n_head"],
        "mlp": GELU[require(c["activation_function"], "activation_function", tuple(GELU))],
        "ffn": 4 * c["n_embd"] if c["n_inner"] is None else c["n_inner"],
        "vocab": c["vocab_size"],
        "max_positions": c["n_positions"],
        "norm_eps": c["layer_norm_epsilon"],
        "tied": c["tie_word_embeddings"],
        "dropout": c["resid_pdrop"],
        "embedding_dropout": c["embd_pdrop"],
        "attention_dropout": c["attn_pdrop"],
    }


def _common(c: Keys) -> dict[str, Any]:
    """Return the fields that all families with rotary positions share, except for positions."""
    return {
        "family": c.kind.removesuffix("_moe").removesuffix("_text"),
        "layers": c["num_hidden_layers"],
        "hidden": c["hidden_size"],
        "heads": c["num_attention_heads"],
        "ffn": c["intermediate_size"],
        "vocab": c["vocab_size"],
        "max_positions": c["max_position_embeddings"],
        "tied": c["tie_word_embeddings"],
        "attention_dropout": c["attention_dropout"],
    }


def _neox(c: Keys) -> dict[str, Any]:
    require_layers_alike(c, 0, c["num_hidden_layers"])
    _require_own_heads(c, c["hidden_size"] // c["num_attention_heads"])
    base = c["rotary_emb_base"]
    fraction = c["rotary_pct"]
    bias = c["attention_bias"]
    turned = rope(c, base, fraction, "rotary_emb_base")
    for key, used in (
        ("rope_theta", turned["rope_base"]),
        ("partial_rotary_factor", turned["rotary_fraction"]),
    ):
        require(c[key], key, (used, None))  # transformers goes by rotary_emb_base and rotary_pct
    return {
        **_common(c),
        **turned,
        "mlp": GELU[require(c["hidden_act"], "hidden_act", tuple(GELU))],
        "norm_eps": c["layer_norm_eps"],
        "qkv_bias": bias,
        "output_bias": bias,
        "parallel_residual": c["use_parallel_residual"],
        "dropout": c["hidden_dropout"],
    }


def _rms(c: Keys) -> dict[str, Any]:
    """Return the fields that the families after Llama share."""
    require(c["hidden_act"], "hidden_act", SILU)
    turned = rope(c, c["rope_theta"])
    require(turned["rotary_fraction"], "partial_rotary_factor", (1.0,))
    return {**_rms_sizes(c), **turned}


def _rms_sizes(c: Keys) -> dict[str, Any]:
    """Return the fields of families that turn all features of a head, except for positions and
    activation function."""
    require(c["partial_rotary_factor"], "partial_rotary_factor", (1, 1.0, None))
    return _sizes(c)


def _sizes(c: Keys) -> dict[str, Any]:
    """Return the fields that the families after Llama share, except for positions and activation
    function."""
    kv_heads = c["num_key_value_heads"]
    head_dim = c["head_dim"]
    return {
        **_common(c),
        "kv_heads": c["num_attention_heads"] if kv_heads is None else kv_heads,
        "head_dim": c["hidden_size"] // c["num_attention_heads"] if head_dim is None else head_dim,
        "norm_eps": c["rms_norm_eps"],
    }


def _llama(c: Keys) -> dict[str, Any]:
    require_layers_alike(c, 0, c["num_hidden_layers"])
    bias = c["attention_bias"]
    return {**_rms(c), "qkv_bias": bias, "output_bias": bias, "mlp_bias": c["mlp_bias"]}


def _mistral(c: Keys) -> dict[str, Any]:
    window = window_of(c)
    require_layers_alike(c, window, c["num_hidden_layers"])
    return {**_rms(c), "window": window}


def _qwen2(c: Keys) -> dict[str, Any]:
    return {**_rms(c), "qkv_bias": True, **windows_of(c)}


def _qwen3(c: Keys) -> dict[str, Any]:
    bias = c["attention_bias"]
    return {**_rms(c), "qkv_bias": bias, "output_bias": bias, **windows_of(c)}


def _qwen3_moe(c: Keys) -> dict[str, Any]:
    window = window_of(c) if c["use_sliding_window"] else 0
    require_layers_alike(c, window, c["num_hidden_layers"])
    if c["sliding_window"] is not None and window:
        # transformers gives the window to all layers
        require(c["max_window_layers"], "max_window_layers", (0, None))
    c.asked.add("max_window_layers")
    return {**_rms(c), **_attention_biases(c), "window": window, **qwen_experts(c)}


def _qwen2_moe(c: Keys) -> dict[str, Any]:
    if (
        c["use_sliding_window"] and c["layer_types"] is None
    ):  # versions of transformers differ in what that means
        raise UserError(
            "config.json has use_sliding_window = true: give layer_types, the layers that "
            "have the window"
        )
    return {**_rms(c), **windows_of(c), "qkv_bias": c["qkv_bias"], **qwen_experts(c, shared=True)}


def _glm4_moe(c: Keys) -> dict[str, Any]:
    """Return the fields of GLM-4.5; layers for multi-token prediction are not read, which a note
    says."""
    require(c["hidden_act"], "hidden_act", SILU)
    require_layers_alike(c, 0, c["num_hidden_layers"])
    fraction = c["partial_rotary_factor"]
    layers = c["num_hidden_layers"]
    first = c["first_k_dense_replace"]
    shared = c["n_shared_experts"] * c["moe_intermediate_size"]
    if first >= layers:
        raise UserError(
            f"config.json has first_k_dense_replace = {first}: none of {layers} layers has experts"
        )
    if not shared > 0:
        raise UserError(
            f"config.json has n_shared_experts = {c['n_shared_experts']}, of which only 1 or "
            "more is known"
        )
    return {
        **_sizes(c),
        **rope(c, c["rope_theta"], 1.0 if fraction is None else fraction),
        "family": "glm4_moe",
        "mtp_layers": c["num_mtp_layers"] or 0,
        "qkv_bias": c["attention_bias"],
        "output_bias": False,
        "qk_norm": c["use_qk_norm"],
        "experts": c["n_routed_experts"],
        "experts_per_token": c["num_experts_per_tok"],
        "norm_topk": c["norm_topk_prob"],
        "shared_experts": shared,
        "router_aux_loss": 0.0,
        **feed_forwards(c, list(range(first))),
        "router": by_groups(c)
        | {"score": "sigmoid", "correction": True, "scale": float(c["routed_scaling_factor"])},
    }


def _olmo2(c: Keys) -> dict[str, Any]:
    require_layers_alike(c, 0, c["num_hidden_layers"])
    return {**_rms(c), **_attention_biases(c)}


def _olmo3(c: Keys) -> dict[str, Any]:
    require(c["hidden_act"], "hidden_act", SILU)
    windows = windows_by_type(c, 4)
    # transformers takes rope_theta for the layers without the window only
    usual = DEFAULTS[c.kind]["rope_theta"]
    turned = rope_by_layer(c, c["rope_theta"], usual, windows)
    return {**_rms_sizes(c), **turned, **windows, **_attention_biases(c)}


def _gemma3(c: Keys) -> dict[str, Any]:
    """Return the fields of Gemma 3's text model; the norms and the scale of embeddings follow from
    the family."""
    require(GELU.get(c["hidden_activation"]), "hidden_activation", ("gelu",))
    windows = windows_by_type(c, c["sliding_window_pattern"])
    turned = rope_by_layer(c, c["rope_theta"], c["rope_local_base_freq"], windows)
    scalar = float(c["query_pre_attn_scalar"])
    return {
        **_rms_sizes(c),
        **turned,
        **windows,
        **_attention_biases(c),
        "attention_scalar": scalar,
    }


def _deepseek(c: Keys) -> dict[str, Any]:
    """Return the fields of DeepSeek-V2 and V3; the norms of latents have their own epsilon, that of
    the class."""
    for key in (
        "q_lora_rank",
        "kv_lora_rank",
        "qk_rope_head_dim",
        "qk_nope_head_dim",
        "v_head_dim",
    ):
        if c[key] == 0 or (c[key] is None and key != "q_lora_rank"):
            raise UserError(
                f"config.json has {key} = {c[key]}, with which there is no latent attention"
            )
    if c["qk_rope_head_dim"] % 2:
        raise UserError(
            f"config.json has qk_rope_head_dim = {c['qk_rope_head_dim']}: rotary positions "
            "rotate pairs"
        )
    heads = c["num_attention_heads"]
    turning = c["qk_rope_head_dim"]
    still = c["qk_nope_head_dim"]
    require(c["num_key_value_heads"], "num_key_value_heads", (heads, None))
    # their classes put the width that turns there
    require(c["head_dim"], "head_dim", (turning, None))
    require(c["qk_head_dim"], "qk_head_dim", (turning + still, None))
    require(c["hidden_act"], "hidden_act", SILU)
    require(c["partial_rotary_factor"], "partial_rotary_factor", (1, 1.0, None))
    turned = rope(c, c["rope_theta"])
    require(turned["rotary_fraction"], "partial_rotary_factor", (1.0,))
    latent = {
        "kv_rank": c["kv_lora_rank"],
        "query_rank": c["q_lora_rank"] or 0,
        "rope_dim": turning,
        "nope_dim": still,
        "value_dim": c["v_head_dim"],
    }
    c["num_mtp_layers"]  # of DeepSeek-V3; `notes` says that V2 has none
    return {
        **_common(c),
        **turned,
        **_attention_biases(c),
        "latent": latent,
        "norm_eps": c["rms_norm_eps"],
    }


def _deepseek_v2(c: Keys) -> dict[str, Any]:
    """Return the fields of DeepSeek-V2, whose weights of a token's experts transformers never
    normalizes."""
    fields = {**_deepseek(c), "mlp_bias": c["mlp_bias"]}
    method = c["topk_method"]
    normalized = c["norm_topk_prob"]
    routed = _deepseek_experts(c)
    groups = c["n_group"]
    limits = c["topk_group"]
    if not routed["experts"]:
        return {**fields, **routed}
    require(normalized, "norm_topk_prob", (False, None))
    grouped = require(method, "topk_method", ("greedy", "group_limited_greedy")) != "greedy"
    if grouped:
        _require_groups(groups, limits)
    router = {"score": "softmax", "scale": float(c["routed_scaling_factor"])}
    return {**fields, **routed, "router": router | (by_groups(c, 1) if grouped else {})}


def _deepseek_v3(c: Keys) -> dict[str, Any]:
    # the order of rows, by which they are read
    require(c["rope_interleave"], "rope_interleave", (True, False))
    fields = _deepseek(c)
    routed = _deepseek_experts(c)
    normalized = c["norm_topk_prob"]
    fields["mtp_layers"] = c["num_mtp_layers"] or 0
    scale = c["routed_scaling_factor"]
    groups = c["n_group"]
    limits = c["topk_group"]
    if not routed["experts"]:
        return {**fields, **routed}
    _require_groups(groups, limits)
    router = {"score": "sigmoid", "correction": True, "scale": float(scale), **by_groups(c)}
    return {**fields, **routed, "norm_topk": bool(normalized), "router": router}


def _require_groups(groups: Any, limits: Any) -> None:
    if not all(type(number) is int for number in (groups, limits)):
        raise UserError(
            f"config.json has n_group = {groups} and topk_group = {limits}: both must be numbers"
        )


def _deepseek_experts(c: Keys) -> dict[str, Any]:
    """Return the fields of experts and feed-forwards; of a model none of whose layers has experts,
    experts = 0."""
    shared = c["n_shared_experts"]
    dense = c["first_k_dense_replace"]
    scale = c["routed_scaling_factor"]
    routed = {**experts(c, c["n_routed_experts"], c["aux_loss_alpha"]), "norm_topk": False}
    fields = feed_forwards(c, list(range(min(dense, c["num_hidden_layers"]))))
    if "experts" in fields:
        return fields
    if not shared or not scale:
        raise UserError(
            f"config.json has n_shared_experts = {shared} and routed_scaling_factor = "
            f"{scale}: give both"
        )
    return {**routed, **fields, "shared_experts": shared * c["moe_intermediate_size"]}


def _gemma2(c: Keys) -> dict[str, Any]:
    """Return the fields of Gemma 2; the norms and the scale of embeddings follow from the
    family."""
    require(GELU.get(c["hidden_activation"]), "hidden_activation", ("gelu",))
    turned = rope(c, c["rope_theta"])
    require(turned["rotary_fraction"], "partial_rotary_factor", (1.0,))
    return {
        **_rms_sizes(c),
        **turned,
        **windows_by_type(c, 2),
        **_attention_biases(c),
        "attention_scalar": float(c["query_pre_attn_scalar"]),
        "attention_softcap": _softcap(c, "attn_logit_softcapping"),
        "final_softcap": _softcap(c, "final_logit_softcapping"),
    }


def _softcap(c: Keys, key: str) -> float:
    """Return a soft cap; null there is 0 here."""
    cap = c[key]
    if cap is not None and not cap > 0:
        raise UserError(f"config.json has {key} = {cap}, with which nothing is left: null is none")
    return float(cap or 0)


def _gpt_oss(c: Keys) -> dict[str, Any]:
    """Return the fields of gpt-oss; sinks, activation and biases of experts follow from the
    family."""
    if c.given.get("rope_scaling") is None and c.given.get("rope_parameters") is None:
        c.given["rope_parameters"] = dict(GPT_OSS_ROPE)
    fields = {
        **_rms(c),
        **windows_by_type(c, 2),
        **_attention_biases(c),
        **experts(c, c["num_local_experts"], c["router_aux_loss_coef"]),
    }
    scaling = fields["rope_scaling"]
    said = (
        ("initial_context_length", scaling.get(ORIGINAL)),
        ("experts_per_token", fields["experts_per_token"]),
    )
    for key, used in said:  # transformers ignores them
        require(c[key], key, (used, None))
    return {
        **fields,
        "swiglu_alpha": float(c["swiglu_alpha"]),
        "swiglu_limit": float(c["swiglu_limit"]),
    }


def _attention_biases(c: Keys) -> dict[str, Any]:
    return dict.fromkeys(("qkv_bias", "output_bias"), c["attention_bias"])


def _mixtral(c: Keys) -> dict[str, Any]:
    return {**_mistral(c), **experts(c, c["num_local_experts"], c["router_aux_loss_coef"])}


def _require_own_heads(c: Keys, width: int) -> None:
    """Check families that do not read head_dim."""
    c.asked.add("head_dim")
    require(c.given.get("head_dim"), "head_dim", (width, None))


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
