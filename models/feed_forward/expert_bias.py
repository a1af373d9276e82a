"""Biases of experts, one of which is added to a result that the ranks of tp sum.

An expert's bias is added to its rows before the router's weights are applied. The first product's
bias is cut over tp like its output features. The second product's results are partial sums on the
ranks of tp, so its bias must be added once: each rank adds it to some of the features, and holds
the bias of these. Every gradient is thus whole on the rank that holds the bias, and zero for an
expert without rows.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megaprec.comm.layout import Part, layout_of
from megaprec.comm.main_grad import (
    Destination,
    begin_accumulation,
    begin_cleared,
    destinations,
)
from megaprec.precision.row_sums import add_rows_
from models.feed_forward.grouped_products import view_as_stacked
from parallel.context import Context
from parallel.layers import parameter


def make_bias_of_sum(
    context: Context,
    name: str,
    features: int,
) -> nn.Parameter:
    """Return this rank's part of the bias [features] of a result that the ranks of tp sum, with its
    padding."""
    part = Part.cut(name, (features,), 0, context.tp)
    return parameter(context, [part], 0.0)


def features_of_bias(bias: nn.Parameter) -> slice:
    """Return the features that a bias made by `make_bias_of_sum` is added to on this rank."""
    part = layout_of(bias).parts[0]
    return slice(part.start, part.start + part.local[0])


def add_biases(
    y: Tensor,
    biases: Sequence[nn.Parameter],
    ends: Tensor | None = None,
    features: slice | None = None,
) -> Tensor:
    """Return y [m, n] with the bias of each row's expert added.

    ends: int32 [experts], the end of each expert's rows; None: all rows are of one expert.
    features: those that biases are added to; None: all.
    """
    all_features = slice(0, y.shape[1])
    return _AddBiases.apply(y, ends, features or all_features, *biases)


class _AddBiases(torch.autograd.Function):
    """y [m, n] plus the bias of each row's expert, in some of the features."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        ends: Tensor | None,
        features: slice,
        *biases: nn.Parameter,
    ) -> Tensor:
        ctx.biases = biases
        ctx.features = features
        ctx.expert_of_row = None if ends is None else _expert_of_rows(ends, len(y))
        # A bias is padded to the same length on all ranks; the padding belongs to no feature.
        width = features.stop - features.start
        unpadded = [bias[:width] for bias in biases]
        # A copy: an input that changes in place would have to be marked for autograd.
        added = y.clone()
        if ctx.expert_of_row is None:
            bias_of_rows = unpadded[0]
        else:
            bias_of_rows = torch.stack(unpadded)[ctx.expert_of_row]
        added[:, features].add_(bias_of_rows)
        return added

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # the number of the first bias among the inputs that are tensors: y, ends if it is one, ...
        first_bias = 1 if ctx.expert_of_row is None else 2
        sums = _sum_rows(grad[:, ctx.features], ctx.expert_of_row, len(ctx.biases))
        wanted = destinations(ctx, first_bias, ctx.biases)
        if {*wanted} == {Destination.MAIN}:
            _add_to_all(ctx.biases, sums)
            return grad, None, None, *([None] * len(wanted))
        gradients = [
            _deliver_gradient(bias, gradient, where)
            for bias, gradient, where in zip(ctx.biases, sums, wanted, strict=True)
        ]
        return grad, None, None, *gradients


def _expert_of_rows(ends: Tensor, rows: int) -> Tensor:
    """Return the expert of each row: int64 [rows], on the device of `ends`."""
    # right: the row whose number is an end is the first one of the next expert
    row_numbers = torch.arange(rows, dtype=ends.dtype, device=ends.device)
    return torch.searchsorted(ends, row_numbers, right=True)


def _sum_rows(
    rows: Tensor,
    expert_of_row: Tensor | None,
    experts: int,
) -> Tensor:
    """Return the sum of each expert's rows [m, n], in FP32 or wider: [experts, n]."""
    wide_dtype = torch.promote_types(rows.dtype, torch.float32)
    if expert_of_row is None:
        return rows.sum(0, dtype=wide_dtype).unsqueeze(0)
    sums = rows.new_zeros(experts, rows.shape[1], dtype=wide_dtype)
    add_rows_(sums, expert_of_row, rows.to(wide_dtype))
    return sums


def _add_to_all(biases: Sequence[nn.Parameter], gradients: Tensor) -> None:
    """Add gradients [experts, n] to the main gradients of the biases, one of each expert.

    One operator adds all of them if the main gradients lie in one memory at equal distances, and
    all or none of these gradients are the first ones of a step.
    """
    totals: list[Tensor] = []
    first_ones: list[bool] = []
    for bias in biases:
        # gives a total its memory, if it has none yet
        total, is_first = begin_accumulation(bias)
        totals.append(total)
        first_ones.append(is_first)
    stacked = view_as_stacked(totals)
    if stacked is None or len({*first_ones}) > 1:
        for total, gradient, is_first in zip(totals, gradients, first_ones, strict=True):
            _accumulate(total, gradient, is_first)
    else:
        _accumulate(stacked, gradients, first_ones[0])


def _accumulate(total: Tensor, gradient: Tensor, is_first: bool) -> None:
    """Add the gradient [..., n] to the total [..., n and padding]. The first one of a step
    overwrites."""
    if is_first:
        total.zero_()
    total[..., : gradient.shape[-1]].add_(gradient)


def _deliver_gradient(
    bias: nn.Parameter,
    gradient: Tensor,
    where: Destination,
) -> Tensor | None:
    """Add the gradient [n] to the bias's main gradient and return None; or return it for autograd,
    with the padding of the bias, if `where` says so."""
    if where is Destination.NOWHERE:
        return None
    if where is Destination.MAIN:
        begin_cleared(bias)[: len(gradient)].add_(gradient)
        return None
    padded = torch.zeros_like(bias)
    padded[: len(gradient)].add_(gradient)
    return padded
