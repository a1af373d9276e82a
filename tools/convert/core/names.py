"""The name tables: Hugging Face's families and Megatron-core's GPT model, row by row."""

from collections.abc import Mapping, Sequence

from models.activations import XIELU_BETA, XIELU_EPS
from models.config import ModelConfig
from tools.convert.core.rules import Cut, Layers, NameRule, layers_of_modules
from tools.convert.core.transforms import (
    CONVOLUTIONS,
    DELTA_GATES,
    DELTA_NET,
    DELTA_ROWS,
    EXPERTS_GATE_UP,
    EXPERTS_INTERLEAVED,
    EXPERTS_STACKED,
    EXPERTS_TRANSPOSED,
    GATED_QUERY,
    GROUPED,
    GROUPED_GATED,
    GROUPED_INTERLEAVED,
    INTERLEAVED,
    LATENT_DOWN,
    LATENT_DOWN_HALVES,
    LATENT_QUERY,
    LATENT_QUERY_HALVES,
    LATENT_UP,
    MAMBA,
    MAMBA_CONVOLUTION_BIASES,
    MAMBA_CONVOLUTIONS,
    ONE_CONVOLUTION,
    PACKED,
    PACKED_TRANSPOSED,
    RATES_OF_HEADS,
    SAME,
    STACKED,
    STACKED_DELTA_NET,
    TRANSPOSED,
    TURNED_BACK,
    Transform,
)

QKV = ("query", "key", "value")
_ATTENTION = "layers.N.attention"
_MLP = "layers.N.mlp"
_DELTA_NET = "layers.N.delta_net"
_MAMBA = "layers.N.mamba"
# What passes the convolution of a Mamba-2 mixer, in the order of Mamba's letters x, B and C.
_CONVOLVED = ("value", "key", "query")
_MAMBA_PROJECTED = tuple(f"{_MAMBA}.{part}.weight" for part in ("gate", *_CONVOLVED, "step"))
_MAMBA_KERNELS = tuple(f"{_MAMBA}.{part}_convolution.weight" for part in _CONVOLVED)
_MAMBA_KERNEL_BIASES = tuple(f"{_MAMBA}.{part}_convolution.bias" for part in _CONVOLVED)
_DELTA_KERNELS = tuple(f"{_DELTA_NET}.{part}_convolution.weight" for part in QKV)
CORRECTION = f"{_MLP}.router.correction"


def _weight_and_bias(
    foreign: str, logical: str, how: Transform = SAME, bias_how: Transform = SAME
) -> list[NameRule]:
    """Return the rules of the weight and the bias of a layer; where a model has no bias, one
    matches nothing."""
    return [
        NameRule(f"{foreign}.weight", (f"{logical}.weight",), how),
        NameRule(f"{foreign}.bias", (f"{logical}.bias",), bias_how),
    ]


def _qkv(suffix: str) -> tuple[str, ...]:
    return tuple(f"{_ATTENTION}.{part}.{suffix}" for part in QKV)


def _gpt2() -> list[NameRule]:
    """Return the rules of GPT-2, whose linear layers are Conv1D: [features in, features out]."""
    layer = "transformer.h.N"
    return [
        NameRule("transformer.wte.weight", ("embedding.weight",)),
        NameRule("transformer.wpe.weight", ("positions.weight",)),
        *_weight_and_bias(f"{layer}.ln_1", "layers.N.attention_norm"),
        NameRule(f"{layer}.attn.c_attn.weight", _qkv("weight"), PACKED_TRANSPOSED),
        NameRule(f"{layer}.attn.c_attn.bias", _qkv("bias"), PACKED),
        *_weight_and_bias(f"{layer}.attn.c_proj", f"{_ATTENTION}.output", TRANSPOSED),
        *_weight_and_bias(f"{layer}.ln_2", "layers.N.mlp_norm"),
        *_weight_and_bias(f"{layer}.mlp.c_fc", f"{_MLP}.up", TRANSPOSED),
        *_weight_and_bias(f"{layer}.mlp.c_proj", f"{_MLP}.down", TRANSPOSED),
        *_weight_and_bias("transformer.ln_f", "final_norm"),
        NameRule("lm_head.weight", ("head.weight",)),
    ]


def _gpt_neox() -> list[NameRule]:
    """Return the rules of GPT-NeoX, whose queries, keys and values are one tensor, head by head."""
    layer = "gpt_neox.layers.N"
    return [
        NameRule("gpt_neox.embed_in.weight", ("embedding.weight",)),
        *_weight_and_bias(f"{layer}.input_layernorm", "layers.N.attention_norm"),
        NameRule(f"{layer}.attention.query_key_value.weight", _qkv("weight"), GROUPED),
        NameRule(f"{layer}.attention.query_key_value.bias", _qkv("bias"), GROUPED),
        *_weight_and_bias(f"{layer}.attention.dense", f"{_ATTENTION}.output"),
        *_weight_and_bias(f"{layer}.post_attention_layernorm", "layers.N.mlp_norm"),
        *_weight_and_bias(f"{layer}.mlp.dense_h_to_4h", f"{_MLP}.up"),
        *_weight_and_bias(f"{layer}.mlp.dense_4h_to_h", f"{_MLP}.down"),
        *_weight_and_bias("gpt_neox.final_layer_norm", "final_norm"),
        NameRule("embed_out.weight", ("head.weight",)),
    ]


