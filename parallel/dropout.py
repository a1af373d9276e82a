"""Dropout that drops the same elements in every layout.

Whether an element is kept is a function of the seed, the step, the layer's name and the element's logical
coordinates: which sample of the global batch, which position, which feature or head. So tp, pp, dp, the
micro-batch size and recomputation cannot change it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megaprec.comm.random import bits, keep, key
from parallel.context import Context


@dataclass(frozen=True)
class MicrobatchInfo:
    """Where in the run a micro-batch stands.

    step: number of the training step. samples: int64 [b], each sample's number within the global batch.
    weight: scalar, what a loss of one sample is multiplied by: the loss scale over the samples of the global batch.
        Needed by layers that have a loss of their own.
    """

    step: int
    samples: Tensor
    weight: Tensor | None = None


def dropout(x: Tensor, probability: float, context: Context, name: str, place: MicrobatchInfo | None) -> Tensor:
    """x [s, b, hidden], or this rank's part of the sequence if that is cut. None for `place` (evaluation) keeps all."""
    if place is None or probability == 0:
        return x
    first = context.tp.rank * x.shape[0] if context.cut_sequence else 0
    positions = torch.arange(first, first + x.shape[0], device=x.device)
    return _drop(
        x, probability, context, name, place, (positions, place.samples, torch.arange(x.shape[2], device=x.device))
    )


def attention_dropout(
    weights: Tensor, probability: float, context: Context, name: str, place: MicrobatchInfo | None
) -> Tensor:
    """weights [b, own heads, query, key]."""
    if place is None or probability == 0:
        return weights
    _, heads, queries, keys = weights.shape
    own = torch.arange(context.tp.rank * heads, (context.tp.rank + 1) * heads, device=weights.device)
    rest = (torch.arange(n, device=weights.device) for n in (queries, keys))
    return _drop(weights, probability, context, name, place, (place.samples, own, *rest))


def _drop(
    x: Tensor, probability: float, context: Context, name: str, place: MicrobatchInfo, coordinates: tuple[Tensor, ...]
) -> Tensor:
    secret = key(context.seed, place.step, name)
    index = torch.zeros((), dtype=torch.int64, device=x.device)
    for coordinate in coordinates:  # mixed one dim at a time, so the sizes of the others do not matter
        index = bits(secret, index).unsqueeze(-1) + coordinate
    return torch.where(keep(secret, index, 1 - probability), x / (1 - probability), 0)
