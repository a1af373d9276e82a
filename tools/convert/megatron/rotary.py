"""Rotary positions and multi-latent attention in Megatron's args, both ways.

YaRN has one set of names in multi-latent attention, those of megatron-core's MLATransformerConfig,
and another in ordinary attention, with a prefix (`_apply_yarn_config_from_args` of
megatron/training/argument_utils.py). Three arguments serve both: rotary_scaling_factor, mscale and
mscale_all_dim. In multi-latent attention scores are multiplied by the square of mscale_all_dim's
factor besides, whatever the kind of positions.
"""

import math
from collections.abc import Iterator
from typing import Any

from megaprec.errors import UserError
from models.config import ModelConfig
from models.family_defaults import default_attention_scalar
from models.rope import ORIGINAL, RopeScaling
from tools.convert.megatron.keys import Args, given

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 8192}  # fixed there
LEARNED = "learned_absolute"
YARN = "yarn"
LATENT_YARN = {ORIGINAL: 4096, "beta_fast": 32.0, "beta_slow": 1.0}  # there is no argument for them
# Arguments of ordinary attention that multi-latent attention ignores, or has a meaning of its own
# for.
UNUSED = (
    "use_rope_scaling",
    "rotary_seq_len_interpolation_factor",
    "softmax_scale",
    "add_qkv_bias",
    "rotary_interleaved",
)


def is_learned(a: Args) -> bool:
    """Return True if positions are learned. They are unless one of two args says that they turn."""
    learned = a.get("position_embedding_type", LEARNED) == LEARNED and not a.get(
        "use_rotary_position_embeddings"
    )
    if learned and a.get("add_position_embedding") is False:
        raise UserError(
            "Megatron's add_position_embedding = False cannot be converted: it has no "
            "positions at all"
        )
    return learned


def rotary_of(a: Args, learned: bool) -> dict[str, Any]:
    """Return the fields of rotary positions in ordinary attention."""
    fraction = 1.0 if learned else float(given(a, "rotary_percent", 1.0))
    base = float(given(a, "rotary_base", 10000))
    if learned:
        scaling = {}
    elif _is_yarn(a):
        scaling = _plain_yarn(a, fraction)
    else:
        scaling = _scaling(a)
    return {"rope_base": base, "rotary_fraction": fraction, "rope_scaling": scaling}


def _is_yarn(a: Args) -> bool:
    return a.get("position_embedding_type") == YARN


def _scaling(a: Args) -> dict[str, Any]:
    """Return the scaling of rotary positions: Llama 3.1's, or linear."""
    factor = a.get("rotary_seq_len_interpolation_factor")
    scaled = bool(a.get("use_rope_scaling"))
    if factor is not None and scaled:
        raise UserError(
            "Megatron's rotary_seq_len_interpolation_factor beside use_rope_scaling cannot "
            "be converted"
        )
    if factor is not None:
        if factor < 1:
            raise UserError(f"Megatron's rotary_seq_len_interpolation_factor = {factor} is below 1")
        return {"kind": "linear", "factor": float(factor)}
    if scaled:
        return {"kind": "llama3", "factor": given(a, "rope_scaling_factor", 8.0), **LLAMA3}
    return {}


def _plain_yarn(a: Args, fraction: float) -> dict[str, Any]:
    """Return YaRN's scaling in ordinary attention, where all features of a head turn."""
    for key in ("use_rope_scaling", "rotary_seq_len_interpolation_factor", "rotary_interleaved"):
        if a.get(key):
            raise UserError(
                f"Megatron's {key} = {a[key]} cannot be converted with "
                "position_embedding_type = yarn"
            )
    if fraction != 1:
        raise UserError(
            f"Megatron's rotary_percent = {fraction} cannot be converted with "
            "position_embedding_type = yarn"
        )
    original = given(a, f"yarn_{ORIGINAL}", LATENT_YARN[ORIGINAL])
    fast, slow = (given(a, f"yarn_{key}", LATENT_YARN[key]) for key in ("beta_fast", "beta_slow"))
    return _yarn(
        a, original, fast, slow, bool(given(a, "yarn_correction_range_round_to_int", True))
    )


