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
from parallel.leaves import PLAIN, Leaves, row_by_row

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

    The loss is the same on every tp rank. The other parameters are those of
    `cross_entropy_and_log_sum`.
    """
    losses, _ = cross_entropy_and_log_sum(
        logits,
        targets,
        vocabulary,
        tp,
        sensitive,
        consume,
        leaves,
    )
    return losses


def cross_entropy_and_log_sum(
    logits: Tensor,
    targets: Tensor,
    vocabulary: Part,
    tp: Axis,
    sensitive: torch.dtype = torch.float32,
    consume: bool = False,
    leaves: Leaves = PLAIN,
) -> tuple[Tensor, Tensor]:
    """Return the loss of each token, and the log of the sum of the exponentials of its logits, of
    which a z-loss is the square. Both are in the `sensitive` dtype, with the shape of `targets`.

    They are the same on every tp rank. Either may be differentiated, or both.
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

    def losses(logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits, targets, part, tp, sensitive, leaves=leaves)

    return losses


class CrossEntropy(torch.autograd.Function):
    """The autograd function of `cross_entropy_and_log_sum`.

    logits [..., local vocabulary], targets int64 [...] -> losses and logs of sums [...], in the
    sensitive dtype. The gradient of the logits is softmax minus one at the target for the loss, and
    softmax for the log of the sum.
    """

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
    ) -> tuple[Tensor, Tensor]:
        # None for the gradient of a result that is not used
        ctx.set_materialize_grads(False)
        # a matrix: one row for each token
        rows = logits.reshape(-1, logits.shape[-1])
        flat_targets = targets.reshape(-1)
        unpadded = rows[:, : vocabulary.local[0]]
        largest, local_sums = _largest_and_sums(
            unpadded,
            flat_targets,
            vocabulary.start,
            tp,
            sensitive,
            leaves,
        )
        # one message for both
        sum_of_exponentials, shifted_target = tp.sum_(local_sums)
        # outside of the leaf: its compiled form is tried on random numbers, which may be negative
        shifted_log_sum = sum_of_exponentials.log()
        losses, log_sum = leaves(
            _losses,
            shifted_log_sum,
            shifted_target,
            largest,
            flat_targets,
            vocabulary.shape[0],
        )
        ctx.save_for_backward(rows, flat_targets, log_sum)
        ctx.first = vocabulary.start
        ctx.columns = unpadded.shape[1]
        ctx.shape = logits.shape
        ctx.consume = consume
        ctx.leaves = leaves
        return losses.view(targets.shape), log_sum.view(targets.shape)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any,
        grad: Tensor | None,
        log_sum_grad: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """Return the gradient of the logits, (softmax - [1 at the target]) * grad + softmax *
        log_sum_grad, rounded to their dtype.

        grad: of the losses. log_sum_grad: of the logs of sums. None: that result was not used.
        """
        rows, targets, log_sum = ctx.saved_tensors
        if grad is None:
            grad_column = torch.zeros_like(log_sum)[:, None]
        else:
            grad_column = _as_column(grad)
        arguments: tuple[Any, ...] = (targets, log_sum, grad_column, ctx.first, ctx.columns)
        leaf: Callable[..., Tensor] = _loss_gradient
        # softmax then has a factor of its own
        if log_sum_grad is not None:
            softmax_column = grad_column + _as_column(log_sum_grad)
            arguments = (*arguments, softmax_column)
            leaf = _two_part_gradient
        if ctx.consume:
            result = rows.detach()
            write_blocks = partial(_write_gradient, result)
            ctx.leaves(leaf, result, *arguments, otherwise=write_blocks)
            increment_version(result)  # which compiled code does not
        else:
            result = torch.empty_like(rows)
            _write_gradient(result, rows, *arguments)
        return result.view(ctx.shape), None, None, None, None, None, None


