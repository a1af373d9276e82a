"""The name tables: Hugging Face's families and Megatron-core's GPT model, row by row."""

from collections.abc import Mapping, Sequence

from models.config import ModelConfig
from tools.convert.core.rules import Cut, Layers, Rule, layers_of_modules
from tools.convert.core.transforms import (
    EXPERTS_INTERLEAVED,
    EXPERTS_TRANSPOSED,
    GROUPED,
    GROUPED_INTERLEAVED,
    LATENT_DOWN,
    LATENT_DOWN_HALVES,
    LATENT_QUERY,
    LATENT_QUERY_HALVES,
    LATENT_UP,
    PACKED,
    PACKED_TRANSPOSED,
    SAME,
    STACKED,
    TRANSPOSED,
    Transform,
)

QKV = ("query", "key", "value")
_A = "layers.N.attention"
_M = "layers.N.mlp"
CORRECTION = f"{_M}.router.correction"


def _both(
    foreign: str, logical: str, how: Transform = SAME, bias_how: Transform = SAME
) -> list[Rule]:
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


# Norms of a layer -> ours: before each branch, after it, and both.
_BEFORE = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
_AFTER = {
    "post_attention_layernorm": "attention_post_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
}
_AROUND = {"input_layernorm": "attention_norm", "pre_feedforward_layernorm": "mlp_norm", **_AFTER}


def _projections() -> list[Rule]:
    """Queries, keys and values of the families after Llama."""
    attention = "model.layers.N.self_attn"
    return [
        *(rule for part in QKV for rule in _both(f"{attention}.{part[0]}_proj", f"{_A}.{part}")),
        Rule(f"{attention}.q_norm.weight", (f"{_A}.query_norm.weight",)),
        Rule(f"{attention}.k_norm.weight", (f"{_A}.key_norm.weight",)),
    ]


def _latents(interleaved: bool) -> list[Rule]:
    """Queries, keys and values of DeepSeek. interleaved: rotary partners are neighbours."""
    attention = "model.layers.N.self_attn"
    if interleaved:
        query, down = (LATENT_QUERY, LATENT_DOWN)
    else:
        query, down = (LATENT_QUERY_HALVES, LATENT_DOWN_HALVES)
    parts = ("key_value_down", "key_rope")
    return [
        Rule(f"{attention}.q_proj.weight", (f"{_A}.query.weight",), query),
        *_both(f"{attention}.q_a_proj", f"{_A}.query_down"),
        Rule(f"{attention}.q_a_layernorm.weight", (f"{_A}.query_down_norm.weight",)),
        Rule(f"{attention}.q_b_proj.weight", (f"{_A}.query_up.weight",), query),
        *(
            Rule(
                f"{attention}.kv_a_proj_with_mqa.{kind}",
                tuple(f"{_A}.{part}.{kind}" for part in parts),
                down,
            )
            for kind in ("weight", "bias")
        ),
        Rule(f"{attention}.kv_a_layernorm.weight", (f"{_A}.key_value_down_norm.weight",)),
        Rule(
            f"{attention}.kv_b_proj.weight",
            (f"{_A}.key_up.weight", f"{_A}.value_up.weight"),
            LATENT_UP,
        ),
    ]


def _llama(
    feed_forward: Sequence[Rule],
    norms: Mapping[str, str] = _BEFORE,
    projections: Sequence[Rule] = (),
) -> list[Rule]:
    layer = "model.layers.N"
    of_attention, of_mlp = (
        [
            rule
            for theirs, ours in norms.items()
            if branch in ours
            for rule in _both(f"{layer}.{theirs}", f"layers.N.{ours}")
        ]
        for branch in ("attention", "mlp")
    )
    return [
        Rule("model.embed_tokens.weight", ("embedding.weight",)),
        *of_attention,
        *(projections or _projections()),
        Rule(f"{layer}.self_attn.sinks", (f"{_A}.sinks.weight",)),
        *_both(f"{layer}.self_attn.o_proj", f"{_A}.output"),
        *of_mlp,
        *feed_forward,
        *_both("model.norm", "final_norm"),
        Rule("lm_head.weight", ("head.weight",)),
    ]


def _gated() -> list[Rule]:
    parts = ("gate", "up", "down")
    return [
        rule for part in parts for rule in _both(f"model.layers.N.mlp.{part}_proj", f"{_M}.{part}")
    ]


