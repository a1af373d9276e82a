"""The linear product y = x @ W.T as one differentiable function with overlapped collectives.

The weight gradient is added to `weight.main_grad`, the FP32 view of the gradient buffer, as soon as
it is computed; autograd never holds a weight gradient. The all-reduce of the input gradient runs
while the weight gradient is computed. An input that is sharded along the sequence is all-gathered
while the input gradient is computed. No other stage waits for the weight gradient, so a pipeline
schedule may defer it (`weight_grad_queue.py`).
"""

from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megaprec.comm.axis import Axis
from megaprec.comm.main_grad import (
    Destination,
    begin_accumulation,
    cleared_main_grad,
    destination,
    has_main_grad,
    note_weights_read,
    require_unchanged_weights,
)
from megaprec.comm.waiting import Pending
from megaprec.errors import UserError
from megaprec.precision.gemm import Gemm
from megaprec.precision.gemm_provider import Factor, GemmProvider
from megaprec.precision.row_sums import add_rows_
from megaprec.torch_private import reshaped_result
from parallel.weight_grad_queue import WeightGradQueue


class InputLayout(Enum):
    """The layout of a linear layer's input over tp."""

    OWN = "each rank its own features"
    COPIED = "all of it on every rank"
    SEQUENCE = "cut along the sequence, gathered for the product"