# Norms of a layer -> ours: before each branch, after it, and both.
_BEFORE = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
_AFTER = {
    "post_attention_layernorm": "attention_post_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
}
# Of Cohere, one for both branches, and of Apertus.
_SHARED = {"input_layernorm": "attention_norm"}
_BEFORE_IN_APERTUS = {
    "attention_layernorm": "attention_norm",
    "feedforward_layernorm": "mlp_norm",
}
# Of VaultGemma, and of all other Gemmas.
_BEFORE_IN_VAULT = {"input_layernorm": "attention_norm", "pre_feedforward_layernorm": "mlp_norm"}
_AROUND = {**_BEFORE_IN_VAULT, **_AFTER}
# Of GLM-4, and of HyperCLOVA X.
_AROUND_IN_GLM4 = {
    **_BEFORE,
    "post_self_attn_layernorm": "attention_post_norm",
    "post_mlp_layernorm": "mlp_post_norm",
}
_AROUND_IN_HYPERCLOVA = {
    **_BEFORE,
    "post_norm1": "attention_post_norm",
    "post_norm2": "mlp_post_norm",
}


def _projections(turning: Transform = SAME) -> list[NameRule]:
    """Return the rules of queries, keys and values of the families after Llama. turning: of what
    has rotary positions, queries and keys."""
    attention = "model.layers.N.self_attn"
    rules: list[NameRule] = []
    for part in QKV:
        how = SAME if part == "value" else turning
        rules += _weight_and_bias(f"{attention}.{part[0]}_proj", f"{_ATTENTION}.{part}", how, how)
    return [
        *rules,
        NameRule(f"{attention}.q_norm.weight", (f"{_ATTENTION}.query_norm.weight",)),
        NameRule(f"{attention}.k_norm.weight", (f"{_ATTENTION}.key_norm.weight",)),
    ]


def _fused_projections() -> list[NameRule]:
    """Return the rules of Phi-3's queries, keys and values, which are one tensor."""
    return [NameRule("model.layers.N.self_attn.qkv_proj.weight", _qkv("weight"), PACKED)]


def _latents(interleaved: bool) -> list[NameRule]:
    """Return the rules of queries, keys and values of DeepSeek. interleaved: rotary partners are
    neighbours."""
    attention = "model.layers.N.self_attn"
    # Published files have partners side by side; rope_interleave = false has them as ours are.
    query = LATENT_QUERY if interleaved else LATENT_QUERY_HALVES
    down = LATENT_DOWN if interleaved else LATENT_DOWN_HALVES
    rules = [
        NameRule(f"{attention}.q_proj.weight", (f"{_ATTENTION}.query.weight",), query),
        *_weight_and_bias(f"{attention}.q_a_proj", f"{_ATTENTION}.query_down"),
        NameRule(f"{attention}.q_a_layernorm.weight", (f"{_ATTENTION}.query_down_norm.weight",)),
        NameRule(f"{attention}.q_b_proj.weight", (f"{_ATTENTION}.query_up.weight",), query),
    ]
    for suffix in ("weight", "bias"):
        parts = (f"{_ATTENTION}.key_value_down.{suffix}", f"{_ATTENTION}.key_rope.{suffix}")
        rules.append(NameRule(f"{attention}.kv_a_proj_with_mqa.{suffix}", parts, down))
    up_parts = (f"{_ATTENTION}.key_up.weight", f"{_ATTENTION}.value_up.weight")
    return [
        *rules,
        NameRule(
            f"{attention}.kv_a_layernorm.weight", (f"{_ATTENTION}.key_value_down_norm.weight",)
        ),
        NameRule(f"{attention}.kv_b_proj.weight", up_parts, LATENT_UP),
    ]


def _gated_attention_or_delta_net(by_key_head: bool) -> list[NameRule]:
    """Return the rules of Qwen3-Next and Qwen3.5: of attention whose queries have a gate beside
    them, and of gated delta nets.

    by_key_head: what is projected in a gated delta net is two tensors, whose rows are those of one
        head of keys after the other; otherwise only queries, keys and values are one tensor.
    """
    attention = "model.layers.N.self_attn"
    delta_net = "model.layers.N.linear_attn"
    rules = [rule for rule in _projections() if "q_proj" not in rule.foreign]
    for suffix in ("weight", "bias"):
        query_and_gate = (f"{_ATTENTION}.query.{suffix}", f"{_ATTENTION}.gate.{suffix}")
        rules.append(NameRule(f"{attention}.q_proj.{suffix}", query_and_gate, GATED_QUERY))
    projected = tuple(f"{_DELTA_NET}.{part}.weight" for part in QKV)
    gate = f"{_DELTA_NET}.gate.weight"
    strength = f"{_DELTA_NET}.strength.weight"
    decay = f"{_DELTA_NET}.decay.weight"
    if by_key_head:
        projections = [
            NameRule(f"{delta_net}.in_proj_qkvz.weight", (*projected, gate), DELTA_NET),
            NameRule(f"{delta_net}.in_proj_ba.weight", (strength, decay), DELTA_GATES),
        ]
    else:
        projections = [
            NameRule(f"{delta_net}.in_proj_qkv.weight", projected, DELTA_ROWS),
            NameRule(f"{delta_net}.in_proj_z.weight", (gate,)),
            NameRule(f"{delta_net}.in_proj_b.weight", (strength,)),
            NameRule(f"{delta_net}.in_proj_a.weight", (decay,)),
        ]
    return [
        *rules,
        NameRule(f"{delta_net}.dt_bias", (f"{_DELTA_NET}.decay.bias",)),
        NameRule(f"{delta_net}.A_log", (f"{_DELTA_NET}.decay.log_rate",)),
        NameRule(f"{delta_net}.conv1d.weight", _DELTA_KERNELS, CONVOLUTIONS),
        *projections,
        NameRule(f"{delta_net}.norm.weight", (f"{_DELTA_NET}.output_norm.weight",)),
        NameRule(f"{delta_net}.out_proj.weight", (f"{_DELTA_NET}.output.weight",)),
    ]


