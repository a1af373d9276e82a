"""The model of a Hugging Face config.json.

Every key of the file is read here, known not to matter, or refused by name (`keys`). A setting that one side has and
the other cannot express is an error, never dropped.
"""

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from megaprec.errors import UserError
from models.config import ModelConfig
from tools.convert.hf.keys import Keys, require
from tools.convert.hf.rope import rope

GELU = {
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_python_tanh"), "gelu"),
    **dict.fromkeys(("gelu", "gelu_python"), "gelu_exact"),
}
SILU = ("silu", "swish")
LAYER_TYPES = {"full_attention": False, "attention": False, "sliding_attention": True}
Json = Mapping[str, Any]


def make_model(fields: Json, origin: str) -> ModelConfig:
    """Return the model with these fields. Raises UserError that names `origin` if they do not make one."""
    try:
        return ModelConfig(**fields)
    except ValidationError as error:
        found = error.errors(include_url=False)
        raise UserError(
            *(f"{origin}: {' '.join((*map(str, e['loc']), e['msg'].removeprefix('Value error, ')))}" for e in found)
        ) from error


def from_hugging_face(config: Json) -> ModelConfig:
    """Return the model of a config.json. Raises UserError for an unknown architecture, key or value."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _READERS:
        raise UserError(f"model_type {kind!r} is not known: there are {', '.join(_READERS)}")
    keys = Keys(config, kind)
    try:
        fields = _READERS[kind](keys) | {"init_std": keys["initializer_range"]}
    except UserError:
        raise
    except (TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        raise UserError(f"config.json of a {kind} model misstates something: {error}") from error
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        keys[key]  # `special_ids` has them
    if unread := list(keys.unread()):
        raise UserError(*unread)
    return make_model(fields, "config.json")


def special_ids(config: Json) -> dict[str, Any]:
    """Return the ids of the tokens that begin and end a text, and of padding, from config.json or its family."""
    keys = Keys(config, config["model_type"])
    return {key: keys[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}


def _gpt2(c: Keys) -> dict[str, Any]:
    _require_layers_alike(c, 0, c["n_layer"])
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
        "family": c.kind.removesuffix("_moe"),
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
    _require_layers_alike(c, 0, c["num_hidden_layers"])
    _require_own_heads(c, c["hidden_size"] // c["num_attention_heads"])
    base, fraction, bias = c["rotary_emb_base"], c["rotary_pct"], c["attention_bias"]
    turned = rope(c, base, fraction, "rotary_emb_base")
    for key, used in (("rope_theta", turned["rope_base"]), ("partial_rotary_factor", turned["rotary_fraction"])):
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
    require(c["partial_rotary_factor"], "partial_rotary_factor", (1, 1.0, None))
    kv_heads, head_dim = c["num_key_value_heads"], c["head_dim"]
    turned = rope(c, c["rope_theta"])
    require(turned["rotary_fraction"], "partial_rotary_factor", (1.0,))
    return {
        **_common(c),
        **turned,
        "kv_heads": c["num_attention_heads"] if kv_heads is None else kv_heads,
        "head_dim": c["hidden_size"] // c["num_attention_heads"] if head_dim is None else head_dim,
        "norm_eps": c["rms_norm_eps"],
    }


def _llama(c: Keys) -> dict[str, Any]:
    _require_layers_alike(c, 0, c["num_hidden_layers"])
    bias = c["attention_bias"]
    return {**_rms(c), "qkv_bias": bias, "output_bias": bias, "mlp_bias": c["mlp_bias"]}


def _mistral(c: Keys) -> dict[str, Any]:
    window = _window(c)
    _require_layers_alike(c, window, c["num_hidden_layers"])
    return {**_rms(c), "window": window}


def _qwen2(c: Keys) -> dict[str, Any]:
    return {**_rms(c), "qkv_bias": True, **_windows(c)}


def _qwen3(c: Keys) -> dict[str, Any]:
    bias = c["attention_bias"]
    return {**_rms(c), "qkv_bias": bias, "output_bias": bias, **_windows(c)}


def _qwen3_moe(c: Keys) -> dict[str, Any]:
    """Return the fields of Qwen 3 MoE; the width of a feed-forward without experts is read and ignored, for there
    is none.
    """
    window, bias = _window(c) if c["use_sliding_window"] else 0, c["attention_bias"]
    _require_layers_alike(c, window, c["num_hidden_layers"])
    if c["sliding_window"] is not None and window:
        require(c["max_window_layers"], "max_window_layers", (0, None))  # transformers gives the window to all layers
    c.asked.add("max_window_layers")
    return {
        **_rms(c),
        "ffn": c["moe_intermediate_size"],
        "qkv_bias": bias,
        "output_bias": bias,
        "window": window,
        **_experts(c, c["num_experts"]),
        "norm_topk": c["norm_topk_prob"],
    }


def _mixtral(c: Keys) -> dict[str, Any]:
    return {**_mistral(c), **_experts(c, c["num_local_experts"])}


def _experts(c: Keys, number: Any) -> dict[str, Any]:
    aux = c["router_aux_loss_coef"]
    return {"experts": number, "experts_per_token": c["num_experts_per_tok"], "router_aux_loss": aux}


def _window(c: Keys) -> Any:
    """Return sliding_window; null there is 0 here."""
    window = c["sliding_window"]
    if window == 0:
        raise UserError("config.json has sliding_window = 0, with which no token attends to anything: null is none")
    if c.has("use_sliding_window") and c.kind in ("mistral", "mixtral"):
        require(c.given["use_sliding_window"], "use_sliding_window", (window is not None,))
        c.asked.add("use_sliding_window")
    return window or 0


def _windows(c: Keys) -> dict[str, Any]:
    """Return Qwen's window and its layers: those of layer_types, otherwise those from a certain one on."""
    window, layers = _window(c) if c["use_sliding_window"] else 0, c["num_hidden_layers"]
    c.asked.add("sliding_window")
    first, types = c["max_window_layers"], c["layer_types"]
    has = [number >= first for number in range(layers)] if types is None else _types(types, layers)
    if types is not None and any(has) and not window:
        raise UserError("config.json has layer_types with sliding_attention, but no sliding_window that is in use")
    chosen = tuple(number for number, one in enumerate(has) if one) if window else ()
    return {"window": window if chosen else 0, "window_layers": () if len(chosen) == layers else chosen}


def _types(types: Any, layers: int) -> list[bool]:
    """Return the layers that have the window."""
    if not isinstance(types, list) or len(types) != layers:
        raise UserError(f"config.json has layer_types of {len(types)} layers, but num_hidden_layers = {layers}")
    return [LAYER_TYPES[require(one, "layer_types", tuple(LAYER_TYPES))] for one in types]


def _require_layers_alike(c: Keys, window: Any, layers: int) -> None:
    """Check families whose layers transformers treats alike, whatever layer_types says."""
    types = c["layer_types"]
    if types is not None and set(_types(types, layers)) - {window > 0}:
        alike = "sliding_attention" if window else "full_attention"
        raise UserError(f"config.json has layer_types, but transformers gives all layers of a {c.kind} model {alike}")


def _require_own_heads(c: Keys, width: int) -> None:
    """Check families that do not read head_dim."""
    c.asked.add("head_dim")
    require(c.given.get("head_dim"), "head_dim", (width, None))


_READERS: dict[str, Callable[[Keys], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "gpt_neox": _neox,
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
}
