"""The model that InternEvo's `model = dict(...)` describes, for checkpoints of its InternLM type.

The dict is read completely: a key describes the model, or is known not to change what the weights
compute, or is refused. Keys that the dict omits get the values of InternEvo's builder
(modeling_internlm.py:build_model_with_cfg), with a note. The feed-forward and the biases are
recognized by the tensors.
"""

from collections.abc import Mapping
from typing import Any

from megaprec.errors import UserError
from megaprec.kinds import is_number
from models.config import ModelConfig
from tools.convert.hf.config import make_model

REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")
# What the builder takes where the dict says nothing.
DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 2048,
    "norm_type": "rmsnorm",
    "layer_norm_epsilon": 1e-5,
    "rope_base": 10000,
    "drop_rate": 0.0,
    "attn_drop_rate": 0.0,
    "embed_grad_scale": 1,
}
# Keys of which one value is known, the one that changes nothing.
ONLY: dict[str, tuple[Any, ...]] = {
    "is_reward": (False,),
    "use_dynamic_ntk_rope": (False,),
    "qk_interleaved": (False,),
    "norm_head": (False,),
    "deepnorm": (False,),
    "num_experts": (0, 1, None),
}
CHECKED = (
    "use_swiglu",
    "mlp_ratio",
    "multiple_of",
    "no_bias",
    "num_kv_attention_heads",
    "num_chunks",
)
# How the model is stored, cut, drawn or computed, which its weights do not depend on.
UNIMPORTANT = {
    "apply_post_layer_norm",  # accepted by the builder and not used
    "attn_other_init_std",
    "attn_wqkv_init_std",
    "checkpoint",
    "dropout_selective_checkpoint",
    "dtype",
    "embed_split_hidden",  # seen from the tensors
    "embedding_init_std",
    "ffn_other_init_std",
    "ffn_uplayer_init_std",
    "init_type",
    "mlp_layer_fusion",  # undone when saved
    "out_head_init_std",
    "parallel_output",
    "residual_in_fp32",
    # chooses a kernel; the layers that it chooses besides are seen from the tensors
    "use_flash_attn",
    "use_scaled_init",
    "vocab_parallel",
}
WHOLE = (*REQUIRED, "max_position_embeddings", "multiple_of", "num_chunks")
NUMBERS = (
    "mlp_ratio",
    "layer_norm_epsilon",
    "rope_base",
    "drop_rate",
    "attn_drop_rate",
    "embed_grad_scale",
)
MULTIPLE = 256  # the width of a gated feed-forward is rounded up to this


def model_of(
    said: Mapping[str, Any], gated: bool, ffn: int, biased: bool, origin: str
) -> tuple[ModelConfig, str]:
    """The model, and a note on what InternEvo's builder decided ("" if nothing). ffn: width of the
    feed-forward.

    Raises UserError that names the key in `origin` that is missing, unknown or contradicted by the
    tensors.
    """
    _refuse(said, origin)
    _check(said, gated, ffn, biased, origin)
    given = {key: said.get(key, default) for key, default in DEFAULTS.items()}
    if given["norm_type"] not in ("rmsnorm", "layernorm"):
        raise UserError(
            f"{origin}: norm_type = {given['norm_type']!r} is not known: 'rmsnorm' and "
            "'layernorm' are"
        )
    fields = {
        "family": "llama",
        "layers": said["num_layers"],
        "hidden": said["hidden_size"],
        "heads": said["num_attention_heads"],
        "vocab": said["vocab_size"],
        "mlp": "swiglu" if gated else "gelu",
        "ffn": ffn,
        "max_positions": given["max_position_embeddings"],
        "norm": "rms" if given["norm_type"] == "rmsnorm" else "layer",
        "norm_eps": given["layer_norm_epsilon"],
        "rope_base": given["rope_base"],
        "dropout": given["drop_rate"],
        "attention_dropout": given["attn_drop_rate"],
        "embedding_grad_scale": given["embed_grad_scale"],
        "qkv_bias": biased,
        "output_bias": biased,
    }
    taken = ", ".join(
        f"{key} = {default!r}" for key, default in DEFAULTS.items() if key not in said
    )
    note = f"{origin} leaves to InternEvo, which takes: {taken}" if taken else ""
    return make_model({key: _number(key, value) for key, value in fields.items()}, origin), note


def _number(key: str, value: Any) -> Any:
    """Numbers that are real, but that a configuration may write as integers."""
    real = ("norm_eps", "rope_base", "dropout", "attention_dropout", "embedding_grad_scale")
    if key in real and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def _refuse(said: Mapping[str, Any], origin: str) -> None:
    problems = [
        f"{origin} lacks {key}, which says what the model is" for key in REQUIRED if key not in said
    ]
    problems += [
        (
            f"{origin}: {key} = {said[key]!r} cannot be converted: only "
            f"{' or '.join(map(repr, known))} can"
        )
        for key, known in ONLY.items()
        if said.get(key, known[0]) not in known
    ]
    known = {*REQUIRED, *DEFAULTS, *ONLY, *CHECKED, *UNIMPORTANT}
    problems += [f"{origin}: the key {key!r} is not known, so it is not known what the model is"
                 for key in said if key not in known]  # fmt: skip
    problems += [
        (
            f"{origin}: {key} = {said[key]!r} must be a "
            f"{'whole number above 0' if key in WHOLE else 'number'}"
        )
        for key in (*WHOLE, *NUMBERS)
        if key in said
        and not (is_number(said[key], whole=key in WHOLE) and (key in NUMBERS or said[key] > 0))
    ]
    if problems:
        raise UserError(*problems)


def _check(said: Mapping[str, Any], gated: bool, ffn: int, biased: bool, origin: str) -> None:
    """Raises UserError if the dict and the tensors contradict each other."""
    if (
        said.get("num_kv_attention_heads", said["num_attention_heads"])
        != said["num_attention_heads"]
    ):
        raise UserError(
            f"{origin}: num_kv_attention_heads is not num_attention_heads, which InternLM "
            "models need"
        )
    if "no_bias" in said and bool(said["no_bias"]) == biased:
        there = "have" if biased else "have no"
        raise UserError(
            f"{origin}: no_bias = {said['no_bias']!r}, but the attention layers {there} biases"
        )
    if "use_swiglu" in said and bool(said["use_swiglu"]) != gated:
        there = "has a gate" if gated else "has no gate"
        raise UserError(
            f"{origin}: use_swiglu = {said['use_swiglu']!r}, but the feed-forward {there}"
        )
    if "mlp_ratio" in said:
        width = int(said["hidden_size"] * said["mlp_ratio"])
        multiple = said.get("multiple_of", MULTIPLE) if gated else 1
        if (expected := -(-width // multiple) * multiple) != ffn:
            raise UserError(
                f"{origin}: mlp_ratio leads to a width of {expected}, but the feed-forward of "
                f"all files has {ffn}: "
                "files of ranks are missing, or it is another model that is described"
            )