def _latents_or_kimi_delta() -> list[NameRule]:
    """Return the rules of Kimi Linear: of latent attention and of Kimi Delta Attention, which have
    the same names for some of their tensors."""
    delta = "model.layers.N.self_attn"
    rules = _latents(interleaved=False)
    for part in QKV:
        letter = part[0]
        rules += [
            NameRule(f"{delta}.{letter}_proj.weight", (f"{_DELTA_NET}.{part}.weight",)),
            NameRule(
                f"{delta}.{letter}_conv1d.weight",
                (f"{_DELTA_NET}.{part}_convolution.weight",),
                ONE_CONVOLUTION,
            ),
        ]
    # f: the gate of what is forgotten, g: that of the output; a: down, b: up
    alone = {
        "A_log": ("decay.log_rate", RATES_OF_HEADS),
        "dt_bias": ("decay.bias", SAME),
        "f_a_proj.weight": ("decay_down.weight", SAME),
        "f_b_proj.weight": ("decay_up.weight", SAME),
        "b_proj.weight": ("strength.weight", SAME),
        "g_a_proj.weight": ("gate_down.weight", SAME),
        "g_b_proj.weight": ("gate_up.weight", SAME),
        "o_norm.weight": ("output_norm.weight", SAME),
        "o_proj.weight": ("output.weight", SAME),
    }
    for theirs, (ours, how) in alone.items():
        rules.append(NameRule(f"{delta}.{theirs}", (f"{_DELTA_NET}.{ours}",), how))
    return rules


def _experts_of_granite() -> list[NameRule]:
    """Return the rules of Granite's experts: all of a layer in one tensor, gate above up."""
    moe = "model.layers.N.block_sparse_moe"
    gate_up = (f"{_MLP}.experts.E.gate.weight", f"{_MLP}.experts.E.up.weight")
    down = (f"{_MLP}.experts.E.down.weight",)
    return [
        NameRule(f"{moe}.router.layer.weight", (f"{_MLP}.router.weight",)),
        NameRule(f"{moe}.input_linear.weight", gate_up, EXPERTS_GATE_UP),
        NameRule(f"{moe}.output_linear.weight", down, EXPERTS_STACKED),
    ]


def _experts_of_kimi() -> list[NameRule]:
    """Return the rules of Kimi Linear's experts, and of its layers without them."""
    moe = "model.layers.N.block_sparse_moe"
    rules = [
        *_gated(),
        *_experts("block_sparse_moe", "w1", "w3", "w2"),
        NameRule(f"{moe}.gate.e_score_correction_bias", (CORRECTION,)),
    ]
    for part in ("gate", "up", "down"):
        logical = f"{_MLP}.shared.{part}.weight"
        rules.append(NameRule(f"{moe}.shared_experts.{part}_proj.weight", (logical,)))
    return rules


def _nemotron_h() -> list[NameRule]:
    """Return the rules of Nemotron-H, whose layers have one branch: all kinds of it have the same
    name, and so have their norms."""
    layer = "backbone.layers.N"
    mixer = f"{layer}.mixer"
    rules: list[NameRule] = []
    for part in (*QKV, "output"):
        rules += _weight_and_bias(f"{mixer}.{part[0]}_proj", f"{_ATTENTION}.{part}")
    for part in ("up", "down"):
        rules += _weight_and_bias(f"{mixer}.{part}_proj", f"{_MLP}.{part}")
    rules += [
        NameRule(f"{mixer}.gate.weight", (f"{_MLP}.router.weight",)),
        NameRule(f"{mixer}.gate.e_score_correction_bias", (CORRECTION,)),
    ]
    for theirs, ours in (("experts.E", "experts.E"), ("shared_experts", "shared")):
        for part in ("up", "down"):
            logical = f"{_MLP}.{ours}.{part}.weight"
            rules.append(NameRule(f"{mixer}.{theirs}.{part}_proj.weight", (logical,)))
    return [
        NameRule("backbone.embeddings.weight", ("embedding.weight",)),
        NameRule(f"{layer}.norm.weight", ("layers.N.attention_norm.weight",)),
        NameRule(f"{layer}.norm.weight", ("layers.N.mlp_norm.weight",)),
        *rules,
        NameRule(f"{mixer}.A_log", (f"{_MAMBA}.log_rate",)),
        NameRule(f"{mixer}.D", (f"{_MAMBA}.skip",)),
        NameRule(f"{mixer}.dt_bias", (f"{_MAMBA}.step.bias",)),
        NameRule(f"{mixer}.conv1d.weight", _MAMBA_KERNELS, MAMBA_CONVOLUTIONS),
        NameRule(f"{mixer}.conv1d.bias", _MAMBA_KERNEL_BIASES, MAMBA_CONVOLUTION_BIASES),
        NameRule(f"{mixer}.in_proj.weight", _MAMBA_PROJECTED, MAMBA),
        NameRule(f"{mixer}.norm.weight", (f"{_MAMBA}.output_norm.weight",)),
        NameRule(f"{mixer}.out_proj.weight", (f"{_MAMBA}.output.weight",)),
        NameRule("backbone.norm_f.weight", ("final_norm.weight",)),
        NameRule("lm_head.weight", ("head.weight",)),
    ]


