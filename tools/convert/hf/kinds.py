"""The kinds of values in a config.json: what a key holds is of the same kind as its default.

Python would take much that transformers does not: text as a number, any text as true. So a value of
another kind is refused by the name of its key before anything is read. Null is not judged here:
some keys may be null, and if a model cannot be made, `nulls` names those that may not.
"""

from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any

from tools.convert.hf.defaults import ALIASES, DEFAULTS

Json = Mapping[str, Any]

IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Keys whose default is null in some family, or a number of another kind than others may be.
_KINDS = {
    **dict.fromkeys(
        (
            "head_dim",
            "n_inner",
            "qk_head_dim",
            "num_key_value_heads",
            "sliding_window",
            "n_group",
            "topk_group",
            "num_experts_per_tok",
            "original_max_position_embeddings",
            "initial_context_length",
            "experts_per_token",
        ),
        int,
    ),
    **dict.fromkeys(("rope_theta", "partial_rotary_factor", "query_pre_attn_scalar"), float),
    **dict.fromkeys(("layer_types", "mlp_only_layers"), list),
}
_MAY_BE_NULL = (
    "num_key_value_heads",
    "sliding_window",
    "head_dim",
    "q_lora_rank",
    "num_mtp_layers",
    "partial_rotary_factor",
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "router_jitter_noise",
)
_ABOVE_0 = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "n_embd",
    "n_layer",
    "n_head",
    "n_positions",
    "num_experts_per_tok",
    "decoder_sparse_step",
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "initializer_range",
    "query_pre_attn_scalar",
    "swiglu_alpha",
    "swiglu_limit",
)
_LAYERS = ("num_hidden_layers", "n_layer", "num_mtp_layers", "num_nextn_predict_layers")
MOST_LAYERS = 4096  # as `model.layers`; layers are listed before a model is made
SHORT = 60  # characters of a value that is shown in a line
_DESCRIPTIONS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number, 0 or more",
    float: "a number, 0 or more",
    str: "text",
    list: "a list",
}


def wrong_kinds(config: Json, family: str) -> Iterator[str]:
    """Yield a line for each value in a config.json that is of another kind than its key."""
    for key, value in config.items():
        if value is None:
            continue
        problem = _problem_of_ids(value) if key in IDS else _problem_of_kind(key, value, family)
        if problem:
            yield f"config.json has {key} = {short(value)}: it must be {problem}"


def _problem_of_ids(value: Any) -> str:
    """Return what the id of a special token must be; "" if it is."""
    ids = value if isinstance(value, list) else [value]
    return "" if all(type(token_id) is int for token_id in ids) else "the number of a token"


def _problem_of_kind(key: str, value: Any, family: str) -> str:
    """Return what the value of a key must be; "" if it is, or if the key is none of the family."""
    name = ALIASES.get(family, {}).get(key, key)
    if name not in DEFAULTS[family]:
        return ""
    kind = _KINDS.get(key, type(DEFAULTS[family][name]))
    if kind not in _DESCRIPTIONS:
        return ""
    if not _is_of_kind(value, kind):
        return _DESCRIPTIONS[kind]
    if key in _ABOVE_0 and not value:
        return "above 0"
    if kind is int and key in _LAYERS and value > MOST_LAYERS:
        return f"at most {MOST_LAYERS}"
    return ""


def nulls(config: Json, family: str, read_keys: set[str]) -> Iterator[str]:
    """Yield a line for each null that was read though its key has to have a value."""
    for key in sorted(read_keys - {*_MAY_BE_NULL, *IDS}):
        if key in config and config[key] is None and DEFAULTS[family].get(key) is not None:
            yield f"config.json has {key} = null: give it a value"


def short(value: Any) -> str:
    """Return a value as it is shown in a line."""
    printed = repr(value)
    return printed if len(printed) <= SHORT else f"{printed[: SHORT - 3]}..."


def _is_of_kind(value: Any, kind: type) -> bool:
    """Return True if a value is of a kind; true is no number, and no number is below 0."""
    if kind in (bool, str, list):
        return isinstance(value, kind)
    numbers = (int,) if kind is int else (int, float)
    return type(value) in numbers and isfinite(value) and value >= 0
