"""Cross entropy in FP32 over a vocabulary that is sharded over tp, without an all-gather of the logits.

Each rank holds the logits of its own vocabulary rows. The loss needs the largest logit (an all-reduce MAX over tp), the
sum of the exponentials and the target's logit (one all-reduce SUM for both), so the communication is three numbers per
token. Padding rows of the vocabulary are excluded, as if their logits were minus infinity. A target outside the
vocabulary has no logit: its loss is NaN, so that no step is applied with it.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.comm.layout import Part, layout_of
from parallel.layers import ColumnParallelLinear

_BLOCK = 1 << 17  # elements of FP32 logits at a time on a CPU: they stay in cache and reuse memory


def cross_entropy(
    logits: Tensor, targets: Tensor, vocabulary: Part, tp: Axis, sensitive: torch.dtype = torch.float32
) -> Tensor:
    """Return the loss of each token, in the `sensitive` dtype, with the shape of `targets`.

    The loss is the same on every tp rank.
    logits: [..., padded own rows].
    targets: int64 [...], ids of the whole vocabulary.
    vocabulary: this rank's slice of the vocabulary.
    """
    return CrossEntropy.apply(logits, targets, vocabulary, tp, sensitive)


def vocab_parallel_loss(head: ColumnParallelLinear) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss function of a head whose outputs are logits: (its output, targets) -> the loss of each target."""
    part, context = layout_of(head.weight).parts[0], head.context
    return lambda logits, targets: cross_entropy(logits, targets, part, context.tp, context.plan.sensitive)


class CrossEntropy(torch.autograd.Function):
    """The autograd function of `cross_entropy`; the gradient of the logits is softmax minus one at the target."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, vocabulary: Part, tp: Axis, sensitive: torch.dtype
    ) -> Tensor:
        rows = logits.reshape(-1, logits.shape[-1])
        local, here = _local(targets.reshape(-1), vocabulary)
        own = rows[:, : vocabulary.local[0]]
        largest = tp.max_(own.amax(-1).to(sensitive)) if own.shape[1] else tp.max_(_lowest(rows, sensitive))
        sums = torch.zeros(2, len(rows), dtype=sensitive, device=rows.device)
        for some in _blocks(rows):
            wide = own[some].to(sensitive, copy=True).sub_(largest[some, None])  # a copy: the logits are not modified
            if own.shape[1]:
                sums[1, some] = torch.where(here[some], wide.gather(1, local[some, None]).squeeze(1), 0)
            sums[0, some] = wide.exp_().sum(-1)
        wanted = targets.reshape(-1)
        sums[1].masked_fill_((wanted < 0) | (wanted >= vocabulary.shape[0]), math.nan)
        exponentials, target = tp.sum_(sums)
        log_sum = exponentials.log()
        ctx.save_for_backward(rows, local, here, log_sum + largest)
        ctx.columns, ctx.shape = own.shape[1], logits.shape
        return (log_sum - target).view(targets.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        """Return (softmax - one at the target) * grad, rounded to the dtype of the logits."""
        rows, local, here, log_sum = ctx.saved_tensors
        grad = grad.reshape(-1, 1)
        result = torch.empty_like(rows)
        result[:, ctx.columns :] = 0
        for some in _blocks(rows) if ctx.columns else ():
            softmax = rows[some, : ctx.columns].to(log_sum.dtype, copy=True).sub_(log_sum[some, None]).exp_()
            softmax.scatter_add_(1, local[some, None], -here[some, None].to(softmax.dtype))
            result[some, : ctx.columns] = softmax.mul_(grad[some])
        return result.view(ctx.shape), None, None, None, None


def _local(targets: Tensor, vocabulary: Part) -> tuple[Tensor, Tensor]:
    """Return each target's column on this rank, 0 if another rank holds it, and True where this rank holds it."""
    local = targets - vocabulary.start
    here = (local >= 0) & (local < vocabulary.local[0])
    return local.masked_fill(~here, 0), here


def _lowest(rows: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.full((len(rows),), torch.finfo(dtype).min, dtype=dtype, device=rows.device)


def _blocks(rows: Tensor) -> list[slice]:
    step = max(1, _BLOCK // max(1, rows.shape[1])) if rows.device.type == "cpu" else max(1, len(rows))
    starts = range(0, len(rows), step)
    if type(rows) is not Tensor:  # a fake tensor has no values: two blocks take as much memory as all of them
        starts = starts[:2]
    return [slice(first, first + step) for first in starts]
