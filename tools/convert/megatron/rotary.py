"""Rotary positions and multi-latent attention in Megatron's args, both ways.

YaRN has one set of names in multi-latent attention, those of megatron-core's MLATransformerConfig,
and another in ordinary attention, with a prefix (`_apply_yarn_config_from_args` of
megatron/training/argument_utils.py). Three arguments serve both: rotary_scaling_factor, mscale and
mscale_all_dim. In multi-latent attention scores are multiplied by the square of mscale_all_dim's
factor besides, whatever the kind of positions.
"""

import math
from typing import Any

from megaprec.errors import UserError
from models.config import ModelConfig
from models.rope_scaling import ORIGINAL, RopeScaling
from tools.convert.megatron.keys import Args, argument_or, query_groups

# Numbers of Llama 3.1's scaling that Megatron has in its code (rotary_pos_embedding.py).
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 8192}
LEARNED = "learned_absolute"
NO_POSITIONS = "none"
YARN = "yarn"
# Fields of YaRN and their defaults; of multi-latent attention no command line has them.
YARN_DEFAULTS = {ORIGINAL: 4096, "beta_fast": 32.0, "beta_slow": 1.0}
# Arguments of ordinary attention that multi-latent attention ignores, or has a meaning of its own
# for.
UNUSED = (
    "use_rope_scaling",
    "rotary_seq_len_interpolation_factor",
    "softmax_scale",
    "add_qkv_bias",
    "rotary_interleaved",
)


def positions_of(arguments: Args) -> str:
    """Return the kind of positions: learned, unless one of two args says that they turn, or that
    there are none."""
    kind = arguments.get("position_embedding_type", LEARNED)
    if arguments.get("use_rotary_position_embeddings") or kind not in (LEARNED, NO_POSITIONS):
        return "rope"
    if kind == NO_POSITIONS:
        return "none"
    if arguments.get("add_position_embedding") is False:
        raise UserError.of("convert.megatron_no_positions")
    return "learned"


def rotary_of(arguments: Args, positions: str) -> dict[str, Any]:
    """Return the fields of rotary positions in ordinary attention. positions: the kind, as
    `positions_of` returns it: YaRN too is "rope"."""
    turns = positions == "rope"
    fraction = float(argument_or(arguments, "rotary_percent", 1.0)) if turns else 1.0
    base = float(argument_or(arguments, "rotary_base", 10000))
    # Args of rotary positions may be left over; other positions have none.
    if not turns:
        scaling = {}
    elif _is_yarn(arguments):
        scaling = _plain_yarn(arguments, fraction)
    else:
        scaling = _scaling(arguments)
    return {"rope_base": base, "rotary_fraction": fraction, "rope_scaling": scaling}


def _is_yarn(arguments: Args) -> bool:
    return arguments.get("position_embedding_type") == YARN


def _scaling(arguments: Args) -> dict[str, Any]:
    """Return the fields of the scaling of rotary positions: Llama 3.1's, or linear; {} for none.
    Raises UserError for both, and for a linear factor below 1."""
    factor = arguments.get("rotary_seq_len_interpolation_factor")
    scaled = bool(arguments.get("use_rope_scaling"))
    if factor is not None and scaled:
        raise UserError.of("convert.megatron_two_scalings")
    if factor is not None:
        if factor < 1:
            raise UserError.of("convert.megatron_scaling_below_one", factor=factor)
        return {"kind": "linear", "factor": float(factor)}
    if scaled:
        return {
            "kind": "llama3",
            "factor": argument_or(arguments, "rope_scaling_factor", 8.0),
            **LLAMA3,
        }
    return {}


def _plain_yarn(arguments: Args, fraction: float) -> dict[str, Any]:
    """Return YaRN's scaling in ordinary attention, where all features of a head turn."""
    for argument_name in (
        "use_rope_scaling",
        "rotary_seq_len_interpolation_factor",
        "rotary_interleaved",
    ):
        if arguments.get(argument_name):
            raise UserError.of(
                "convert.megatron_yarn_key", key=argument_name, args=arguments[argument_name]
            )
    if fraction != 1:
        raise UserError.of("convert.megatron_yarn_percent", fraction=fraction)
    truncate = bool(argument_or(arguments, "yarn_correction_range_round_to_int", True))
    return _yarn(arguments, "yarn_", truncate)