def _experts(moe: str, gate: str, up: str, down: str) -> list[Rule]:
    parts = {gate: "gate", up: "up", down: "down"}
    return [
        Rule(f"model.layers.N.{moe}.gate.weight", (f"{_M}.router.weight",)),
        *(
            Rule(
                f"model.layers.N.{moe}.experts.E.{theirs}.weight",
                (f"{_M}.experts.E.{ours}.weight",),
            )
            for theirs, ours in parts.items()
        ),
    ]


def _beside_experts(shared: str) -> list[Rule]:
    """The correction of the router's choice, shared experts and their gate."""
    layer = "model.layers.N.mlp"
    return [
        Rule(f"{layer}.gate.e_score_correction_bias", (CORRECTION,)),
        *(
            Rule(f"{layer}.{shared}.{p}_proj.weight", (f"{_M}.shared.{p}.weight",))
            for p in ("gate", "up", "down")
        ),
        Rule(f"{layer}.{shared}_gate.weight", (f"{_M}.shared_gate.weight",)),
    ]


def _shared_experts(shared: str = "shared_experts") -> list[Rule]:
    """Experts with shared ones beside them, and feed-forwards of layers without experts."""
    return [
        *_gated(),
        *_experts("mlp", "gate_proj", "up_proj", "down_proj"),
        *_beside_experts(shared),
    ]


def _stacked_experts() -> list[Rule]:
    """Experts of gpt-oss: all of a layer in one tensor, and gate and up of it row by row in
    turn."""
    mlp = "model.layers.N.mlp"
    gate_up = f"{mlp}.experts.gate_up_proj"
    down = f"{mlp}.experts.down_proj"
    rules = _both(f"{mlp}.router", f"{_M}.router")
    for suffix, kind in (("", "weight"), ("_bias", "bias")):
        both = tuple(f"{_M}.experts.E.{part}.{kind}" for part in ("gate", "up"))
        rules.append(Rule(gate_up + suffix, both, EXPERTS_INTERLEAVED))
        rules.append(Rule(down + suffix, (f"{_M}.experts.E.down.{kind}",), EXPERTS_TRANSPOSED))
    return rules


def _with_modules(rules: Sequence[Rule]) -> list[Rule]:
    """Return the rows with those of modules of multi-token prediction after the layers: what is
    around each module's layer, which is numbered as one of the model's, and the layer.
    """
    layer = "model.layers.N"
    end = 1 + max(n for n, rule in enumerate(rules) if ".N." in rule.foreign)
    return [
        *rules[:end],
        *_both(f"{layer}.enorm", "mtp.K.embedding_norm"),
        *_both(f"{layer}.hnorm", "mtp.K.hidden_norm"),
        Rule(f"{layer}.eh_proj.weight", ("mtp.K.projection.weight",)),
        *_both(f"{layer}.shared_head.norm", "mtp.K.final_norm"),
        *layers_of_modules(rules, layer, layer),
        *rules[end:],
    ]


# By the model_type in config.json.
HUGGING_FACE: dict[str, list[Rule]] = {
    "deepseek_v2": _llama(_shared_experts(), projections=_latents(True)),
    "deepseek_v3": _with_modules(_llama(_shared_experts(), projections=_latents(True))),
    "gpt2": _gpt2(),
    "gpt_neox": _neox(),
    "llama": _llama(_gated()),
    "mistral": _llama(_gated()),
    "qwen2": _llama(_gated()),
    "qwen2_moe": _llama(_shared_experts("shared_expert")),
    "qwen3": _llama(_gated()),
    "qwen3_moe": _llama([*_gated(), *_experts("mlp", "gate_proj", "up_proj", "down_proj")]),
    "glm4_moe": _with_modules(_llama(_shared_experts())),
    "olmo2": _llama(_gated(), _AFTER),
    "olmo3": _llama(_gated(), _AFTER),
    "gemma2": _llama(_gated(), _AROUND),
    "gemma3_text": _llama(_gated(), _AROUND),
    "gpt_oss": _llama(_stacked_experts()),
    "mixtral": _llama(_experts("block_sparse_moe", "w1", "w3", "w2")),
}
# Of folders whose config.json has rope_interleave = false.
IN_HALVES: dict[str, list[Rule]] = {
    "deepseek_v3": _with_modules(_llama(_shared_experts(), projections=_latents(False)))
}
# What a folder may leave out before every name: it was saved without the head.
PREFIXES = {"gpt2": "transformer.", "gpt_neox": "gpt_neox."}
# Buffers that old folders hold and that nothing has to be kept of: ends of their names.
BUFFERS = (
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
    ".rotary_emb.inv_freq",
)


