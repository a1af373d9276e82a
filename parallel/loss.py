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

# elements of FP32 logits at a time on a CPU: they stay in cache and reuse memory
_BLOCK = 1 << 17
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
    if isinstance(logits, CutTensor):
        is_cut_by_vocabulary = logits.cut.dim == logits.dim() - 1 and logits.cut.outer == 1
        if not is_cut_by_vocabulary:
            raise UserError.of(
                "parallel.logits_cut_elsewhere", shape=list(logits.shape), dim=logits.cut.dim
            )
    return CrossEntropy.apply(
        unchecked(logits),
        targets,
        vocabulary,
        tp,
        sensitive,
        consume,
        leaves,
    )


def vocab_parallel_loss(head: ColumnParallelLinear) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss function of a head whose outputs are logits: (its output, targets) -> the
    loss of each target.

    A target outside the vocabulary, such as the -100 that nn.functional.cross_entropy leaves out,
    has the loss NaN: take the mean of the others, `losses[targets != -100].mean()`.
    """
    if not isinstance(head, ColumnParallelLinear):
        raise UserError.of("parallel.head_not_parallel", kind=type(head).__name__)
    part = layout_of(head.weight).parts[0]
    context = head.context
    tp = context.tp
    sensitive = context.plan.sensitive
    leaves = context.leaves
    return lambda logits, targets: cross_entropy(
        logits,
        targets,
        part,
        tp,
        sensitive,
        leaves=leaves,
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
        # a matrix: one row for each token
        rows = logits.reshape(-1, logits.shape[-1])
        flat_targets = targets.reshape(-1)
        target_columns, is_local = _local_columns(flat_targets, vocabulary)
        unpadded = rows[:, : vocabulary.local[0]]
        if unpadded.shape[1]:
            # The largest logit is subtracted before the exponentials, which could overflow.
            largest = tp.max_(unpadded.amax(-1).to(sensitive))
            sums = leaves(
                _loss_sums,
                unpadded,
                target_columns,
                is_local,
                largest,
                otherwise=_loss_sums_by_blocks,
            )
        else:  # this rank has padding only, and still takes part in the collectives
            largest = tp.max_(_lowest(rows, sensitive))
            sums = torch.zeros(2, len(rows), dtype=sensitive, device=rows.device)
        outside = (flat_targets < 0) | (flat_targets >= vocabulary.shape[0])
        sums[1].masked_fill_(outside, math.nan)
        # one message for both
        exponentials, target = tp.sum_(sums)
        shifted_log_sum = exponentials.log()
        # the logarithm of the sum of exp(logits), from which softmax follows
        log_sum = shifted_log_sum + largest
        ctx.save_for_backward(rows, target_columns, is_local, log_sum)
        ctx.columns = unpadded.shape[1]
        ctx.shape = logits.shape
        ctx.consume = consume
        ctx.leaves = leaves
        return (shifted_log_sum - target).view(targets.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return (softmax - [1 at the target]) * grad, rounded to the dtype of the logits."""
        rows, target_columns, is_local, log_sum = ctx.saved_tensors
        grad_column = grad.flatten().contiguous()[:, None]
        arguments = (target_columns, is_local, log_sum, grad_column, ctx.columns)
        if ctx.consume:
            result = rows.detach()
            write_blocks = partial(_write_gradient, result)
            ctx.leaves(_loss_gradient, result, *arguments, otherwise=write_blocks)
            increment_version(result)  # which compiled code does not
        else:
            result = torch.empty_like(rows)
            _write_gradient(result, rows, *arguments)
        return result.view(ctx.shape), None, None, None, None, None, None


def _loss_sums(
    logits: Tensor,
    target_columns: Tensor,
    is_local: Tensor,
    largest: Tensor,
) -> Tensor:
    """Return the sum of the exponentials of each row, and its target's logit: [2, rows].

    logits: [rows, columns] without padding.
    target_columns: int64 [rows], the column of the target.
    is_local: bool [rows], True if this rank has that column.
    largest: [rows], the largest logit of each row on any rank, which is subtracted from all.
    """
    wide = logits.to(largest.dtype) - largest[:, None]
    target = torch.where(is_local, wide.gather(1, target_columns[:, None]).squeeze(1), 0)
    return torch.stack((wide.exp().sum(-1), target))


def _loss_sums_by_blocks(
    logits: Tensor,
    target_columns: Tensor,
    is_local: Tensor,
    largest: Tensor,
) -> Tensor:
    """Return what `_loss_sums` does, computed a block of rows at a time."""
    sums = torch.zeros(2, len(logits), dtype=largest.dtype, device=logits.device)
    for block in _blocks(logits):
        # a copy: the logits are not modified
        wide = logits[block].to(largest.dtype, copy=True).sub_(largest[block, None])
        at_target = wide.gather(1, target_columns[block, None]).squeeze(1)
        sums[1, block] = torch.where(is_local[block], at_target, 0)
        sums[0, block] = wide.exp_().sum(-1)
        del wide  # before the next block is made
    return sums


def _loss_gradient(
    rows: Tensor,
    target_columns: Tensor,
    is_local: Tensor,
    log_sum: Tensor,
    grad_column: Tensor,
    columns: int,
) -> Tensor:
    """Overwrite logits, which are `columns` and padding, with their gradient.

    log_sum: [rows], the logarithm of the sum of the exponentials on all ranks.
    grad_column: [rows, 1], the gradient of each loss. A target outside the vocabulary leaves a
        finite gradient: its loss alone is NaN.
    """
    column = torch.arange(rows.shape[1], device=rows.device)
    softmax = (rows.to(log_sum.dtype) - log_sum[:, None]).exp()
    at_target = (column == target_columns[:, None]) & is_local[:, None]
    gradient = (softmax - at_target.to(softmax.dtype)) * grad_column
    return rows.copy_(torch.where(column < columns, gradient, 0))


def _write_gradient(
    result: Tensor,
    rows: Tensor,
    target_columns: Tensor,
    is_local: Tensor,
    log_sum: Tensor,
    grad: Tensor,
    columns: int,
) -> None:
    """Write the gradient of logits into `result`, a block of rows at a time."""
    result[:, columns:] = 0
    if columns == 0:
        return
    for block in _blocks(rows):
        wide = rows[block, :columns].to(log_sum.dtype, copy=True)
        softmax = wide.sub_(log_sum[block, None]).exp_()
        softmax.scatter_add_(
            1, target_columns[block, None], -is_local[block, None].to(softmax.dtype)
        )
        result[block, :columns] = softmax.mul_(grad[block])
        del wide, softmax  # before the next block is made


def _local_columns(targets: Tensor, vocabulary: Part) -> tuple[Tensor, Tensor]:
    """Return each target's column on this rank, and a bool: True if this rank holds the target.

    The column is 0 if another rank holds it.
    """
    columns = targets - vocabulary.start
    is_local = (columns >= 0) & (columns < vocabulary.local[0])
    return columns.masked_fill(~is_local, 0), is_local


def _lowest(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the lowest number of `dtype` for each row, which no maximum chooses."""
    return torch.full((len(rows),), torch.finfo(dtype).min, dtype=dtype, device=rows.device)


def _blocks(rows: Tensor) -> list[slice]:
    """Return the blocks of rows that are computed at a time."""
    block = _BLOCK if rows.device.type == "cpu" else _GPU_BLOCK
    step = max(1, block // max(1, rows.shape[1]))
    starts = range(0, len(rows), step)
    if type(rows) is not Tensor:
        # A fake tensor has no values, and two blocks take as much memory as all of them.
        starts = starts[:2]
    return [slice(first, first + step) for first in starts]