class Linear(torch.autograd.Function):
    """x [s, b, k] in the compute dtype, weight [n, k], bias [n] or None -> [s', b, n]; s' = tp * s
    for SEQUENCE.

    input_layout: of x over tp.
    deferred: the queue for the gradient of a weight that has a main gradient; bias gradients are
        never deferred.
    products: the matrix products of this layer; None: products in the dtype of x.
    The backward pass keeps what the products need of x. Under SEQUENCE it keeps its shard of x
    and all-gathers it again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        input_layout: InputLayout,
        tp: Axis,
        deferred: WeightGradQueue | None = None,
        products: GemmProvider | None = None,
    ) -> Tensor:
        if not x.is_meta and torch.is_autocast_enabled(x.device.type):
            raise UserError.of("parallel.autocast")
        ctx.input_layout = input_layout
        ctx.tp = tp
        ctx.weight = weight
        ctx.bias = bias
        ctx.deferred = deferred or WeightGradQueue()
        ctx.dtype = x.dtype
        # Of this pass: FP8's settings and scales may have changed before its backward pass runs.
        ctx.products = products.for_pass() if products else Gemm(x.dtype, x.dtype)
        # The backward pass reads the weight again, and must find the same values.
        note_weights_read(ctx, weight)
        is_sharded = input_layout is InputLayout.SEQUENCE
        full_input = tp.gather(x) if is_sharded else x
        y, saved = ctx.products.forward(_as_matrix(full_input), weight)
        if is_sharded:  # keep the shard only; the backward pass gathers it again
            ctx.save_for_backward(x)
        else:
            ctx.save_for_backward(*saved)
        # A view that is made here could not be modified in place by code after the layer, as by
        # nn.ReLU(inplace=True).
        y = reshaped_result(y, [*full_input.shape[:-1], weight.shape[0]])
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        require_unchanged_weights(ctx)
        weight = ctx.weight
        products = ctx.products
        if ctx.needs_input_grad[1]:
            weight_destination = destination(ctx, 1, weight)
        else:
            weight_destination = Destination.NOWHERE
        # Detached: deferred work would otherwise keep the whole graph alive, down to the stage's
        # input.
        saved: Factor = tuple(tensor.detach() for tensor in ctx.saved_tensors)
        # The order overlaps transfers with products: the input is gathered while its gradient is
        # computed, and that gradient is summed while the weight gradient is computed.
        if weight_destination is Destination.NOWHERE:
            input_factor: Callable[[], Factor] = Pending((), saved)
        else:
            input_factor = _start_input_factor(ctx, saved)
        grad_rows = _as_matrix(grad)
        for_input, for_weight = products.gradient_factors(grad_rows)
        finish_grad_x: Callable[[], Tensor | None] = Pending((), None)
        if ctx.needs_input_grad[0]:
            finish_grad_x = _start_input_gradient(ctx, for_input, grad.shape)

        grad_weight = None
        if weight_destination is Destination.AUTOGRAD:  # which needs it now
            grad_weight = products.weight_gradient(for_weight, input_factor()).to(weight.dtype)
        elif weight_destination is Destination.MAIN:
            ctx.deferred.offer(
                lambda: add_weight_gradient(products, weight, for_weight, input_factor())
            )
        grad_bias = None
        if ctx.bias is not None:
            grad_bias = add_gradient(ctx.bias, grad_rows, destination(ctx, 2, ctx.bias))
        return finish_grad_x(), grad_weight, grad_bias, None, None, None, None


def _as_matrix(x: Tensor) -> Tensor:
    """Return x [..., k] as a matrix [m, k]."""
    return x.reshape(-1, x.shape[-1])


def _start_input_factor(ctx: Any, saved: Factor) -> Callable[[], Factor]:
    """Start to all-gather over tp what the weight gradient needs of the input, if x is sharded.

    The returned function waits for the result and returns it. Deferred work gathers only then,
    because the full input would otherwise be kept until it runs.
    """
    if ctx.input_layout is not InputLayout.SEQUENCE:
        return Pending((), saved)
    products = ctx.products
    shard = saved[0]
    if ctx.deferred.is_collecting:
        gather: Callable[[], Tensor] = partial(ctx.tp.gather, shard)
    else:
        gather = ctx.tp.start_gather(shard)
    return lambda: products.keep(_as_matrix(gather()))


def _start_input_gradient(
    ctx: Any,
    grad: Factor,
    shape: torch.Size,
) -> Callable[[], Tensor]:
    """Compute the input gradient and start its all-reduce or reduce-scatter over tp.

    shape: of the gradient of the output, [s', b, n]. The returned function waits for the result and
    returns it.
    """
    grad_x = ctx.products.input_gradient(grad, ctx.weight, ctx.dtype)
    grad_x = grad_x.view(*shape[:-1], ctx.weight.shape[1])
    if ctx.input_layout is InputLayout.SEQUENCE:
        return ctx.tp.start_scatter_sum(grad_x)
    if ctx.input_layout is InputLayout.OWN:
        return Pending((), grad_x)
    finish_sum = ctx.tp.start_sum_(grad_x)

    def finish() -> Tensor:
        finish_sum()
        return grad_x

    return finish


def add_weight_gradient(
    products: GemmProvider,
    weight: nn.Parameter,
    grad: Factor,
    x: Factor,
) -> None:
    """Add the weight gradient to the main gradient."""
    main, first = begin_accumulation(weight)
    products.add_weight_gradient_(main, grad, x, first)


def add_gradient(
    vector: nn.Parameter,
    rows: Tensor,
    target: Destination,
) -> Tensor | None:
    """Return the sum of `rows` [tokens, n], the gradient of `vector` [n], if autograd wants it.

    Otherwise return None; a sum that goes to the main gradient is added there.
    """
    if target is Destination.NOWHERE:
        return None
    summed = rows.sum(0, dtype=sum_dtype(vector, rows.dtype))
    if target is Destination.AUTOGRAD:
        return summed.to(vector.dtype)
    cleared_main_grad(vector).add_(summed)
    return None


def sum_dtype(vector: nn.Parameter, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of `dtype` are summed over tokens: the main gradient's if
    it is wider."""
    if not has_main_grad(vector):
        return dtype
    main_grad: Tensor = vector.main_grad  # type: ignore[attr-defined]
    return torch.promote_types(dtype, main_grad.dtype)


class Add(torch.autograd.Function):
    """x [s, b, n] + parameter [n], or x + rows of a table parameter, in the dtype of x.

    rows: a slice of s rows, or int64 [s, b]. The backward pass sums over tokens in the dtype of the
        main gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        parameter: nn.Parameter,
        rows: slice | Tensor | None = None,
    ) -> Tensor:
        ctx.parameter = parameter
        ctx.rows = rows
        if rows is None:
            return (x + parameter).to(x.dtype)
        if isinstance(rows, Tensor):
            addend = parameter[rows]  # [s, b, n]
        else:
            addend = parameter[rows].unsqueeze(1)  # [s, 1, n]
        return (x + addend).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        target = destination(ctx, 1, ctx.parameter)
        if target is Destination.NOWHERE:
            return grad, None, None
        if target is Destination.MAIN:
            total = cleared_main_grad(ctx.parameter)
        else:
            total = torch.zeros_like(ctx.parameter)
        if ctx.rows is None:
            total.add_(grad.flatten(0, -2).sum(0, dtype=total.dtype))
        elif isinstance(ctx.rows, Tensor):
            add_rows_(total, ctx.rows.flatten(), grad.flatten(0, 1).to(total.dtype))
        else:
            total[ctx.rows].add_(grad.sum(1, dtype=total.dtype))
        return grad, None if target is Destination.MAIN else total, None


class Widen(torch.autograd.Function):
    """A parameter cast to a wider dtype, whose gradient is added to the main gradient without being
    rounded first."""

    @staticmethod
    def forward(
        ctx: Any,
        parameter: nn.Parameter,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.parameter = parameter
        return parameter.to(dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        target = destination(ctx, 0, ctx.parameter)
        if target is Destination.AUTOGRAD:
            return grad.to(ctx.parameter.dtype), None
        if target is Destination.MAIN:
            cleared_main_grad(ctx.parameter).add_(grad)
        return None, None