def _yarn(a: Args, original: int, fast: float, slow: float, truncate: bool) -> dict[str, Any]:
    """Return YaRN's scaling. With other mscales than ours has words for, the factor of features is
    given itself."""
    factor, one, all_dims = _factor(a), *_mscales(a)
    scaling = {
        "kind": YARN,
        "factor": factor,
        ORIGINAL: original,
        "beta_fast": float(fast),
        "beta_slow": float(slow),
    }
    scaling |= {"truncate": truncate}
    if one and all_dims:
        return {**scaling, "mscale": one, "mscale_all_dim": all_dims}
    if (one, all_dims) == (1.0, 0.0):
        return scaling
    ratio = _mscale(factor, one) / _mscale(factor, all_dims)
    return {
        **scaling,
        "attention_factor": ratio,
        **({"mscale_all_dim": all_dims} if all_dims else {}),
    }


def _factor(a: Args) -> float:
    if a.get("rotary_scaling_factor") is None:
        key = "rope_type" if a.get("multi_latent_attention") else "position_embedding_type"
        raise UserError(
            f"Megatron's {key} = {a.get(key)} needs rotary_scaling_factor, which its args lack"
        )
    factor = float(a["rotary_scaling_factor"])
    if factor < 1:
        raise UserError(f"Megatron's rotary_scaling_factor = {factor} is below 1")
    return factor


def _mscales(a: Args) -> tuple[float, float]:
    return float(given(a, "mscale", 1.0)), float(given(a, "mscale_all_dim", 0.0))


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0


def latent_of(a: Args) -> dict[str, Any]:
    """Return the fields of multi-latent attention, its positions among them. UserError for what
    ours has not."""
    _require_latent(a)
    heads = a["num_attention_heads"]
    eps = given(a, "norm_epsilon", 1e-5)
    turning = a["qk_pos_emb_head_dim"]
    still = a["qk_head_dim"]
    latent = {
        "kv_rank": a["kv_lora_rank"],
        "query_rank": a["q_lora_rank"] or 0,
        "rope_dim": turning,
    }
    fields = {
        "latent": {**latent, "nope_dim": still, "value_dim": a["v_head_dim"], "norm_eps": eps},
        "kv_heads": heads,
        "head_dim": turning + still,
        "qk_norm": False,
        "qkv_bias": False,
        "rope_base": float(given(a, "rotary_base", 10000)),
        "rotary_fraction": 1.0,
    }
    if given(a, "rope_type", YARN) == YARN:
        original, fast, slow = (given(a, key, value) for key, value in LATENT_YARN.items())
        return {**fields, "rope_scaling": _yarn(a, original, fast, slow, truncate=True)}
    _, all_dims = _mscales(a)
    if all_dims:
        scalar = (turning + still) / _mscale(_factor(a), all_dims) ** 4
    else:
        scalar = float(turning + still)
    return {**fields, "rope_scaling": {}, "attention_scalar": scalar}


def _require_latent(a: Args) -> None:
    needed = {
        "qk_layernorm": (True,),
        "normalization": ("RMSNorm",),
        "position_embedding_type": ("rope",),
    }
    needed |= {"softmax_type": ("vanilla", None), "rotary_percent": (1, 1.0, None)}
    needed |= dict.fromkeys(UNUSED, (False, None))
    if a.get("use_rotary_position_embeddings"):
        needed["position_embedding_type"] = ("rope", LEARNED)
    for key, values in needed.items():
        if a.get(key) not in values:
            raise UserError(
                f"Megatron's {key} = {a.get(key)!r} beside multi_latent_attention = True "
                "cannot be converted: only "
                f"{values[0]} can"
            )
    groups = a.get("num_query_groups") if a.get("group_query_attention", True) else None
    if groups not in (None, a["num_attention_heads"]):
        raise UserError(
            f"Megatron's num_query_groups = {groups} has no meaning beside "
            "multi_latent_attention = True"
        )


