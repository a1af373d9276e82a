"""Megatron-LM's layout of a model: the part of a tensor on each tensor-parallel rank, the files, and the args.

A checkpoint is a folder iter_0000100/ with one file per model-parallel rank, mp_rank_TT/model_optim_rng.pt, or
mp_rank_TT_PPP/ if there are pipeline stages. Layers are numbered within a stage. The vocabulary is padded with rows
that are not converted.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megaprec.errors import UserError
from models.config import ModelConfig
from tools.convert.core.rules import Cut
from tools.convert.hf.config import make_model
from tools.convert.hf.write_config import NAMES, TRAINING
from tools.convert.megatron.keys import named, refuse_others

FILE = "model_optim_rng.pt"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fixed there
LEARNED = "learned_absolute"
BLOCKS: dict[Cut, int] = {"halves": 2, "thirds": 3}  # how many parts of a tensor are each cut over the ranks
TRACKER = "latest_checkpointed_iteration.txt"


def part(whole: Tensor, cut: Cut, rank: int, tp: int, padded: int) -> Tensor:
    """Return the part of a tensor on tensor-parallel rank `rank` of `tp`. padded: rows of the padded vocabulary."""
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
    """The model that Megatron's args describe. vocab: tokens without padding; None: what the args say, or all rows.

    UserError for an argument by which it would be none of ours (`megatron_keys`).
    """
    try:
        known = named(args)
        refuse_others(known)
        return make_model(_model_of(known, vocab), "Megatron's args")
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"Megatron's args lack or misstate {error}") from error


def _model_of(a: Mapping[str, Any], vocab: int | None) -> dict[str, Any]:
    learned, heads, bias = _learned(a), a["num_attention_heads"], bool(_given(a, "add_bias_linear", True))
    experts = a.get("num_experts") or 0
    gated = _gated(a)
    grouped = a.get("num_query_groups") if a.get("group_query_attention", True) else None
    share = a.get("share_embeddings_and_output_weights")
    head_dim = _given(a, "kv_channels", a["hidden_size"] // heads)
    _require(a, head_dim)
    return {
        "family": "mixtral" if experts else "gpt2" if learned else "llama",
        "layers": a["num_layers"],
        "hidden": a["hidden_size"],
        "heads": heads,
        "kv_heads": grouped or heads,
        "head_dim": head_dim,
        "mlp": "swiglu" if gated else _gelu(a, bias, experts),
        "ffn": (a.get("moe_ffn_hidden_size") if experts else None) or a.get("ffn_hidden_size") or 4 * a["hidden_size"],
        "vocab": vocab or a.get("vocab_size") or a["padded_vocab_size"],
        "max_positions": a["max_position_embeddings"],
        "norm": "rms" if a.get("normalization") == "RMSNorm" else "layer",
        "norm_eps": _given(a, "norm_epsilon", 1e-5),
        "positions": "learned" if learned else "rope",
        "rope_base": float(_given(a, "rotary_base", 10000)),
        "rotary_fraction": 1.0 if learned else float(_given(a, "rotary_percent", 1.0)),
        "rope_scaling": {} if learned else _scaling(a),
        "bias": bias,
        "qkv_bias": bias or bool(a.get("add_qkv_bias")),
        "mlp_bias": bias and not experts,
        "qk_norm": bool(a.get("qk_layernorm")),
        "tied": bool(share) if share is not None else not a.get("untie_embeddings_and_output_weights", False),
        "dropout": _given(a, "hidden_dropout", 0.1),
        "attention_dropout": _given(a, "attention_dropout", 0.1),
        "init_std": _given(a, "init_method_std", 0.02),
        **_window(a),
        **(_router(a, experts) if experts else {}),
    }


def _given(a: Mapping[str, Any], key: str, default: Any) -> Any:
    """The default is Megatron's own; its args say None where nothing was given."""
    value = a.get(key)
    return default if value is None else value


def _learned(a: Mapping[str, Any]) -> bool:
    """Positions are learned unless one of two args says that they turn."""
    learned = a.get("position_embedding_type", LEARNED) == LEARNED and not a.get("use_rotary_position_embeddings")
    if learned and a.get("add_position_embedding") is False:
        raise UserError("Megatron's add_position_embedding = False cannot be converted: it has no positions at all")
    return learned


