"""Differentiable collectives over the tp axis.

Each collective is a linear map on the tensors that all ranks hold together, where a tensor that is
replicated on every rank counts once. Its backward pass is the transpose of that map:

                    forward             backward           use
    copy            (nothing)           all-reduce         replicated input of a column-parallel
                                                           layer
    reduce          all-reduce          (nothing)          output of a row-parallel layer
    gather          all-gather, dim 0   reduce-scatter     sequence shards to a column-parallel
                                                           layer
    reduce_scatter  reduce-scatter      all-gather, dim 0  a row-parallel layer to sequence shards
    split           own shard, dim d    all-gather         replicated to sharded
    join            all-gather, dim d   own shard          sharded to replicated

Use `gather` if each rank goes on to compute something different with the result: the gradients are
then partial gradients, which must be summed. Use `join` if every rank computes the same with the
result: every rank then already holds the whole gradient.
"""

from typing import Any

import torch
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.errors import UserError
from parallel.cut_features import CutTensor, unchecked

# `copy` and `split` take whole tensors. A slice that a user's plain module may get from a parallel
# layer is marked (`CutTensor`): they leave the mark, so that an operation inside refuses it by
# name. The decoder's own layers mark nothing. The others take what each rank has for itself, and so
# a slice too.


def copy(x: Tensor, axis: Axis) -> Tensor:
    """Return x; the backward pass all-reduces the gradient over the axis."""
    return _Copy.apply(x, axis) if axis.size > 1 else x


def reduce(x: Tensor, axis: Axis) -> Tensor:
    """Return x all-reduced (summed) over the axis; the backward pass passes the gradient on."""
    return _Reduce.apply(unchecked(x), axis) if axis.size > 1 else x


def gather(x: Tensor, axis: Axis) -> Tensor:
    """All-gather [n, ...] along dim 0 to [size * n, ...]; the backward pass is a reduce-scatter."""
    return _Gather.apply(unchecked(x), axis) if axis.size > 1 else x


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """Reduce-scatter [size * n, ...] along dim 0 to [n, ...]; the backward pass is an
    all-gather."""
    return _ReduceScatter.apply(unchecked(x), axis) if axis.size > 1 else x


def split(
    x: Tensor,
    axis: Axis,
    dim: int,
) -> Tensor:
    """Return this rank's shard of x: `dim` shrinks from size * n to n; the backward pass is an
    all-gather over the axis."""
    return _Split.apply(x, axis, dim) if axis.size > 1 else x


def join(
    x: Tensor,
    axis: Axis,
    dim: int,
) -> Tensor:
    """All-gather x along `dim`, from n to size * n; the backward pass keeps this rank's shard of
    the gradient."""
    # joining along another dimension would mix up the slices
    if isinstance(x, CutTensor) and (x.cut.dim != dim % x.dim() or x.cut.outer != 1):
        raise UserError.of(
            "parallel.join_dimension",
            dim=dim,
            shape=list(x.shape),
            cut_dim=x.cut.dim,
            outer=x.cut.outer,
        )
    return _Join.apply(unchecked(x), axis, dim) if axis.size > 1 else x


def _gather_dim(
    x: Tensor,
    axis: Axis,
    dim: int,
) -> Tensor:
    """All-gather x along `dim`."""
    # ranks' shards follow each other along dim 0 only
    gathered = axis.gather(x.movedim(dim, 0).contiguous())
    return gathered.movedim(0, dim)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        axis: Axis,
    ) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # a copy: autograd may use the same gradient elsewhere
        return ctx.axis.sum_(grad.clone(memory_format=torch.contiguous_format)), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        axis: Axis,
    ) -> Tensor:
        # a copy: the sum is written in place
        return axis.sum_(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        axis: Axis,
    ) -> Tensor:
        ctx.axis = axis
        return axis.gather(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # each rank computed something else with the gathered tensor: their gradients are addends
        return ctx.axis.scatter_sum(grad), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        axis: Axis,
    ) -> Tensor:
        ctx.axis = axis
        return axis.scatter_sum(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.gather(grad), None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        axis: Axis,
        dim: int,
    ) -> Tensor:
        ctx.axis = axis
        ctx.dim = dim
        return axis.chunk(x, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gather_dim(grad, ctx.axis, ctx.dim), None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        axis: Axis,
        dim: int,
    ) -> Tensor:
        ctx.axis = axis
        ctx.dim = dim
        return _gather_dim(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # every rank has the whole gradient, as all computed the same with the joined tensor
        return ctx.axis.chunk(grad, ctx.dim).contiguous(), None, None
