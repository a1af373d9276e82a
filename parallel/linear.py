"""The linear product y = x @ W.T as one differentiable function with overlapped collectives.

The weight gradient is added to `weight.main_grad`, the FP32 view of the gradient buffer, as soon as
it is computed; autograd never holds a weight gradient. The all-reduce of the input gradient runs
while the weight gradient is computed. An input that is sharded along the sequence is all-gathered
while the input gradient is computed. No other stage waits for the weight gradient, so a pipeline
schedule may defer it (`weight_grad_queue.py`).

Three transfers of sequence parallelism are waited for: the gather of an input, the sum of the
ranks' products, and the gather of that sum's gradient. Products may be fused with these
(`fused_products.py`): by `Linear` with the first, by `SummedLinear` with the other two.

A factor is a tensor in the form in which a product reads it, such as FP8 codes and their scales
(`megaprec.precision.gemm_provider`). A function named `start_...` begins a transfer and returns a
function that waits for its result; `Pending((), x)` is such a function where nothing is waited for.
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
    begin_cleared,
    destination,
    has_main_grad,
    main_grad_dtype,
    note_weights_read,
    require_unchanged_weights,
)
from megaprec.comm.waiting import Pending
from megaprec.errors import UserError
from megaprec.precision.gemm import Gemm
from megaprec.precision.gemm_provider import Factor, GemmProvider
from megaprec.precision.row_sums import add_rows_
from megaprec.torch_private import reshaped_result
from parallel.fused_products import gathered_and_product, product_of_gathered, sum_of_products
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
    fused: under SEQUENCE, gather the input within the product. `products` must be a Gemm with one
        dtype of factors and results.
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
        fused: bool = False,
    ) -> Tensor:
        _begin(ctx, x, weight, tp, deferred, products)
        ctx.input_layout = input_layout
        ctx.bias = bias
        is_sharded = input_layout is InputLayout.SEQUENCE
        shape = [*x.shape[:-1], weight.shape[0]]
        if is_sharded:
            shape[0] *= tp.size
        if fused:
            gemm: Gemm = ctx.products
            y = product_of_gathered(gemm.factor(x), gemm.factor(weight).t(), tp)
            saved: Factor = ()
        else:
            full_input = tp.gather(x) if is_sharded else x
            y, saved = ctx.products.forward(_as_matrix(full_input), weight)
        if is_sharded:  # keep the shard only; the backward pass gathers it again
            ctx.save_for_backward(x)
        else:
            ctx.save_for_backward(*saved)
        # A view that is made here could not be modified in place by code after the layer, as by
        # nn.ReLU(inplace=True).
        y = reshaped_result(y, shape)
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        require_unchanged_weights(ctx)
        weight_destination = _weight_destination(ctx)
        saved = _saved_factor(ctx)
        # The order overlaps transfers with products: the input is gathered while its gradient is
        # computed, and that gradient is summed while the weight gradient is computed.
        if weight_destination is Destination.NOWHERE:
            input_factor: Callable[[], Factor] = Pending((), saved)
        else:
            input_factor = _start_input_factor(ctx, saved)
        grad_rows = _as_matrix(grad)
        for_input, for_weight = ctx.products.gradient_factors(grad_rows)
        finish_grad_x: Callable[[], Tensor | None] = Pending((), None)
        if ctx.needs_input_grad[0]:
            finish_grad_x = _start_input_gradient(ctx, for_input, grad.shape)

        grad_weight = _weight_gradient(ctx, for_weight, input_factor, weight_destination)
        grad_bias = None
        if ctx.bias is not None:
            grad_bias = add_gradient(ctx.bias, grad_rows, destination(ctx, 2, ctx.bias))
        return finish_grad_x(), grad_weight, grad_bias, None, None, None, None, None


class SummedLinear(torch.autograd.Function):
    """The sum over tp of each rank's x @ W.T, cut along the sequence, by products that are fused
    with their transfers: x [tp * s, b, k], weight [n, k] -> [s, b, n].

    deferred: the queue for the gradient of a weight that has a main gradient.
    products: with one dtype of factors and results.
    The backward pass all-gathers the gradient within the product that gives the gradient of x.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        tp: Axis,
        deferred: WeightGradQueue,
        products: Gemm,
    ) -> Tensor:
        _begin(ctx, x, weight, tp, deferred, products)
        ctx.save_for_backward(*products.keep(_as_matrix(x)))
        return sum_of_products(products.factor(x), products.factor(weight).t(), tp)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        require_unchanged_weights(ctx)
        products: Gemm = ctx.products
        weight_destination = _weight_destination(ctx)
        saved = _saved_factor(ctx)
        grad_shard = products.factor(grad)
        grad_x = None
        if ctx.needs_input_grad[0]:
            weight = products.factor(ctx.weight)
            full_grad, product = gathered_and_product(grad_shard, weight, ctx.tp)
            grad_x = product.to(ctx.dtype)
        else:
            full_grad = ctx.tp.gather(grad_shard)
        _, for_weight = products.gradient_factors(_as_matrix(full_grad))
        grad_weight = _weight_gradient(ctx, for_weight, lambda: saved, weight_destination)
        return grad_x, grad_weight, None, None, None


