"""The loss of a model that has learned nothing, as far as its initial weights tell it.

The logits z of a token are the products of a row of the head with the normalized hidden state h,
whose mean square is at most 1. Rows are drawn independently of h with standard deviation s, so that
z is normal with

    sigma^2 = s^2 * |h|^2 <= s^2 * hidden

and the mean over tokens of

    loss = log(sum of exp z) - z of the target

lies between ln V (as if h were 0) and ln V + sigma^2 / 2, but for chance. Chance is at most as
large as if all tokens had one h: the mean of the targets' logits then has the standard deviation
sigma * sqrt(sum of p^2), where p are the frequencies of the targets in the batch, and the sum of
exponentials a relative one of sqrt((exp(sigma^2) - 1) / V).

A tied head knows the current token: its row is part of h, and its logit up to sigma * sqrt(hidden).
That adds to the sum of exponentials, and where the next token is the same one it makes the loss
smaller. A soft cap bounds this logit. Under muP s is divided by the growth of the width.
"""

import math
from dataclasses import dataclass

import torch

from models.config import ModelConfig
from models.engine.passes import Share

DEVIATIONS = 6.0  # of chance, that the loss may be outside of its limits
LARGEST_VARIANCE = 50.0  # of logits; larger ones would overflow, and no loss is told from another
# A loss this near to ln V has no logits: chance leads there in one run of thousands.
EXACT = 1e-6
LEAST_SIGMA = 0.03  # of logits, of which such a loss is told


@dataclass(frozen=True)
class FirstLoss:
    """The limits of the first loss. uniform: the loss of equal logits. sigma: of the logits."""

    uniform: float
    low: float
    high: float
    sigma: float

    def problem(self, loss: float) -> str:
        """Return in words why this is not the loss of a fresh model; empty if it may be."""
        if not self.low <= loss <= self.high:
            return (
                f"the first loss is {loss:.4f}, and that of fresh weights lies between "
                f"{self.low:.4f} and {self.high:.4f} (ln of the vocabulary: {self.uniform:.4f}): "
                "look at the initial weights, the targets and the loss"
            )
        if abs(loss - self.uniform) <= EXACT and self.sigma >= LEAST_SIGMA:
            return (
                f"the first loss is exactly {self.uniform:.6f}, the ln of the vocabulary: all "
                "logits are equal, as with an output head or a final norm of zeros"
            )
        return ""


def expected_first_loss(model: ModelConfig, share: Share) -> FirstLoss:
    """Return the limits of the loss of the first step.

    model: not of a factory, whose initial weights are its own. share: of the step, on any rank.
    """
    std = _std_of_head(model) / model.logit_divisor
    variance = min(LARGEST_VARIANCE, std**2 * model.hidden)
    sigma = math.sqrt(variance)
    uniform = math.log(model.vocab)
    squares, repeated = _of_targets(share)
    chance = sigma * math.sqrt(squares)
    chance += math.sqrt(math.expm1(variance) / model.vocab)
    # the largest logit of the current token itself, which a tied head knows
    peak = sigma * math.sqrt(model.hidden) if model.tied else 0.0
    if model.final_softcap:
        peak = min(peak, model.final_softcap)
    highest = uniform + variance / 2
    if peak:
        highest = _log_sum(highest, peak)
    margin = DEVIATIONS * chance + EXACT
    return FirstLoss(
        uniform=uniform,
        low=uniform - repeated * peak - margin,
        high=highest + margin,
        sigma=sigma,
    )


def _std_of_head(model: ModelConfig) -> float:
    """Return the standard deviation of the head's weights, with the final norm's factor: by the
    run file and the published rule of muP, and not by the code that draws them."""
    own_std = model.init.embedding if model.tied else model.init.head
    std = own_std or model.init_std
    if not model.mup_base_hidden:
        return std
    # logits shrink with the width, tied or not
    return std * model.mup_base_hidden / model.hidden


def _of_targets(share: Share) -> tuple[float, float]:
    """Return the sum of the squared frequencies of the targets, and the frequency of those that
    repeat their own token."""
    weights = torch.ones(share.targets.shape, dtype=torch.float64)
    if share.mask is not None and share.mask.sum() > 0:
        weights = share.mask.double()
    weights = weights / weights.sum()
    _, places = share.targets.unique(return_inverse=True)
    frequencies = places.flatten().bincount(weights.flatten())
    repeated = weights[share.tokens == share.targets].sum()
    return frequencies.square().sum().item(), repeated.item()


def _log_sum(one: float, other: float) -> float:
    """Return log(exp(one) + exp(other))."""
    larger = max(one, other)
    return larger + math.log1p(math.exp(min(one, other) - larger))
