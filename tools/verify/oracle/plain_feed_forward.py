"""Feed-forwards and experts of the plain decoder: every token goes through every expert, and
most weights are zero."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megaprec.errors import UserError
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
        """Return how many tokens each expert was given: int64 [experts]."""
        chosen_by_token = self.chosen.flatten(0, -2)
        return chosen_by_token.sum(0)

    @property
    def balance(self) -> Tensor:
        """Return the balance loss without its weight, the mean over samples."""
        chosen = self.chosen.to(self.logits)
        num_experts = chosen.shape[-1]
        of_experts = chosen.sum(1)  # [b, experts]
        of_samples = chosen.sum((1, 2))
        shares = of_experts / of_samples[:, None]
        means = self.probabilities.mean(1)
        products = shares * means
        of_each_sample = products.sum(-1)
        # 1 if all experts are chosen equally often
        return of_each_sample.mean() * num_experts

    @property
    def z(self) -> Tensor:
        """Return the mean of the squares of the logs of the sums of exponentials of the logits."""
        log_sums = self.logits.logsumexp(-1)
        return log_sums.square().mean()


def router_loss(config: ModelConfig, routings: Sequence[Routing]) -> Tensor:
    """Return the loss of all routers, with its weights."""
    total = torch.zeros(())
    for routing in routings:
        weighted_balance = config.router_aux_loss * routing.balance
        weighted_z = config.router_z_loss * routing.z
        total = total + weighted_balance + weighted_z
    return total


def mlp(config: ModelConfig, weights: Weights, name: str, x: Tensor) -> Tensor:
    """Return what a feed-forward makes of x [b, s, hidden], of the same shape."""
    up = linear(weights, f"{name}.up", x)
    gate = linear(weights, f"{name}.gate", x) if config.gated else None
    # the one activation that has weights
    is_xielu = config.mlp == "xielu"
    inner = _xielu(weights, name, up) if is_xielu else _activated(config, up, gate)
    return linear(weights, f"{name}.down", inner)


def _activated(config: ModelConfig, up: Tensor, gate: Tensor | None) -> Tensor:
    """Return the inner features of a feed-forward. gate: of the kinds that have one."""
    if gate is not None:
        return _gated(config, up, gate)
    if config.mlp == "relu2":
        return up.relu().square()
    if config.mlp == "gelu":
        return F.gelu(up, approximate="tanh")
    if config.mlp == "gelu_exact":
        return F.gelu(up)
    raise _unknown(config)


def _xielu(weights: Weights, name: str, up: Tensor) -> Tensor:
    """Return xIELU of the inner features (Huang, 2024), by the numbers of the layer."""
    of_positive = F.softplus(weights[f"{name}.activation.alpha_p"])
    of_negative = 0.5 + F.softplus(weights[f"{name}.activation.alpha_n"])
    # -1e-6 as in transformers' XIELUActivation
    exponent = up.clamp(max=-1e-6)
    positive = of_positive * up.square()
    negative = of_negative * (exponent.expm1() - up)
    return torch.where(up > 0, positive, negative) + 0.5 * up


def _unknown(config: ModelConfig) -> UserError:
    """Return the error about an activation that the plain decoder does not have."""
    return UserError.of("parity.oracle_activation", mlp=config.mlp)


def _gated(config: ModelConfig, up: Tensor, gate: Tensor) -> Tensor:
    """Return what a feed-forward with a gate gives to its last matrix. Raises UserError."""
    if config.mlp == "swiglu":
        return F.silu(gate) * up
    if config.mlp == "geglu":
        return F.gelu(gate, approximate="tanh") * up
    if config.mlp != "swiglu_clamped":
        raise _unknown(config)
    limit = config.swiglu_limit
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    scaled = config.swiglu_alpha * gate
    opening = scaled.sigmoid()
    # as gpt-oss has it, from one on
    shifted_up = up + 1
    return shifted_up * gate * opening


def experts(
    config: ModelConfig, weights: Weights, name: str, x: Tensor, routings: list[Routing]
) -> Tensor:
    """Return what experts make of x [b, s, hidden], of the same shape. routings: receives the
    choice of this router."""
    logits = linear(weights, f"{name}.router", x)
    by_softmax = config.router.score == "softmax"
    scores = logits.softmax(-1) if by_softmax else logits.sigmoid()
    correction = weights.get(f"{name}.router.correction")
    chosen = _chosen(config, correction, scores.detach())
    total = scores.sum(-1, keepdim=True)
    probabilities = scores / total
    routings.append(Routing(chosen, probabilities, logits, correction))
    expert_weights = scores * chosen
    if config.norm_topk:
        total = expert_weights.sum(-1, keepdim=True)
        expert_weights = expert_weights / total
    expert_weights = expert_weights * config.router.scale
    y = torch.zeros_like(x)
    if config.shared_experts:
        y = mlp(config, weights, f"{name}.shared", x)
    if config.shared_gate:
        gate = linear(weights, f"{name}.shared_gate", x)
        y = y * gate.sigmoid()
    for expert in range(config.experts):
        weight = expert_weights[..., [expert]]
        expert_output = mlp(config, weights, f"{name}.experts.{expert}", x)
        y = y + weight * expert_output
    return y


def _chosen(config: ModelConfig, correction: Tensor | None, scores: Tensor) -> Tensor:
    """Return True for the experts that a token is sent to, [b, s, experts]."""
    settings = config.router
    ranked = scores if correction is None else scores + correction.detach()
    groups = ranked.unflatten(-1, (settings.groups, -1))
    # a group is as good as the sum of its best experts
    best_of_groups = _descending(groups)[..., : settings.group_best]
    of_groups = best_of_groups.sum(-1)
    last_group = settings.groups_per_token - 1
    least_group = _descending(of_groups)[..., [last_group]]
    is_out = of_groups < least_group
    # lower than any score: experts of other groups are never chosen
    ranked = groups.masked_fill(is_out.unsqueeze(-1), -9.0)
    ranked = ranked.flatten(-2)
    last_expert = config.experts_per_token - 1
    least = _descending(ranked)[..., [last_expert]]
    return ranked >= least


def _descending(scores: Tensor) -> Tensor:
    """Return scores in descending order, over the last dimension."""
    return scores.sort(-1, descending=True).values