def _gated(a: Mapping[str, Any]) -> bool:
    """Return True if the feed-forward is gated, which is by SiLU in all models that can be converted."""
    gated, activation = bool(a.get("swiglu") or a.get("gated_linear_unit")), a.get("activation_func")
    if gated and not a.get("swiglu") and activation != "silu":
        raise UserError("Megatron's gated_linear_unit without activation_func = silu cannot be converted")
    if not gated and activation == "silu":
        raise UserError("Megatron's activation_func = silu without gated_linear_unit cannot be converted")
    return gated


def _gelu(a: Mapping[str, Any], bias: bool, experts: int) -> str:
    """Fused with a bias, its gelu is the tanh approximation, and exact otherwise; without biases nothing is fused."""
    if a.get("use_te_activation_func"):
        raise UserError("Megatron's use_te_activation_func = True cannot be converted where its activation is gelu")
    fused = a.get("bias_activation_fusion") if "bias_activation_fusion" in a else _given(a, "bias_gelu_fusion", True)
    return "gelu" if fused and bias and not experts else "gelu_exact"


def _scaling(a: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scaling of rotary positions: Llama 3.1's, or linear."""
    factor, scaled = a.get("rotary_seq_len_interpolation_factor"), bool(a.get("use_rope_scaling"))
    if factor is not None and scaled:
        raise UserError("Megatron's rotary_seq_len_interpolation_factor beside use_rope_scaling cannot be converted")
    if factor is not None:
        if factor < 1:
            raise UserError(f"Megatron's rotary_seq_len_interpolation_factor = {factor} is below 1")
        return {"kind": "linear", "factor": float(factor)}
    return {"kind": "llama3", "factor": _given(a, "rope_scaling_factor", 8.0), **LLAMA3} if scaled else {}


def _window(a: Mapping[str, Any]) -> dict[str, Any]:
    """window_size is (tokens before, tokens after); window_attn_skip_freq says which layers have it, from 1 on."""
    window, layers = a.get("window_size"), range(1, a["num_layers"] + 1)
    if not window:
        return {}
    before, after = window
    if after or before < 0:
        raise UserError(f"Megatron's window_size = {window} cannot be converted: only (tokens before, 0) can")
    skip = a.get("window_attn_skip_freq")
    has = [bool(skip[n - 1]) if isinstance(skip, list | tuple) else not skip or n % skip != 0 for n in layers]
    chosen = tuple(n for n, one in enumerate(has) if one)
    every = len(chosen) == len(has)
    return {"window": before + 1, "window_layers": () if every else chosen} if chosen else {}


def _router(a: Mapping[str, Any], experts: int) -> dict[str, Any]:
    """Without pre-softmax, probabilities are of the chosen experts alone, and so sum to one."""
    kind, aux = a.get("moe_router_load_balancing_type"), _given(a, "moe_aux_loss_coeff", 0.0)
    return {
        "experts": experts,
        "experts_per_token": _given(a, "moe_router_topk", 2),
        "norm_topk": not a.get("moe_router_pre_softmax"),
        "router_aux_loss": 0.0 if kind == "none" else float(aux),
        "router_z_loss": float(a.get("moe_z_loss_coeff") or 0.0),
    }


def _require(a: Mapping[str, Any], head_dim: int) -> None:
    """Raises UserError for what depends on several args."""
    scale, rope, every = a.get("softmax_scale"), a.get("no_rope_freq"), a.get("moe_layer_freq")
    if scale is not None and abs(scale * head_dim**0.5 - 1) > 1e-6:
        raise UserError(f"Megatron's softmax_scale = {scale} cannot be converted: only 1 / sqrt(kv_channels) can")
    if any(rope) if isinstance(rope, list | tuple) else rope:
        raise UserError(f"Megatron's no_rope_freq = {rope!r} cannot be converted: all layers must turn")
    if a.get("qk_layernorm") and a.get("normalization") != "RMSNorm":
        raise UserError("Megatron's qk_layernorm = True cannot be converted but with normalization = RMSNorm")
    if not a.get("num_experts"):
        return
    if not (all(every) if isinstance(every, list | tuple) else every in (1, None)):
        raise UserError(f"Megatron's moe_layer_freq = {every!r} cannot be converted: all layers must have experts")
    if _given(a, "moe_router_topk", 2) == 1 and not a.get("moe_router_pre_softmax"):
        raise UserError("Megatron's moe_router_topk = 1 without moe_router_pre_softmax has no router that learns")
    if _given(a, "add_bias_linear", True):
        raise UserError(
            f"Megatron's add_bias_linear = True beside num_experts = {a['num_experts']} cannot be converted: experts "
            "have no biases here"
        )


def _cannot(model: ModelConfig) -> Iterator[str]:
    """Yield the properties of `model` that Megatron's GPT model lacks."""
    scaling = model.rope_scaling
    if model.parallel_residual:
        yield "parallel_residual"
    llama3 = scaling.kind == "llama3" and not LLAMA3.items() - scaling.model_dump().items()
    if not (scaling.kind == "none" or llama3 or (scaling.kind == "linear" and scaling.factor == int(scaling.factor))):
        yield f"rope_scaling {scaling.model_dump(exclude_defaults=True)}"
    if model.mlp == "gelu" and (model.experts or not model.mlp_bias):
        yield "gelu (its tanh approximation needs biases)"
    if model.output_bias > model.qkv_bias or model.output_bias != model.mlp_bias:
        yield "biases in the attention's output alone or in the feed-forward alone"
    if model.experts and model.experts_per_token == 1 and model.norm_topk:
        yield "norm_topk with one expert for each token (it wants moe_router_pre_softmax there)"
    if model.qk_norm and model.norm != "rms":
        yield "qk_norm without norm = rms"


def unsaid(model: ModelConfig, args: Mapping[str, Any]) -> list[str]:
    """Return what `args` of `model` omit, as key = value. Raises UserError if the model would compute otherwise."""
    again = model_of(args, None)
    differs = [key for key in type(model).model_fields if getattr(model, key) != getattr(again, key)]
    free = (*TRAINING, *NAMES, *(() if model.experts else ("experts_per_token", "norm_topk")))
    if lost := [key for key in differs if key not in free]:
        raise UserError(*(f"Megatron's GPT model cannot have model.{key} = {getattr(model, key)}" for key in lost))
    routers = () if model.experts else ("router_aux_loss", "router_z_loss")
    return [f"{key} = {getattr(model, key)}" for key in differs if key in TRAINING and key not in routers]


def args_of(model: ModelConfig, padded: int, tp: int, pp: int, fused_norms: bool, dtype: torch.dtype) -> dict[str, Any]:
    """Megatron's args for `model`. UserError for what they cannot say."""
    if lacking := list(_cannot(model)):
        raise UserError(f"Megatron's GPT model has no {', '.join(lacking)}")
    learned, base, scaling = model.positions == "learned", model.rope_base, model.rope_scaling
    windows = [int(model.of_layer(n).window > 0) for n in range(model.layers)] if model.window_layers else None
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
        "use_rope_scaling": scaling.kind == "llama3",
        "rope_scaling_factor": scaling.factor,
        "rotary_seq_len_interpolation_factor": int(scaling.factor) if scaling.kind == "linear" else None,
        "window_size": (model.window - 1, 0) if model.window else None,
        "window_attn_skip_freq": windows,
        "bias_gelu_fusion": model.mlp == "gelu",
        "add_bias_linear": model.output_bias,
        "add_qkv_bias": model.qkv_bias,
        "qk_layernorm": model.qk_norm,
        "untie_embeddings_and_output_weights": not model.tied,
        "num_experts": model.experts or None,
        "moe_router_topk": model.experts_per_token,
        "moe_router_pre_softmax": not model.norm_topk,
        "moe_aux_loss_coeff": model.router_aux_loss,
        "moe_z_loss_coeff": model.router_z_loss or None,
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
    }
