"""Hybrid models in Megatron's args, both ways: layers of one branch, and gated delta nets.

A MambaModel, in later versions a HybridModel, has layers of one branch: a Mamba-2 mixer (M),
attention (*) or a feed-forward (-). A pattern of letters says which, or ratios from which Megatron
makes one. `spec` names its modules, of which no others are known here. What else a mixer is, no
argument says (megatron/core/ssm/mamba_mixer.py): its convolution sees 4 tokens, its norm adds 1e-5,
and no time step is too short.

Gated delta nets are an experimental variant of a GPT model's attention, in the layers of
linear_attention_freq.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from megaprec.errors import UserError
from models.config import ModelConfig
from models.delta_net import DeltaNet
from models.mamba import Mamba
from tools.convert.megatron.keys import Args, argument_or

# Modules of a hybrid model, as --spec names them: a module of Python and a name in it.
SPECS = (
    ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"],
    ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"],
)
PATTERNS = ("hybrid_override_pattern", "hybrid_layer_pattern")
LETTERS = "M*-"
STAGE_END = "|"  # in a pattern of later versions
KERNEL = 4
NORM_EPS = 1e-5
EXPANSION = 2  # of the hidden size, to the width of a mixer whose number of heads is not given
DELTA_NETS = ("gated_delta_net", "gdn")  # later versions have the second name
# Our sizes by Megatron's names, with its defaults.
_MAMBA_SIZES = {
    "mamba_head_dim": ("head_dim", 64),
    "mamba_state_dim": ("state_dim", 128),
    "mamba_num_groups": ("groups", 8),
}
_DELTA_SIZES = {
    "linear_num_key_heads": ("key_heads", 16),
    "linear_num_value_heads": ("value_heads", 32),
    "linear_key_head_dim": ("key_dim", 128),
    "linear_value_head_dim": ("value_dim", 128),
    "linear_conv_kernel_dim": ("kernel", 4),
}
MAMBA_ARGUMENTS = ("mamba_num_heads", *_MAMBA_SIZES)
DELTA_ARGUMENTS = ("linear_attention_freq", *_DELTA_SIZES)


def pattern_of(arguments: Args) -> str:
    """Return the letter of each layer of a hybrid model; empty for a model that is none.

    UserError for what contradicts itself, and for layers that no model here has.
    """
    spec = _is_hybrid_spec(arguments)
    given = _given_pattern(arguments)
    ratios = [argument_or(arguments, f"hybrid_{kind}_ratio", 0.0) for kind in ("attention", "mlp")]
    if not (spec or given or any(ratios)):
        # Of a GPT model it changes initial weights only, and nothing tells which it is.
        if arguments.get("is_hybrid_model"):
            raise UserError.of("convert.megatron_hybrid_unsaid")
        return ""
    layers = arguments["num_layers"]
    if min(ratios) < 0 or sum(ratios) > 1:
        raise UserError.of("convert.megatron_hybrid_ratios", attention=ratios[0], mlp=ratios[1])
    of_ratios = allocated(layers, *ratios)
    if not given:
        return of_ratios
    # As Megatron itself refuses it.
    if len(given) != layers:
        raise UserError.of(
            "convert.megatron_hybrid_length", pattern=given, kinds=len(given), layers=layers
        )
    if any(ratios) and Counter(given) != Counter(of_ratios):
        raise UserError.of(
            "convert.megatron_hybrid_counts",
            pattern=given,
            attention=ratios[0],
            mlp=ratios[1],
            allocated=of_ratios,
        )
    return given


def stage_patterns(arguments: Args) -> Sequence[str]:
    """Return the letters of each pipeline stage, virtual ones too, if the pattern says where stages
    end; otherwise nothing."""
    for key in PATTERNS:
        pattern = arguments.get(key) or ""
        if STAGE_END in pattern:
            return pattern.split(STAGE_END)
    return []


def _given_pattern(arguments: Args) -> str:
    """Return the pattern of letters, without the ends of stages; empty if none is given."""
    override, layer = (arguments.get(key) for key in PATTERNS)
    # Later versions keep the first under the name of the second too.
    if override and layer and override != layer:
        raise UserError.of("convert.megatron_hybrid_two", override=override, layer=layer)
    key = PATTERNS[0] if override else PATTERNS[1]
    pattern = override or layer or ""
    letters = pattern.replace(STAGE_END, "")
    for letter in letters:
        if letter not in LETTERS:
            raise UserError.of(
                "convert.megatron_hybrid_letter", key=key, pattern=pattern, letter=letter
            )
    return letters


def _is_hybrid_spec(arguments: Args) -> bool:
    """Return True if the modules are those of a hybrid model; UserError for others."""
    spec = arguments.get("spec")
    if not spec:
        return False
    if [*spec] not in SPECS:
        raise UserError.of("convert.megatron_spec", spec=" ".join(map(str, spec)))
    return True


def allocated(layers: int, attention_ratio: float, mlp_ratio: float) -> str:
    """Return the pattern that Megatron makes of ratios (`allocate_layers` of
    mamba_hybrid_layer_allocation.py).

    Attention lies evenly between runs of mixers, which begin and end the model; feed-forwards then
    take the place of mixers, evenly from the end.
    """
    attention = round(layers * attention_ratio)
    mixers = layers - attention
    letters = _placed(["M"] * layers, "*", mixers / (attention + 1))
    feed_forwards = round(layers * mlp_ratio)
    if feed_forwards:
        letters = _placed(letters, "-", (mixers - feed_forwards) / feed_forwards)
    return "".join(letters)


def _placed(letters: list[str], letter: str, run: float) -> list[str]:
    """Return the letters with `letter` in the place of some mixers.

    run: how many mixers stay before each, on average. It may have a fraction, which is carried over
        to the next run.
    """
    placed = [*letters]
    mixers_left = run  # of the present run
    for number, before in enumerate(letters):
        if before != "M":
            continue
        if mixers_left < 0.5:
            placed[number] = letter
            mixers_left += run
        else:
            mixers_left -= 1
    return placed


def hybrid_of(arguments: Args) -> dict[str, Any]:
    """Return the fields of layers of one branch; none if the model has no such. UserError for what
    no model here has."""
    pattern = pattern_of(arguments)
    if not pattern:
        return {}
    # The modules of a hybrid model's attention have no such norms, whatever the args say.
    if arguments.get("qk_layernorm"):
        raise UserError.of("convert.megatron_hybrid_qk_norm")
    fields = {"hybrid_pattern": pattern, **_idle_attention(arguments, pattern)}
    if "M" not in pattern:
        return fields
    eps = argument_or(arguments, "norm_epsilon", 1e-5)
    if eps != NORM_EPS:
        raise UserError.of("convert.megatron_mamba_eps", eps=eps, own=NORM_EPS)
    sizes = _sizes(arguments, _MAMBA_SIZES)
    heads = arguments.get("mamba_num_heads")
    if heads is None:
        width = EXPANSION * arguments["hidden_size"]
        if width % sizes["head_dim"]:
            raise UserError.of(
                "convert.megatron_mamba_heads", width=width, head_dim=sizes["head_dim"]
            )
        heads = width // sizes["head_dim"]
    return {**fields, "mamba": {"heads": heads, **sizes, "kernel": KERNEL}}


def _idle_attention(arguments: Args, pattern: str) -> dict[str, Any]:
    """Return the fields of attention that Megatron's defaults turn on, off again if no layer has
    it."""
    if "*" in pattern:
        return {}
    return {
        "attention_dropout": 0.0,
        "qkv_bias": bool(arguments.get("add_qkv_bias")),
        "output_bias": False,
    }


def needs_transformer_engine(model: ModelConfig) -> bool:
    """Return True if Megatron makes the layers of its Transformer Engine alone, in which norms
    belong to the linear layers after them."""
    return bool(model.hybrid_pattern or model.delta_net)


def hybrid_args(model: ModelConfig) -> dict[str, Any]:
    """Return Megatron's args of layers of one branch; none for a GPT model."""
    if not model.hybrid_pattern:
        return {}
    args: dict[str, Any] = {
        "spec": SPECS[0],
        "is_hybrid_model": True,
        "hybrid_override_pattern": model.hybrid_pattern,
    }
    if model.mamba:
        args["mamba_num_heads"] = model.mamba.heads
        args |= _said(model.mamba, _MAMBA_SIZES)
    return args