def _yarn(arguments: Args, prefix: str, truncate: bool) -> dict[str, Any]:
    """Return YaRN's scaling. Where our mscale and mscale_all_dim cannot say what theirs do,
    attention_factor says it.

    prefix: of the arguments that only one kind of attention has.
    """
    stated = {}
    for field, default in YARN_DEFAULTS.items():
        stated[field] = argument_or(arguments, f"{prefix}{field}", default)
    factor = _yarn_factor(arguments)
    mscale, mscale_all_dim = _mscales(arguments)
    scaling: dict[str, Any] = {
        "kind": YARN,
        "factor": factor,
        ORIGINAL: stated[ORIGINAL],
        "beta_fast": float(stated["beta_fast"]),
        "beta_slow": float(stated["beta_slow"]),
        "truncate": truncate,
    }
    # Ours takes the quotient of their factors only if both are given, and else that of 1.
    if mscale and mscale_all_dim:
        return {**scaling, "mscale": mscale, "mscale_all_dim": mscale_all_dim}
    if (mscale, mscale_all_dim) == (1.0, 0.0):
        return scaling
    scaling["attention_factor"] = _scale(factor, mscale) / _scale(factor, mscale_all_dim)
    if mscale_all_dim:
        scaling["mscale_all_dim"] = mscale_all_dim
    return scaling


def _yarn_factor(arguments: Args) -> float:
    """Return the factor of YaRN. Raises UserError if it is missing, or below 1."""
    if arguments.get("rotary_scaling_factor") is None:
        # The argument that says YaRN.
        key = "position_embedding_type"
        if arguments.get("multi_latent_attention"):
            key = "rope_type"
        raise UserError.of("convert.megatron_factor_missing", key=key, value=arguments.get(key))
    factor = float(arguments["rotary_scaling_factor"])
    if factor < 1:
        raise UserError.of("convert.megatron_factor_below_one", factor=factor)
    return factor


def _mscales(arguments: Args) -> tuple[float, float]:
    """Return (mscale, mscale_all_dim)."""
    mscale = float(argument_or(arguments, "mscale", 1.0))
    return mscale, float(argument_or(arguments, "mscale_all_dim", 0.0))


def _scale(factor: float, mscale: float) -> float:
    """Return YaRN's factor of features (`yarn_get_mscale` of megatron-core)."""
    return 0.1 * mscale * math.log(factor) + 1.0


def latent_of(arguments: Args) -> dict[str, Any]:
    """Return the fields of multi-latent attention, its positions among them. UserError for what
    ours has not."""
    _require_latent(arguments)
    heads = arguments["num_attention_heads"]
    norm_eps = argument_or(arguments, "norm_epsilon", 1e-5)
    rope_dim = arguments["qk_pos_emb_head_dim"]
    nope_dim = arguments["qk_head_dim"]
    fields = {
        "latent": {
            "kv_rank": arguments["kv_lora_rank"],
            "query_rank": arguments["q_lora_rank"] or 0,
            "rope_dim": rope_dim,
            "nope_dim": nope_dim,
            "value_dim": arguments["v_head_dim"],
            "norm_eps": norm_eps,
        },
        "kv_heads": heads,
        "head_dim": rope_dim + nope_dim,
        "qk_norm": False,
        "qkv_bias": False,
        "rope_base": float(argument_or(arguments, "rotary_base", 10000)),
        "rotary_fraction": 1.0,
    }
    if argument_or(arguments, "rope_type", YARN) == YARN:
        return {**fields, "rope_scaling": _yarn(arguments, "", truncate=True)}
    # Scores are divided by the root of the scalar, and multiplied by the square of YaRN's factor:
    # the scalar is to be divided by its fourth power.
    attention_scalar = float(rope_dim + nope_dim)
    _, mscale_all_dim = _mscales(arguments)
    if mscale_all_dim:
        score_factor = _scale(_yarn_factor(arguments), mscale_all_dim)
        attention_scalar /= score_factor**4
    return {**fields, "rope_scaling": {}, "attention_scalar": attention_scalar}


