"""Cross entropy in FP32 over a vocabulary that is sharded over tp, without an all-gather of the
logits.

Each rank holds the logits of its own vocabulary rows. The loss needs the largest logit (an
all-reduce MAX over tp), the sum of the exponentials and the target's logit (one all-reduce SUM for
both), so the communication is three numbers per token. Padding rows of the vocabulary are excluded,
as if their logits were minus infinity. A target outside the vocabulary has no logit: its loss is
NaN, so that no step is applied with it.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from megaprec.comm.axis import Axis
from megaprec.comm.layout import Part, layout_of
from megaprec.errors import UserError
from parallel.cut_features import CutTensor, unchecked
from parallel.layers import ColumnParallelLinear
from parallel.leaves import PLAIN, Leaves

_BLOCK = 1 << 17  # elements of FP32 logits at a time on a CPU: they stay in cache and reuse memory
# and on a GPU: enough to fill it, 67 MB, where those of 8192 tokens and 128k words take 4.2 GB
_GPU_BLOCK = 1 << 24


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    vocabulary: Part,
    tp: Axis,
    sensitive: torch.dtype = torch.float32,
    consume: bool = False,
    leaves: Leaves = PLAIN,
) -> Tensor:
    """Return the loss of each token, in the `sensitive` dtype, with the shape of `targets`.

    The loss is the same on every tp rank.
    logits: [..., padded own rows].
    targets: int64 [...], ids of the whole vocabulary.
    vocabulary: this rank's slice of the vocabulary.
    consume: the backward pass writes the gradient over the logits. No other function may need them
        then; if autograd has kept them for one, its backward pass raises RuntimeError.
    leaves: the form in which the passes over the logits are computed.
    """
    if isinstance(logits, CutTensor) and (
        logits.cut.dim != logits.dim() - 1 or logits.cut.outer != 1
    ):
        raise UserError(
            f"logits {list(logits.shape)}: it is dimension {logits.cut.dim} of which each "
            "rank has a slice, but the "
            "vocabulary must be the last one"
        )
    return CrossEntropy.apply(
        unchecked(logits), targets, vocabulary, tp, sensitive, consume, leaves
    )


def vocab_parallel_loss(head: ColumnParallelLinear) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss function of a head whose outputs are logits: (its output, targets) -> the
    loss of each target.

    A target outside the vocabulary, such as the -100 that nn.functional.cross_entropy leaves out,
    has the loss NaN: take the mean of the others, `losses[targets != -100].mean()`.
    """
    if not isinstance(head, ColumnParallelLinear):
        raise UserError(
            "head: must be a ColumnParallelLinear, as parallelize makes it of a layer of "
            "style 'column', not a "
            f"{type(head).__name__}; for a head that each rank holds whole use "
            "nn.functional.cross_entropy"
        )
    part = layout_of(head.weight).parts[0]
    context = head.context
    tp = context.tp
    sensitive = context.plan.sensitive
    leaves = context.leaves
    return lambda logits, targets: cross_entropy(
        logits, targets, part, tp, sensitive, leaves=leaves
    )


class CrossEntropy(torch.autograd.Function):
    """The autograd function of `cross_entropy`; the gradient of the logits is softmax minus one at
    the target."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        vocabulary: Part,
        tp: Axis,
        sensitive: torch.dtype,
        consume: bool = False,
        leaves: Leaves = PLAIN,
    ) -> Tensor:
        rows = logits.reshape(-1, logits.shape[-1])
        local, here = _local(targets.reshape(-1), vocabulary)
        own = rows[:, : vocabulary.local[0]]
        if own.shape[1]:
            largest = tp.max_(own.amax(-1).to(sensitive))
        else:
            largest = tp.max_(_lowest(rows, sensitive))
        if own.shape[1]:
            sums = leaves(_loss_sums, own, local, here, largest, otherwise=_loss_sums_by_blocks)
        else:
            sums = torch.zeros(2, len(rows), dtype=sensitive, device=rows.device)
        wanted = targets.reshape(-1)
        sums[1].masked_fill_((wanted < 0) | (wanted >= vocabulary.shape[0]), math.nan)
        exponentials, target = tp.sum_(sums)
        log_sum = exponentials.log()
        ctx.save_for_backward(rows, local, here, log_sum + largest)
        ctx.columns = own.shape[1]
        ctx.shape = logits.shape
        ctx.consume = consume
        ctx.leaves = leaves
        return (log_sum - target).view(targets.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return (softmax - one at the target) * grad, rounded to the dtype of the logits."""
        rows, local, here, log_sum = ctx.saved_tensors
        given = (local, here, log_sum, grad.flatten().contiguous()[:, None], ctx.columns)
        if not ctx.consume:
            result = torch.empty_like(rows)
            _write_gradient(result, rows, *given)
        else:
            result = rows.detach()
            ctx.leaves(_loss_gradient, result, *given, otherwise=partial(_write_gradient, result))
            increment_version(result)  # which compiled code does not
        return result.view(ctx.shape), None, None, None, None, None, None


