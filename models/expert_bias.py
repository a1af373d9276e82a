"""Biases of experts.

An expert's bias is added to its rows before the router's weights are applied. The first product's
bias is cut over tp like its output features. The second product's results are partial sums on the
ranks of tp, so its bias must be added
once: each rank adds it to some of the features, and holds the bias of these. Every gradient is thus
whole on the rank that holds the bias, and zero for an expert without rows.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megaprec.comm.layout import Part, layout_of
from megaprec.optim.main_grad import Destination, cleared, destination
from parallel.context import Context
from parallel.layers import parameter


def bias_of_sum(context: Context, name: str, features: int) -> nn.Parameter:
    """Return this rank's part of the bias [features] of a result that the ranks of tp sum, with its
    padding."""
    return parameter(context, [Part.cut(name, (features,), 0, context.tp)], 0.0)


def features_of(bias: nn.Parameter) -> slice:
    """Return the features that a bias made by `bias_of_sum` is added to on this rank."""
    part = layout_of(bias).parts[0]
    return slice(part.start, part.start + part.local[0])


def add_biases(
    y: Tensor, biases: Sequence[nn.Parameter], ends: Tensor | None = None, own: slice | None = None
) -> Tensor:
    """Return y [m, n] with the bias of each row's expert added.

    ends: int32 [experts], the end of each expert's rows; None: all rows are of one expert.
    own: the features that biases are added to; None: all.
    """
    return _AddBiases.apply(y, ends, own or slice(0, y.shape[1]), *biases)


class _AddBiases(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, ends: Tensor | None, own: slice, *biases: nn.Parameter
    ) -> Tensor:
        ctx.biases = biases
        ctx.own = own
        ctx.experts = None if ends is None else _expert_of_rows(ends, len(y))
        some = [bias[: own.stop - own.start] for bias in biases]
        added = y.clone()
        added[:, own].add_(some[0] if ctx.experts is None else torch.stack(some)[ctx.experts])
        return added

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        first = 1 if ctx.experts is None else 2
        goes = [destination(ctx, first + n, bias) for n, bias in enumerate(ctx.biases)]
        return grad, None, None, *_bias_gradients(grad[:, ctx.own], ctx.experts, ctx.biases, goes)


def _expert_of_rows(ends: Tensor, rows: int) -> Tensor:
    """Return the expert of each row: int64 [rows], on the device of `ends`."""
    return torch.searchsorted(
        ends, torch.arange(rows, dtype=ends.dtype, device=ends.device), right=True
    )


def _bias_gradients(
    rows: Tensor,
    experts: Tensor | None,
    biases: Sequence[nn.Parameter],
    goes: Sequence[Destination],
) -> list[Tensor | None]:
    """Add the sums of each expert's rows [m, n] to the main gradients of the biases, or return
    them, as `goes` says."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    if experts is None:
        sums = rows.sum(0, dtype=wide).unsqueeze(0)
    else:  # accumulation into indexed rows has a fixed order on every device
        sums = rows.new_zeros(len(biases), rows.shape[1], dtype=wide)
        sums.index_put_((experts,), rows.to(wide), accumulate=True)
    return [_added(bias, own, where) for bias, own, where in zip(biases, sums, goes, strict=True)]


def _added(bias: nn.Parameter, gradient: Tensor, goes: Destination) -> Tensor | None:
    if goes is Destination.NOWHERE:
        return None
    total = cleared(bias) if goes is Destination.MAIN else torch.zeros_like(bias)
    total[: len(gradient)].add_(gradient)
    return None if goes is Destination.MAIN else total
