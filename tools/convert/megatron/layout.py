"""Megatron-LM's layout of a model: the part of a tensor on each tensor-parallel rank, the files,
and the args.

A checkpoint is a folder iter_0000100/ with one file per model-parallel rank,
mp_rank_TT/model_optim_rng.pt, or mp_rank_TT_PPP/ if there are pipeline stages. Layers are numbered
within a stage. The vocabulary is padded with rows that are not converted.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megaprec.errors import UserError
from models.computed import TRAINING, as_computed
from models.config import ModelConfig
from models.router import PLAIN
from tools.convert.core.rules import Cut
from tools.convert.hf.config import make_model
from tools.convert.hf.write_config import NAMES
from tools.convert.megatron.feed_forwards import (
    activation_of,
    experts_of,
    feed_forward_args,
    without_feed_forward,
)
from tools.convert.megatron.keys import given, named, refuse_others
from tools.convert.megatron.kinds import require_kinds
from tools.convert.megatron.rotary import (
    is_learned,
    latent_args,
    latent_of,
    rotary_args,
    rotary_of,
    unsaid_by_arguments,
    without_rotary,
)

FILE = "model_optim_rng.pt"
EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
# how many parts of a tensor are each cut over the ranks
BLOCKS: dict[Cut, int] = {
    "halves": 2,
    "thirds": 3,
}
TRACKER = "latest_checkpointed_iteration.txt"


def part(whole: Tensor, cut: Cut, rank: int, tp: int, padded: int) -> Tensor:
    """Return the part of a tensor on tensor-parallel rank `rank` of `tp`. padded: rows of the
    padded vocabulary."""
    if cut == "whole" or (tp == 1 and cut != "vocabulary"):
        return whole
    if cut == "columns":
        return whole.chunk(tp, 1)[rank]
    if cut in BLOCKS:
        return torch.cat([block.chunk(tp)[rank] for block in whole.chunk(BLOCKS[cut])])
    if cut == "vocabulary":
        rows = padded // tp
        own = whole[rank * rows : (rank + 1) * rows]
        return F.pad(own, (0, 0, 0, rows - len(own)))
    return whole.chunk(tp)[rank]


def merged(parts: Iterator[Tensor], cut: Cut, shape: Sequence[int], tp: int) -> Tensor:
    """The way back from `part`, over all ranks, of which no two are in memory at once. shape: of
    the whole."""
    first = next(parts)
    if tp == 1 or cut == "whole":
        return first[: shape[0]]
    whole = first.new_empty(shape)
    blocks = BLOCKS.get(cut)
    own = whole.unflatten(0, (blocks, -1)) if blocks else whole
    dim = 1 if blocks or cut == "columns" else 0
    at = 0
    for values in chain((first,), parts):
        shown = values.unflatten(0, (blocks, -1)) if blocks else values
        length = min(shown.shape[dim], own.shape[dim] - at)
        own.narrow(dim, at, length).copy_(shown.narrow(dim, 0, length))
        at += length
    return whole


def part_shape(shape: Sequence[int], cut: Cut, tp: int, padded: int) -> tuple[int, ...]:
    """Shape of what each rank has. UserError if the tensor cannot be cut evenly."""
    rows, *rest = shape
    units = {"rows": rows, "halves": rows // 2, "columns": rest[0] if rest else 0}
    if cut in units and units[cut] % tp:
        raise UserError(f"{list(shape)} cannot be cut evenly among {tp} tensor-parallel ranks")
    if cut == "whole":
        return tuple(shape)
    if cut == "columns":
        return rows, rest[0] // tp
    return ((padded if cut == "vocabulary" else rows) // tp, *rest)


def rank_folder(tp_rank: int, pp_rank: int, pp: int, ep_rank: int = 0, ep: int = 1) -> str:
    """Name of a rank's folder. An axis of size one is left out."""
    return (
        f"mp_rank_{tp_rank:02d}"
        + (f"_{pp_rank:03d}" if pp > 1 else "")
        + (f"_{ep_rank:03d}" if ep > 1 else "")
    )


