"""The choice of a token's experts and their weights: the settings `model.router`, and the
arithmetic.

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

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

# Added to the sum of sigmoid scores, which may all be zero, as transformers and Megatron-core do.
SUM_FLOOR = 1e-20


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

    def problems(self, experts: int, per_token: int) -> Iterator[str]:
        """Yield a line for each setting that does not fit a model of so many experts, and so many
        for each token."""
        if experts % self.groups:
            yield f"router.groups {self.groups} does not divide experts {experts}"
            return
        group_size = experts // self.groups
        chosen_groups = self.groups_per_token
        if chosen_groups > self.groups:
            yield (
                f"router.groups_per_token {chosen_groups} is more than router.groups {self.groups}"
            )
        elif self.limits and per_token > chosen_groups * group_size:
            yield (
                f"experts_per_token {per_token} is more than the {chosen_groups * group_size} "
                f"experts of router.groups_per_token {chosen_groups}: choose more groups or "
                "fewer experts"
            )
        if self.limits and self.group_best > group_size:
            yield (
                f"router.group_best {self.group_best} is more than the {group_size} experts of a "
                "group"
            )

    def at_least(self, experts: int, per_token: int) -> int:
        """Return the smallest number of experts, `experts` or more, whose groups are of one size
        and large enough.

        Groups are as large as if they were compared, for transformers compares them also where all
        are chosen.
        """
        experts_of_group = -(-experts // self.groups)  # rounded up
        chosen_of_group = -(-per_token // self.groups_per_token)
        return max(experts_of_group, chosen_of_group, self.group_best) * self.groups

    @property
    def limits(self) -> bool:
        """Return True if a token's experts must be of some groups only."""
        return self.groups_per_token < self.groups


PLAIN = RouterSettings(score="softmax")
CORRECTED = RouterSettings(score="sigmoid", correction=True)


def is_correction(name: str) -> bool:
    """Return True if a logical tensor corrects a router's choice: it has no moments, and counts for
    its gradient."""
    return name.endswith(".router.correction")


def expert_scores(settings: RouterSettings, logits: Tensor) -> Tensor:
    """Return the score of each expert, of the shape and dtype of `logits` [..., experts]."""
    return logits.softmax(-1) if settings.score == "softmax" else logits.sigmoid()


def choose_experts(
    settings: RouterSettings, scores: Tensor, correction: Tensor | None, per_token: int
) -> Tensor:
    """Return the numbers of the chosen experts, int64 [..., per_token].

    scores: [..., experts].
    correction: [experts], or None.
    """
    with torch.no_grad():
        ranked = scores if correction is None else scores + correction
        if settings.limits:
            eligible = experts_of_best_groups(settings, ranked)
            ranked = ranked.masked_fill(~eligible, float("-inf"))
        return ranked.topk(per_token, -1).indices


def experts_of_best_groups(settings: RouterSettings, ranked: Tensor) -> Tensor:
    """Return bool [..., experts], True for the experts of the best groups.

    ranked: [..., experts], by which the experts are compared.
    """
    groups = ranked.unflatten(-1, (settings.groups, -1))
    group_scores = groups.topk(settings.group_best, -1).values.sum(-1)
    best_groups = group_scores.topk(settings.groups_per_token, -1).indices
    is_best = torch.zeros(groups.shape[:-1], dtype=torch.bool, device=ranked.device)
    is_best.scatter_(-1, best_groups, True)
    return is_best.unsqueeze(-1).expand(groups.shape).flatten(-2)


def expert_weights(
    settings: RouterSettings, scores: Tensor, chosen: Tensor, normalize: bool
) -> Tensor:
    """Return the weights of the chosen experts, [..., per_token].

    scores: [..., experts].
    chosen: [..., per_token].
    normalize: divide by the sum of the chosen experts' scores.
    """
    weights = scores.gather(-1, chosen)
    if normalize:
        floor = SUM_FLOOR if settings.score == "sigmoid" else 0.0
        weights = weights / (weights.sum(-1, keepdim=True) + floor)
    return weights if settings.scale == 1 else weights * settings.scale
