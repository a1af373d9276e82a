"""The name tables: Hugging Face's families and Megatron-core's GPT model, row by row."""

from collections.abc import Mapping, Sequence

from models.config import ModelConfig
from tools.convert.core.rules import Cut, Rule
from tools.convert.core.transforms import (
    GROUPED,
    GROUPED_INTERLEAVED,
    PACKED,
    PACKED_TRANSPOSED,
    SAME,
    STACKED,
    TRANSPOSED,
    Transform,
)

QKV = ("query", "key", "value")
_A, _M = "layers.N.attention", "layers.N.mlp"


def _both(foreign: str, logical: str, how: Transform = SAME, bias_how: Transform = SAME) -> list[Rule]:
    """The weight and the bias of a layer; which of them a model has, it knows itself."""
    return [
        Rule(f"{foreign}.weight", (f"{logical}.weight",), how),
        Rule(f"{foreign}.bias", (f"{logical}.bias",), bias_how),
    ]


def _qkv(kind: str) -> tuple[str, ...]:
    return tuple(f"{_A}.{part}.{kind}" for part in QKV)


def _gpt2() -> list[Rule]:
    """Its linear layers are Conv1D: [features in, features out]."""
    layer = "transformer.h.N"
    return [
        Rule("transformer.wte.weight", ("embedding.weight",)),
        Rule("transformer.wpe.weight", ("positions.weight",)),
        *_both(f"{layer}.ln_1", "layers.N.attention_norm"),
        Rule(f"{layer}.attn.c_attn.weight", _qkv("weight"), PACKED_TRANSPOSED),
        Rule(f"{layer}.attn.c_attn.bias", _qkv("bias"), PACKED),
        *_both(f"{layer}.attn.c_proj", f"{_A}.output", TRANSPOSED),
        *_both(f"{layer}.ln_2", "layers.N.mlp_norm"),
        *_both(f"{layer}.mlp.c_fc", f"{_M}.up", TRANSPOSED),
        *_both(f"{layer}.mlp.c_proj", f"{_M}.down", TRANSPOSED),
        *_both("transformer.ln_f", "final_norm"),
        Rule("lm_head.weight", ("head.weight",)),
    ]


def _neox() -> list[Rule]:
    layer = "gpt_neox.layers.N"
    return [
        Rule("gpt_neox.embed_in.weight", ("embedding.weight",)),
        *_both(f"{layer}.input_layernorm", "layers.N.attention_norm"),
        Rule(f"{layer}.attention.query_key_value.weight", _qkv("weight"), GROUPED),
        Rule(f"{layer}.attention.query_key_value.bias", _qkv("bias"), GROUPED),
        *_both(f"{layer}.attention.dense", f"{_A}.output"),
        *_both(f"{layer}.post_attention_layernorm", "layers.N.mlp_norm"),
        *_both(f"{layer}.mlp.dense_h_to_4h", f"{_M}.up"),
        *_both(f"{layer}.mlp.dense_4h_to_h", f"{_M}.down"),
        *_both("gpt_neox.final_layer_norm", "final_norm"),
        Rule("embed_out.weight", ("head.weight",)),
    ]


def _llama(feed_forward: Sequence[Rule]) -> list[Rule]:
    layer = "model.layers.N"
    return [
        Rule("model.embed_tokens.weight", ("embedding.weight",)),
        *_both(f"{layer}.input_layernorm", "layers.N.attention_norm"),
        *(rule for part in QKV for rule in _both(f"{layer}.self_attn.{part[0]}_proj", f"{_A}.{part}")),
        Rule(f"{layer}.self_attn.q_norm.weight", (f"{_A}.query_norm.weight",)),
        Rule(f"{layer}.self_attn.k_norm.weight", (f"{_A}.key_norm.weight",)),
        *_both(f"{layer}.self_attn.o_proj", f"{_A}.output"),
        *_both(f"{layer}.post_attention_layernorm", "layers.N.mlp_norm"),
        *feed_forward,
        *_both("model.norm", "final_norm"),
        Rule("lm_head.weight", ("head.weight",)),
    ]


def _gated() -> list[Rule]:
    parts = ("gate", "up", "down")
    return [rule for part in parts for rule in _both(f"model.layers.N.mlp.{part}_proj", f"{_M}.{part}")]


def _experts(moe: str, gate: str, up: str, down: str) -> list[Rule]:
    parts = {gate: "gate", up: "up", down: "down"}
    return [
        Rule(f"model.layers.N.{moe}.gate.weight", (f"{_M}.router.weight",)),
        *(
            Rule(f"model.layers.N.{moe}.experts.E.{theirs}.weight", (f"{_M}.experts.E.{ours}.weight",))
            for theirs, ours in parts.items()
        ),
    ]


# By the model_type in config.json.
HUGGING_FACE = {
    "gpt2": _gpt2(),
    "gpt_neox": _neox(),
    "llama": _llama(_gated()),
    "mistral": _llama(_gated()),
    "qwen2": _llama(_gated()),
    "qwen3": _llama(_gated()),
    "qwen3_moe": _llama(_experts("mlp", "gate_proj", "up_proj", "down_proj")),
    "mixtral": _llama(_experts("block_sparse_moe", "w1", "w3", "w2")),
}
# What a folder may leave out before every name: it was saved without the head.
PREFIXES = {"gpt2": "transformer.", "gpt_neox": "gpt_neox."}
# Buffers that old folders hold and that nothing has to be kept of: ends of their names.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")


