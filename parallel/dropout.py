"""Dropout that drops the same elements in every layout.

An element is kept or dropped by a function of the seed, the step, the layer's name and the element's logical
coordinates: the sample within the global batch, the position, and the feature or head. The result therefore does not
depend on tp, pp, dp, the micro-batch size or recomputation.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megaprec.comm.random import bits, keep, key
from parallel.context import Context


@dataclass(frozen=True)
class MicrobatchInfo:
    """The identity of a micro-batch within the run.

    step: number of the training step.
    samples: int64 [b], the number of each sample within the global batch.
    weight: scalar factor for a loss per sample: the loss scale divided by the number of samples of the global batch.
        Required by layers that have a loss of their own, such as routers.
    """

    step: int
    samples: Tensor
    weight: Tensor | None = None


def dropout(x: Tensor, probability: float, context: Context, name: str, place: MicrobatchInfo | None) -> Tensor:
    """Apply dropout to activations x [s, b, hidden].

    Under sequence parallelism x is this rank's shard of the sequence.
    place: the micro-batch; None (evaluation) keeps every element.
    """
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
    """Apply dropout to attention weights [b, own heads, query, key]. place: as in `dropout`."""
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
    for coordinate in coordinates:  # one dimension at a time: the result does not depend on the sizes of the others
        index = bits(secret, index).unsqueeze(-1) + coordinate
    return torch.where(keep(secret, index, 1 - probability), x / (1 - probability), 0)