def _require_latent(arguments: Args) -> None:
    """Raise UserError for args that multi-latent attention ignores, or that ours has not."""
    rotary = arguments.get("use_rotary_position_embeddings")
    allowed: dict[str, tuple[Any, ...]] = {
        "qk_layernorm": (True,),
        "normalization": ("RMSNorm",),
        "position_embedding_type": ("rope", LEARNED) if rotary else ("rope",),
        "softmax_type": ("vanilla", None),
        "rotary_percent": (1, 1.0, None),
        **dict.fromkeys(UNUSED, (False, None)),
    }
    for argument_name, values in allowed.items():
        if arguments.get(argument_name) not in values:
            raise UserError.of(
                "convert.megatron_latent_key",
                key=argument_name,
                value=arguments.get(argument_name),
                values=values[0],
            )
    groups = query_groups(arguments)
    # A latent gives every head keys and values of its own.
    if groups not in (None, arguments["num_attention_heads"]):
        raise UserError.of("convert.megatron_latent_groups", groups=groups)


def rotary_args(model: ModelConfig) -> dict[str, Any]:
    """Return Megatron's args of positions."""
    scaling = model.rope_scaling
    # In multi-latent attention rope_type says YaRN.
    embedding_type = YARN if scaling.kind == YARN and not model.latent else "rope"
    if model.positions != "rope":
        embedding_type = LEARNED if model.positions == "learned" else NO_POSITIONS
    # Megatron-LM's argument is a whole number.
    base = model.rope_base
    return {
        "position_embedding_type": embedding_type,
        "add_position_embedding": embedding_type == LEARNED,
        "use_rotary_position_embeddings": embedding_type == "rope",
        "rotary_base": int(base) if base == int(base) else base,
        "rotary_percent": model.rotary_fraction,
        "rotary_interleaved": False,
        "use_rope_scaling": scaling.kind == "llama3",
        "rope_scaling_factor": scaling.factor,
        "rotary_seq_len_interpolation_factor": _linear_factor(scaling),
        **_yarn_args(model),
    }


def _linear_factor(scaling: RopeScaling) -> int | None:
    # A whole number in Megatron-LM; another factor is refused when the args are read back.
    return int(scaling.factor) if scaling.kind == "linear" else None


def _yarn_args(model: ModelConfig) -> dict[str, Any]:
    """Return Megatron's args of YaRN, which are neutral without it."""
    scaling = model.rope_scaling
    if scaling.kind != YARN:
        return {"rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
    arguments: dict[str, Any] = {
        "rotary_scaling_factor": scaling.factor,
        "mscale": scaling.mscale or 1.0,
        "mscale_all_dim": scaling.mscale_all_dim,
    }
    if not model.latent:
        for field in YARN_DEFAULTS:
            arguments[f"yarn_{field}"] = getattr(scaling, field)
        arguments["yarn_correction_range_round_to_int"] = scaling.truncate
    return arguments


def latent_args(model: ModelConfig) -> dict[str, Any]:
    """Return Megatron's args of multi-latent attention, or that there is none."""
    sizes = model.latent
    scaling = model.rope_scaling
    if not sizes:
        return {
            "multi_latent_attention": False,
            "kv_channels": model.head_dim,
            "qk_layernorm": model.qk_norm,
        }
    arguments: dict[str, Any] = {
        "multi_latent_attention": True,
        # the width that attention without Transformer Engine returns
        "kv_channels": sizes.value_dim,
        "qk_layernorm": True,
        "q_lora_rank": sizes.query_rank or None,
        "kv_lora_rank": sizes.kv_rank,
        "qk_head_dim": sizes.nope_dim,
        "qk_pos_emb_head_dim": sizes.rope_dim,
        "v_head_dim": sizes.value_dim,
        "rope_type": "rope",
    }
    if scaling.kind == YARN:
        arguments["rope_type"] = YARN
        for field in YARN_DEFAULTS:
            arguments[field] = getattr(scaling, field)
    return arguments


def unsaid_by_arguments(model: ModelConfig) -> list[str]:
    """Return what args say, but no argument of Megatron-LM's command line does, as key = value."""
    if not (model.latent and model.rope_scaling.kind == YARN):
        return []
    scaling = model.rope_scaling
    unsaid = []
    for field, default in YARN_DEFAULTS.items():
        value = getattr(scaling, field)
        if value != default:
            unsaid.append(f"{field} = {value}")
    return unsaid