def _llama(
    feed_forward: Sequence[NameRule],
    norms: Mapping[str, str] = _BEFORE,
    projections: Sequence[NameRule] = (),
) -> list[NameRule]:
    """Return the rules of the families after Llama.

    feed_forward: those of feed-forwards, or of experts.
    norms: names of a layer's norms -> ours.
    projections: those of queries, keys and values, if they are not the usual ones.
    """
    layer = "model.layers.N"
    attention_norms: list[NameRule] = []
    mlp_norms: list[NameRule] = []
    for theirs, ours in norms.items():
        of_branch = attention_norms if "attention" in ours else mlp_norms
        of_branch += _weight_and_bias(f"{layer}.{theirs}", f"layers.N.{ours}")
    return [
        NameRule("model.embed_tokens.weight", ("embedding.weight",)),
        *attention_norms,
        *(projections or _projections()),
        NameRule(f"{layer}.self_attn.sinks", (f"{_ATTENTION}.sinks.weight",)),
        *_weight_and_bias(f"{layer}.self_attn.o_proj", f"{_ATTENTION}.output"),
        *mlp_norms,
        *feed_forward,
        *_weight_and_bias("model.norm", "final_norm"),
        NameRule("lm_head.weight", ("head.weight",)),
    ]


def _gated() -> list[NameRule]:
    """Return the rules of gated feed-forwards."""
    rules: list[NameRule] = []
    for part in ("gate", "up", "down"):
        rules += _weight_and_bias(f"model.layers.N.mlp.{part}_proj", f"{_MLP}.{part}")
    return rules


def _ungated(up: str, down: str) -> list[NameRule]:
    """Return the rules of feed-forwards without a gate. up, down: the names of their layers."""
    mlp = "model.layers.N.mlp"
    return [
        *_weight_and_bias(f"{mlp}.{up}", f"{_MLP}.up"),
        *_weight_and_bias(f"{mlp}.{down}", f"{_MLP}.down"),
    ]


def _xielu() -> list[NameRule]:
    """Return the rules of the numbers that xIELU learns."""
    return [
        NameRule(f"model.layers.N.mlp.act_fn.{alpha}", (f"{_MLP}.activation.{alpha}",))
        for alpha in ("alpha_p", "alpha_n")
    ]


def _fused_gated() -> list[NameRule]:
    """Return the rules of Phi-3's feed-forwards, gate above up in one tensor."""
    mlp = "model.layers.N.mlp"
    gate_up = (f"{_MLP}.gate.weight", f"{_MLP}.up.weight")
    return [
        NameRule(f"{mlp}.gate_up_proj.weight", gate_up, STACKED),
        NameRule(f"{mlp}.down_proj.weight", (f"{_MLP}.down.weight",)),
    ]


def _experts(moe: str, gate: str, up: str, down: str) -> list[NameRule]:
    """Return the rules of a router and of experts one by one. moe: the module that has them."""
    layer = f"model.layers.N.{moe}"
    rules = [NameRule(f"{layer}.gate.weight", (f"{_MLP}.router.weight",))]
    for theirs, ours in ((gate, "gate"), (up, "up"), (down, "down")):
        logical = f"{_MLP}.experts.E.{ours}.weight"
        rules.append(NameRule(f"{layer}.experts.E.{theirs}.weight", (logical,)))
    return rules


def _shared_expert_rules(shared: str) -> list[NameRule]:
    """Return the rules of the correction of the router's choice, shared experts and their gate."""
    layer = "model.layers.N.mlp"
    rules = [NameRule(f"{layer}.gate.e_score_correction_bias", (CORRECTION,))]
    for part in ("gate", "up", "down"):
        logical = f"{_MLP}.shared.{part}.weight"
        rules.append(NameRule(f"{layer}.{shared}.{part}_proj.weight", (logical,)))
    rules.append(NameRule(f"{layer}.{shared}_gate.weight", (f"{_MLP}.shared_gate.weight",)))
    return rules


def _shared_experts(shared: str = "shared_experts") -> list[NameRule]:
    """Return the rules of experts with shared ones beside them, and of layers without experts."""
    return [
        *_gated(),
        *_experts("mlp", "gate_proj", "up_proj", "down_proj"),
        *_shared_expert_rules(shared),
    ]


