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
WHOLE_NUMBERS = (*REQUIRED, "max_position_embeddings", "multiple_of", "num_chunks")
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
    config: Mapping[str, Any], gated: bool, ffn: int, biased: bool, origin: str
) -> tuple[ModelConfig, str]:
    """Return the model, and a note on what InternEvo's builder decided ("" if nothing).

    gated: the feed-forward has a gate.
    ffn: width of the feed-forward.
    biased: attention has biases.
    origin: where the dict is, for messages.
    Raises UserError that names the key in `origin` that is missing, unknown or contradicted by the
    tensors.
    """
    _refuse(config, origin)
    _check_against_tensors(config, gated, ffn, biased, origin)
    settings = {key: config.get(key, default) for key, default in DEFAULTS.items()}
    if settings["norm_type"] not in ("rmsnorm", "layernorm"):
        raise UserError.of("convert.internevo_norm", origin=origin, norm_type=settings["norm_type"])
    fields = {
        "family": "llama",
        "layers": config["num_layers"],
        "hidden": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "vocab": config["vocab_size"],
        "mlp": "swiglu" if gated else "gelu",
        "ffn": ffn,
        "max_positions": settings["max_position_embeddings"],
        "norm": "rms" if settings["norm_type"] == "rmsnorm" else "layer",
        "norm_eps": _as_real(settings["layer_norm_epsilon"]),
        "rope_base": _as_real(settings["rope_base"]),
        "dropout": _as_real(settings["drop_rate"]),
        "attention_dropout": _as_real(settings["attn_drop_rate"]),
        "embedding_grad_scale": _as_real(settings["embed_grad_scale"]),
        "qkv_bias": biased,
        "output_bias": biased,
    }
    missing = [f"{key} = {default!r}" for key, default in DEFAULTS.items() if key not in config]
    note = f"{origin} leaves to InternEvo, which takes: {', '.join(missing)}" if missing else ""
    return make_model(fields, origin), note


def _as_real(value: Any) -> Any:
    """Return a number that is real, but that a configuration may write as an integer."""
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def _refuse(config: Mapping[str, Any], origin: str) -> None:
    """Raise UserError for keys that are missing or not known, and for values that are not read."""
    problems = [
        f"{origin} lacks {key}, which says what the model is"
        for key in REQUIRED
        if key not in config
    ]
    for key, allowed in ONLY.items():
        if config.get(key, allowed[0]) not in allowed:
            problems.append(
                f"{origin}: {key} = {config[key]!r} cannot be converted: only "
                f"{' or '.join(map(repr, allowed))} can"
            )
    known_keys = {*REQUIRED, *DEFAULTS, *ONLY, *CHECKED, *UNIMPORTANT}
    problems += [
        f"{origin}: the key {key!r} is not known, so it is not known what the model is"
        for key in config
        if key not in known_keys
    ]
    problems += _problems_of_numbers(config, origin)
    if problems:
        raise UserError(*problems)


def _problems_of_numbers(config: Mapping[str, Any], origin: str) -> list[str]:
    """Return a line for each value that is not the number that it has to be."""
    problems = []
    for key in WHOLE_NUMBERS:
        if key in config and not (is_number(config[key], whole=True) and config[key] > 0):
            problems.append(f"{origin}: {key} = {config[key]!r} must be a whole number above 0")
    for key in NUMBERS:
        if key in config and not is_number(config[key]):
            problems.append(f"{origin}: {key} = {config[key]!r} must be a number")
    return problems


def _check_against_tensors(
    config: Mapping[str, Any], gated: bool, ffn: int, biased: bool, origin: str
) -> None:
    """Raise UserError if the dict and the tensors contradict each other."""
    heads = config["num_attention_heads"]
    if config.get("num_kv_attention_heads", heads) != heads:
        raise UserError.of("convert.internevo_heads", origin=origin)
    if "no_bias" in config and bool(config["no_bias"]) == biased:
        biases = "have" if biased else "have no"
        raise UserError.of(
            "convert.internevo_bias", origin=origin, no_bias=config["no_bias"], biases=biases
        )
    if "use_swiglu" in config and bool(config["use_swiglu"]) != gated:
        gate = "has a gate" if gated else "has no gate"
        raise UserError.of(
            "convert.internevo_swiglu", origin=origin, use_swiglu=config["use_swiglu"], gate=gate
        )
    if "mlp_ratio" in config:
        width = int(config["hidden_size"] * config["mlp_ratio"])
        multiple = config.get("multiple_of", MULTIPLE) if gated else 1
        expected = -(-width // multiple) * multiple
        if expected != ffn:
            raise UserError.of("convert.internevo_width", origin=origin, expected=expected, ffn=ffn)
