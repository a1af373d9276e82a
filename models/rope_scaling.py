"""The scaling of rotary positions to longer sequences (`model.rope_scaling`).

`RopeScaling` extends a model that was trained on short sequences to long ones: its slow pairs of
features rotate less. `models.attention.rope` computes the angles.
"""

import math
from collections.abc import Iterator
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from megaprec.errors import Problem, UserError

ORIGINAL = "original_max_position_embeddings"
"""The key of the length that a model was first trained on."""

# The keys that each kind reads. All other keys must keep their defaults.
PARAMETERS: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": ("factor",),
    "dynamic": ("factor", ORIGINAL),
    "llama3": ("factor", ORIGINAL, "low_freq_factor", "high_freq_factor", "query_beta"),
    "yarn": (
        "factor",
        ORIGINAL,
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "query_beta",
    ),
    "proportional": ("factor", "fraction"),
}


class RopeScaling(BaseModel):
    """Scaling of rotary positions to longer sequences.

    Keys are named as in Hugging Face's `rope_scaling`, except `kind`. Raises pydantic's
    ValidationError (a ValueError) that lists every problem with the fields.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    kind: Literal["none", "linear", "dynamic", "llama3", "yarn", "proportional"] = Field(
        default="none",
        description=(
            "linear: all pairs; dynamic: the base, by the length of the sequence; proportional: "
            "all pairs, and the slowest do not turn; others: slow"
        ),
    )
    factor: float = Field(default=1.0, ge=1, description="how many times longer sequences may be")
    original_max_position_embeddings: int = Field(
        default=0,
        ge=0,
        description="longest sequence that the model was first trained on; dynamic, llama3, yarn",
    )
    low_freq_factor: float = Field(
        default=1.0, gt=0, description="llama3: wavelengths above original / this: stretched"
    )
    high_freq_factor: float = Field(
        default=4.0, gt=0, description="llama3: wavelengths below original / this: left"
    )
    beta_fast: float = Field(
        default=32.0, gt=0, description="yarn: pairs with more turns than this are left"
    )
    beta_slow: float = Field(
        default=1.0, gt=0, description="yarn: pairs with fewer turns than this are stretched"
    )
    attention_factor: float = Field(
        default=0.0, ge=0, description="yarn: queries and keys times this; 0: by factor"
    )
    mscale: float = Field(
        default=0.0, ge=0, description="yarn: attention_factor by mscale and mscale_all_dim; 0: not"
    )
    mscale_all_dim: float = Field(default=0.0, ge=0, description="yarn: see mscale")
    truncate: bool = Field(
        default=True, description="yarn: the range between slow and fast in whole pairs"
    )
    query_beta: float = Field(
        default=0.0,
        ge=0,
        description=(
            "llama3, yarn: queries times 1 + this * ln(1 + n), where n original lengths lie before "
            "them; Hugging Face's llama_4_scaling_beta"
        ),
    )

    fraction: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description=(
            "proportional: fraction of the pairs that turn, the fastest; Hugging Face's "
            "partial_rotary_factor"
        ),
    )

    @model_validator(mode="after")
    def _require_valid(self) -> Self:
        if problems := [problem.within("rope_scaling.") for problem in self._problems()]:
            raise UserError(*problems)
        return self

    def _problems(self) -> Iterator[Problem]:
        """Yield the problems, whose sentences begin with a key of this table."""
        parameters = PARAMETERS[self.kind]
        # A key that the kind does not read was given for nothing.
        for name, value in self.model_dump(exclude_defaults=True).items():
            if name not in ("kind", *parameters):
                yield Problem.of(
                    "model.rope_key_unused",
                    name=name,
                    value=value,
                    kind=self.kind,
                    parameters=", ".join(parameters) or "no other key",
                )
        if ORIGINAL in parameters and not self.original_max_position_embeddings:
            yield Problem.of("model.rope_key_missing", name=ORIGINAL, kind=self.kind)
        if self.high_freq_factor <= self.low_freq_factor:
            yield Problem.of(
                "model.rope_freq_factors", high=self.high_freq_factor, low=self.low_freq_factor
            )
        if self.beta_fast <= self.beta_slow:
            yield Problem.of("model.rope_betas", fast=self.beta_fast, slow=self.beta_slow)


def attention_factor(scaling: RopeScaling) -> float:
    """Return the factor by which rotated queries and keys are multiplied: 1, except for YaRN."""
    if scaling.kind != "yarn":
        return 1.0
    # a factor that is given comes before what follows from other keys
    if scaling.attention_factor:
        return scaling.attention_factor
    # As in DeepSeek, whose factor of `mscale_all_dim` multiplies scores instead (`score_factor`).
    if scaling.mscale and scaling.mscale_all_dim:
        factor = _mscale(scaling.factor, scaling.mscale)
        factor_of_scores = _mscale(scaling.factor, scaling.mscale_all_dim)
        return factor / factor_of_scores
    return _mscale(scaling.factor, 1.0)


def score_factor(scaling: RopeScaling) -> float:
    """Return the factor, besides that of rotated features, of queries and keys in latent attention:
    1 but for YaRN."""
    if scaling.mscale_all_dim:
        return _mscale(scaling.factor, scaling.mscale_all_dim)
    return 1.0


def _mscale(factor: float, mscale: float) -> float:
    """Return YaRN's factor of attention for sequences `factor` times as long."""
    # 0.1 ln(factor) + 1 is the paper's fit (Peng et al., 2023), `mscale` DeepSeek's factor of it.
    return 0.1 * mscale * math.log(factor) + 1.0
