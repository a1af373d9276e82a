"""The settings of a router (`model.router`): how a token's experts are chosen and weighted.

    scores    softmax or sigmoid of the logits, one for each expert
    choice    the `experts_per_token` highest of scores + correction, where the correction balances
              loads and is part of nothing else; it may be limited to the best groups of
              neighbouring experts
    weights   the scores of the chosen experts, divided by their sum (`norm_topk`), times `scale`

A softmax over the chosen logits alone is the same as a softmax over all of them, divided by the sum
of the chosen: so "top-k before the softmax" is `norm_topk = true`, and "after" is `norm_topk =
false`.

A group counts as much as its `group_best` best experts together: 1 in DeepSeek-V2, 2 in DeepSeek-V3
and GLM-4.5, experts_per_token / groups_per_token in Megatron-core (`group_limited_topk`,
moe_utils.py).
"""

from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from megaprec.errors import Problem


class RouterSettings(BaseModel):
    """The choice of experts. Raises pydantic's ValidationError (a ValueError) that lists every
    problem."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    score: Literal["softmax", "sigmoid"] = Field(
        description="scores of the experts, from the router's logits"
    )
    scale: float = Field(
        default=1.0, gt=0, description="factor of the weights of a token's experts"
    )
    groups: int = Field(default=1, gt=0, description="number of groups of neighbouring experts")
    groups_per_token: int = Field(
        default=1, gt=0, description="groups that a token's experts may be of"
    )
    group_best: int = Field(
        default=2, gt=0, description="best experts of a group by whose sum groups are compared"
    )
    correction: bool = Field(
        default=False,
        description="a bias for each expert that corrects the choice alone and follows the loads",
    )

    def problems(self, experts: int, per_token: int) -> Iterator[Problem]:
        """Yield a line for each setting that does not fit a model.

        experts: the number of experts of a layer.
        per_token: the number that each token is sent to.
        """
        if experts % self.groups:
            yield Problem.of("model.router_groups", groups=self.groups, experts=experts)
            return
        group_size = experts // self.groups
        chosen_groups = self.groups_per_token
        if chosen_groups > self.groups:
            yield Problem.of(
                "model.router_groups_per_token", chosen_groups=chosen_groups, groups=self.groups
            )
        elif self.limits and per_token > chosen_groups * group_size:
            yield Problem.of(
                "model.router_few_experts",
                per_token=per_token,
                eligible=chosen_groups * group_size,
                chosen_groups=chosen_groups,
            )
        if self.limits and self.group_best > group_size:
            yield Problem.of(
                "model.router_group_best", group_best=self.group_best, group_size=group_size
            )

    def at_least(self, experts: int, per_token: int) -> int:
        """Return the smallest number of experts, `experts` or more, with which these settings are
        valid: groups are of one size, and large enough for the experts that are chosen of them.

        per_token: the number of experts that each token is sent to. Groups are as large as if they
        were compared, for transformers compares them also where all are chosen.
        """
        # both rounded up
        experts_of_group = -(-experts // self.groups)
        chosen_of_group = -(-per_token // self.groups_per_token)
        group_size = max(experts_of_group, chosen_of_group, self.group_best)
        return group_size * self.groups

    @property
    def limits(self) -> bool:
        """Return True if a token's experts must be of some groups only."""
        return self.groups_per_token < self.groups


PLAIN = RouterSettings(score="softmax")
CORRECTED = RouterSettings(score="sigmoid", correction=True)
