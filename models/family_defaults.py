"""Defaults of a model's fields that follow from its family or from earlier fields."""

from collections.abc import Callable
from typing import Any

from models.rope import score_factor

# Kinds of feed-forward with a gate.
GATED = ("swiglu", "geglu", "swiglu_clamped")
# A derived feed-forward width is rounded up to this, so that tensor parallelism can shard it.
FFN_MULTIPLE = 64

Fields = dict[str, Any]
"""The fields of a model that are known before the one whose default is asked for."""


def by_family(usual: Any, **exceptions: Any) -> Callable[[Fields], Any]:
    """Return the function that gives a family's default: `usual` for all but the exceptions."""
    return lambda fields: exceptions.get(fields["family"], usual)


def default_bias(fields: Fields) -> bool:
    """Return the model's `bias`."""
    return fields["bias"]


def default_expert_bias(fields: Fields) -> bool:
    """Return True for gpt-oss with experts, which have biases there."""
    return fields["family"] == "gpt_oss" and fields["experts"] > 0


def default_ffn(fields: Fields) -> int:
    """Return the default feed-forward width: four times hidden, or two thirds of that for a gated
    feed-forward.

    A gated feed-forward has three matrices instead of two, so both have the same number of
    parameters.
    """
    hidden: int = fields["hidden"]
    if fields["mlp"] in GATED:
        # 8/3 of hidden, rounded up to a multiple.
        return -(-8 * hidden // (3 * FFN_MULTIPLE)) * FFN_MULTIPLE
    return 4 * hidden


def default_embedding_scale(fields: Fields) -> float:
    """Return the factor of the embeddings: 1, for Gemma the square root of hidden."""
    if fields["family"] in ("gemma2", "gemma3"):
        return fields["hidden"] ** 0.5
    return 1.0


def default_attention_scalar(fields: Fields) -> float:
    """Return the number by whose square root scores are divided: the width of a head.

    In latent attention YaRN also multiplies scores by the square of a factor, as in DeepSeek-V2.
    """
    if fields["latent"]:
        # Scores are divided by the root of this: a square of the factor is its fourth power here.
        return fields["head_dim"] / score_factor(fields["rope_scaling"]) ** 4
    return float(fields["head_dim"])