def _largest_and_sums(
    logits: Tensor,
    targets: Tensor,
    first: int,
    tp: Axis,
    sensitive: torch.dtype,
    leaves: Leaves,
) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each row over all ranks, [rows], and two numbers of each row,
    [2, rows], which the ranks are to sum:

        0   the sum over this rank's columns of exp(logit - largest)
        1   the target's logit less the largest, 0 if another rank has the target

    One all-reduce MAX over tp. The compiled form reads the logits once: exponentials are first
    taken relative to this rank's own largest logit, then scaled. Operator by operator the logits
    are read twice.
    logits: [rows, columns] of this rank without padding. first: the id of column 0.
    """
    columns = logits.shape[1]
    if columns == 0:  # this rank has padding only, and still takes part in the collectives
        largest = tp.max_(_lowest(logits, sensitive))
        return largest, torch.zeros(2, len(logits), dtype=sensitive, device=logits.device)
    in_one_read = leaves(_loss_sums, logits, targets, first, sensitive, otherwise=_no_result)
    if in_one_read is None:
        largest = tp.max_(logits.amax(-1).to(sensitive))
        return largest, _sums_by_blocks(logits, targets, first, largest)
    own_largest, own_sum, target_logit = in_one_read
    largest = tp.max_(own_largest.clone())
    sums = leaves(
        _scaled_loss_sums,
        own_largest,
        own_sum,
        target_logit,
        largest,
        targets,
        first,
        columns,
    )
    return largest, sums


@row_by_row
def _loss_sums(
    logits: Tensor,
    targets: Tensor,
    first: int,
    sensitive: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return, of each row of this rank's logits, the largest one, the sum of exp(logit - largest),
    and the target's logit, 0 if another rank has it: [rows] each, of dtype `sensitive`.

    torch's compiler for GPUs computes the first two in one read of the logits: the sum is scaled
    whenever a larger logit is met. It knows this form of them by its pattern.
    """
    wide = logits.to(sensitive)
    largest = wide.amax(-1, keepdim=True)
    sum_of_exponentials = (wide - largest).exp().sum(-1, keepdim=True)
    target_columns, is_local = _local_columns(targets, first, logits.shape[1])
    at_target = logits.gather(1, target_columns.unsqueeze(1)).squeeze(1).to(sensitive)
    target_logit = torch.where(is_local, at_target, 0)
    return largest.squeeze(1), sum_of_exponentials.squeeze(1), target_logit


def _no_result(*_: Any) -> None:
    """Return None in place of `_loss_sums` where that is not compiled: it would read the logits
    twice, and `_sums_by_blocks` then needs less memory."""


def _scaled_loss_sums(
    own_largest: Tensor,
    own_sum: Tensor,
    target_logit: Tensor,
    largest: Tensor,
    targets: Tensor,
    first: int,
    columns: int,
) -> Tensor:
    """Return the numbers [2, rows] of `_largest_and_sums` from the results of `_loss_sums`.

    own_largest, own_sum, target_logit: the results of `_loss_sums`.
    largest: the largest logit of each row over all ranks.
    """
    scale = (own_largest - largest).exp()
    # where this rank has minus infinities only, the sum of their exponentials is NaN
    scaled_sum = torch.where(scale == 0, 0, own_sum * scale)
    _, is_local = _local_columns(targets, first, columns)
    shifted_target = torch.where(is_local, target_logit - largest, 0)
    return torch.stack((scaled_sum, shifted_target))


def _sums_by_blocks(
    logits: Tensor,
    targets: Tensor,
    first: int,
    largest: Tensor,
) -> Tensor:
    """Return the numbers [2, rows] of `_largest_and_sums`, computed a block of rows at a time.

    largest: the largest logit of each row over all ranks.
    """
    target_columns, is_local = _local_columns(targets, first, logits.shape[1])
    sums = torch.zeros(2, len(logits), dtype=largest.dtype, device=logits.device)
    for block in _blocks(logits):
        # a copy: the logits are not modified
        wide = logits[block].to(largest.dtype, copy=True).sub_(largest[block, None])
        at_target = wide.gather(1, target_columns[block, None]).squeeze(1)
        sums[1, block] = torch.where(is_local[block], at_target, 0)
        sums[0, block] = wide.exp_().sum(-1)
        del wide  # before the next block is made
    return sums


def _losses(
    shifted_log_sum: Tensor,
    shifted_target: Tensor,
    largest: Tensor,
    targets: Tensor,
    vocabulary_size: int,
) -> tuple[Tensor, Tensor]:
    """Return the loss of each row, NaN if its target is outside the vocabulary, and the logarithm
    of the sum of the exponentials of its logits, from which softmax follows: [rows] each.

    shifted_log_sum, shifted_target: that logarithm and the target's logit, both less `largest`.
    """
    outside = (targets < 0) | (targets >= vocabulary_size)
    losses = shifted_log_sum - shifted_target.masked_fill(outside, math.nan)
    return losses, shifted_log_sum + largest