def as_megatron_steps(model: ModelConfig) -> ModelConfig:
    """Return a model whose time steps may be as short as Megatron's."""
    shortest = Mamba.model_fields["least_step"].default
    mamba = model.mamba.model_copy(update={"least_step": shortest})
    return model.model_copy(update={"mamba": mamba})


def delta_of(arguments: Args, mlp: str) -> dict[str, Any]:
    """Return the fields of gated delta nets, and of the gate of attention beside them. UserError
    for what no model here has.

    mlp: the kind of feed-forward, whose activation is theirs too.
    """
    gate = bool(arguments.get("attention_output_gate"))
    if gate and arguments.get("multi_latent_attention"):
        raise UserError.of("convert.megatron_gate_latent")
    if gate and arguments.get("rotary_interleaved"):
        raise UserError.of("convert.megatron_gate_interleaved")
    fields: dict[str, Any] = {"attention_gate": gate}
    if arguments.get("experimental_attention_variant") not in DELTA_NETS:
        return fields
    if mlp != "swiglu":
        raise UserError.of("convert.megatron_delta_activation", mlp=mlp)
    # The norm of a head's output is the model's.
    if arguments.get("normalization") != "RMSNorm":
        raise UserError.of("convert.megatron_delta_norm")
    layers = _delta_layers(arguments)
    # The sizes of what no layer has decide nothing.
    if not layers:
        return fields
    sizes = _sizes(arguments, _DELTA_SIZES)
    return {**fields, "delta_net": sizes, "delta_layers": layers}