def megatron(
    fused_norms: bool, interleaved: bool, model: ModelConfig, fused_before_experts: bool = False
) -> list[Rule]:
    """Megatron-core's GPTModel, in the order of its parameters.

    fused_norms: norms belong to the linear layer after them, as Transformer Engine has it; else they stand alone, as
    the norm before experts always does but in distributed checkpoints without Transformer Engine, which name it as if
    it came before a feed-forward (fused_before_experts). interleaved: rotary partners are neighbours
    (args.rotary_interleaved).
    """
    layer, gated = "decoder.layers.N", model.mlp == "swiglu"
    qkv, inner = f"{layer}.self_attention.linear_qkv", f"{layer}.mlp.linear_fc1"
    attention_norm = _norm(f"{qkv}.layer_norm_" if fused_norms else f"{layer}.input_layernorm.", "attention_norm")
    fused_mlp = fused_norms and (fused_before_experts or not model.experts)
    mlp_norm = _norm(f"{inner}.layer_norm_" if fused_mlp else f"{layer}.pre_mlp_layernorm.", "mlp_norm")
    return [
        Rule("embedding.word_embeddings.weight", ("embedding.weight",), SAME, "vocabulary"),
        Rule("embedding.position_embeddings.weight", ("positions.weight",)),
        *(() if fused_norms else attention_norm),
        Rule(f"{layer}.self_attention.linear_proj.weight", (f"{_A}.output.weight",), SAME, "columns"),
        Rule(f"{layer}.self_attention.linear_proj.bias", (f"{_A}.output.bias",)),
        *(attention_norm if fused_norms else ()),
        Rule(f"{qkv}.weight", _qkv("weight"), GROUPED_INTERLEAVED if interleaved else GROUPED, "rows"),
        Rule(f"{qkv}.bias", _qkv("bias"), GROUPED_INTERLEAVED if interleaved else GROUPED, "rows"),
        Rule(f"{layer}.self_attention.q_layernorm.weight", (f"{_A}.query_norm.weight",)),
        Rule(f"{layer}.self_attention.k_layernorm.weight", (f"{_A}.key_norm.weight",)),
        *mlp_norm,
        *_megatron_mlp(f"{layer}.mlp", _M, gated),
        Rule(f"{layer}.mlp.router.weight", (f"{_M}.router.weight",)),
        *_megatron_mlp(f"{layer}.mlp.experts.local_experts.E", f"{_M}.experts.E", gated),
        *_both("decoder.final_layernorm", "final_norm"),
        Rule("output_layer.weight", ("head.weight",), SAME, "vocabulary"),
    ]


def _norm(prefix: str, logical: str) -> list[Rule]:
    return [Rule(prefix + kind, (f"layers.N.{logical}.{kind}",)) for kind in ("weight", "bias")]


def _megatron_mlp(foreign: str, logical: str, gated: bool) -> list[Rule]:
    parts = ("gate", "up") if gated else ("up",)
    how: Transform = STACKED if gated else SAME
    cut: Cut = "halves" if gated else "rows"
    return [
        *(
            Rule(f"{foreign}.linear_fc1.{kind}", tuple(f"{logical}.{part}.{kind}" for part in parts), how, cut)
            for kind in ("weight", "bias")
        ),
        Rule(f"{foreign}.linear_fc2.weight", (f"{logical}.down.weight",), SAME, "columns"),
        Rule(f"{foreign}.linear_fc2.bias", (f"{logical}.down.bias",)),
    ]


def internevo(mlp: Mapping[str, str], split_hidden: bool, weight_parallel: bool) -> list[Rule]:
    """InternEvo's InternLM model (modeling_internlm.py).

    mlp: its names of the feed-forward's layers -> ours. split_hidden: the embedding's features are cut over ranks, not
    its vocabulary. weight_parallel: the rows of every linear layer are cut, as they lie.
    """
    qkv: Cut = "rows" if weight_parallel else "thirds"
    closing: Cut = "rows" if weight_parallel else "columns"
    layer = "blocks.N"
    return [
        Rule("embedding.weight", ("embedding.weight",), SAME, "columns" if split_hidden else "rows"),
        *_both(f"{layer}.norm1", "layers.N.attention_norm"),
        Rule(f"{layer}.mixer.Wqkv.weight", _qkv("weight"), PACKED, qkv),
        Rule(f"{layer}.mixer.Wqkv.bias", _qkv("bias"), PACKED, qkv),
        Rule(f"{layer}.mixer.out_proj.weight", (f"{_A}.output.weight",), SAME, closing),
        Rule(f"{layer}.mixer.out_proj.bias", (f"{_A}.output.bias",), SAME, "rows" if weight_parallel else "whole"),
        *_both(f"{layer}.norm2", "layers.N.mlp_norm"),
        *(
            Rule(f"{layer}.mlp.{theirs}.weight", (f"{_M}.{ours}.weight",), SAME, closing if ours == "down" else "rows")
            for theirs, ours in mlp.items()
        ),
        *_both("norm", "final_norm"),
        Rule("head.weight", ("head.weight",), SAME, "rows"),
    ]
