"""The choice of the next token: the likeliest, or one drawn from the likelier ones.

Tokens are ordered by their logits, and each limit keeps the first of them: top_k a number, top_p those that together
have a probability, min_p those with a fraction of the likeliest's probability. The probabilities are those at the
temperature, among the tokens that the limits before have kept. Order and meaning are those of transformers.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megaprec.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """Settings of the choice. temperature: divides the logits; 0: the likeliest token, whatever the limits.

    top_k: number of tokens; 0: all. top_p: least probability of the kept tokens together; 1: all. min_p: least
    probability of a token, as a fraction of the likeliest's; 0: all.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 1.0
    min_p: float = 0.0

    def problems(self) -> Iterator[str]:
        """Yield a line for each setting that is wrong, named as the option of the command."""
        if not 0 <= self.temperature < math.inf:
            yield f"--temperature {self.temperature:g}: give 0 (always the most likely token) or more"
        if self.top_k < 0:
            yield f"--top-k {self.top_k}: give at least 1, or 0 for no such limit"
        if not 0 < self.top_p <= 1:
            yield f"--top-p {self.top_p:g}: give a number above 0 and at most 1, which is no limit"
        if not 0 <= self.min_p <= 1:
            yield f"--min-p {self.min_p:g}: give a number from 0, which is no limit, to 1"

    def choose(self, logits: Tensor, generator: torch.Generator, barred: Tensor | None = None) -> int:
        """Return the id of the next token. logits: [vocab]. barred: True for ids that are never chosen; None bars none.

        Raises UserError if the logits are not finite.
        """
        if not logits.isfinite().all():
            raise UserError("the model computes inf or NaN: its weights are of no use")
        if barred is not None:
            logits = logits.masked_fill(barred, -math.inf)
        if self.temperature < torch.finfo(logits.dtype).tiny:  # a smaller one is 0 in the arithmetic of the logits
            return int(logits.argmax())
        ids, probabilities = self.candidates(logits)
        return int(ids[torch.multinomial(probabilities, 1, generator=generator)])

    def candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ids of the tokens that may be chosen, likeliest first, and their probabilities."""
        count = min(self.top_k or len(logits), len(logits))
        best, ids = logits.topk(count)
        probabilities = ((best - best[0]) / self.temperature).softmax(-1)
        if self.top_p < 1:
            before = probabilities.cumsum(-1) - probabilities
            probabilities = _first(probabilities, before < self.top_p)
        if self.min_p > 0:
            probabilities = _first(probabilities, probabilities >= self.min_p * probabilities[0])
        return ids[: len(probabilities)], probabilities


def _first(probabilities: Tensor, kept: Tensor) -> Tensor:
    """Return the probabilities of the kept ones, which are the first and at least one, as a share of their sum."""
    some = probabilities[: max(1, int(kept.sum()))]
    return some / some.sum()