def _begin(
    ctx: Any,
    x: Tensor,
    weight: nn.Parameter,
    tp: Axis,
    deferred: WeightGradQueue | None,
    products: GemmProvider | None,
) -> None:
    """Note in `ctx` what both passes of a product of x with `weight` need: the axis, the weight,
    the queue of weight gradients, the dtype of x, and what computes the products.

    Raises UserError under torch's autocast.
    """
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        raise UserError.of("parallel.autocast")
    ctx.tp = tp
    ctx.weight = weight
    ctx.deferred = deferred or WeightGradQueue()
    ctx.dtype = x.dtype
    # Of this pass: FP8's settings and scales may have changed before its backward pass runs.
    ctx.products = products.for_pass() if products else Gemm(x.dtype, x.dtype)
    # The backward pass reads the weight again, and must find the same values.
    note_weights_read(ctx, weight)


def _as_matrix(x: Tensor) -> Tensor:
    """Return x [..., k] as a matrix [m, k]."""
    return x.reshape(-1, x.shape[-1])


def _weight_destination(ctx: Any) -> Destination:
    """Return where the weight gradient goes. In both functions the weight is input number 1."""
    if ctx.needs_input_grad[1]:
        return destination(ctx, 1, ctx.weight)
    return Destination.NOWHERE


def _saved_factor(ctx: Any) -> Factor:
    """Return the saved tensors, detached: deferred work would otherwise keep the whole graph alive,
    down to the stage's input."""
    return tuple(tensor.detach() for tensor in ctx.saved_tensors)


def _weight_gradient(
    ctx: Any,
    grad: Factor,
    input_factor: Callable[[], Factor],
    target: Destination,
) -> Tensor | None:
    """Return the weight gradient if autograd wants it, otherwise None.

    One that goes to the main gradient is work for the queue, which runs it at once, unless the
    executor collects the work of a split backward pass.
    grad: the gradient of the output. input_factor: returns the factor of the input, and waits for
        its transfer if it has one.
    """
    weight = ctx.weight
    products = ctx.products
    if target is Destination.AUTOGRAD:
        return products.weight_gradient(grad, input_factor()).to(weight.dtype)
    if target is Destination.MAIN:
        ctx.deferred.offer(lambda: add_weight_gradient(products, weight, grad, input_factor()))
    return None


def _start_input_factor(ctx: Any, saved: Factor) -> Callable[[], Factor]:
    """Start to all-gather over tp the input that the weight gradient needs, if x is sharded.

    saved: the factor of x, or its shard. The returned function waits, and returns the factor of the
    full input. Deferred work begins to gather only when it calls that function: the full input
    would otherwise be kept until then.
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

    grad: the factor of the gradient of the output. shape: of that gradient, [s', b, n].
    The returned function waits, and returns the gradient of x in its shape and dtype.
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
    """Add the weight gradient to the main gradient of `weight`.

    grad, x: the factors of the gradient of the output and of the input.
    """
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
    begin_cleared(vector).add_(summed)
    return None


def sum_dtype(vector: nn.Parameter, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of `dtype` are summed over tokens: the main gradient's if
    it is wider."""
    if not has_main_grad(vector):
        return dtype
    return torch.promote_types(dtype, main_grad_dtype(vector))


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
            total = begin_cleared(ctx.parameter)
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
            begin_cleared(ctx.parameter).add_(grad)
        return None, None
