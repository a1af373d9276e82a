"""Dropout that drops the same elements in every layout, and the micro-batch that random numbers
depend on.

An element is kept or dropped by a function of the seed, the step, the layer's name and the
element's logical coordinates: the sample within the global batch, the position, and the feature or
head. The result therefore does not depend on tp, pp, dp, the micro-batch size or recomputation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megaprec.comm.random import bits, keep, key
from megaprec.fp8.nvfp4 import Microbatch
from megaprec.fp8.state import FP8State
from parallel.context import Context
from parallel.leaves import PLAIN, Leaves
from parallel.sequence_cut import positions_between


@dataclass(frozen=True)
class MicrobatchInfo:
    """The identity of a micro-batch within the run.

    step: number of the training step.
    samples: int64 [b], the number of each sample within the global batch.
    weight: scalar factor for a loss per sample: the loss scale divided by the number of samples of
        the global batch. Required by layers that have a loss of their own, such as routers.
    """

    step: int
    samples: Tensor
    weight: Tensor | None = None


def note_microbatch(fp8: FP8State, microbatch: MicrobatchInfo | None) -> None:
    """Set `fp8.microbatch` to the micro-batch that the layers compute from now on: the random
    numbers by which products in NVFP4 round gradients depend on it. microbatch: None in
    evaluation."""
    fp8.microbatch = None
    # other kinds of FP8 scales do not read it, and it would keep a tensor alive
    if microbatch is not None and fp8.recipe is not None and fp8.recipe.scales.four_bits:
        fp8.microbatch = Microbatch(microbatch.step, microbatch.samples[0])


def dropout(
    x: Tensor,
    probability: float,
    context: Context,
    name: str,
    microbatch: MicrobatchInfo | None,
) -> Tensor:
    """Apply dropout to activations x [s, b, hidden].

    Under sequence and context parallelism x is this rank's part of the sequence.
    microbatch: the micro-batch; None (evaluation) keeps every element.
    """
    if microbatch is None or probability == 0:
        return x
    positions = positions_between(context, x.shape[0], x.device)
    features = torch.arange(x.shape[2], device=x.device)
    coordinates = (positions, microbatch.samples, features)
    return _drop(x, probability, context, name, microbatch, coordinates)


def attention_dropout(
    weights: Tensor,
    probability: float,
    context: Context,
    name: str,
    microbatch: MicrobatchInfo | None,
    positions: tuple[range, range] | None = None,
) -> Tensor:
    """Apply dropout to attention weights [b, local heads, query, key].

    microbatch: as in `dropout`.
    positions: those of the queries and of the keys in their sequence; None: all of them.
    """
    if microbatch is None or probability == 0:
        return weights
    _, head_count, query_count, key_count = weights.shape
    # heads are cut over tp in order
    first_head = context.tp.rank * head_count
    heads = range(first_head, first_head + head_count)
    queries, keys = positions or (range(query_count), range(key_count))
    device = weights.device
    coordinates = (
        microbatch.samples,
        _indices(heads, device),
        _indices(queries, device),
        _indices(keys, device),
    )
    return _drop(weights, probability, context, name, microbatch, coordinates)


def _indices(span: range, device: torch.device) -> Tensor:
    return torch.arange(span.start, span.stop, device=device)


def drop(
    x: Tensor,
    probability: float,
    random_key: int,
    ranges: Sequence[range],
) -> Tensor:
    """Apply dropout to `x` of any shape.

    random_key: the key of the random numbers.
    ranges: the coordinates of the elements along each dimension in the logical tensor, of which `x`
        may be a slice.
    """
    coordinates = [_indices(span, x.device) for span in ranges]
    return _Dropout.apply(x, probability, random_key, PLAIN, *coordinates)


def _drop(
    x: Tensor,
    probability: float,
    context: Context,
    name: str,
    microbatch: MicrobatchInfo,
    coordinates: tuple[Tensor, ...],
) -> Tensor:
    """Apply dropout to x, by random numbers that depend on seed, step, name and coordinates.

    coordinates: int64 [n] of each of x's dimensions.
    """
    random_key = key(context.seed, microbatch.step, name)
    return _Dropout.apply(x, probability, random_key, context.leaves, *coordinates)


class _Dropout(torch.autograd.Function):
    """x, or 0 where an element is dropped, divided by the probability of being kept.

    random_key: the key of the random numbers.
    coordinates: int64 [n] of each of x's dimensions.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        probability: float,
        random_key: int,
        leaves: Leaves,
        *coordinates: Tensor,
    ) -> Tensor:
        # a tensor, as it differs between calls: a number would need a compiled form for each
        key_tensor = torch.full((), random_key, dtype=torch.int64, device=x.device)
        y, mask = leaves(_dropout, x, probability, key_tensor, *coordinates)
        ctx.save_for_backward(mask)
        ctx.probability = probability
        ctx.leaves = leaves
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (mask,) = ctx.saved_tensors
        grad_x = ctx.leaves(_dropout_gradient, grad, mask, ctx.probability)
        other_inputs = len(ctx.needs_input_grad) - 1
        return grad_x, *[None] * other_inputs


def _dropout(
    x: Tensor,
    probability: float,
    random_key: Tensor,
    *coordinates: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return x after dropout, and True where an element is kept."""
    index = torch.zeros((), dtype=torch.int64, device=x.device)
    # One dimension after the other, each mixed into the bits of those before. So the numbers depend
    # on an element's coordinates, and not on the sizes of the dimensions, as its position in memory
    # does.
    for coordinate in coordinates:
        index = bits(random_key, index).unsqueeze(-1) + coordinate
    mask = keep(random_key, index, 1 - probability)
    return _dropout_gradient(x, mask, probability), mask


def _dropout_gradient(
    x: Tensor,
    mask: Tensor,
    probability: float,
) -> Tensor:
    """Return x / (1 - probability) where the mask is True, otherwise 0; forward and backward."""
    return torch.where(mask, x / (1 - probability), 0)