def _stacked_experts() -> list[NameRule]:
    """Return the rules of experts of gpt-oss: all of a layer in one tensor, and gate and up of it
    row by row in turn."""
    mlp = "model.layers.N.mlp"
    rules = _weight_and_bias(f"{mlp}.router", f"{_MLP}.router")
    # Their biases are named by an underscore, for the stacked tensor is no module with a bias.
    for suffix, kind in (("", "weight"), ("_bias", "bias")):
        gate_up = (f"{_MLP}.experts.E.gate.{kind}", f"{_MLP}.experts.E.up.{kind}")
        down = (f"{_MLP}.experts.E.down.{kind}",)
        rules.append(NameRule(f"{mlp}.experts.gate_up_proj{suffix}", gate_up, EXPERTS_INTERLEAVED))
        rules.append(NameRule(f"{mlp}.experts.down_proj{suffix}", down, EXPERTS_TRANSPOSED))
    return rules


def _with_modules(rules: Sequence[NameRule]) -> list[NameRule]:
    """Return the rows with those of modules of multi-token prediction after the layers: what is
    around each module's layer, which is numbered as one of the model's, and the layer.
    """
    layer = "model.layers.N"
    # After the last row of a layer, where the modules' layers are numbered on.
    of_layers = [number for number, rule in enumerate(rules) if ".N." in rule.foreign]
    end = of_layers[-1] + 1
    return [
        *rules[:end],
        *_weight_and_bias(f"{layer}.enorm", "mtp.K.embedding_norm"),
        *_weight_and_bias(f"{layer}.hnorm", "mtp.K.hidden_norm"),
        NameRule(f"{layer}.eh_proj.weight", ("mtp.K.projection.weight",)),
        *_weight_and_bias(f"{layer}.shared_head.norm", "mtp.K.final_norm"),
        *layers_of_modules(rules, layer, layer),
        *rules[end:],
    ]


# A number of each layer, which stands in a buffer there.
_LAYER_SCALAR = NameRule("model.layers.N.layer_scalar", ("layers.N.scalar",))

