"""Gradients that are shares: several tp ranks hold the same slice, and each saw only part of what flows into it.

Under sequence parallelism a norm's weight is used on a part of the sequence on every rank; a key/value head that
is shared by several ranks serves other query heads on each. The gradient is the SUM of the shares, always, and
everyone who holds the slice must have it before norms are taken.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megaprec.comm.axis import Axis
from megaprec.comm.layout import Part, layout_of


def sum_partial(parameters: Sequence[nn.Parameter], tp: Axis) -> None:
    """Sums the shares in the parameters' `main_grad` over tp, in one packed all-reduce."""
    shares = [share for p in parameters for share in _shares(p)] if tp.size > 1 else []
    if not shares:
        return
    packed = torch.cat([_slots(part, values) for part, values in shares])
    tp.sum_(packed)
    for (part, values), summed in zip(
        shares, packed.split([part.shards * v.numel() for part, v in shares]), strict=True
    ):
        values.copy_(summed.chunk(part.shards)[part.shard])


def _shares(parameter: nn.Parameter) -> list[tuple[Part, Tensor]]:
    layout, flat = layout_of(parameter), parameter.main_grad.view(-1)  # type: ignore[attr-defined]
    if not layout.partial:
        return []
    return [(part, flat[first:last]) for part, first, last in layout.spans() if part.copies > 1]


def _slots(part: Part, values: Tensor) -> Tensor:
    """One slot per different slice, ours filled in: the sum over tp then adds only copies of the same slice."""
    slots = values.new_zeros(part.shards, values.numel())
    slots[part.shard] = values
    return slots.view(-1)
