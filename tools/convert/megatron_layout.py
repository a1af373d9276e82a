"""How Megatron-LM lays a model out: which part of a tensor a tensor-parallel rank has, its files, and its args.

A checkpoint is a folder iter_0000100/ with one file per model-parallel rank, mp_rank_TT/model_optim_rng.pt, or
mp_rank_TT_PPP/ if there are pipeline stages. Layers are numbered within a stage. The vocabulary is padded with rows
that nothing is kept of.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megaprec.errors import UserError
from models.config import ModelConfig
from tools.convert.config import make_model
from tools.convert.rules import Cut

FILE = "model_optim_rng.pt"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fixed there
LEARNED = "learned_absolute"
BLOCKS: dict[Cut, int] = {"halves": 2, "thirds": 3}  # how many parts of a tensor are each cut over the ranks
TRACKER = "latest_checkpointed_iteration.txt"


def part(whole: Tensor, cut: Cut, rank: int, tp: int, padded: int) -> Tensor:
    """What tensor-parallel rank `rank` of `tp` has of a tensor. padded: rows of the vocabulary with padding."""
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
    """The way back from `part`, over all ranks, of which no two are in memory at once. shape: of the whole."""
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
    return f"mp_rank_{tp_rank:02d}" + (f"_{pp_rank:03d}" if pp > 1 else "") + (f"_{ep_rank:03d}" if ep > 1 else "")


def model_of(args: Mapping[str, Any], vocab: int | None) -> ModelConfig:
    """The model that Megatron's args describe. vocab: tokens without padding; None: what the args say, or all rows."""
    try:
        return make_model(_model_of(args, vocab), "Megatron's args")
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise UserError(f"Megatron's args lack or misstate {error}") from error


def _model_of(a: Mapping[str, Any], vocab: int | None) -> dict[str, Any]:
    learned, heads = (
        a.get("position_embedding_type", "learned_absolute") == "learned_absolute",
        a["num_attention_heads"],
    )
    _refuse(a)
    gated, bias, experts = bool(a.get("swiglu")), bool(a.get("add_bias_linear", True)), a.get("num_experts") or 0
    scaled = bool(a.get("use_rope_scaling")) and not learned
    rms = a.get("normalization", "LayerNorm") == "RMSNorm"
    return {
        "family": "mixtral" if experts else "gpt2" if learned else "llama",
        "layers": a["num_layers"],
        "hidden": a["hidden_size"],
        "heads": heads,
        "kv_heads": (a.get("num_query_groups") if a.get("group_query_attention", True) else None) or heads,
        "head_dim": a.get("kv_channels") or a["hidden_size"] // heads,
        "mlp": "swiglu" if gated else "gelu",
        "ffn": (a.get("moe_ffn_hidden_size") if experts else None) or a.get("ffn_hidden_size") or 4 * a["hidden_size"],
        "vocab": vocab or a.get("vocab_size") or a["padded_vocab_size"],
        "max_positions": a["max_position_embeddings"],
        "norm": "rms" if rms else "layer",
        "norm_eps": a.get("norm_epsilon") or a.get("layernorm_epsilon") or 1e-5,
        "positions": "learned" if learned else "rope",
        "rope_base": float(a.get("rotary_base") or 10000),
        "rotary_fraction": 1.0 if learned else float(a.get("rotary_percent") or 1.0),
        "rope_scaling": {"kind": "llama3", "factor": a["rope_scaling_factor"], **LLAMA3} if scaled else {},
        "bias": bias,
        "qkv_bias": bias or bool(a.get("add_qkv_bias")),
        "mlp_bias": bias and not experts,
        "qk_norm": bool(a.get("qk_layernorm")),
        "tied": not a.get("untie_embeddings_and_output_weights", False),
        "experts": experts,
        "experts_per_token": a.get("moe_router_topk") or 2,
        "router_aux_loss": float(a.get("moe_aux_loss_coeff") or 0.0),
    }


def _refuse(a: Mapping[str, Any]) -> None:
    """Raises UserError for what no model of ours has."""
    known = (LEARNED, "rope")
    if (positions := a.get("position_embedding_type", known[0])) not in known:
        raise UserError(f"Megatron's position_embedding_type = {positions!r} is not known: {' or '.join(known)} is")
    odd = ("squared_relu", "multi_latent_attention", "apply_layernorm_1p", "mtp_num_layers")
    if wrong := [key for key in odd if a.get(key)]:
        raise UserError(f"Megatron's {wrong[0]} = {a[wrong[0]]!r} cannot be converted")


def _unsaid(model: ModelConfig) -> Iterator[str]:
    """What `model` has and Megatron's GPT model has not."""
    scaling = model.rope_scaling
    for key in ("parallel_residual", "window"):
        if getattr(model, key):
            yield key
    if scaling.kind != "none" and (scaling.kind != "llama3" or LLAMA3.items() - scaling.model_dump().items()):
        yield f"rope_scaling {scaling.model_dump(exclude_defaults=True)}"
    if model.mlp == "gelu_exact":
        yield "gelu_exact (its gelu is the tanh approximation)"
    if model.output_bias > model.qkv_bias or (not model.experts and model.output_bias != model.mlp_bias):
        yield "biases in the attention's output alone or in the feed-forward alone"
    if model.experts and not model.norm_topk:
        yield "norm_topk = false"


def args_of(model: ModelConfig, padded: int, tp: int, pp: int, fused_norms: bool, dtype: torch.dtype) -> dict[str, Any]:
    """Megatron's args for `model`. UserError for what they cannot say."""
    if unsaid := list(_unsaid(model)):
        raise UserError(f"Megatron's GPT model has no {', '.join(unsaid)}")
    learned, base = model.positions == "learned", model.rope_base
    return {
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "group_query_attention": model.kv_heads != model.heads,
        "num_query_groups": model.kv_heads,
        "kv_channels": model.head_dim,
        "ffn_hidden_size": model.ffn,
        "swiglu": model.mlp == "swiglu",
        "vocab_size": model.vocab,
        "padded_vocab_size": padded,
        "make_vocab_size_divisible_by": padded // tp,
        "max_position_embeddings": model.max_positions,
        "seq_length": model.max_positions,
        "position_embedding_type": LEARNED if learned else "rope",
        "add_position_embedding": learned,
        "use_rotary_position_embeddings": not learned,
        "rotary_base": int(base) if base == int(base) else base,
        "rotary_percent": model.rotary_fraction,
        "rotary_interleaved": False,
        "normalization": "RMSNorm" if model.norm == "rms" else "LayerNorm",
        "norm_epsilon": model.norm_eps,
        "use_rope_scaling": model.rope_scaling.kind == "llama3",
        "rope_scaling_factor": model.rope_scaling.factor,
        "add_bias_linear": model.output_bias,
        "add_qkv_bias": model.qkv_bias,
        "qk_layernorm": model.qk_norm,
        "untie_embeddings_and_output_weights": not model.tied,
        "num_experts": model.experts or None,
        "moe_router_topk": model.experts_per_token,
        "moe_aux_loss_coeff": model.router_aux_loss,
        "hidden_dropout": model.dropout,
        "attention_dropout": model.attention_dropout,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "transformer_impl": "transformer_engine" if fused_norms else "local",
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "use_legacy_models": False,
    }
