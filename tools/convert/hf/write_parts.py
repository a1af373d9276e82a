"""Parts of a config.json that we write: keys that belong together and that several families
have."""

from collections.abc import Callable, Sequence
from typing import Any

from models.config import ModelConfig


def qwen_experts(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of Qwen's experts, and of the layers without them."""
    return {
        "num_experts": model.experts,
        "norm_topk_prob": model.norm_topk,
        "moe_intermediate_size": model.ffn,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(model.dense_layers),
        "intermediate_size": model.dense_ffn,
    }


def softcaps(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of soft caps; null is none."""
    return {
        "attn_logit_softcapping": model.attention_softcap or None,
        "final_logit_softcapping": model.final_softcap or None,
    }


def layer_types(model: ModelConfig, always: bool = False) -> dict[str, list[str]]:
    """Return layer_types for a model in which only some layers have the window. always: for any
    model."""
    if not (model.window_layers or always):
        return {}
    types = []
    for layer in range(model.layers):
        has_window = model.of_layer(layer).window > 0
        types.append("sliding_attention" if has_window else "full_attention")
    return {"layer_types": types}


def would_do(
    model: ModelConfig, keys: Sequence[str], says: Callable[[ModelConfig], bool]
) -> list[str]:
    """Return, for each key whose change alone makes a model that a family says, its value and one
    that would do."""
    remedies = []
    for key in keys:
        value = getattr(model, key)
        candidates = [_default(model, key)]
        if key == "shared_experts" and model.ffn:
            candidates.append(model.ffn * max(1, round(model.shared_experts / model.ffn)))
        if isinstance(value, bool):
            candidates.append(not value)
        for candidate in candidates:
            if candidate != value and says(model.model_copy(update={key: candidate})):
                remedies.append(f"{key} = {value}: {candidate} would do")
                break
    return remedies


def unlike_its_family(model: ModelConfig, keys: Sequence[str]) -> list[str]:
    """Return the keys with values that the family of a model does not have by itself."""
    return [
        f"{key} = {getattr(model, key)}"
        for key in keys
        if getattr(model, key) != _default(model, key)
    ]


def _default(model: ModelConfig, key: str) -> Any:
    """Return the value that a key has if neither it nor `bias`, from which some follow, is
    stated."""
    stated_keys = model.model_fields_set - {key, "bias"}
    stated = {name: value for name, value in model.model_dump().items() if name in stated_keys}
    try:
        return getattr(ModelConfig.model_validate(stated), key)
    except ValueError:  # what is stated fits this value alone
        return getattr(model, key)
