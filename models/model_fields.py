"""The keys of a model's configuration: type, default, range and help of each.

A field that is not given follows from the family or from earlier fields, so the order of the fields
matters. Beside its type stands what a key needs of others, where that is as simple as `Beside`.
`models.config` checks the fields against each other and counts FLOPs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from megaprec.one_of import one_of
from models.activations import ACTIVATIONS
from models.delta_net import NO_DELTA_NET, DeltaNet
from models.initial_weights import InitialStd
from models.latent import LARGEST_SIZE, NO_LATENT, Latent
from models.mamba import NO_MAMBA, Mamba
from models.rope_scaling import RopeScaling, score_factor
from models.router_settings import CORRECTED, PLAIN, RouterSettings

# A derived feed-forward width is rounded up to this, so that tensor parallelism can shard it.
FFN_MULTIPLE = 64

# Keys that are not known in models that have layers with a recurrent state.
_NOT_WITH_RECURRENCE = ("window", "mup_base_hidden", "factory")
_NOT_WITH_PATTERNS = (*_NOT_WITH_RECURRENCE, "latent", "delta_net", "dense_layers")


@dataclass(frozen=True)
class Beside:
    """The needs that a key has of others if it is on, that is true, above 0 or not empty.

    of_attention: attention alone reads the key, so that a model without layers of attention refuses
        it.
    not_with: other keys that the model cannot have on at the same time.
    """

    of_attention: bool = False
    not_with: tuple[str, ...] = ()


Fields = dict[str, Any]
"""The fields of a model that are known before the one whose default is asked for."""


def by_family(usual: Any, **exceptions: Any) -> Callable[[Fields], Any]:
    """Return a function of a model's fields that returns a default by its family: `usual`, or the
    exception of that family."""

    def default(fields: Fields) -> Any:
        return exceptions.get(fields["family"], usual)

    return default


def default_bias(fields: Fields) -> bool:
    """Return the model's `bias`."""
    return fields["bias"]


def default_attention_bias(fields: Fields) -> bool:
    """Return the model's `bias`, False where `hybrid_pattern` has no layer of attention."""
    return fields["bias"] and (not fields["hybrid_pattern"] or "*" in fields["hybrid_pattern"])


def default_expert_bias(fields: Fields) -> bool:
    """Return True for gpt-oss with experts, whose feed-forwards have biases."""
    return fields["family"] == "gpt_oss" and fields["experts"] > 0


