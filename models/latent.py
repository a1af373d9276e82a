"""The sizes of multi-head latent attention (DeepSeek-V2, 2024).

Keys and values are made from a short vector per token.

A token's hidden features are projected down to a latent of `kv_rank` features, from which all
heads' keys and values are made, and, if `query_rank` is above 0, to another one for all heads'
queries. Rotary positions would spoil latents, so a head has `rope_dim` features of its own for
them: its query has them besides `nope_dim` features without positions, and its key takes them from
one vector that all heads share. A head's value has `value_dim` features.
"""

from collections.abc import Iterator
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from megaprec.errors import Problem, UserError

# The largest size of any kind: torch and other formats have 32-bit sizes in places.
LARGEST_SIZE = 2**31 - 1


class Latent(BaseModel):
    """The sizes of multi-head latent attention; none if `kv_rank` is 0.

    Raises pydantic's ValidationError (a ValueError) that lists every problem with the fields.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    kv_rank: int = Field(
        default=0,
        ge=0,
        le=LARGEST_SIZE,
        description="width of the latent of keys and values; 0: none",
    )
    query_rank: int = Field(
        default=0,
        ge=0,
        le=LARGEST_SIZE,
        description="width of the latent of queries; 0: without one",
    )
    rope_dim: int = Field(
        default=0, ge=0, le=LARGEST_SIZE, description="features of a head with rotary positions"
    )
    nope_dim: int = Field(
        default=0,
        ge=0,
        le=LARGEST_SIZE,
        description="features of a head's query and key without positions",
    )
    value_dim: int = Field(
        default=0, ge=0, le=LARGEST_SIZE, description="features of a head's value"
    )
    norm_eps: float = Field(default=1e-6, gt=0, description="epsilon of the norms of the latents")

    @model_validator(mode="after")
    def _require_valid(self) -> Self:
        if problems := [problem.within("latent.") for problem in self._problems()]:
            raise UserError(*problems)
        return self

    def _problems(self) -> Iterator[Problem]:
        """Yield the problems, whose sentences begin with a key of this table."""
        # Without latents any other size was given for nothing.
        if not self.kv_rank:
            for name, value in self.model_dump(exclude_defaults=True).items():
                yield Problem.of("model.latent_key_unused", name=name, value=value)
            return
        for name in ("rope_dim", "nope_dim", "value_dim"):
            if not getattr(self, name):
                yield Problem.of("model.latent_key_missing", name=name)
        if self.rope_dim % 2:
            yield Problem.of("model.latent_rope_dim", rope_dim=self.rope_dim)

    def __bool__(self) -> bool:
        return self.kv_rank > 0

    @property
    def head_dim(self) -> int:
        """Return the number of features of a head's query and key."""
        return self.rope_dim + self.nope_dim

    @property
    def width(self) -> int:
        """Return the number of features of a token that all heads share: both latents and the key's
        rotary part."""
        return self.query_rank + self.kv_rank + self.rope_dim

    def up_weights(self, heads: int) -> int:
        """Return the number of elements of the matrices from the latents to `heads` heads."""
        query = self.query_rank * self.head_dim
        key_value = self.kv_rank * (self.nope_dim + self.value_dim)
        return heads * (query + key_value)


NO_LATENT = Latent()
"""The sizes of a model, or of a layer, without them."""