def _loss_sums(own: Tensor, local: Tensor, here: Tensor, largest: Tensor) -> Tensor:
    """Return the sum of the exponentials of each row of logits, and its target's logit: [2,
    rows]."""
    wide = own.to(largest.dtype) - largest[:, None]
    target = torch.where(here, wide.gather(1, local[:, None]).squeeze(1), 0)
    return torch.stack((wide.exp().sum(-1), target))


def _loss_sums_by_blocks(own: Tensor, local: Tensor, here: Tensor, largest: Tensor) -> Tensor:
    """Return `_loss_sums`, computed a block of rows at a time."""
    sums = torch.zeros(2, len(own), dtype=largest.dtype, device=own.device)
    for some in _blocks(own):
        # a copy: the logits are not modified
        wide = own[some].to(largest.dtype, copy=True).sub_(largest[some, None])
        sums[1, some] = torch.where(here[some], wide.gather(1, local[some, None]).squeeze(1), 0)
        sums[0, some] = wide.exp_().sum(-1)
        del wide  # before the next block is made
    return sums


def _loss_gradient(
    rows: Tensor, local: Tensor, here: Tensor, log_sum: Tensor, grad: Tensor, columns: int
) -> Tensor:
    """Overwrite logits, which are `columns` and padding, with their gradient."""
    column = torch.arange(rows.shape[1], device=rows.device)
    softmax = (rows.to(log_sum.dtype) - log_sum[:, None]).exp()
    at_target = (column == local[:, None]) & here[:, None]
    return rows.copy_(
        torch.where(column < columns, (softmax - at_target.to(softmax.dtype)) * grad, 0)
    )


def _write_gradient(
    result: Tensor,
    rows: Tensor,
    local: Tensor,
    here: Tensor,
    log_sum: Tensor,
    grad: Tensor,
    columns: int,
) -> None:
    """Write the gradient of logits into `result`, a block of rows at a time."""
    result[:, columns:] = 0
    for some in _blocks(rows) if columns else ():
        softmax = rows[some, :columns].to(log_sum.dtype, copy=True).sub_(log_sum[some, None]).exp_()
        softmax.scatter_add_(1, local[some, None], -here[some, None].to(softmax.dtype))
        result[some, :columns] = softmax.mul_(grad[some])
        del softmax


def _local(targets: Tensor, vocabulary: Part) -> tuple[Tensor, Tensor]:
    """Return each target's column on this rank, 0 if another rank holds it, and True where this
    rank holds it."""
    local = targets - vocabulary.start
    here = (local >= 0) & (local < vocabulary.local[0])
    return local.masked_fill(~here, 0), here


def _lowest(rows: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.full((len(rows),), torch.finfo(dtype).min, dtype=dtype, device=rows.device)


def _blocks(rows: Tensor) -> list[slice]:
    block = _BLOCK if rows.device.type == "cpu" else _GPU_BLOCK
    step = max(1, block // max(1, rows.shape[1]))
    starts = range(0, len(rows), step)
    if (
        type(rows) is not Tensor
    ):  # a fake tensor has no values: two blocks take as much memory as all of them
        starts = starts[:2]
    return [slice(first, first + step) for first in starts]
