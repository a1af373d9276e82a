"""Feed-forwards and experts of the plain decoder: every token goes through every expert, and
most weights are zero."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import ModelConfig
from tools.verify.oracle.plain_parts import Weights, linear


@dataclass(frozen=True)
class Routing:
    """The choice of a router, each [b, s, experts].

    chosen: True for the experts that a token is sent to.
    probabilities: scores that sum to one.
    logits: of the router.
    correction: of the choice, if there is one.
    """

    chosen: Tensor
    probabilities: Tensor
    logits: Tensor
    correction: Tensor | None

    @property
    def counts(self) -> Tensor:
        """Return how many tokens each expert was given."""
        return self.chosen.flatten(0, -2).sum(0)

    @property
    def balance(self) -> Tensor:
        """Return the balance loss without its weight, the mean over samples."""
        chosen = self.chosen.to(self.logits)
        shares = chosen.sum(1) / chosen.sum((1, 2))[:, None]
        means = self.probabilities.mean(1)
        return (shares * means).sum(-1).mean() * chosen.shape[-1]

    @property
    def z(self) -> Tensor:
        """Return the mean of the squares of the logs of the sums of exponentials of the logits."""
        return self.logits.logsumexp(-1).square().mean()


def router_loss(config: ModelConfig, routings: Sequence[Routing]) -> Tensor:
    """Return the loss of all routers, with its weights."""
    total = torch.zeros(())
    for routing in routings:
        weighted_z = config.router_z_loss * routing.z
        total = total + config.router_aux_loss * routing.balance + weighted_z
    return total


def mlp(config: ModelConfig, w: Weights, name: str, x: Tensor) -> Tensor:
    """Return what a feed-forward makes of x."""
    up = linear(w, f"{name}.up", x)
    if config.mlp == "swiglu":
        inner = F.silu(linear(w, f"{name}.gate", x)) * up
    elif config.mlp == "swiglu_clamped":
        gate = linear(w, f"{name}.gate", x).clamp(max=config.swiglu_limit)
        up = up.clamp(-config.swiglu_limit, config.swiglu_limit)
        inner = (up + 1) * gate * (config.swiglu_alpha * gate).sigmoid()
    elif config.mlp == "geglu":
        inner = F.gelu(linear(w, f"{name}.gate", x), approximate="tanh") * up
    elif config.mlp == "relu2":
        inner = up.relu().square()
    else:
        inner = F.gelu(up, approximate="tanh" if config.mlp == "gelu" else "none")
    return linear(w, f"{name}.down", inner)


def experts(
    config: ModelConfig, w: Weights, name: str, x: Tensor, routings: list[Routing]
) -> Tensor:
    """Return what experts make of x [b, s, hidden]. routings: receives that of this router."""
    logits = linear(w, f"{name}.router", x)
    scores = logits.softmax(-1) if config.router.score == "softmax" else logits.sigmoid()
    correction = w.get(f"{name}.router.correction")
    chosen = _chosen(config, correction, scores.detach())
    probabilities = scores / scores.sum(-1, keepdim=True)
    routings.append(Routing(chosen, probabilities, logits, correction))
    weights = scores * chosen
    if config.norm_topk:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * config.router.scale
    y = torch.zeros_like(x)
    if config.shared_experts:
        y = mlp(config, w, f"{name}.shared", x)
    if config.shared_gate:
        y = y * linear(w, f"{name}.shared_gate", x).sigmoid()
    for n in range(config.experts):
        y = y + weights[..., [n]] * mlp(config, w, f"{name}.experts.{n}", x)
    return y


def _chosen(config: ModelConfig, correction: Tensor | None, scores: Tensor) -> Tensor:
    """Return True for the experts that a token is sent to, [b, s, experts]."""
    settings = config.router
    ranked = scores if correction is None else scores + correction.detach()
    groups = ranked.unflatten(-1, (settings.groups, -1))
    best_of_groups = groups.sort(-1, descending=True).values[..., : settings.group_best]
    of_groups = best_of_groups.sum(-1)
    least_group = of_groups.sort(-1, descending=True).values[..., [settings.groups_per_token - 1]]
    is_out = (of_groups < least_group).unsqueeze(-1)
    # no score is as low
    ranked = groups.masked_fill(is_out, -9.0).flatten(-2)
    least = ranked.sort(-1, descending=True).values[..., [config.experts_per_token - 1]]
    return ranked >= least