def default_ffn(fields: Fields) -> int:
    """Return the default feed-forward width: four times hidden, or two thirds of that for a gated
    feed-forward.

    A gated feed-forward has three matrices instead of two, so both have the same number of
    parameters.
    """
    hidden: int = fields["hidden"]
    if ACTIVATIONS[fields["mlp"]].gated:
        # 8/3 of hidden in multiples, rounded up without a detour through floats
        multiples = -(-8 * hidden // (3 * FFN_MULTIPLE))
        return multiples * FFN_MULTIPLE
    return 4 * hidden


def _named(gated: bool) -> str:
    """Return the names of the activations with or without a gate, as a list in words such as "gelu,
    relu2 or xielu"."""
    names = [name for name, activation in ACTIVATIONS.items() if activation.gated == gated]
    *all_but_last, last = names
    return f"{', '.join(all_but_last)} or {last}"


def default_embedding_scale(fields: Fields) -> float:
    """Return the factor of the embeddings: 1, for Gemma the square root of hidden."""
    if fields["family"] in ("gemma2", "gemma3", "gemma4"):
        return fields["hidden"] ** 0.5
    return 1.0


def default_attention_scalar(fields: Fields) -> float:
    """Return the number by whose square root scores are divided: the width of a head, for Gemma 4,
    whose queries and keys are normalized, 1.

    In latent attention YaRN also multiplies scores by the square of a factor, as in DeepSeek-V2.
    Under muP scores are multiplied by sqrt(mup_base_head_dim) / head_dim.
    """
    scalar = 1.0 if fields["family"] == "gemma4" else float(fields["head_dim"])
    if fields["latent"]:
        # Scores are divided by the root of the scalar, and multiplied by the square of the factor:
        # in the scalar that is its fourth power.
        scalar = fields["head_dim"] / score_factor(fields["rope_scaling"]) ** 4
    if fields["mup_base_head_dim"]:
        # Scores are then divided by sqrt(d) * sqrt(d / base) = d / sqrt(base).
        return scalar * (fields["head_dim"] / fields["mup_base_head_dim"])
    return scalar


def default_delta_layers(fields: Fields) -> tuple[int, ...]:
    """Return the layers that have a gated delta net: all but each fourth, as in Qwen3-Next."""
    if not fields["delta_net"]:
        return ()
    return tuple(number for number in range(fields["layers"]) if (number + 1) % 4)


class ModelFields(BaseModel):
    """The fields of `ModelConfig`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    family: Literal[
        "llama",
        "gpt2",
        "gpt_neox",
        "mistral",
        "qwen2",
        "qwen3",
        "qwen3_next",
        "qwen3_5",
        "mixtral",
        "olmo2",
        "olmo3",
        "gemma2",
        "gemma3",
        "gemma4",
        "glm4_moe",
        "deepseek_v2",
        "deepseek_v3",
        "gpt_oss",
        "nemotron_h",
        "seed_oss",
        "arcee",
        "olmoe",
        "minimax_m2",
        "dots1",
        "solar_open",
        "glm4_moe_lite",
        "youtu",
        "smollm3",
        "granite",
        "kimi_linear",
        "exaone4",
        "ernie4_5",
        "phi3",
        "cohere2",
        "nanochat",
        "apertus",
        "ministral3",
        "glm4",
    ] = Field(
        default="llama", description="Model family, which sets the defaults of the keys below."
    )
    # Sizes.
    layers: int = Field(gt=0, le=4096, description="Number of transformer layers.")
    hidden: int = Field(
        gt=0, le=LARGEST_SIZE, description="Hidden size: width of the residual stream."
    )
    heads: int = Field(gt=0, le=65_536, description="Number of attention heads.")
    latent: Latent = Field(
        default=NO_LATENT,
        strict=False,
        description=(
            "Multi-head latent attention, such as {kv_rank = 512, query_rank = 1536, rope_dim = "
            f"64, nope_dim = 128, value_dim = 128}}; keys: {', '.join(Latent.model_fields)}; "
            "default: none."
        ),
    )
    kv_heads: int = Field(
        default_factory=lambda fields: fields["heads"],
        gt=0,
        le=65_536,
        description=(
            "Number of key and value heads (grouped-query attention); default: model.heads."
        ),
    )
    head_dim: int = Field(
        default_factory=lambda fields: (
            fields["latent"].head_dim or fields["hidden"] // fields["heads"]
        ),
        gt=0,
        le=LARGEST_SIZE,
        description=(
            "Width of one attention head; default, and if 0: model.hidden / model.heads; with "
            "model.latent the width of a query, rope_dim + nope_dim."
        ),
    )
    global_head_dim: int = Field(
        default=0,
        ge=0,
        le=LARGEST_SIZE,
        description=(
            "Width of one attention head in layers without the sliding window, beside "
            "model.window_layers that have it; 0: model.head_dim."
        ),
    )
    global_kv_heads: int = Field(
        default=0,
        ge=0,
        le=65_536,
        description=(
            "Number of key and value heads in layers without the sliding window, beside "
            "model.window_layers that have it; 0: model.kv_heads."
        ),
    )
    global_key_as_value: bool = Field(
        default=False,
        description=(
            "Layers without the sliding window have no projection to values: a value is its key "
            "before model.qk_norm and rotary positions."
        ),
    )
    delta_net: Annotated[DeltaNet, Beside(not_with=_NOT_WITH_RECURRENCE)] = Field(
        default=NO_DELTA_NET,
        strict=False,
        description=(
            "Gated delta net in place of attention in model.delta_layers, such as {key_heads = 16, "
            "value_heads = 32, key_dim = 128, value_dim = 128}; keys: "
            f"{', '.join(DeltaNet.model_fields)}; default: none."
        ),
    )
    delta_layers: tuple[int, ...] = Field(
        default_factory=default_delta_layers,
        strict=False,
        description=(
            "Numbers of the layers, from 0, that have model.delta_net in place of attention; "
            "default: with model.delta_net all but each fourth, otherwise none."
        ),
    )
    hybrid_pattern: Annotated[str, Beside(not_with=_NOT_WITH_PATTERNS)] = Field(
        default="",
        pattern="^[ME*-]*$",
        max_length=4096,
        description=(
            "Kinds of the layers, one letter each, of a model whose layers have one branch: "
            "M model.mamba, * attention, - a feed-forward, E model.experts; empty: all layers have "
            "attention and a feed-forward or experts."
        ),
    )
    mamba: Mamba = Field(
        default=NO_MAMBA,
        strict=False,
        description=(
            "Mamba-2 mixer of the layers M of model.hybrid_pattern, such as {heads = 128, head_dim "
            f"= 64, state_dim = 128, groups = 8}}; keys: {', '.join(Mamba.model_fields)}; "
            "default: none."
        ),
    )
    # Maximal update parametrization.
    mup_base_hidden: int = Field(
        default=0,
        ge=0,
        le=LARGEST_SIZE,
        description=(
            "Hidden size of the base model of muP (docs/mup.md), whose learning rate and initial "
            "weights this model's are scaled from, as if all its widths were smaller by "
            "model.hidden / model.mup_base_hidden; 0: no muP."
        ),
    )
    mup_base_head_dim: int = Field(
        default=0,
        ge=0,
        le=LARGEST_SIZE,
        description=(
            "Width of one attention head of the base model of muP, from which scores fall as 1 / "
            "head_dim; 0: model.head_dim, so that scores are those without muP."
        ),
    )
    # The feed-forward.
    mlp: Annotated[str, one_of(ACTIVATIONS)] = Field(
        default_factory=by_family(
            "swiglu",
            gpt2="gelu",
            gpt_neox="gelu_exact",
            gemma2="geglu",
            gemma3="geglu",
            gemma4="geglu",
            gpt_oss="swiglu_clamped",
            nemotron_h="relu2",
            arcee="relu2",
            nanochat="relu2",
            apertus="xielu",
        ),
        description=(
            f"Feed-forward: with a gate {_named(gated=True)}, without {_named(gated=False)}; relu2 "
            "is the square of relu, geglu and gelu are in the tanh approximation, xielu learns two "
            "numbers for each layer; default: swiglu, for gpt2 gelu, for gpt_neox gelu_exact, for "
            "gemma2, gemma3 and gemma4 geglu, for gpt_oss swiglu_clamped, for nemotron_h, arcee "
            "and nanochat relu2, for apertus xielu."
        ),
    )
    swiglu_alpha: float = Field(
        default=1.702, gt=0, description="Factor of the gate inside the sigmoid of swiglu_clamped."
    )
    swiglu_limit: float = Field(
        default=7.0,
        gt=0,
        description=(
            "Limit of swiglu_clamped: the gate is at most this, the other factor between minus "
            "this and this."
        ),
    )
    ffn: int = Field(
        default_factory=default_ffn,
        gt=0,
        le=LARGEST_SIZE,
        description=(
            "Feed-forward width, of each expert in a model with experts; default: with a gate 8/3 "
            f"of model.hidden, rounded up to a multiple of {FFN_MULTIPLE}, otherwise 4 times "
            "model.hidden."
        ),
    )
    # Vocabulary and sequences.
    vocab: int = Field(
        default=0,
        ge=0,
        le=LARGEST_SIZE,
        description="Vocabulary size, in tokens; 0: the tokenizer's.",
    )
    max_positions: int = Field(
        default=1024,
        gt=0,
        le=LARGEST_SIZE,
        description="Longest sequence, in tokens; default in a run file: train.seq_length.",
    )
    # Norms.
    norm: Literal["rms", "layer"] = Field(
        default_factory=by_family("rms", gpt2="layer", gpt_neox="layer", cohere2="layer"),
        description=(
            "Norm: RMSNorm (rms) or LayerNorm (layer); default: rms, for gpt2, gpt_neox and "
            "cohere2 layer."
        ),
    )
    norm_weight: bool = Field(
        default_factory=by_family(True, nanochat=False),
        description=(
            "RMSNorms multiply by a weight that is learned, but for those of model.latent, "
            "model.delta_net and model.mamba, which always do; default: true, for nanochat false."
        ),
    )
    norm_bias: bool = Field(
        default_factory=lambda fields: fields["norm"] == "layer" and fields["family"] != "cohere2",
        description="Biases of the LayerNorms; an RMSNorm has none. Without them and with "
        "model.bias = false a model has no biases; default: true for LayerNorm, for cohere2 false.",
    )
    embedding_norm: Annotated[bool, Beside(not_with=("mtp_layers",))] = Field(
        default_factory=by_family(False, nanochat=True),
        description=(
            "A norm of the embeddings, with learned positions if there are any, before the first "
            "layer; default: true for nanochat."
        ),
    )
    norm_eps: float = Field(
        default=1e-5, gt=0, description="Epsilon that norms add to the variance."
    )
    norm_at: Literal["before", "after", "around"] = Field(
        default_factory=by_family(
            "before",
            olmo2="after",
            olmo3="after",
            gemma2="around",
            gemma3="around",
            gemma4="around",
            glm4="around",
            exaone4="after",
        ),
        description=(
            "Norms of each branch, attention and feed-forward: before it, after it (on its output, "
            "before the residual addition), or both (around); default: before, for olmo2, olmo3 "
            "and exaone4 after, for gemma2, gemma3, gemma4 and glm4 around."
        ),
    )
    norm_unit_offset: Annotated[bool, Beside(not_with=("latent",))] = Field(
        default_factory=by_family(False, gemma2=True, gemma3=True, qwen3_next=True, qwen3_5=True),
        description=(
            "RMSNorms multiply by 1 + weight, with weights that begin at 0, but for that of "
            "model.delta_net; default: true for gemma2, gemma3, qwen3_next and qwen3_5."
        ),
    )
    qk_norm: Annotated[bool, Beside(of_attention=True, not_with=("latent",))] = Field(
        default_factory=by_family(
            False,
            qwen3=True,
            qwen3_next=True,
            qwen3_5=True,
            olmo2=True,
            olmo3=True,
            gemma3=True,
            gemma4=True,
            olmoe=True,
            minimax_m2=True,
            dots1=True,
            exaone4=True,
            nanochat=True,
            apertus=True,
        ),
        description=(
            "RMSNorm on query and key, before rotary positions; default: true for qwen3, "
            "qwen3_next, qwen3_5, olmo2, olmo3, gemma3, gemma4, olmoe, minimax_m2, dots1, exaone4, "
            "nanochat and apertus."
        ),
    )
    qk_norm_over: Literal["head", "all"] = Field(
        default_factory=by_family("head", olmo2="all", olmo3="all", olmoe="all", minimax_m2="all"),
        description=(
            "Features that model.qk_norm takes together: those of one head, or of all heads; "
            "default: head, for olmo2, olmo3, olmoe and minimax_m2 all."
        ),
    )
    value_norm: Annotated[bool, Beside(of_attention=True, not_with=("latent",))] = Field(
        default_factory=by_family(False, gemma4=True),
        description=(
            "RMSNorm without a weight on the values of each head; default: true for gemma4."
        ),
    )
    # The residual stream.
    parallel_residual: bool = Field(
        default_factory=by_family(False, gpt_neox=True, cohere2=True),
        description=(
            "Attention and feed-forward both read the input of the layer; default: true for "
            "gpt_neox and cohere2."
        ),
    )
    shared_norm: bool = Field(
        default_factory=by_family(False, cohere2=True),
        description=(
            "With model.parallel_residual: the feed-forward reads the norm before attention, and "
            "has none of its own; default: true for cohere2."
        ),
    )
    branch_scale: float = Field(
        default=1.0,
        gt=0,
        description=(
            "Factor of the output of each branch, attention and feed-forward, before it is added "
            "to the residual stream (Granite's residual_multiplier)."
        ),
    )
    layer_scalar: bool = Field(
        default_factory=by_family(False, gemma4=True),
        description=(
            "The residual stream after each layer is multiplied by a number of the layer, which "
            "begins at 1 and is not trained; default: true for gemma4."
        ),
    )
    # Positions.
    positions: Literal["rope", "learned", "none"] = Field(
        default_factory=by_family("rope", gpt2="learned", nemotron_h="none", kimi_linear="none"),
        description=(
            "Position embeddings: rotary (rope), learned, or none; default: rope, for gpt2 "
            "learned, for nemotron_h and kimi_linear none."
        ),
    )
    rope_base: float = Field(
        default=10000.0, gt=1, description="Base of the rotary wavelengths (rope_theta)."
    )
    rotary_fraction: float = Field(
        default_factory=by_family(
            1.0,
            gpt_neox=0.25,
            glm4_moe=0.5,
            glm4=0.5,
            minimax_m2=0.5,
            qwen3_next=0.25,
            qwen3_5=0.25,
        ),
        gt=0,
        le=1,
        description=(
            "Fraction of each head's features, counted from the first, that get rotary positions; "
            "default: 1.0, for gpt_neox, qwen3_next and qwen3_5 0.25, for glm4, glm4_moe and "
            "minimax_m2 0.5."
        ),
    )
    rope_scaling: RopeScaling = Field(
        default=RopeScaling(),
        strict=False,
        description=(
            'Scaling of rotary positions to longer sequences, such as {kind = "linear", factor = '
            "2.0}; kinds: none, linear, dynamic, llama3, yarn and proportional, with Hugging "
            "Face's keys."
        ),
    )
    window_rope_base: float = Field(
        default=0.0,
        ge=0,
        description=(
            "Base of the rotary wavelengths in layers with the sliding window, which then have no "
            "scaling; 0: these layers have the rotary positions of all others."
        ),
    )
    nope_layers: tuple[int, ...] = Field(
        default=(),
        strict=False,
        description=(
            "Numbers of the layers, from 0, whose attention has no rotary positions (NoPE), as in "
            "SmolLM3; empty: none."
        ),
    )
    # Scores and logits.
    attention_scalar: float = Field(
        default_factory=default_attention_scalar,
        gt=0,
        description=(
            "Attention scores are divided by the square root of this number; default: "
            "model.head_dim, for gemma4 1, times model.head_dim / model.mup_base_head_dim if that "
            "is given; with model.latent and rope_scaling.mscale_all_dim this divided by the "
            "fourth power of yarn's factor."
        ),
    )
    attention_sinks: Annotated[bool, Beside(of_attention=True, not_with=("latent",))] = Field(
        default_factory=by_family(False, gpt_oss=True),
        description=(
            "Each head learns a sink: one more logit in the denominator of its softmax; default: "
            "true for gpt_oss."
        ),
    )
    attention_gate: Annotated[bool, Beside(of_attention=True, not_with=("latent",))] = Field(
        default_factory=by_family(False, qwen3_next=True, qwen3_5=True),
        description=(
            "The output of attention is multiplied by the sigmoid of one more projection, feature "
            "by feature, before the output projection; default: true for qwen3_next and qwen3_5."
        ),
    )
    attention_softcap: Annotated[float, Beside(of_attention=True)] = Field(
        default_factory=by_family(0.0, gemma2=50.0),
        ge=0,
        description=(
            "Soft cap of attention scores, cap * tanh(score / cap); 0: none; default: 0, for "
            "gemma2 50."
        ),
    )
    final_softcap: float = Field(
        default_factory=by_family(0.0, gemma2=30.0, nanochat=15.0),
        ge=0,
        description=(
            "Soft cap of the logits, cap * tanh(logit / cap); 0: none; default: 0, for gemma2 30, "
            "for nanochat 15."
        ),
    )
    logit_divisor: float = Field(
        default=1.0,
        gt=0,
        description="The logits are divided by this number, before their soft cap (Granite's "
        "logits_scaling).",
    )
    # Attention within a window.
    window: int = Field(
        default=0,
        ge=0,
        le=LARGEST_SIZE,
        description=(
            "Sliding window of attention, in tokens, the token itself included; 0: all tokens "
            "before."
        ),
    )
    window_layers: tuple[int, ...] = Field(
        default=(),
        strict=False,
        description=(
            "Numbers of the layers, from 0, that have the sliding window; empty: all layers."
        ),
    )
    # Biases. The first one is the default of the others, so it comes before them.
    bias: bool = Field(
        default_factory=by_family(False, gpt2=True, gpt_neox=True),
        description=(
            "Default of model.qkv_bias, model.output_bias and model.mlp_bias; default: true for "
            "gpt2 and gpt_neox."
        ),
    )
    qkv_bias: Annotated[bool, Beside(of_attention=True)] = Field(
        default_factory=lambda fields: (
            default_attention_bias(fields)
            or fields["family"] in ("qwen2", "gpt_oss", "seed_oss", "glm4")
        ),
        description=(
            "Biases of the query, key and value projections and of model.attention_gate, with "
            "model.latent of those down to the latents; default: model.bias, for qwen2, gpt_oss, "
            "seed_oss and glm4 true."
        ),
    )
    output_bias: Annotated[bool, Beside(of_attention=True)] = Field(
        default_factory=lambda fields: (
            default_attention_bias(fields) or fields["family"] == "gpt_oss"
        ),
        description="Bias of attention's output projection; default: model.bias, for gpt_oss true.",
    )
    mlp_bias: bool = Field(
        default_factory=default_bias, description="Biases of the feed-forward; default: model.bias."
    )
    # The output head.
    tied: bool = Field(
        default_factory=by_family(
            False,
            gpt2=True,
            gemma2=True,
            gemma3=True,
            gemma4=True,
            youtu=True,
            smollm3=True,
            ernie4_5=True,
            cohere2=True,
        ),
        description=(
            "The output head shares the weight of the embedding; default: true for gpt2, "
            "gemma2, gemma3, gemma4, youtu, smollm3, ernie4_5 and cohere2."
        ),
    )
    # Experts. Losses and corrections keep their loads balanced.
    experts: int = Field(
        default_factory=by_family(
            0,
            mixtral=8,
            glm4_moe=128,
            gpt_oss=32,
            olmoe=64,
            minimax_m2=256,
            solar_open=128,
        ),
        ge=0,
        le=65_536,
        description=(
            "Number of experts per layer (mixture of experts); 0: one feed-forward and no router; "
            "default: 0, for mixtral 8, for gpt_oss 32, for olmoe 64, for glm4_moe and solar_open "
            "128, for minimax_m2 256."
        ),
    )
    experts_per_token: int = Field(
        default_factory=by_family(2, gpt_oss=4, olmoe=8, minimax_m2=8),
        gt=0,
        le=65_536,
        description=(
            "Number of experts that the router chooses for each token; default: 2, for gpt_oss 4, "
            "for olmoe and minimax_m2 8."
        ),
    )
    expert_bias: bool = Field(
        default_factory=default_expert_bias,
        description="Biases of the experts' feed-forwards; default: true for gpt_oss.",
    )
    router_bias: bool = Field(
        default_factory=default_expert_bias,
        description="Bias of the router; default: true for gpt_oss.",
    )
    norm_topk: bool = Field(
        default=True,
        description=(
            "Normalize the router's weights of a token's experts to a sum of one (before "
            "model.router's scale); with softmax scores this is a softmax over the chosen experts."
        ),
    )
    router: RouterSettings = Field(
        default_factory=by_family(
            PLAIN,
            glm4_moe=CORRECTED,
            deepseek_v3=CORRECTED,
            nemotron_h=CORRECTED,
            minimax_m2=CORRECTED,
            dots1=CORRECTED,
            solar_open=CORRECTED,
            glm4_moe_lite=CORRECTED,
            kimi_linear=CORRECTED,
        ),
        strict=False,
        description=(
            'Choice of experts, such as {score = "sigmoid", scale = 2.5, correction = true}; keys: '
            f"{', '.join(RouterSettings.model_fields)}; default: softmax scores, for glm4_moe, "
            "glm4_moe_lite, solar_open, dots1, minimax_m2, deepseek_v3, nemotron_h and kimi_linear "
            "sigmoid scores with a correction by loads."
        ),
    )
    dense_layers: tuple[int, ...] = Field(
        default=(),
        strict=False,
        description=(
            "Numbers of the layers, from 0, that have one feed-forward in place of experts."
        ),
    )
    dense_ffn: int = Field(
        default_factory=lambda fields: fields["ffn"],
        gt=0,
        le=LARGEST_SIZE,
        description=(
            "Width of the feed-forward of model.dense_layers, and of the layers - beside layers E "
            "of model.hybrid_pattern; default: model.ffn."
        ),
    )
    shared_experts: int = Field(
        default=0,
        ge=0,
        le=LARGEST_SIZE,
        description=(
            "Width of a feed-forward beside the experts of a layer, which every token passes; "
            "0: none."
        ),
    )
    shared_gate: bool = Field(
        default=False,
        description=(
            "The result of model.shared_experts is multiplied by the sigmoid of one more logit "
            "of each token."
        ),
    )
    router_aux_loss: float = Field(
        default=0.01,
        ge=0,
        description="Weight of the load-balancing loss of each layer with experts.",
    )
    router_z_loss: float = Field(
        default=0.0,
        ge=0,
        description=(
            "Weight of the z-loss, which keeps the router's logits small, of each layer with "
            "experts."
        ),
    )
    router_correction_speed: float = Field(
        default=0.001,
        ge=0,
        description=(
            "Change of router.correction in each step, up or down by the load of an expert; 0: it "
            "stays as it is."
        ),
    )
    z_loss: float = Field(
        default=0.0,
        ge=0,
        description=(
            "Weight of the z-loss, which keeps the logits of the head from growing; PaLM's is 1e-4."
        ),
    )
    # Dropout.
    dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Dropout probability at the places of model.dropout_at.",
    )
    dropout_at: Literal["branches", "stream"] = Field(
        default="branches",
        description=(
            "Places of dropout. branches: the embedding and the outputs of attention and "
            "feed-forward; stream: the input of each layer and the output of attention, as in "
            "InternEvo."
        ),
    )
    embedding_dropout: float = Field(
        default_factory=lambda fields: fields["dropout"],
        ge=0,
        lt=1,
        description=(
            "Dropout probability of embeddings, unless model.dropout_at is stream; default: "
            "model.dropout."
        ),
    )
    attention_dropout: Annotated[float, Beside(of_attention=True)] = Field(
        default=0.0, ge=0, lt=1, description="Dropout probability of attention probabilities."
    )
    # Factors of values and gradients.
    embedding_scale: float = Field(
        default_factory=default_embedding_scale,
        gt=0,
        description=(
            "Factor of the embeddings, rounded to their dtype; default: 1, for gemma2, gemma3 and "
            "gemma4 the square root of model.hidden."
        ),
    )
    embedding_grad_scale: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Factor of the embedding's gradient, without the part of a tied head.",
    )
    head_grad_scale: float = Field(
        default=1.0, gt=0, le=1, description="Factor of the gradient of the output head's weight."
    )
    # Initial weights.
    init_std: float = Field(
        default=0.02, gt=0, description="Standard deviation of initial weights."
    )
    init: InitialStd = Field(
        default=InitialStd(),
        strict=False,
        description=(
            "Standard deviation of initial weights by kind of matrix, such as {embedding = 0.01, "
            f"qkv = 0.006}}; keys: {', '.join(InitialStd.model_fields)}; empty: model.init_std for "
            "all."
        ),
    )
    # Multi-token prediction.
    mtp_layers: int = Field(
        default=0,
        ge=0,
        le=16,
        description=(
            "Number of modules of multi-token prediction after the last layer: module k is trained "
            "to predict k tokens further ahead; 0: none."
        ),
    )
    mtp_loss_weight: float = Field(
        default=0.3,
        ge=0,
        description=(
            "Weight of the mean of the modules' losses (model.mtp_layers) in the training loss."
        ),
    )
    # A model of the user's own.
    factory: str = Field(
        default="",
        description=(
            'Factory of a custom model, as "file.py:function" or "package.module:function" '
            "(docs/parity.md); empty: the built-in family of model.family."
        ),
    )


BESIDE: Mapping[str, Beside] = {
    key: mark
    for key, field in ModelFields.model_fields.items()
    for mark in field.metadata
    if isinstance(mark, Beside)
}
"""What keys need of others, by key."""
