"""The cut of a model's parameters into buckets: those that share a flat buffer, a reduction and an
all-gather."""

from collections import Counter
from collections.abc import Callable, Sequence

from torch import nn

from megaprec.comm.layout import layout_of
from megaprec.optim.flat_buffer import param_dtype
from megaprec.precision.plan import PrecisionPlan

_MIN_ELEMENTS = 40_000_000  # a message over few ranks; Megatron-LM's default
_ELEMENTS_PER_RANK = 1_000_000  # keeps the part of each of many ranks large

# the names of the moments that are kept of a parameter
Moments = Callable[[nn.Parameter], Sequence[str]]


def buckets(
    parameters: Sequence[nn.Parameter],
    plan: PrecisionPlan,
    size: int,
    moments: Moments = lambda _: (),
) -> list[list[nn.Parameter]]:
    """Return lists of parameters that share a buffer.

    Parameters of a buffer are of one kind and have the same `moments`. Buffers have at least `size`
    elements, except the last of a kind, and are ordered by their first parameter. Tied parameters
    get buffers of their own, so that every holder cuts them into the same slices. So do experts on
    ranks of their own, parameters that torch has sharded over more ranks than the tensor-parallel
    ones, and parameters that balance loads.
    """
    # the bucket of each kind that is being filled, and its number of elements
    open_buckets: dict[tuple[object, ...], list[nn.Parameter]] = {}
    elements = Counter[tuple[object, ...]]()
    in_order: list[list[nn.Parameter]] = []
    for parameter in parameters:
        layout = layout_of(parameter)
        part = layout.parts[0]
        num_ranks = part.shards * part.copies
        # what a reduction, an all-gather or an update treats in its own way
        marks = (layout.tied, layout.again, layout.expert, layout.balancing)
        kind = (*marks, param_dtype(parameter, plan), num_ranks, moments(parameter))
        if kind not in open_buckets or elements[kind] >= size:
            open_buckets[kind] = []
            elements[kind] = 0
            in_order.append(open_buckets[kind])
        open_buckets[kind].append(parameter)
        elements[kind] += parameter.numel()
    return in_order


def bucket_elements(requested: int, dp: int) -> int:
    """Return the elements of a bucket: `requested`, or for 0 as many as keep its messages large
    over `dp` ranks.

    Each of them sends and receives a part of a bucket, so buckets grow with dp, as in Megatron-LM
    (megatron/core/distributed/distributed_data_parallel.py).
    """
    return requested or max(_MIN_ELEMENTS, _ELEMENTS_PER_RANK * dp)