# By the model_type in config.json.
HUGGING_FACE: dict[str, list[NameRule]] = {
    "deepseek_v2": _llama(_shared_experts(), projections=_latents(True)),
    "deepseek_v3": _with_modules(_llama(_shared_experts(), projections=_latents(True))),
    "gpt2": _gpt2(),
    "gpt_neox": _gpt_neox(),
    "llama": _llama(_gated()),
    "mistral": _llama(_gated()),
    "qwen2": _llama(_gated()),
    "qwen2_moe": _llama(_shared_experts("shared_expert")),
    "qwen3": _llama(_gated()),
    "qwen3_moe": _llama([*_gated(), *_experts("mlp", "gate_proj", "up_proj", "down_proj")]),
    "qwen3_next": _llama(
        _shared_experts("shared_expert"), projections=_gated_attention_or_delta_net(True)
    ),
    "qwen3_5_text": _llama(_gated(), projections=_gated_attention_or_delta_net(False)),
    "qwen3_5_moe_text": _llama(
        _shared_experts("shared_expert"), projections=_gated_attention_or_delta_net(False)
    ),
    "glm4_moe": _with_modules(_llama(_shared_experts())),
    "olmo2": _llama(_gated(), _AFTER),
    "olmo3": _llama(_gated(), _AFTER),
    "gemma2": _llama(_gated(), _AROUND),
    "gemma3_text": _llama(_gated(), _AROUND),
    "gemma4_text": _llama([*_gated(), _LAYER_SCALAR], _AROUND),
    "gemma4_unified_text": _llama([*_gated(), _LAYER_SCALAR], _AROUND),
    "gpt_oss": _llama(_stacked_experts()),
    "mixtral": _llama(_experts("block_sparse_moe", "w1", "w3", "w2")),
    "iquestcoder": _llama(_gated()),
    "internlm3": _llama(_gated()),
    "seed_oss": _llama(_gated()),
    "arcee": _llama(_gated()),
    "exaone4": _llama(_gated(), _AFTER),
    # whose rotary partners are neighbours
    "ernie4_5": _llama(_gated(), projections=_projections(INTERLEAVED)),
    "phi3": _llama(_fused_gated(), projections=_fused_projections()),
    "granite": _llama(_gated()),
    "granitemoe": _llama(_experts_of_granite()),
    "smollm3": _llama(_gated()),
    "olmoe": _llama(_experts("mlp", "gate_proj", "up_proj", "down_proj")),
    "minimax_m2": _llama(
        [
            *_experts("block_sparse_moe", "w1", "w3", "w2"),
            NameRule("model.layers.N.block_sparse_moe.e_score_correction_bias", (CORRECTION,)),
        ]
    ),
    "dots1": _llama(_shared_experts()),
    "solar_open": _llama(_shared_experts()),
    "glm4_moe_lite": _with_modules(_llama(_shared_experts(), projections=_latents(True))),
    "youtu": _llama(_gated(), projections=_latents(True)),
    "cohere2": _llama(_gated(), _SHARED, _projections(INTERLEAVED)),
    "nanochat": _llama(_ungated("fc1", "fc2"), {}, _projections(TURNED_BACK)),
    "apertus": _llama([*_ungated("up_proj", "down_proj"), *_xielu()], _BEFORE_IN_APERTUS),
    "ministral3": _llama(_gated()),
    "nemotron_h": _nemotron_h(),
    "kimi_linear": _llama(_experts_of_kimi(), projections=_latents_or_kimi_delta()),
    "gemma": _llama(_gated()),
    "vaultgemma": _llama(_gated(), _BEFORE_IN_VAULT),
    "cohere": _llama(_gated(), _SHARED, _projections(INTERLEAVED)),
    "glm4": _llama(_fused_gated(), _AROUND_IN_GLM4, _projections(INTERLEAVED)),
    "glm": _llama(_fused_gated(), projections=_projections(INTERLEAVED)),
    "ministral": _llama(_gated()),
    "cwm": _llama(_gated()),
    "hyperclovax": _llama(_gated(), _AROUND_IN_HYPERCLOVA),
    "starcoder2": _llama(_ungated("c_fc", "c_proj")),
    "stablelm": _llama(_gated()),
    "jais2": _llama(_ungated("up_proj", "down_proj")),
}
# Of folders whose config.json has rope_interleave = false.
IN_HALVES: dict[str, list[NameRule]] = {
    "deepseek_v3": _with_modules(_llama(_shared_experts(), projections=_latents(False))),
    "glm4_moe_lite": _with_modules(_llama(_shared_experts(), projections=_latents(False))),
    "youtu": _llama(_gated(), projections=_latents(False)),
}
# What a folder that was saved without the head may leave out before every name; of other families
# it is "model.".
PREFIXES = {"gpt2": "transformer.", "gpt_neox": "gpt_neox.", "nemotron_h": "backbone."}
# Another beginning of names, which stands for that of the table: of parameters in transformers 5,
# and of a text model that transformers has saved as a part of one with images.
OTHER_PREFIXES = {
    "nemotron_h": "model.",
    "qwen3_5_text": "model.language_model.",
    "qwen3_5_moe_text": "model.language_model.",
}
# Beginnings of names of tensors that published folders hold beside a model, and that neither
# transformers nor we read: of modules for multi-token prediction that are named on their own.
UNREAD = {"qwen3_next": "mtp.", "qwen3_5_text": "mtp.", "qwen3_5_moe_text": "mtp."}
# Numbers beside the weights of each layer that are the same in all models of a family, by the ends
# of their names.
CONSTANTS: dict[str, dict[str, float]] = {
    "apertus": {"mlp.act_fn.beta": XIELU_BETA, "mlp.act_fn.eps": XIELU_EPS}
}
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
) -> list[NameRule]:
    """Return the rules of Megatron-core's GPTModel, or of its MambaModel if layers have one branch,
    in the order of its parameters.

    fused_norms: norms belong to the linear layer after them, as Transformer Engine has it; else
        they stand alone, as the norm before experts always does but in distributed checkpoints
        without Transformer Engine, which name it as if it came before a feed-forward
        (fused_before_experts).
    interleaved: rotary partners are neighbours (args.rotary_interleaved).
    down: how the projections down to latents are sharded.
    """
    layer = "decoder.layers.N"
    layer_rules = [
        *_megatron_attention(layer, fused_norms, interleaved, model, down),
        *_megatron_mamba(f"{layer}.mixer", model),
        *_megatron_delta_net(f"{layer}.self_attention", model),
        *_megatron_mlp_norms(layer, fused_norms, fused_norms and fused_before_experts),
        *_megatron_mlp(f"{layer}.mlp", _MLP, model.gated),
        *_weight_and_bias(f"{layer}.mlp.router", f"{_MLP}.router"),
        NameRule(f"{layer}.mlp.router.expert_bias", (CORRECTION,)),
        *_megatron_mlp(f"{layer}.mlp.experts.local_experts.E", f"{_MLP}.experts.E", model.gated),
        NameRule(f"{layer}.mlp.shared_experts.gate_weight", (f"{_MLP}.shared_gate.weight",)),
        *_megatron_mlp(f"{layer}.mlp.shared_experts", f"{_MLP}.shared", model.gated),
    ]
    module = "mtp.layers.K"
    final_norm = "decoder.final_norm" if model.hybrid_pattern else "decoder.final_layernorm"
    return [
        NameRule("embedding.word_embeddings.weight", ("embedding.weight",), SAME, "vocabulary"),
        NameRule("embedding.position_embeddings.weight", ("positions.weight",)),
        *layer_rules,
        *_weight_and_bias(final_norm, "final_norm"),
        *_weight_and_bias(f"{module}.enorm", "mtp.K.embedding_norm"),
        *_weight_and_bias(f"{module}.hnorm", "mtp.K.hidden_norm"),
        NameRule(f"{module}.eh_proj.weight", ("mtp.K.projection.weight",), SAME, "rows"),
        *layers_of_modules(layer_rules, layer, f"{module}.transformer_layer"),
        *_weight_and_bias(f"{module}.final_layernorm", "mtp.K.final_norm"),
        NameRule("output_layer.weight", ("head.weight",), SAME, "vocabulary"),
    ]


def _megatron_attention(
    layer: str, fused_norms: bool, interleaved: bool, model: ModelConfig, down: Cut
) -> list[NameRule]:
    """Return the rules of attention and of the norm before it, which is registered with the linear
    layer that it is fused with."""
    attention = f"{layer}.self_attention"
    fused = fused_norms and not model.latent  # before several layers a norm stands alone
    if fused:
        norm = _norm(f"{attention}.linear_qkv.layer_norm_", "attention_norm", "attention")
    else:
        norm = _norm(f"{layer}.input_layernorm.", "attention_norm", "attention")
    output = [
        NameRule(
            f"{attention}.core_attention.softmax_offset",
            (f"{_ATTENTION}.sinks.weight",),
            SAME,
            "rows",
        ),
        NameRule(
            f"{attention}.linear_proj.weight", (f"{_ATTENTION}.output.weight",), SAME, "columns"
        ),
        NameRule(f"{attention}.linear_proj.bias", (f"{_ATTENTION}.output.bias",)),
    ]
    if model.latent:
        projections = _megatron_latents(attention, fused_norms, down)
    else:
        projections = _megatron_qkv(attention, interleaved, model.attention_gate)
    # `Attention` registers its output before `SelfAttention` does the projections, with which a
    # fused norm comes (megatron/core/transformer/attention.py).
    if fused:
        return [*output, *norm, *projections]
    return [*norm, *output, *projections]