def _delta_layers(arguments: Args) -> tuple[int, ...]:
    """Return the numbers of the layers with a gated delta net.

    linear_attention_freq is a list with a number for each layer, or n: then every nth has attention
    in place of it.
    """
    frequency = arguments.get("linear_attention_freq")
    layers = arguments["num_layers"]
    if isinstance(frequency, list | tuple):
        has_net = [*frequency]
    elif isinstance(frequency, int) and frequency > 0:
        has_net = [int((layer + 1) % frequency != 0) for layer in range(layers)]
    else:
        raise UserError.of("convert.megatron_delta_form", frequency=frequency)
    if len(has_net) != layers or not all(has in (0, 1) for has in has_net):
        raise UserError.of("convert.megatron_delta_length", frequency=frequency, layers=layers)
    return tuple(layer for layer, has in enumerate(has_net) if has)


def delta_args(model: ModelConfig) -> dict[str, Any]:
    """Return Megatron's args of gated delta nets and of the gate of attention; none of a model
    without them."""
    args: dict[str, Any] = {}
    if model.attention_gate:
        args["attention_output_gate"] = True
    if not model.delta_net:
        return args
    return {
        **args,
        "experimental_attention_variant": DELTA_NETS[0],
        "linear_attention_freq": [
            int(layer in model.delta_layers) for layer in range(model.layers)
        ],
        **_said(model.delta_net, _DELTA_SIZES),
    }


def _sizes(arguments: Args, names: Mapping[str, tuple[str, int]]) -> dict[str, Any]:
    """Return our sizes. names: of theirs, each with ours and Megatron's default."""
    return {ours: argument_or(arguments, key, default) for key, (ours, default) in names.items()}


def _said(sizes: Mamba | DeltaNet, names: Mapping[str, tuple[str, int]]) -> dict[str, Any]:
    """Return Megatron's args of sizes; invert `_sizes`."""
    return {key: getattr(sizes, ours) for key, (ours, _) in names.items()}