def megatron(
    fused_norms: bool,
    interleaved: bool,
    model: ModelConfig,
    fused_before_experts: bool = False,
    down: Cut = "whole",
) -> list[Rule]:
    """Megatron-core's GPTModel, in the order of its parameters.

    fused_norms: norms belong to the linear layer after them, as Transformer Engine has it; else
    they stand alone, as the norm before experts always does but in distributed checkpoints without
    Transformer Engine, which name it as if it came before a feed-forward (fused_before_experts).
    interleaved: rotary partners are neighbours (args.rotary_interleaved). down: how the projections
    down to latents are sharded.
    """
    layer = "decoder.layers.N"
    gated = model.gated
    attention = f"{layer}.self_attention"
    inner = f"{layer}.mlp.linear_fc1"
    fused_attention = fused_norms and not model.latent  # before several layers a norm stands alone
    attention_norm = _norm(
        f"{attention}.linear_qkv.layer_norm_" if fused_attention else f"{layer}.input_layernorm.",
        "attention_norm",
    )
    with_mlp: dict[Layers, bool] = {
        "dense": fused_norms,
        "experts": fused_norms and fused_before_experts,
    }
    layers = [
        *(() if fused_attention else attention_norm),
        Rule(f"{attention}.core_attention.softmax_offset", (f"{_A}.sinks.weight",), SAME, "rows"),
        Rule(f"{attention}.linear_proj.weight", (f"{_A}.output.weight",), SAME, "columns"),
        Rule(f"{attention}.linear_proj.bias", (f"{_A}.output.bias",)),
        *(attention_norm if fused_attention else ()),
        *(
            _megatron_latents(attention, fused_norms, down)
            if model.latent
            else _megatron_qkv(attention, interleaved)
        ),
        *(
            rule
            for layers, fused in with_mlp.items()
            for rule in _norm(
                f"{inner}.layer_norm_" if fused else f"{layer}.pre_mlp_layernorm.",
                "mlp_norm",
                layers,
            )
        ),
        *_megatron_mlp(f"{layer}.mlp", _M, gated),
        *_both(f"{layer}.mlp.router", f"{_M}.router"),
        Rule(f"{layer}.mlp.router.expert_bias", (CORRECTION,)),
        *_megatron_mlp(f"{layer}.mlp.experts.local_experts.E", f"{_M}.experts.E", gated),
        Rule(f"{layer}.mlp.shared_experts.gate_weight", (f"{_M}.shared_gate.weight",)),
        *_megatron_mlp(f"{layer}.mlp.shared_experts", f"{_M}.shared", gated),
    ]
    module = "mtp.layers.K"
    return [
        Rule("embedding.word_embeddings.weight", ("embedding.weight",), SAME, "vocabulary"),
        Rule("embedding.position_embeddings.weight", ("positions.weight",)),
        *layers,
        *_both("decoder.final_layernorm", "final_norm"),
        *_both(f"{module}.enorm", "mtp.K.embedding_norm"),
        *_both(f"{module}.hnorm", "mtp.K.hidden_norm"),
        Rule(f"{module}.eh_proj.weight", ("mtp.K.projection.weight",), SAME, "rows"),
        *layers_of_modules(layers, layer, f"{module}.transformer_layer"),
        *_both(f"{module}.final_layernorm", "mtp.K.final_norm"),
        Rule("output_layer.weight", ("head.weight",), SAME, "vocabulary"),
    ]


def _megatron_qkv(attention: str, interleaved: bool) -> list[Rule]:
    how = GROUPED_INTERLEAVED if interleaved else GROUPED
    return [
        Rule(f"{attention}.linear_qkv.weight", _qkv("weight"), how, "rows"),
        Rule(f"{attention}.linear_qkv.bias", _qkv("bias"), how, "rows"),
        Rule(f"{attention}.q_layernorm.weight", (f"{_A}.query_norm.weight",)),
        Rule(f"{attention}.k_layernorm.weight", (f"{_A}.key_norm.weight",)),
    ]