def _megatron_mlp_norms(layer: str, fused: bool, fused_before_experts: bool) -> list[NameRule]:
    """Return the rules of the norms before feed-forwards, and before experts."""
    fused_in: dict[Layers, bool] = {"dense": fused, "experts": fused_before_experts}
    rules: list[NameRule] = []
    for layers, is_fused in fused_in.items():
        if is_fused:
            rules += _norm(f"{layer}.mlp.linear_fc1.layer_norm_", "mlp_norm", layers)
        else:
            rules += _norm(f"{layer}.pre_mlp_layernorm.", "mlp_norm", layers)
    return rules


def _megatron_mamba(mixer: str, model: ModelConfig) -> list[NameRule]:
    """Return the rules of a Mamba-2 mixer, whose own parameters come before those of its modules.
    Ranks cut each of the tensors that are stacked in one (megatron/core/ssm/mamba_mixer.py)."""
    sizes = model.mamba
    convolved = (sizes.width, sizes.key_width, sizes.key_width)
    projected = (sizes.width, *convolved, sizes.heads)
    kernels = NameRule(f"{mixer}.conv1d.weight", _MAMBA_KERNELS, MAMBA_CONVOLUTIONS, convolved)
    kernel_biases = NameRule(
        f"{mixer}.conv1d.bias", _MAMBA_KERNEL_BIASES, MAMBA_CONVOLUTION_BIASES, convolved
    )
    return [
        NameRule(f"{mixer}.dt_bias", (f"{_MAMBA}.step.bias",), SAME, "rows"),
        NameRule(f"{mixer}.A_log", (f"{_MAMBA}.log_rate",), SAME, "rows"),
        NameRule(f"{mixer}.D", (f"{_MAMBA}.skip",), SAME, "rows"),
        *_norm(f"{mixer}.in_proj.layer_norm_", "attention_norm", "mamba"),
        NameRule(f"{mixer}.in_proj.weight", _MAMBA_PROJECTED, MAMBA, projected),
        kernels,
        kernel_biases,
        NameRule(f"{mixer}.norm.weight", (f"{_MAMBA}.output_norm.weight",), SAME, "rows"),
        NameRule(f"{mixer}.out_proj.weight", (f"{_MAMBA}.output.weight",), SAME, "columns"),
    ]


def _megatron_delta_net(net: str, model: ModelConfig) -> list[NameRule]:
    """Return the rules of a gated delta net, as `_megatron_mamba` does
    (megatron/core/ssm/gated_delta_net.py)."""
    sizes = model.delta_net
    convolved = (sizes.key_width, sizes.key_width, sizes.value_width)
    projected = (*convolved, sizes.value_width, sizes.value_heads, sizes.value_heads)
    parts = (*QKV, "gate", "strength", "decay")
    weights = tuple(f"{_DELTA_NET}.{part}.weight" for part in parts)
    return [
        NameRule(f"{net}.dt_bias", (f"{_DELTA_NET}.decay.bias",), SAME, "rows"),
        NameRule(f"{net}.A_log", (f"{_DELTA_NET}.decay.log_rate",), SAME, "rows"),
        *_norm(f"{net}.in_proj.layer_norm_", "attention_norm", "delta_net"),
        NameRule(f"{net}.in_proj.weight", weights, STACKED_DELTA_NET, projected),
        NameRule(f"{net}.conv1d.weight", _DELTA_KERNELS, CONVOLUTIONS, convolved),
        NameRule(f"{net}.out_norm.weight", (f"{_DELTA_NET}.output_norm.weight",)),
        NameRule(f"{net}.out_proj.weight", (f"{_DELTA_NET}.output.weight",), SAME, "columns"),
    ]


def _megatron_qkv(attention: str, interleaved: bool, gated: bool) -> list[NameRule]:
    """Return the rules of queries, keys and values. gated: queries have gates beside them."""
    how = GROUPED_INTERLEAVED if interleaved else GROUPED
    weights = _qkv("weight")
    biases = _qkv("bias")
    if gated:
        how = GROUPED_GATED
        weights = (weights[0], f"{_ATTENTION}.gate.weight", *weights[1:])
        biases = (biases[0], f"{_ATTENTION}.gate.bias", *biases[1:])
    return [
        NameRule(f"{attention}.linear_qkv.weight", weights, how, "rows"),
        NameRule(f"{attention}.linear_qkv.bias", biases, how, "rows"),
        NameRule(f"{attention}.q_layernorm.weight", (f"{_ATTENTION}.query_norm.weight",)),
        NameRule(f"{attention}.k_layernorm.weight", (f"{_ATTENTION}.key_norm.weight",)),
    ]


