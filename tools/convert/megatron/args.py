"""Megatron's args and our model: the model that args describe, and the args of a model.

Every argument is read, known not to matter, or refused by name (`keys`).
"""

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import BaseModel

from megaprec.errors import UserError
from models.config import ModelConfig
from models.equivalence import TRAINING_ONLY_KEYS, with_idle_keys_reset
from tools.convert.hf.config import NAMES, differing_fields
from tools.convert.hf.windows import window_fields
from tools.convert.megatron.feed_forwards import (
    activation_of,
    experts_of,
    feed_forward_args,
)
from tools.convert.megatron.hybrid_layers import (
    DELTA_NETS,
    as_megatron_steps,
    delta_args,
    delta_of,
    hybrid_args,
    hybrid_of,
    pattern_of,
)
from tools.convert.megatron.keys import (
    argument_or,
    canonical_names,
    query_groups,
    refuse_others,
)
from tools.convert.megatron.kinds import require_kinds
from tools.convert.megatron.rotary import (
    latent_args,
    latent_of,
    positions_of,
    rotary_args,
    rotary_of,
    unsaid_by_arguments,
)
from tools.saved.model_fields import make_model

# A softmax_scale is 1 / sqrt(kv_channels) to this relative difference: people round it in scripts.
SCALE_TOLERANCE = 1e-6


def model_of_args(arguments: Mapping[str, Any], vocab: int | None) -> ModelConfig:
    """Return the model that Megatron's args describe. vocab: tokens without padding; None: what the
    args say, or all rows.

    UserError for an argument by which it would be none of ours (`keys`).
    """
    try:
        canonical = canonical_names(arguments)
        require_kinds(canonical)
        refuse_others(canonical)
        return make_model(_fields_of(canonical, vocab), "Megatron's args")
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError.of("convert.megatron_args_missing", error=error) from error


def _fields_of(arguments: Mapping[str, Any], vocab: int | None) -> dict[str, Any]:
    """Return the fields of the model. arguments: by their canonical names."""
    positions = positions_of(arguments)
    # A checkpoint of another program may lack arguments: Megatron-LM's own defaults count then.
    bias = bool(argument_or(arguments, "add_bias_linear", True))
    experts = arguments.get("num_experts") or 0
    latent = bool(arguments.get("multi_latent_attention"))
    _refuse_combinations(arguments)
    activation = activation_of(arguments, bias, experts)
    return {
        "family": _family(arguments, positions, experts),
        "layers": arguments["num_layers"],
        "hidden": arguments["hidden_size"],
        "ffn": _feed_forward_width(arguments, experts),
        "vocab": vocab or arguments.get("vocab_size") or arguments["padded_vocab_size"],
        "max_positions": arguments["max_position_embeddings"],
        "norm": "rms" if arguments.get("normalization") == "RMSNorm" else "layer",
        "norm_eps": argument_or(arguments, "norm_epsilon", 1e-5),
        "norm_unit_offset": False,
        "positions": positions,
        "bias": bias,
        "output_bias": bias,
        "mlp_bias": bias and not experts,
        "attention_sinks": arguments.get("softmax_type") == "learnable",
        "tied": _is_tied(arguments),
        "dropout": argument_or(arguments, "hidden_dropout", 0.1),
        "attention_dropout": argument_or(arguments, "attention_dropout", 0.1),
        "init_std": argument_or(arguments, "init_method_std", 0.02),
        **activation,
        "heads": arguments["num_attention_heads"],
        **(latent_of(arguments) if latent else _attention(arguments, positions, bias)),
        **hybrid_of(arguments),
        **delta_of(arguments, activation["mlp"]),
        **_window(arguments),
        **_modules(arguments),
        **(experts_of(arguments, experts, bias) if experts else {"experts": 0}),
    }


def _feed_forward_width(arguments: Mapping[str, Any], experts: int) -> int:
    """Return the width of an expert, or of the feed-forward; Megatron's default is 4 times the
    model's."""
    width = arguments.get("moe_ffn_hidden_size") if experts else None
    return width or arguments.get("ffn_hidden_size") or 4 * arguments["hidden_size"]


def _is_tied(arguments: Mapping[str, Any]) -> bool:
    # megatron-core says it positively, Megatron-LM by what is not shared.
    share = arguments.get("share_embeddings_and_output_weights")
    if share is not None:
        return bool(share)
    return not arguments.get("untie_embeddings_and_output_weights", False)