def _megatron_latents(attention: str, fused_norms: bool, down: Cut) -> list[Rule]:
    """Multi-latent attention, whose rotary partners are neighbours (`_apply_rotary_pos_emb_bshd` of
    rope_utils.py)."""
    query_up = f"{attention}.linear_q_up_proj"
    up = f"{attention}.linear_kv_up_proj"
    if fused_norms:
        query_norm = f"{query_up}.layer_norm_weight"
    else:
        query_norm = f"{attention}.q_layernorm.weight"
    norm = f"{up}.layer_norm_weight" if fused_norms else f"{attention}.kv_layernorm.weight"
    norms = {
        "query": Rule(query_norm, (f"{_A}.query_down_norm.weight",)),
        "key_value": Rule(norm, (f"{_A}.key_value_down_norm.weight",)),
    }
    shared = tuple(f"{_A}.{part}.weight" for part in ("key_value_down", "key_rope"))
    made = tuple(f"{_A}.{part}.weight" for part in ("key_up", "value_up"))
    return [
        Rule(f"{attention}.linear_q_proj.weight", (f"{_A}.query.weight",), LATENT_QUERY, "rows"),
        Rule(f"{attention}.linear_q_down_proj.weight", (f"{_A}.query_down.weight",), SAME, down),
        *((norms["query"],) if fused_norms else ()),
        Rule(f"{query_up}.weight", (f"{_A}.query_up.weight",), LATENT_QUERY, "rows"),
        Rule(f"{attention}.linear_kv_down_proj.weight", shared, LATENT_DOWN, down),
        *((norms["key_value"],) if fused_norms else ()),
        Rule(f"{up}.weight", made, LATENT_UP, "rows"),
        *(() if fused_norms else norms.values()),
    ]


def _norm(prefix: str, logical: str, layers: Layers = "all") -> list[Rule]:
    return [
        Rule(prefix + kind, (f"layers.N.{logical}.{kind}",), layers=layers)
        for kind in ("weight", "bias")
    ]


def _megatron_mlp(foreign: str, logical: str, gated: bool) -> list[Rule]:
    parts = ("gate", "up") if gated else ("up",)
    how: Transform = STACKED if gated else SAME
    cut: Cut = "halves" if gated else "rows"
    return [
        *(
            Rule(
                f"{foreign}.linear_fc1.{kind}",
                tuple(f"{logical}.{part}.{kind}" for part in parts),
                how,
                cut,
            )
            for kind in ("weight", "bias")
        ),
        Rule(f"{foreign}.linear_fc2.weight", (f"{logical}.down.weight",), SAME, "columns"),
        Rule(f"{foreign}.linear_fc2.bias", (f"{logical}.down.bias",)),
    ]


def internevo(mlp: Mapping[str, str], split_hidden: bool, weight_parallel: bool) -> list[Rule]:
    """InternEvo's InternLM model (modeling_internlm.py).

    mlp: its names of the feed-forward's layers -> ours. split_hidden: the embedding's features are
    cut over ranks, not its vocabulary. weight_parallel: the rows of every linear layer are cut, as
    they lie.
    """
    qkv: Cut = "rows" if weight_parallel else "thirds"
    closing: Cut = "rows" if weight_parallel else "columns"
    layer = "blocks.N"
    return [
        Rule(
            "embedding.weight", ("embedding.weight",), SAME, "columns" if split_hidden else "rows"
        ),
        *_both(f"{layer}.norm1", "layers.N.attention_norm"),
        Rule(f"{layer}.mixer.Wqkv.weight", _qkv("weight"), PACKED, qkv),
        Rule(f"{layer}.mixer.Wqkv.bias", _qkv("bias"), PACKED, qkv),
        Rule(f"{layer}.mixer.out_proj.weight", (f"{_A}.output.weight",), SAME, closing),
        Rule(
            f"{layer}.mixer.out_proj.bias",
            (f"{_A}.output.bias",),
            SAME,
            "rows" if weight_parallel else "whole",
        ),
        *_both(f"{layer}.norm2", "layers.N.mlp_norm"),
        *(
            Rule(
                f"{layer}.mlp.{theirs}.weight",
                (f"{_M}.{ours}.weight",),
                SAME,
                closing if ours == "down" else "rows",
            )
            for theirs, ours in mlp.items()
        ),
        *_both("norm", "final_norm"),
        Rule("head.weight", ("head.weight",), SAME, "rows"),
    ]