def model_of(args: Mapping[str, Any], vocab: int | None) -> ModelConfig:
    """The model that Megatron's args describe. vocab: tokens without padding; None: what the args
    say, or all rows.

    UserError for an argument by which it would be none of ours (`keys`).
    """
    try:
        known = named(args)
        require_kinds(known)
        refuse_others(known)
        return make_model(_model_of(known, vocab), "Megatron's args")
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"Megatron's args lack or misstate {error}") from error


def _model_of(a: Mapping[str, Any], vocab: int | None) -> dict[str, Any]:
    learned = is_learned(a)
    bias = bool(given(a, "add_bias_linear", True))
    experts = a.get("num_experts") or 0
    latent = bool(a.get("multi_latent_attention"))
    share = a.get("share_embeddings_and_output_weights")
    _require(a)
    return {
        "family": _family(a, learned, experts),
        "layers": a["num_layers"],
        "hidden": a["hidden_size"],
        "ffn": (a.get("moe_ffn_hidden_size") if experts else None)
        or a.get("ffn_hidden_size")
        or 4 * a["hidden_size"],
        "vocab": vocab or a.get("vocab_size") or a["padded_vocab_size"],
        "max_positions": a["max_position_embeddings"],
        "norm": "rms" if a.get("normalization") == "RMSNorm" else "layer",
        "norm_eps": given(a, "norm_epsilon", 1e-5),
        "positions": "learned" if learned else "rope",
        "bias": bias,
        "output_bias": bias,
        "mlp_bias": bias and not experts,
        "attention_sinks": a.get("softmax_type") == "learnable",
        "tied": bool(share)
        if share is not None
        else not a.get("untie_embeddings_and_output_weights", False),
        "dropout": given(a, "hidden_dropout", 0.1),
        "attention_dropout": given(a, "attention_dropout", 0.1),
        "init_std": given(a, "init_method_std", 0.02),
        **activation_of(a, bias, experts),
        "heads": a["num_attention_heads"],
        **(latent_of(a) if latent else _attention(a, learned, bias)),
        **_window(a),
        **_modules(a),
        **(experts_of(a, experts, bias) if experts else {"experts": 0, "router": PLAIN}),
    }