def _attention(arguments: Mapping[str, Any], positions: str, bias: bool) -> dict[str, Any]:
    """Return the fields of attention without latents."""
    heads = arguments["num_attention_heads"]
    scale = arguments.get("softmax_scale")
    head_dim = argument_or(arguments, "kv_channels", arguments["hidden_size"] // heads)
    if scale is not None and abs(scale * head_dim**0.5 - 1) > SCALE_TOLERANCE:
        raise UserError.of("convert.megatron_softmax_scale", scale=scale)
    return {
        "kv_heads": query_groups(arguments) or heads,
        "head_dim": head_dim,
        "qk_norm": bool(arguments.get("qk_layernorm")),
        "qkv_bias": bias or bool(arguments.get("add_qkv_bias")),
        **rotary_of(arguments, positions),
    }


def _family(arguments: Mapping[str, Any], positions: str, experts: int) -> str:
    """Return the family whose name is nearest; it decides nothing, for all that depends on it is
    given."""
    if pattern_of(arguments):
        return "nemotron_h"
    if arguments.get("experimental_attention_variant"):
        return "qwen3_next"
    # A sigmoid of each expert apart is DeepSeek-V3's, and GLM-4.5's without latents.
    sigmoid = experts and arguments.get("moe_router_score_function") == "sigmoid"
    if arguments.get("multi_latent_attention"):
        return "deepseek_v3" if sigmoid else "deepseek_v2"
    if arguments.get("softmax_type") == "learnable":
        return "gpt_oss"
    if experts:
        return "glm4_moe" if sigmoid else "mixtral"
    return "gpt2" if positions == "learned" else "llama"


def _window(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the sliding window, and of the layers that have it.

    window_size is (tokens before, tokens after); window_attn_skip_freq is a list with a value for
    each layer, or n: then every nth layer has none.
    """
    window = arguments.get("window_size")
    layer_numbers = range(1, arguments["num_layers"] + 1)
    if not window:
        return {}
    # Megatron counts the tokens before the current one; ours counts that one too.
    before, after = window
    if after or before < 0:
        raise UserError.of("convert.megatron_window", window=window)
    # Without a list every skip-th layer sees all tokens.
    skip = arguments.get("window_attn_skip_freq")
    if isinstance(skip, list | tuple):
        if len(skip) != len(layer_numbers):
            num_layers = len(layer_numbers)
            raise UserError.of("convert.megatron_window_freq", skip=skip, num_layers=num_layers)
        has_window = [bool(value) for value in skip]
    else:
        has_window = [not skip or number % skip != 0 for number in layer_numbers]
    return window_fields(has_window, before + 1)


def _modules(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of modules of multi-token prediction. Megatron numbers their layers after
    the model's own."""
    if not (modules := arguments.get("mtp_num_layers")):
        return {}
    if positions_of(arguments) == "learned":
        raise UserError.of("convert.megatron_mtp_positions", modules=modules)
    # Not compared with Megatron's own.
    if arguments.get("experimental_attention_variant") in DELTA_NETS:
        raise UserError.of("convert.megatron_mtp_delta", modules=modules)
    if arguments.get("window_size") and arguments.get("window_attn_skip_freq"):
        raise UserError.of(
            "convert.megatron_mtp_windows",
            modules=modules,
            window_attn_skip_freq=arguments["window_attn_skip_freq"],
        )
    return {
        "mtp_layers": modules,
        "mtp_loss_weight": argument_or(arguments, "mtp_loss_scaling_factor", 0.1),
    }


def _refuse_combinations(arguments: Mapping[str, Any]) -> None:
    """Raise UserError for what depends on several args."""
    # Padding only adds rows.
    vocab = arguments.get("vocab_size")
    padded = arguments.get("padded_vocab_size")
    if vocab and padded and padded < vocab:
        raise UserError.of("convert.megatron_vocab", padded=padded, vocab=vocab)
    # a number, or a list with one for each layer
    no_rope = arguments.get("no_rope_freq")
    has_unrotated = any(no_rope) if isinstance(no_rope, list | tuple) else bool(no_rope)
    if has_unrotated:
        raise UserError.of("convert.megatron_no_rope", no_rope=no_rope)
    if arguments.get("qk_layernorm") and arguments.get("normalization") != "RMSNorm":
        raise UserError.of("convert.megatron_qk_norm")


def omitted_fields(model: ModelConfig, args: Mapping[str, Any]) -> list[str]:
    """Return what `args` of `model` omit and only training goes by, as key = value."""
    differing = differing_fields(model, model_of_args(args, None))
    omitted = []
    for name in differing:
        if name in TRAINING_ONLY_KEYS:
            omitted.append(f"{name} = {getattr(model, name)}")
    for field in unsaid_by_arguments(model):
        omitted.append(f"{field} (Megatron-LM has no argument for it)")
    if model.mamba != as_megatron_steps(model).mamba:
        omitted.append(f"mamba.least_step = {model.mamba.least_step} (Megatron has no limit)")
    return omitted


def args_of(
    model: ModelConfig, padded: int, tp: int, pp: int, fused_norms: bool, dtype: torch.dtype
) -> dict[str, Any]:
    """Return Megatron's args for `model`. UserError for what they cannot say.

    padded: rows of the padded vocabulary.
    tp, pp: ranks along tensor and pipeline parallelism.
    fused_norms: norms belong to the linear layers after them, as in Transformer Engine.
    """
    # As a list, for no single number says which layers have the window.
    windows = None
    if model.window_layers:
        windows = [int(model.of_layer(layer).window > 0) for layer in range(model.layers)]
    args = {
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "group_query_attention": model.kv_heads != model.heads,
        "num_query_groups": model.kv_heads,
        "vocab_size": model.vocab,
        "padded_vocab_size": padded,
        "make_vocab_size_divisible_by": padded // tp,
        "max_position_embeddings": model.max_positions,
        "seq_length": model.max_positions,
        "normalization": "RMSNorm" if model.norm == "rms" else "LayerNorm",
        "norm_epsilon": model.norm_eps,
        "window_size": (model.window - 1, 0) if model.window else None,
        "window_attn_skip_freq": windows,
        "add_bias_linear": model.output_bias,
        "softmax_type": "learnable" if model.attention_sinks else "vanilla",
        "mtp_num_layers": model.mtp_layers or None,
        "mtp_loss_scaling_factor": model.mtp_loss_weight if model.mtp_layers else None,
        "add_qkv_bias": model.qkv_bias,
        "untie_embeddings_and_output_weights": not model.tied,
        "init_method_std": model.init_std,
        "hidden_dropout": model.dropout,
        "attention_dropout": model.attention_dropout,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "transformer_impl": "transformer_engine" if fused_norms else "local",
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "use_legacy_models": False,
        **latent_args(model),
        **rotary_args(model),
        **feed_forward_args(model),
        **hybrid_args(model),
        **delta_args(model),
    }
    _require_all_said(model, args)
    return args


def _require_all_said(model: ModelConfig, args: Mapping[str, Any]) -> None:
    """Raise UserError unless args say all of a model that its logits depend on, but for the
    shortest time step: they are read back."""
    model = as_megatron_steps(model)
    try:
        read_back = model_of_args(args, None)
    except UserError as error:
        # What they would say is none of Megatron's models.
        raise UserError.of(
            "convert.megatron_not_expressible",
            lacking=f"arguments that say this model: {error.problems[0]}",
        ) from error
    lost = []
    for name in differing_fields(model, read_back):
        if name not in (*TRAINING_ONLY_KEYS, *NAMES):
            lost.append(_describe_difference(with_idle_keys_reset(model), read_back, name))
    if lost:
        raise UserError.of("convert.megatron_not_expressible", lacking=", ".join(lost))


def _describe_difference(model: ModelConfig, megatron_model: ModelConfig, name: str) -> str:
    """Return what Megatron has not of a field of a model, and what it has: of a table each key that
    differs."""
    value = getattr(model, name)
    other = getattr(megatron_model, name)
    if not isinstance(value, BaseModel):
        return f"{name} = {value} (its own is {other})"
    settings = []
    for key in type(value).model_fields:
        if getattr(value, key) != getattr(other, key):
            own = getattr(other, key)
            settings.append(f"{name}.{key} = {getattr(value, key)} (its own is {own})")
    return ", ".join(settings)
