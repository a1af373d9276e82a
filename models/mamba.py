"""The sizes of a Mamba-2 mixer (Dao and Gu, 2024), which layers of a hybrid model have in place of
attention.

A head keeps a matrix of `state_dim` x `head_dim` numbers, its state, in place of the keys and
values of all earlier tokens (`models.recurrent.state_space`). `groups` groups of heads in a row
share a query and a key, in Mamba's letters C and B. Values, keys and queries pass a causal
convolution over `kernel` tokens first (`models.recurrent.short_convolution`).
"""

from collections.abc import Iterator
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from megaprec.errors import Problem, UserError
from models.latent import LARGEST_SIZE

MOST_HEADS = 65_536


class Mamba(BaseModel):
    """The sizes of a Mamba-2 mixer; none if `heads` is 0.

    Raises pydantic's ValidationError (a ValueError) that lists every problem with the fields.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    heads: int = Field(default=0, ge=0, le=MOST_HEADS, description="heads of values; 0: none")
    head_dim: int = Field(default=0, ge=0, le=LARGEST_SIZE, description="features of a head")
    state_dim: int = Field(
        default=0, ge=0, le=LARGEST_SIZE, description="features of a query and a key"
    )
    groups: int = Field(
        default=1, ge=1, le=MOST_HEADS, description="groups of heads that share query and key"
    )
    kernel: int = Field(default=4, ge=1, le=64, description="tokens that the convolution sees")
    least_step: float = Field(
        default=1e-9, gt=0, description="shorter time steps are as long as this"
    )

    @model_validator(mode="after")
    def _require_valid(self) -> Self:
        if problems := [problem.within("mamba.") for problem in self._problems()]:
            raise UserError(*problems)
        return self

    def _problems(self) -> Iterator[Problem]:
        """Yield the problems, whose sentences begin with a key of this table."""
        # Without heads any other size was given for nothing.
        if not self.heads:
            for name, value in self.model_dump(exclude_defaults=True).items():
                yield Problem.of("model.mamba_key_unused", name=name, value=value)
            return
        for name in ("head_dim", "state_dim"):
            if not getattr(self, name):
                yield Problem.of("model.mamba_key_missing", name=name)
        if self.heads % self.groups:
            yield Problem.of("model.mamba_groups", heads=self.heads, groups=self.groups)

    def __bool__(self) -> bool:
        return self.heads > 0

    def divides(self, ranks: int) -> bool:
        """Return True if `ranks` ranks can share the groups evenly, with their heads and their part
        of the norm, or if there is no mixer."""
        return not self or self.groups % ranks == 0

    def divides_heads(self, ranks: int) -> bool:
        """Return True if `ranks` ranks can share the heads evenly, where several ranks may hold
        copies of a group's key and query, or if there is no mixer."""
        if not self:
            return True
        shares_groups = self.groups % ranks == 0 or ranks % self.groups == 0
        return shares_groups and self.heads % ranks == 0

    @property
    def width(self) -> int:
        """Return the number of features of the values of all heads; the gate has as many."""
        return self.heads * self.head_dim

    @property
    def group_width(self) -> int:
        """Return the number of features of the values of a group, which are normalized together."""
        return self.width // self.groups

    @property
    def key_width(self) -> int:
        """Return the number of features of the keys of all groups; queries have as many."""
        return self.groups * self.state_dim

    @property
    def projected_width(self) -> int:
        """Return the number of features that are projected from a token: gate, values, keys,
        queries, and the time step of each head."""
        return 2 * self.width + 2 * self.key_width + self.heads

    @property
    def convolved_width(self) -> int:
        """Return the number of features that pass the convolution: values, keys and queries."""
        return self.width + 2 * self.key_width

    @property
    def recurrent_flops(self) -> int:
        """Return the FLOPs of the recurrence, per token: a state is written to by an outer product
        and read by a query."""
        # Each of these is one product and one sum for each number of a state.
        return 2 * 2 * self.width * self.state_dim


NO_MAMBA = Mamba()
"""The sizes of a model without one."""