def _attention(a: Mapping[str, Any], learned: bool, bias: bool) -> dict[str, Any]:
    heads = a["num_attention_heads"]
    scale = a.get("softmax_scale")
    grouped = a.get("num_query_groups") if a.get("group_query_attention", True) else None
    head_dim = given(a, "kv_channels", a["hidden_size"] // heads)
    if scale is not None and abs(scale * head_dim**0.5 - 1) > 1e-6:
        raise UserError(
            f"Megatron's softmax_scale = {scale} cannot be converted: only 1 / "
            "sqrt(kv_channels) can"
        )
    return {
        "kv_heads": grouped or heads,
        "head_dim": head_dim,
        "qk_norm": bool(a.get("qk_layernorm")),
        "qkv_bias": bias or bool(a.get("add_qkv_bias")),
        **rotary_of(a, learned),
    }


def _family(a: Mapping[str, Any], learned: bool, experts: int) -> str:
    """Return the family whose name is nearest; it decides nothing, for all that depends on it is
    given."""
    sigmoid = experts and a.get("moe_router_score_function") == "sigmoid"
    if a.get("multi_latent_attention"):
        return "deepseek_v3" if sigmoid else "deepseek_v2"
    if a.get("softmax_type") == "learnable":
        return "gpt_oss"
    if experts:
        return "glm4_moe" if sigmoid else "mixtral"
    return "gpt2" if learned else "llama"


def _window(a: Mapping[str, Any]) -> dict[str, Any]:
    """window_size is (tokens before, tokens after); window_attn_skip_freq says which layers have
    it, from 1 on."""
    window = a.get("window_size")
    layers = range(1, a["num_layers"] + 1)
    if not window:
        return {}
    before, after = window
    if after or before < 0:
        raise UserError(
            f"Megatron's window_size = {window} cannot be converted: only (tokens before, 0) can"
        )
    skip = a.get("window_attn_skip_freq")
    if isinstance(skip, list | tuple) and len(skip) != len(layers):
        raise UserError(
            f"Megatron's window_attn_skip_freq = {skip!r} has not a value for each of "
            f"{len(layers)} layers"
        )
    has = [
        bool(skip[n - 1]) if isinstance(skip, list | tuple) else not skip or n % skip != 0
        for n in layers
    ]
    chosen = tuple(n for n, one in enumerate(has) if one)
    every = len(chosen) == len(has)
    if chosen:
        return {"window": before + 1, "window_layers": () if every else chosen}
    return {}


def _modules(a: Mapping[str, Any]) -> dict[str, Any]:
    """Modules of multi-token prediction. Megatron numbers their layers after the model's own."""
    if not (modules := a.get("mtp_num_layers")):
        return {}
    if is_learned(a):
        raise UserError(
            f"Megatron's mtp_num_layers = {modules} cannot be converted beside learned "
            "positions: modules have rope"
        )
    if a.get("window_size") and a.get("window_attn_skip_freq"):
        raise UserError(
            f"Megatron's mtp_num_layers = {modules} cannot be converted beside "
            "window_attn_skip_freq = "
            f"{a['window_attn_skip_freq']!r}: which window a module's layer has would follow "
            "from its number"
        )
    return {"mtp_layers": modules, "mtp_loss_weight": given(a, "mtp_loss_scaling_factor", 0.1)}


def _require(a: Mapping[str, Any]) -> None:
    """Raises UserError for what depends on several args."""
    vocab = a.get("vocab_size")
    padded = a.get("padded_vocab_size")
    if vocab and padded and padded < vocab:
        raise UserError(
            f"Megatron's padded_vocab_size = {padded} is less than vocab_size = {vocab}: one "
            "is wrong"
        )
    rope = a.get("no_rope_freq")
    if any(rope) if isinstance(rope, list | tuple) else rope:
        raise UserError(
            f"Megatron's no_rope_freq = {rope!r} cannot be converted: all layers must turn"
        )
    if a.get("qk_layernorm") and a.get("normalization") != "RMSNorm":
        raise UserError(
            "Megatron's qk_layernorm = True cannot be converted but with normalization = RMSNorm"
        )


def _cannot(model: ModelConfig) -> Iterator[str]:
    """Yield the properties of `model` that Megatron's GPT model lacks."""
    plain = {
        "norm_at": "before",
        "norm_unit_offset": False,
        "embedding_scale": 1.0,
        "window_rope_base": 0.0,
    }
    plain |= {"parallel_residual": False, "attention_softcap": 0.0, "final_softcap": 0.0}
    yield from (
        f"{key} = {getattr(model, key)}"
        for key, value in plain.items()
        if getattr(model, key) != value
    )
    if model.qk_norm and model.qk_norm_over == "all":
        yield "qk_norm_over = all"
    if model.qk_norm and model.norm != "rms":
        yield "qk_norm without norm = rms"
    if model.mtp_layers and model.window_layers:
        yield f"mtp_layers = {model.mtp_layers} beside window_layers"
    yield from without_rotary(model)
    yield from without_feed_forward(model)


def unsaid(model: ModelConfig, args: Mapping[str, Any]) -> list[str]:
    """Return what `args` of `model` omit, as key = value. Raises UserError if the model would
    compute otherwise."""
    ours = as_computed(model)
    again = as_computed(model_of(args, None))
    differs = [key for key in type(model).model_fields if getattr(ours, key) != getattr(again, key)]
    if lost := [key for key in differs if key not in (*TRAINING, *NAMES)]:
        raise UserError(
            *(
                f"Megatron's GPT model cannot have model.{key} = {getattr(model, key)}"
                for key in lost
            )
        )
    omitted = [f"{key} = {getattr(model, key)}" for key in differs if key in TRAINING]
    return [
        *omitted,
        *(f"{said} (Megatron-LM has no argument for it)" for said in unsaid_by_arguments(model)),
    ]


def args_of(
    model: ModelConfig, padded: int, tp: int, pp: int, fused_norms: bool, dtype: torch.dtype
) -> dict[str, Any]:
    """Megatron's args for `model`. UserError for what they cannot say."""
    if lacking := list(_cannot(as_computed(model))):
        raise UserError(f"Megatron's GPT model has no {', '.join(lacking)}")
    if model.window_layers:
        windows = [int(model.of_layer(n).window > 0) for n in range(model.layers)]
    else:
        windows = None
    return {
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
    }