@row_by_row
def _loss_gradient(
    rows: Tensor,
    targets: Tensor,
    log_sum: Tensor,
    grad_column: Tensor,
    first: int,
    columns: int,
) -> Tensor:
    """Overwrite logits [rows, columns and padding] with their gradient, 0 in the padding, and
    return them.

    log_sum: [rows], the logarithm of the sum of the exponentials on all ranks.
    grad_column: [rows, 1], the gradient of each loss. A target outside the vocabulary leaves a
        finite gradient: its loss alone is NaN.
    """
    column = torch.arange(rows.shape[1], device=rows.device)
    softmax = (rows.to(log_sum.dtype) - log_sum[:, None]).exp()
    at_target = column + first == targets[:, None]
    gradient = (softmax - at_target.to(softmax.dtype)) * grad_column
    return rows.copy_(torch.where(column < columns, gradient, 0))


@row_by_row
def _two_part_gradient(
    rows: Tensor,
    targets: Tensor,
    log_sum: Tensor,
    grad_column: Tensor,
    first: int,
    columns: int,
    softmax_column: Tensor,
) -> Tensor:
    """Overwrite logits with their gradient, as `_loss_gradient` does, where softmax and the target
    have factors of their own.

    softmax_column: [rows, 1], the sum of the gradients of the loss and of `log_sum`.
    """
    column = torch.arange(rows.shape[1], device=rows.device)
    softmax = (rows.to(log_sum.dtype) - log_sum[:, None]).exp()
    at_target = column + first == targets[:, None]
    gradient = softmax * softmax_column - at_target.to(softmax.dtype) * grad_column
    return rows.copy_(torch.where(column < columns, gradient, 0))


def _as_column(grad: Tensor) -> Tensor:
    """Return the gradients of all tokens as a column, [rows, 1]."""
    return grad.flatten().contiguous()[:, None]


def _write_gradient(
    result: Tensor,
    rows: Tensor,
    targets: Tensor,
    log_sum: Tensor,
    grad: Tensor,
    first: int,
    columns: int,
    softmax_grad: Tensor | None = None,
) -> None:
    """Write the gradient of the logits `rows` into `result`, which may be the same tensor, a block
    of rows at a time.

    grad: [rows, 1], the gradient of each loss.
    softmax_grad: as `softmax_column` of `_two_part_gradient`; None: it is `grad`.
    """
    result[:, columns:] = 0
    if columns == 0:
        return
    target_columns, is_local = _local_columns(targets, first, columns)
    for block in _blocks(rows):
        wide = rows[block, :columns].to(log_sum.dtype, copy=True)
        # softmax in place, which then becomes the gradient
        gradient = wide.sub_(log_sum[block, None]).exp_()
        # added at the column of the target: -1, or 0 where another rank has the target
        at_target = -is_local[block, None].to(gradient.dtype)
        if softmax_grad is not None:
            gradient.mul_(softmax_grad[block])
            at_target = at_target * grad[block]
        gradient.scatter_add_(1, target_columns[block, None], at_target)
        if softmax_grad is None:
            gradient.mul_(grad[block])
        result[block, :columns] = gradient
        del wide, gradient  # before the next block is made


def _local_columns(
    targets: Tensor,
    first: int,
    columns: int,
) -> tuple[Tensor, Tensor]:
    """Return each target's column on this rank, and a bool: True if this rank holds the target.

    The column is 0 if another rank holds it. first: the id of column 0. columns: of this rank.
    """
    target_columns = targets - first
    is_local = (target_columns >= 0) & (target_columns < columns)
    return target_columns.masked_fill(~is_local, 0), is_local


def _lowest(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the lowest number of `dtype` for each row, which no maximum chooses."""
    return torch.full((len(rows),), torch.finfo(dtype).min, dtype=dtype, device=rows.device)


def _blocks(rows: Tensor) -> list[slice]:
    """Return the slices of rows [rows, columns] that are computed at a time: of so many rows that
    a slice has about as many elements as a block."""
    block_elements = _BLOCK if rows.device.type == "cpu" else _GPU_BLOCK
    step = max(1, block_elements // max(1, rows.shape[1]))
    starts = range(0, len(rows), step)
    if type(rows) is not Tensor:
        # A fake tensor has no values, and two blocks take as much memory as all of them.
        starts = starts[:2]
    return [slice(first, first + step) for first in starts]
