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
        ("head_dim", "n_inner", "qk_head_dim", "num_key_value_heads", "sliding_window"), int
    ),
    **dict.fromkeys(
        ("n_group", "topk_group", "num_experts_per_tok", "original_max_position_embeddings"), int
    ),
    **dict.fromkeys(("initial_context_length", "experts_per_token"), int),
    **dict.fromkeys(("rope_theta", "partial_rotary_factor", "query_pre_attn_scalar"), float),
    **dict.fromkeys(("layer_types", "mlp_only_layers"), list),
}
_MAY_BE_NULL = (
    *(
        "num_key_value_heads",
        "sliding_window",
        "head_dim",
        "q_lora_rank",
        "num_mtp_layers",
        "partial_rotary_factor",
    ),
    *("final_logit_softcapping", "attn_logit_softcapping", "router_jitter_noise"),
)
_ABOVE_0 = (
    *(
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    ),
    *(
        "max_position_embeddings",
        "n_embd",
        "n_layer",
        "n_head",
        "n_positions",
        "num_experts_per_tok",
    ),
    *(
        "decoder_sparse_step",
        "rms_norm_eps",
        "layer_norm_eps",
        "layer_norm_epsilon",
        "initializer_range",
    ),
    *("query_pre_attn_scalar", "swiglu_alpha", "swiglu_limit"),
)
_LAYERS = ("num_hidden_layers", "n_layer", "num_mtp_layers", "num_nextn_predict_layers")
MOST_LAYERS = 4096  # as `model.layers`; layers are listed before a model is made
_MUST: dict[type, str] = {
    bool: "true or false",
    int: "a whole number, 0 or more",
    float: "a number, 0 or more",
    str: "text",
    list: "a list",
}


def wrong_kinds(given: Json, family: str) -> Iterator[str]:
    """Yield a line for each value in a config.json that is of another kind than its key."""
    names = ALIASES.get(family, {})
    for key, value in given.items():
        if value is None:
            continue
        if key in IDS:
            if not all(type(one) is int for one in (value if isinstance(value, list) else [value])):
                yield f"config.json has {key} = {short(value)}: it must be the number of a token"
            continue
        usual = DEFAULTS[family].get(names.get(key, key))
        kind = _KINDS.get(key, type(usual)) if names.get(key, key) in DEFAULTS[family] else None
        if kind in _MUST and not _is(value, kind):
            yield f"config.json has {key} = {short(value)}: it must be {_MUST[kind]}"
        elif kind in _MUST and key in _ABOVE_0 and not value:
            yield f"config.json has {key} = {short(value)}: it must be above 0"
        elif kind is int and key in _LAYERS and value > MOST_LAYERS:
            yield f"config.json has {key} = {short(value)}: it must be at most {MOST_LAYERS}"


def nulls(given: Json, family: str, asked: set[str]) -> Iterator[str]:
    """Yield a line for each null that was read (`asked`) though its key has to have a value."""
    for key in sorted(asked - {*_MAY_BE_NULL, *IDS}):
        if key in given and given[key] is None and DEFAULTS[family].get(key) is not None:
            yield f"config.json has {key} = null: give it a value"


def short(value: Any) -> str:
    """Return a value as it is shown in a line."""
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _is(value: Any, kind: type) -> bool:
    """Return True if a value is of a kind; true is no number, and no number is below 0."""
    if kind in (bool, str, list):
        return isinstance(value, kind)
    numbers = (int,) if kind is int else (int, float)
    return type(value) in numbers and isfinite(value) and value >= 0