def without_rotary(model: ModelConfig) -> Iterator[str]:
    """Yield the properties of positions and latents that Megatron's GPT model lacks."""
    scaling = model.rope_scaling
    latent = model.latent
    llama3 = scaling.kind == "llama3" and not LLAMA3.items() - scaling.model_dump().items()
    linear = scaling.kind == "linear" and scaling.factor == int(scaling.factor)
    ordinary = llama3 or linear or (_says_yarn(scaling) and model.rotary_fraction == 1)
    if not (
        scaling.kind == "none" or (_says_yarn(scaling) and scaling.truncate if latent else ordinary)
    ):
        where = " in multi-latent attention" if latent else ""
        yield f"rope_scaling {scaling.model_dump(exclude_defaults=True)}{where}"
    usual = default_attention_scalar(
        {"latent": latent, "head_dim": model.head_dim, "rope_scaling": scaling}
    )
    if model.attention_scalar != usual:
        yield f"attention_scalar = {model.attention_scalar}"
    if latent and model.qkv_bias:
        yield "qkv_bias = True in multi-latent attention"
    if latent and latent.norm_eps != model.norm_eps:
        yield f"latent.norm_eps = {latent.norm_eps} beside norm_eps = {model.norm_eps}"
    if not latent and model.output_bias > model.qkv_bias:
        yield "biases in the attention's output alone"


def _says_yarn(scaling: RopeScaling) -> bool:
    """Return True if Megatron has words for YaRN's factors."""
    return (
        scaling.kind == YARN
        and not scaling.attention_factor
        and bool(scaling.mscale) == bool(scaling.mscale_all_dim)
    )


def rotary_args(model: ModelConfig) -> dict[str, Any]:
    """Return Megatron's args of positions."""
    learned = model.positions == "learned"
    base = model.rope_base
    scaling = model.rope_scaling
    yarn = scaling.kind == YARN
    ordinary = "rope" if model.latent or not yarn else YARN
    said = {
        "position_embedding_type": LEARNED if learned else ordinary,
        "add_position_embedding": learned,
        "use_rotary_position_embeddings": ordinary == "rope" and not learned,
        "rotary_base": int(base) if base == int(base) else base,
        "rotary_percent": model.rotary_fraction,
        "rotary_interleaved": False,
        "use_rope_scaling": scaling.kind == "llama3",
        "rope_scaling_factor": scaling.factor,
        "rotary_seq_len_interpolation_factor": int(scaling.factor)
        if scaling.kind == "linear"
        else None,
        "rotary_scaling_factor": scaling.factor if yarn else 1.0,
        "mscale": (scaling.mscale or 1.0) if yarn else 1.0,
        "mscale_all_dim": scaling.mscale_all_dim if yarn else 0.0,
    }
    if yarn and not model.latent:
        said |= {f"yarn_{key}": getattr(scaling, key) for key in LATENT_YARN}
        said |= {"yarn_correction_range_round_to_int": scaling.truncate}
    return said


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
    yarn = scaling.kind == YARN
    return {
        "multi_latent_attention": True,
        # the width that attention without Transformer Engine returns
        "kv_channels": sizes.value_dim,
        "qk_layernorm": True,
        "q_lora_rank": sizes.query_rank or None,
        "kv_lora_rank": sizes.kv_rank,
        "qk_head_dim": sizes.nope_dim,
        "qk_pos_emb_head_dim": sizes.rope_dim,
        "v_head_dim": sizes.value_dim,
        "rope_type": YARN if yarn else "rope",
        **({key: getattr(scaling, key) for key in LATENT_YARN} if yarn else {}),
    }


def unsaid_by_arguments(model: ModelConfig) -> list[str]:
    """Return what args say, but no argument of Megatron-LM's command line does, as key = value."""
    if not (model.latent and model.rope_scaling.kind == YARN):
        return []
    scaling = model.rope_scaling
    return [
        f"{key} = {getattr(scaling, key)}"
        for key, fixed in LATENT_YARN.items()
        if getattr(scaling, key) != fixed
    ]
