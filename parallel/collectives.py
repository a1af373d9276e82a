"""Collectives over tp that know their own backward pass.

Each is a linear map between what all ranks hold together, where a tensor that every rank holds alike counts
once, and its backward pass is the transpose:

    forward                         backward
    copy        (nothing)           sum            replicated input of a column-parallel layer
    reduce      sum                 (nothing)      output of a row-parallel layer
    gather      concatenate dim 0   sum, own part  sequence parallelism, into a column-parallel layer
    scatter     sum, own part       concatenate    sequence parallelism, out of a row-parallel layer
    split       own part, dim d     concatenate    replicated to cut
    join        concatenate, dim d  own part       cut to replicated

`gather` is for what each rank goes on to use differently, so that its gradients are shares to be summed; `join`
is for what every rank goes on to use alike, so that every rank already holds the whole gradient.
"""

from typing import Any

import torch
from torch import Tensor

from megaprec.comm.axis import Axis


def copy(x: Tensor, axis: Axis) -> Tensor:
    """Forward nothing, backward a sum."""
    return _Copy.apply(x, axis) if axis.size > 1 else x


def reduce(x: Tensor, axis: Axis) -> Tensor:
    """Forward a sum, backward nothing."""
    return _Reduce.apply(x, axis) if axis.size > 1 else x


def gather(x: Tensor, axis: Axis) -> Tensor:
    """[n, ...] to [size * n, ...]."""
    return _Gather.apply(x, axis) if axis.size > 1 else x


def scatter(x: Tensor, axis: Axis) -> Tensor:
    """[size * n, ...] to [n, ...]."""
    return _Scatter.apply(x, axis) if axis.size > 1 else x


def split(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """dim of size * n to n."""
    return _Split.apply(x, axis, dim) if axis.size > 1 else x


def join(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """dim of n to size * n."""
    return _Join.apply(x, axis, dim) if axis.size > 1 else x


def _gather_dim(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return axis.gather(x.movedim(dim, 0).contiguous()).movedim(0, dim)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.sum_(grad.clone(memory_format=torch.contiguous_format)), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return axis.sum_(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return axis.gather(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.scatter_sum(grad), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return axis.scatter_sum(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.gather(grad), None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis.chunk(x, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gather_dim(grad, ctx.axis, ctx.dim), None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _gather_dim(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.axis.chunk(grad, ctx.dim).contiguous(), None, None
