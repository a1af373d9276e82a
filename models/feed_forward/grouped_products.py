"""Products of rows with the weights of several experts, without a wait for the rows of each.

Rows are sorted by expert; `ends` says where the rows of each expert end, and stays on the device. A
grouped product reads it there, so the host queues the layers ahead of the device. A loop over
experts must know the numbers on the host, which then waits for the device once per layer.

    y[rows of e] = x[rows of e] @ weight[e].T         x [m, k], weight [e, n, k] -> y [m, n]
    grad_x[rows of e] = grad[rows of e] @ weight[e]
    grad_weight[e] = grad[rows of e].T @ x[rows of e]

torch's grouped product takes one tensor of all weights. Experts are separate parameters, but if one
of the optimizer's buckets holds them all (`Layout.together`), they lie there at equal distances,
and a strided view is that tensor. Otherwise they are copied together. The main gradients lie as the
weights do, and one operator adds to those of all experts (`grouped_sums.py`).
"""

from collections.abc import Sequence
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaprec.comm.main_grad import (
    Destination,
    begin_accumulation,
    destinations,
    note_weights_read,
    require_unchanged_weights,
)
from megaprec.torch_private import grouped_product, has_grouped_products, storage_address
from parallel.weight_grad_queue import WeightGradQueue

# torch's grouped product wants rows and columns that start at multiples of so many bytes.
_ALIGNMENT = 16


def groups_on(
    device: torch.device,
    dtype: torch.dtype,
    sizes: Sequence[int],
) -> bool:
    """Return True if grouped products are to be used: on a CUDA device whose torch has them, in
    bf16. Meta tensors stand for those of such a device.

    sizes: numbers of features. On a CPU a loop is as fast, and its numbers are those of an ordinary
        feed-forward.
    """
    if device.type not in ("cuda", "meta") or dtype != torch.bfloat16:
        return False
    aligned = all(size * dtype.itemsize % _ALIGNMENT == 0 for size in sizes)
    return aligned and has_grouped_products()


class GroupedLinear(torch.autograd.Function):
    """x [m, k] sorted by expert, ends int32 [experts], weights [n, k] of each expert -> [m, n].

    x and weights have the same dtype. The weight gradients are added to the main gradients, if the
    weights have any.
    deferred: the queue for them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        ends: Tensor,
        deferred: WeightGradQueue,
        *weights: nn.Parameter,
    ) -> Tensor:
        note_weights_read(ctx, *weights)
        ctx.save_for_backward(x, ends)
        ctx.weights = weights
        ctx.deferred = deferred
        return grouped_product(x, stack_weights(weights).transpose(1, 2), ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # Weights are not saved but read again, so they must not have changed since.
        require_unchanged_weights(ctx)
        saved_x, saved_ends = ctx.saved_tensors
        x = saved_x.detach()
        ends = saved_ends.detach()
        grad = grad.contiguous()
        weights = ctx.weights
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grouped_product(grad, stack_weights(weights), ends)
        # 2: the number of the first weight among the inputs that are tensors, after x and ends
        wanted = {*destinations(ctx, 2, weights)}
        if Destination.AUTOGRAD in wanted:
            return grad_x, None, None, *_weight_gradients(grad, x, ends).unbind()
        if Destination.MAIN in wanted:
            ctx.deferred.offer(partial(_add_weight_gradients, weights, grad, x, ends))
        return grad_x, None, None, *([None] * len(weights))


class _SumsWithoutStorage:
    """Stands for the module `grouped_sums` where tensors have no storage: its kernel takes no
    memory."""

    @staticmethod
    def add_products_(
        totals: Tensor, grad: Tensor, x: Tensor, ends: Tensor, first: bool
    ) -> None: ...


@cache
def sums_in_triton(device: torch.device) -> Any:
    """Return the module `grouped_sums` if its kernel works on a CUDA device, where it is tried
    once; None if it does not, or on another device. For meta tensors, which stand for those of a
    device where it works, return something with the same function."""
    if device.type == "meta":
        return _SumsWithoutStorage
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    try:
        # By name: it imports Triton, which is optional.
        grouped_sums = import_module("models.feed_forward.grouped_sums")
        return grouped_sums if grouped_sums.computes_the_sums(device) else None
    # Triton raises errors of many kinds, for instance if there is no C compiler.
    except Exception:
        return None


def stack_weights(weights: Sequence[Tensor]) -> Tensor:
    """Return [len(weights), n, k]: a view if the weights lie in one memory at equal distances, else
    a copy."""
    stacked = view_as_stacked(weights)
    if stacked is None:
        return torch.stack([weight.detach() for weight in weights])
    return stacked


def view_as_stacked(matrices: Sequence[Tensor]) -> Tensor | None:
    """Return a view [len(matrices), ...] of matrices or vectors of one shape that lie in one memory
    at equal distances; None if they do not."""
    first = matrices[0]
    storages = {storage_address(matrix) for matrix in matrices}
    if len(storages) > 1 or not all(matrix.is_contiguous() for matrix in matrices):
        return None
    offsets = [matrix.storage_offset() for matrix in matrices]
    # A single matrix has no distance to a next one; its own size serves as well as any.
    distances = {after - before for before, after in pairwise(offsets)} or {first.numel()}
    distance = min(distances)
    are_apart = distance >= first.numel()
    if len(distances) > 1 or not are_apart:
        return None
    size = (len(matrices), *first.shape)
    stride = (distance, *first.stride())
    return first.detach().as_strided(size, stride, offsets[0])


def _weight_gradients(
    grad: Tensor,
    x: Tensor,
    ends: Tensor,
) -> Tensor:
    """Return the weight gradients [experts, n, k]; 0 for an expert without rows.

    grad: [m, n], x: [m, k], both sorted by expert. ends: int32 [experts], the end of each expert's
    rows.
    """
    gradients = grouped_product(grad.t(), x, ends)
    starts = F.pad(ends, (1, 0))[:-1]
    has_no_rows = ends == starts
    # Where an expert has no rows, torch may leave what it finds in memory (issue 172439 of
    # pytorch/pytorch).
    return gradients.masked_fill_(has_no_rows[:, None, None], 0)


def _add_weight_gradients(
    weights: Sequence[nn.Parameter],
    grad: Tensor,
    x: Tensor,
    ends: Tensor,
) -> None:
    """Add the weight gradients of all experts to their main gradients: by one operator or kernel if
    these lie in one memory at equal distances.

    grad, x, ends: as in `_weight_gradients`.
    """
    totals: list[Tensor] = []
    first_ones: list[bool] = []
    for weight in weights:
        total, is_first = begin_accumulation(weight)
        totals.append(total)
        first_ones.append(is_first)
    stacked = view_as_stacked(totals)
    if stacked is None or len({*first_ones}) > 1:
        gradients = _weight_gradients(grad, x, ends)
        for total, gradient, is_first in zip(totals, gradients, first_ones, strict=True):
            _accumulate(total, gradient, is_first)
    elif stacked.dtype == torch.float32 and (sums := sums_in_triton(grad.device)):
        sums.add_products_(stacked, grad, x, ends, first_ones[0])
    else:
        _accumulate(stacked, _weight_gradients(grad, x, ends), first_ones[0])


def _accumulate(total: Tensor, gradient: Tensor, is_first: bool) -> None:
    """Add the gradient to the total. The first one of a step overwrites: main gradients are not
    cleared between steps."""
    if is_first:
        total.copy_(gradient)
    else:
        total.add_(gradient)
