"""Defaults of a model's fields that follow from its family or from earlier fields."""

from collections.abc import Callable
from typing import Any

from models.rope import score_factor

GATED = ("swiglu", "geglu", "swiglu_clamped")  # kinds of feed-forward with a gate
# a derived feed-forward width is rounded up to this, so that tensor parallelism can shard it
FFN_MULTIPLE = 64


def by_family(usual: Any, **others: Any) -> Callable[[dict[str, Any]], Any]:
    """Return the function that gives the default of the family in the fields known so far; `usual`
    for most."""
    return lambda known: others.get(known["family"], usual)


def as_bias(known: dict[str, Any]) -> bool:
    """Return the model's `bias`."""
    return known["bias"]


def of_experts(known: dict[str, Any]) -> bool:
    """Return True for gpt-oss with experts, which have biases there."""
    return known["family"] == "gpt_oss" and known["experts"] > 0


def default_ffn(known: dict[str, Any]) -> int:
    """Return the default feed-forward width: four times hidden, or two thirds of that for a gated
    feed-forward.

    A gated feed-forward has three matrices instead of two, so both have the same number of
    parameters.
    """
    hidden: int = known["hidden"]
    if known["mlp"] in GATED:
        return -(-8 * hidden // (3 * FFN_MULTIPLE)) * FFN_MULTIPLE
    return 4 * hidden


def default_embedding_scale(known: dict[str, Any]) -> float:
    """Return the factor of the embeddings: 1, for Gemma the square root of hidden."""
    if known["family"] in ("gemma2", "gemma3"):
        return known["hidden"] ** 0.5
    return 1.0


def default_attention_scalar(known: dict[str, Any]) -> float:
    """Return the number by whose square root scores are divided: the width of a head.

    In latent attention YaRN also multiplies scores by the square of a factor, as in DeepSeek-V2.
    """
    if known["latent"]:
        return known["head_dim"] / score_factor(known["rope_scaling"]) ** 4
    return float(known["head_dim"])
