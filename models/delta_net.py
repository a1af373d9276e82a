"""The sizes of a gated delta net (Yang, Kautz and Hatamizadeh, 2025), which some layers have in
place of attention.

A head keeps a matrix of `key_dim` x `value_dim` numbers, its state, in place of the keys and values
of all earlier tokens (`models.recurrent.delta_rule`). There are `key_heads` heads of queries and
keys, each of which serves value_heads / key_heads heads of values in a row. Queries, keys and
values pass a causal convolution over `kernel` tokens first (`models.recurrent.short_convolution`).

A state decays by one number of each token. With `gate_rank` each feature of its keys has a decay of
its own, as in Kimi Delta Attention (Kimi Linear, 2025): the decays, and the gate of the output, are
made from two short vectors of so many features (`models.recurrent.kimi_delta_attention`).
"""

from collections.abc import Iterator
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from megaprec.errors import Problem, UserError
from models.latent import LARGEST_SIZE

MOST_HEADS = 65_536


class DeltaNet(BaseModel):
    """The sizes of a gated delta net; none if `value_heads` is 0.

    Raises pydantic's ValidationError (a ValueError) that lists every problem with the fields.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    key_heads: int = Field(default=0, ge=0, le=MOST_HEADS, description="heads of queries and keys")
    value_heads: int = Field(
        default=0, ge=0, le=MOST_HEADS, description="heads of values and states; 0: none"
    )
    key_dim: int = Field(
        default=0, ge=0, le=LARGEST_SIZE, description="features of a head's query and key"
    )
    value_dim: int = Field(
        default=0, ge=0, le=LARGEST_SIZE, description="features of a head's value"
    )
    kernel: int = Field(default=4, ge=1, le=64, description="tokens that the convolution sees")
    gate_rank: int = Field(
        default=0,
        ge=0,
        le=LARGEST_SIZE,
        description=(
            "width of the vectors from which the gate and a decay of each feature of a key are "
            "made, as in Kimi Delta Attention; 0: a decay of each head"
        ),
    )

    @model_validator(mode="after")
    def _require_valid(self) -> Self:
        if problems := [problem.within("delta_net.") for problem in self._problems()]:
            raise UserError(*problems)
        return self

    def _problems(self) -> Iterator[Problem]:
        """Yield the problems, whose sentences begin with a key of this table."""
        # Without heads any other size was given for nothing.
        if not self.value_heads:
            for name, value in self.model_dump(exclude_defaults=True).items():
                yield Problem.of("model.delta_net_key_unused", name=name, value=value)
            return
        for name in ("key_heads", "key_dim", "value_dim"):
            if not getattr(self, name):
                yield Problem.of("model.delta_net_key_missing", name=name)
        if self.key_heads and self.value_heads % self.key_heads:
            yield Problem.of(
                "model.delta_net_heads", value_heads=self.value_heads, key_heads=self.key_heads
            )
        elif self.gate_rank and self.value_heads != self.key_heads:
            yield Problem.of(
                "model.delta_net_gate_rank",
                gate_rank=self.gate_rank,
                value_heads=self.value_heads,
                key_heads=self.key_heads,
            )

    def __bool__(self) -> bool:
        return self.value_heads > 0

    def divides(self, ranks: int) -> bool:
        """Return True if `ranks` ranks can share the heads evenly, where several ranks may hold
        copies of a head of keys, or if there is no gated delta net."""
        if not self:
            return True
        shares_keys = self.key_heads % ranks == 0 or ranks % self.key_heads == 0
        return shares_keys and self.value_heads % ranks == 0

    @property
    def key_width(self) -> int:
        """Return the number of features of the keys of all heads; queries have as many."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Return the number of features of the values of all heads."""
        return self.value_heads * self.value_dim

    @property
    def projected_width(self) -> int:
        """Return the number of features that are projected from a token: queries, keys, values and
        their gate, and two numbers of each head of values; with `gate_rank` two vectors in place of
        the gate and of the second number."""
        if self.gate_rank:
            return self.convolved_width + self.value_heads + 2 * self.gate_rank
        return self.convolved_width + self.value_width + 2 * self.value_heads

    @property
    def decay_width(self) -> int:
        """Return the number of decays of a token: one of each head of values, or with `gate_rank`
        of each feature of its key."""
        return self.value_heads * (self.key_dim if self.gate_rank else 1)

    @property
    def up_weights(self) -> int:
        """Return the number of elements of the matrices from the vectors of `gate_rank` to gate and
        decays."""
        if not self.gate_rank:
            return 0
        return self.gate_rank * (self.value_width + self.decay_width)

    @property
    def convolved_width(self) -> int:
        """Return the number of features that pass the convolution: queries, keys and values."""
        return 2 * self.key_width + self.value_width

    @property
    def recurrent_flops(self) -> int:
        """Return the FLOPs of the recurrence, per token: a state is read by a key, written to by an
        outer product, and read by a query."""
        # Each of these is one product and one sum for each number of a state.
        return 3 * 2 * self.value_heads * self.key_dim * self.value_dim


NO_DELTA_NET = DeltaNet()
"""The sizes of a model, or of a layer, without one."""