def _megatron_latents(attention: str, fused_norms: bool, down: Cut) -> list[NameRule]:
    """Return the rules of multi-latent attention, whose rotary partners are neighbours
    (`_apply_rotary_pos_emb_bshd` of rope_utils.py)."""
    query_up = f"{attention}.linear_q_up_proj"
    kv_up = f"{attention}.linear_kv_up_proj"
    if fused_norms:
        query_norm_name = f"{query_up}.layer_norm_weight"
        kv_norm_name = f"{kv_up}.layer_norm_weight"
    else:
        query_norm_name = f"{attention}.q_layernorm.weight"
        kv_norm_name = f"{attention}.kv_layernorm.weight"
    query_norm = NameRule(query_norm_name, (f"{_ATTENTION}.query_down_norm.weight",))
    kv_norm = NameRule(kv_norm_name, (f"{_ATTENTION}.key_value_down_norm.weight",))
    down_parts = (f"{_ATTENTION}.key_value_down.weight", f"{_ATTENTION}.key_rope.weight")
    up_parts = (f"{_ATTENTION}.key_up.weight", f"{_ATTENTION}.value_up.weight")
    query_rules = [
        NameRule(
            f"{attention}.linear_q_proj.weight",
            (f"{_ATTENTION}.query.weight",),
            LATENT_QUERY,
            "rows",
        ),
        NameRule(
            f"{attention}.linear_q_down_proj.weight",
            (f"{_ATTENTION}.query_down.weight",),
            SAME,
            down,
        ),
    ]
    query_up_rule = NameRule(
        f"{query_up}.weight", (f"{_ATTENTION}.query_up.weight",), LATENT_QUERY, "rows"
    )
    kv_down_rule = NameRule(
        f"{attention}.linear_kv_down_proj.weight", down_parts, LATENT_DOWN, down
    )
    kv_up_rule = NameRule(f"{kv_up}.weight", up_parts, LATENT_UP, "rows")
    if fused_norms:  # each is registered with its linear layer
        return [*query_rules, query_norm, query_up_rule, kv_down_rule, kv_norm, kv_up_rule]
    return [*query_rules, query_up_rule, kv_down_rule, kv_up_rule, query_norm, kv_norm]


def _norm(prefix: str, logical: str, layers: Layers = "all") -> list[NameRule]:
    rules = []
    for suffix in ("weight", "bias"):
        rules.append(NameRule(prefix + suffix, (f"layers.N.{logical}.{suffix}",), layers=layers))
    return rules


def _megatron_mlp(foreign: str, logical: str, gated: bool) -> list[NameRule]:
    """Return the rules of a feed-forward, whose gate and up are one layer."""
    # Megatron computes both by one product, and each rank holds its rows of either.
    parts = ("gate", "up") if gated else ("up",)
    how: Transform = STACKED if gated else SAME
    cut: Cut = "halves" if gated else "rows"
    rules = []
    for suffix in ("weight", "bias"):
        inner = tuple(f"{logical}.{part}.{suffix}" for part in parts)
        rules.append(NameRule(f"{foreign}.linear_fc1.{suffix}", inner, how, cut))
    return [
        *rules,
        NameRule(f"{foreign}.linear_fc2.weight", (f"{logical}.down.weight",), SAME, "columns"),
        NameRule(f"{foreign}.linear_fc2.bias", (f"{logical}.down.bias",)),
    ]


def internevo(mlp: Mapping[str, str], split_hidden: bool, weight_parallel: bool) -> list[NameRule]:
    """Return the rules of InternEvo's InternLM model (modeling_internlm.py).

    mlp: its names of the feed-forward's layers -> ours.
    split_hidden: the embedding's features are cut over ranks, not its vocabulary.
    weight_parallel: the rows of every linear layer are cut, as they lie.
    """
    # Tensor parallelism cuts each of query, key and value, which are one tensor, and the features
    # in of a branch's last layer, whose bias is then whole.
    qkv: Cut = "rows" if weight_parallel else "thirds"
    closing: Cut = "rows" if weight_parallel else "columns"
    closing_bias: Cut = "rows" if weight_parallel else "whole"
    embedding: Cut = "columns" if split_hidden else "rows"
    layer = "blocks.N"
    output = f"{layer}.mixer.out_proj"
    mlp_rules = []
    for theirs, ours in mlp.items():
        cut: Cut = closing if ours == "down" else "rows"
        mlp_rules.append(
            NameRule(f"{layer}.mlp.{theirs}.weight", (f"{_MLP}.{ours}.weight",), SAME, cut)
        )
    return [
        NameRule("embedding.weight", ("embedding.weight",), SAME, embedding),
        *_weight_and_bias(f"{layer}.norm1", "layers.N.attention_norm"),
        NameRule(f"{layer}.mixer.Wqkv.weight", _qkv("weight"), PACKED, qkv),
        NameRule(f"{layer}.mixer.Wqkv.bias", _qkv("bias"), PACKED, qkv),
        NameRule(f"{output}.weight", (f"{_ATTENTION}.output.weight",), SAME, closing),
        NameRule(f"{output}.bias", (f"{_ATTENTION}.output.bias",), SAME, closing_bias),
        *_weight_and_bias(f"{layer}.norm2", "layers.N.mlp_norm"),
        *mlp_rules,
        *_weight_and_bias("norm", "final_norm"),
        NameRule("head.weight", ("head.weight",), SAME, "rows"),
    ]
