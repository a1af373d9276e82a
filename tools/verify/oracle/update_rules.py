"""The update rules by which an oracle trains: those of torch.optim, and the formula of a rule that
torch has not."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megaprec.optim.rules.update_rules import SGD, AdamW, Lion
from tools.config.tables.settings import Optimizer

Groups = list[dict[str, Any]]


class PlainLion(torch.optim.Optimizer):
    """Lion ("Symbolic Discovery of Optimization Algorithms", arXiv 2302.06675, program 1).

    betas: the first mixes the gradient into the momentum whose sign is the step, the second into
        the one that is kept.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float]) -> None:
        # of groups that do not say their own
        defaults = {"lr": lr, "betas": betas, "weight_decay": 0.0}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step."""
        for group in self.param_groups:
            for weights in group["params"]:
                if weights.grad is not None:
                    self._step(weights, group)

    def _step(self, weights: Tensor, group: dict[str, Any]) -> None:
        """Update one parameter and its momentum in place. group: its settings."""
        beta_of_step, beta_of_momentum = group["betas"]
        state = self.state[weights]
        # the name that the momentum of torch's AdamW has
        momentum = state.get("exp_avg", torch.zeros_like(weights))
        gradient = weights.grad
        mixed = beta_of_step * momentum + (1 - beta_of_step) * gradient
        direction = torch.sign(mixed)
        decayed = direction + group["weight_decay"] * weights
        weights -= group["lr"] * decayed
        state["exp_avg"] = beta_of_momentum * momentum + (1 - beta_of_momentum) * gradient


def _adamw(rule: AdamW, groups: Groups, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=lr, betas=rule.betas, eps=rule.eps, foreach=False)


def _sgd(rule: SGD, groups: Groups, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        groups, lr=lr, momentum=rule.momentum, nesterov=rule.nesterov, foreach=False
    )


def _lion(rule: Lion, groups: Groups, lr: float) -> torch.optim.Optimizer:
    return PlainLion(groups, lr=lr, betas=rule.betas)


@dataclass(frozen=True)
class OracleRule:
    """The rule by which an oracle updates.

    make: returns its optimizer. Arguments: megaprec's rule, of which only the options are read; the
        groups of parameters with their weight decays; the learning rate.
    name: of what computes, in a certificate.
    """

    make: Callable[[Any, Groups, float], torch.optim.Optimizer]
    name: str


ORACLE_RULES = {
    "adamw": OracleRule(_adamw, "torch.optim.AdamW"),
    "sgd": OracleRule(_sgd, "torch.optim.SGD"),
    "lion": OracleRule(_lion, "Lion by its formula"),
}
"""By the names that `rule_table.RULES` has."""


def oracle_rule(settings: Optimizer) -> OracleRule | None:
    """Return the rule by which an oracle updates where a run does by that of [optimizer]; None if
    it has none."""
    name = settings.name.lower()
    return ORACLE_RULES.get(name)
