"""A model at other hidden sizes: what grows with hidden, and what stays."""

from collections.abc import Sequence
from fractions import Fraction
from math import gcd
from typing import Any, Literal

from megaprec.errors import Problem, UserError
from models.config import ModelConfig
from models.latent import Latent
from models.model_fields import default_attention_scalar
from tools.saved.model_fields import make_model

Growing = Literal["heads", "head_dim"]
"""What grows of attention with hidden: the number of heads, or their width."""

LAYERS = 2
VOCABULARY = 256
"""Tokens of the models that are measured: what a check of widths needs no more of."""
EXPERTS = 4
LENGTH = 8
"""Tokens of each sample. Few: updates add up over features only where there are more of them than
tokens."""
DEFAULT_WIDTHS = (1, 2, 4, 8)
"""Multiples of the narrowest hidden size."""
WIDEST_DEFAULT = 1024
"""Hidden size that the default widths do not exceed, which a CPU measures in seconds."""


def default_widths(model: ModelConfig, growing: Growing) -> list[int]:
    """Return the hidden sizes to measure: the base model's times 1, 2, 4 and 8, or smaller ones if
    these would take long. Raises UserError if the model has no such sizes."""
    narrowest = model.mup_base_hidden or model.hidden
    while narrowest * DEFAULT_WIDTHS[-1] > WIDEST_DEFAULT and narrowest % 2 == 0:
        narrowest //= 2
    # as narrow as the numbers of heads and features allow
    while narrowest < model.hidden and not _has(model, narrowest, growing):
        narrowest *= 2
    return [narrowest * factor for factor in DEFAULT_WIDTHS]


def _has(model: ModelConfig, hidden: int, growing: Growing) -> bool:
    """Return True if there is the model at this hidden size and its multiples."""
    try:
        models_at(model, [hidden], growing)
    except UserError:
        return False
    return True


def at_width(
    model: ModelConfig, hidden: int, growing: Growing, grows_kv_heads: bool = True
) -> ModelConfig:
    """Return a small model with the widths that `model` has at this hidden size.

    It has its first `LAYERS` layers, a small vocabulary, few experts, and neither dropout nor
    modules of multi-token prediction. Raises UserError if a width would be no whole number.
    """
    # How a gated delta net or a Mamba-2 mixer would grow is not known.
    if model.delta_net:
        raise UserError.of("model.not_beside", key="delta_net", other="mup_base_hidden")
    if model.hybrid_pattern:
        raise UserError.of("model.not_beside", key="hybrid_pattern", other="mup_base_hidden")
    if model.has_global_heads:
        raise UserError.of(
            "model.global_heads_beside", given="global_head_dim", key="mup_base_hidden"
        )
    if problems := _problems(model, hidden, growing):
        raise UserError(*problems)
    changes = _whole(_grown(model, hidden, growing, grows_kv_heads), model.latent)
    return make_model({**_shortened(model), **changes}, f"--widths {hidden}")


def models_at(model: ModelConfig, widths: Sequence[int], growing: Growing) -> list[ModelConfig]:
    """Return the model at each hidden size. Raises UserError.

    Key and value heads grow as heads do, if the narrowest model can have so few.
    """
    narrowest = Fraction(min(widths), model.hidden)
    grows_kv_heads = (model.kv_heads * narrowest).denominator == 1
    return [at_width(model, hidden, growing, grows_kv_heads) for hidden in widths]


def _problems(model: ModelConfig, hidden: int, growing: Growing) -> list[Problem]:
    """Return a problem for each width that is no whole number at this hidden size."""
    problems: list[Problem] = []
    for key, width in _grown(model, hidden, growing, grows_kv_heads=False).items():
        if not isinstance(width, Fraction) or width.denominator == 1:
            continue
        # The width is whole at the hidden sizes that are multiples of this unit.
        width_of_model = width * model.hidden / hidden
        unit = model.hidden // gcd(model.hidden, int(width_of_model))
        problems.append(
            Problem.of(
                "command.mup_check_size", hidden=hidden, key=key, width=float(width), unit=unit
            )
        )
    return problems


def _grown(
    model: ModelConfig, hidden: int, growing: Growing, grows_kv_heads: bool
) -> dict[str, Any]:
    """Return the keys that change with hidden; a Fraction is a width, which must be whole."""
    factor = Fraction(hidden, model.hidden)
    changes: dict[str, Any] = {"hidden": hidden, "ffn": model.ffn * factor}
    if 0 in model.dense_layers and model.layers > 1:
        changes["dense_ffn"] = model.dense_ffn * factor
    changes["shared_experts"] = model.shared_experts * factor
    latent = model.latent
    ranks = {"query_rank": latent.query_rank * factor, "kv_rank": latent.kv_rank * factor}
    if growing == "heads":
        changes["heads"] = model.heads * factor
        # a latent has a key and a value for each head
        if grows_kv_heads or latent:
            changes["kv_heads"] = model.kv_heads * factor
        changes["head_dim"] = model.head_dim
    else:
        changes["head_dim"] = model.head_dim * factor
        for name in ("rope_dim", "nope_dim", "value_dim"):
            ranks[name] = getattr(latent, name) * factor
    if latent:
        changes |= {f"latent.{name}": size for name, size in ranks.items()}
    # Gemma's factor is a function of hidden.
    if model.embedding_scale == model.hidden**0.5:
        changes["embedding_scale"] = hidden**0.5
    return changes


def _whole(changes: dict[str, Any], latent_before: Latent) -> dict[str, Any]:
    """Return the changes as values of a model: whole numbers, and one table of latents."""
    values: dict[str, Any] = {}
    latent: dict[str, Any] = latent_before.model_dump()
    for key, value in changes.items():
        whole = int(value) if isinstance(value, Fraction) else value
        if key.startswith("latent."):
            latent[key.removeprefix("latent.")] = whole
        else:
            values[key] = whole
    if latent_before:
        values["latent"] = latent
    return values


def _shortened(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of the model with few layers and tokens and without what is not measured."""
    layers = min(model.layers, LAYERS)
    keys = model.model_dump()
    keys |= {
        "layers": layers,
        "vocab": VOCABULARY,
        "mtp_layers": 0,
        "dropout": 0.0,
        "embedding_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    if model.positions == "learned":
        keys["max_positions"] = LENGTH
    # one layer with experts remains
    keys["dense_layers"] = (0,) if 0 in model.dense_layers and layers > 1 else ()
    if not keys["dense_layers"]:
        del keys["dense_ffn"]
    if model.experts:
        # Each token passes all experts: a change in the choice of experts would be a jump, and
        # would hide how far the weights move.
        experts = min(model.experts, EXPERTS)
        keys |= {"experts": experts, "experts_per_token": experts}
        groups = {"groups": 1, "groups_per_token": 1}
        keys["router"] = model.router.model_copy(update=groups)
    if model.window_layers:
        keys["window_layers"] = tuple(layer for layer in model.window_layers if layer < layers)
        # without numbers of layers, all would have the window
        if not keys["window_layers"]:
            keys |= {"window": 0, "window_rope_base": 0.0}
    keys["nope_layers"] = tuple(layer for layer in model.nope_layers if layer < layers)
    if len(keys["nope_layers"]) == layers:
        keys["nope_layers"] = ()
    # A default depends on the width and is computed anew; a given one holds at all widths.
    if model.attention_scalar == default_attention_scalar(dict(model)):
        del keys["attention_scalar"]
    return keys
