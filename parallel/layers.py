"""Layers whose weights are sharded over tp.

A pair of layers needs one all-reduce. The column-parallel layer shards its output features, so each
rank goes on with its own. The row-parallel layer shards its input features to match and sums the
products of all ranks. Between pairs the activation is replicated on every rank, or, under sequence
parallelism, sharded along the sequence. The all-reduce then becomes a reduce-scatter, the next pair
begins with an all-gather, and everything between the pairs (norms, dropout, residual additions) is
computed and stored once instead of tp times.

Activations are [sequence, batch, features], so that a shard of the sequence is contiguous.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from megaprec.comm.layout import Layout, Part, attach
from megaprec.comm.main_grad import Destination, begin_cleared, destination
from megaprec.comm.random import normal_part
from megaprec.errors import UserError
from megaprec.precision.row_sums import add_rows_
from parallel import collectives
from parallel.context import Context
from parallel.linear import Add, InputLayout, Linear, SummedLinear


@dataclass(frozen=True)
class Rows:
    """One of the logical matrices stacked in a column-parallel weight: its name and its number of
    output rows.

    shards: the number of slices over tp, if it is smaller than the number of ranks (key/value
        heads); None: one slice per rank.
    heads: the number of heads that it projects to, whose rows lie one head after the other; 1: its
        rows belong to no heads.
    """

    name: str
    rows: int
    shards: int | None = None
    heads: int = 1


class ColumnParallelLinear(nn.Module):
    """y = x @ W.T + b with the output features sharded over tp.

    x: [s, b, input_size], or [s / tp, b, input_size] under sequence parallelism. Returns [s, b, own
    features], or with `gather_output` [s, b, output features].
    output: the number of output features of the logical tensor `name`.weight, or several such
        tensors.
    input_layout: the layout of x; None: as above. With InputLayout.OWN, x is whole and there is no
        collective: the gradient of x is the addend of this rank, which the caller sums over tp.
    gather_output: all-gather the output features over tp.
    Raises ValueError if output features do not divide by tp, and for `gather_output` under sequence
    parallelism.
    """

    def __init__(
        self,
        context: Context,
        input_size: int,
        output: int | Sequence[Rows],
        *,
        name: str = "",
        bias: bool = True,
        gather_output: bool = False,
        std: float = 0.02,
        input_layout: InputLayout | None = None,
    ) -> None:
        super().__init__()
        if gather_output and context.cut_sequence:
            raise ValueError(f"{name}: gather_output would undo sequence parallelism")
        self.context = context
        self.gather_output = gather_output
        default_layout = InputLayout.SEQUENCE if context.cut_sequence else InputLayout.COPIED
        self.input_layout = input_layout or default_layout
        tp = context.tp
        matrices = [Rows(name, output)] if isinstance(output, int) else list(output)
        weight_parts = []
        bias_parts = []
        for matrix in matrices:
            # key/value heads may be fewer than ranks, which then share a slice
            if matrix.rows % (matrix.shards or tp.size):
                raise ValueError(
                    f"{matrix.name}: {matrix.rows} output features do not divide by tensor = "
                    f"{tp.size}"
                )
            weight_part = Part.cut(
                f"{matrix.name}.weight",
                (matrix.rows, input_size),
                dim=0,
                tp=tp,
                shards=matrix.shards,
                heads=matrix.heads,
            )
            bias_part = Part.cut(
                f"{matrix.name}.bias",
                (matrix.rows,),
                dim=0,
                tp=tp,
                shards=matrix.shards,
            )
            weight_parts.append(weight_part)
            bias_parts.append(bias_part)
        # partial: ranks that hold the same key/value heads each have the gradient from their own
        # query heads; of a slice that one rank holds it is whole
        self.weight = parameter(context, weight_parts, std, partial=True)
        self.products = context.products(self.weight)
        self.bias = parameter(context, bias_parts, 0.0, partial=True) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        is_sharded = self.input_layout is InputLayout.SEQUENCE
        y = Linear.apply(
            x,
            self.weight,
            self.bias,
            self.input_layout,
            self.context.tp,
            self.context.deferred,
            self.products,
            is_sharded and self.context.fuses(self.products),
        )
        if self.gather_output:
            return collectives.join(y, self.context.tp, y.dim() - 1)
        return y


class RowParallelLinear(nn.Module):
    """y = x @ W.T + b with the input features sharded over tp.

    The products are summed over tp before the bias is added. x: [s, b, own features], or without
    `input_is_parallel` [s, b, input_size]. Returns [s, b, output_size], or [s / tp, b, output_size]
    under sequence parallelism. Raises ValueError if input features do not divide by tp, and for an
    input that is not parallel under sequence parallelism.
    """

    def __init__(
        self,
        context: Context,
        input_size: int,
        output_size: int,
        *,
        name: str,
        bias: bool = True,
        input_is_parallel: bool = True,
        std: float = 0.02,
    ) -> None:
        super().__init__()
        if input_size % context.tp.size:
            raise ValueError(
                f"{name}: {input_size} input features do not divide by tensor = {context.tp.size}"
            )
        if context.cut_sequence and not input_is_parallel:
            raise ValueError(f"{name}: sequence parallelism needs input_is_parallel")
        self.context = context
        self.input_is_parallel = input_is_parallel
        shape = (output_size, input_size)
        weight_part = Part.cut(f"{name}.weight", shape, dim=1, tp=context.tp)
        self.weight = parameter(context, [weight_part], std)
        self.products = context.products(self.weight)
        self.bias = None
        if bias:
            replicated = Part.cut(f"{name}.bias", (output_size,), dim=None, tp=context.tp)
            # under sequence parallelism a rank adds it to its own tokens only
            self.bias = parameter(context, [replicated], 0.0, partial=context.cut_sequence)

    def forward(self, x: Tensor) -> Tensor:
        tp = self.context.tp
        if not self.input_is_parallel:
            x = collectives.split(x, tp, x.dim() - 1)
        deferred = self.context.deferred
        if self.context.fuses(self.products):
            y = SummedLinear.apply(x, self.weight, tp, deferred, self.products)
        else:
            product = Linear.apply(
                x, self.weight, None, InputLayout.OWN, tp, deferred, self.products
            )
            add_up = collectives.reduce_scatter if self.context.cut_sequence else collectives.reduce
            y = add_up(product, tp)
        # The bias is added after the sum, so that it is added once.
        return y if self.bias is None else Add.apply(y, self.bias, None)


class VocabParallelEmbedding(nn.Module):
    """An embedding table [vocab, hidden] whose rows are sharded over tp.

    Each rank looks up the ids that it holds, and the results are summed over tp. The table is
    padded to a multiple of tp rows; padding rows are zero and are never looked up. An id outside
    the vocabulary puts NaN into its row, on every device and without a synchronization, so that no
    step is applied with it.

    ids: int64 [s, b]. Returns [s, b, hidden] in the dtype of the residual stream, or [s / tp, b,
    hidden] under sequence parallelism.
    """

    def __init__(
        self,
        context: Context,
        vocab: int,
        hidden: int,
        *,
        name: str,
        tied: tuple[int, ...] = (),
        std: float = 0.02,
    ) -> None:
        super().__init__()
        self.context = context
        self.part = Part.cut(f"{name}.weight", (vocab, hidden), dim=0, tp=context.tp)
        self.weight = parameter(context, [self.part], std, tied=tied)

    def forward(self, ids: Tensor) -> Tensor:
        if ids.dtype not in (torch.int32, torch.int64):
            raise UserError.of("parallel.ids_dtype", name=self.part.name, dtype=ids.dtype)
        tp = self.context.tp
        dtype = self.context.plan.residual
        # a lookup outside the table would end the process on a GPU
        valid_ids = ids.clamp(0, self.part.shape[0] - 1)
        outside = valid_ids != ids
        if tp.size == 1:
            return Lookup.apply(
                valid_ids,
                self.weight,
                None,
                dtype,
                outside,
            )
        # an id of another rank looks up row 0, which is then masked
        rows = valid_ids - self.part.start
        foreign = (rows < 0) | (rows >= self.part.local[0])
        x = Lookup.apply(
            rows.masked_fill(foreign, 0),
            self.weight,
            foreign,
            dtype,
            outside,
        )
        if self.context.cut_sequence:
            return collectives.reduce_scatter(x, tp)
        return collectives.reduce(x, tp)


class Lookup(torch.autograd.Function):
    """weight[ids] in `dtype`: rows of an embedding table.

    ids [...], weight [local rows, hidden] -> [..., hidden].
    foreign: True for ids that another tp rank holds; their rows are zero.
    outside: True for ids outside the vocabulary; their rows have a NaN.
    The backward pass sums the rows of the gradient in the dtype of the main gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        ids: Tensor,
        weight: nn.Parameter,
        foreign: Tensor | None,
        dtype: torch.dtype | None = None,
        outside: Tensor | None = None,
    ) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(ids, foreign)
        # a copy, which the masks may write to
        rows = weight[ids].to(dtype or weight.dtype)
        if foreign is not None:
            rows.masked_fill_(foreign.unsqueeze(-1), 0)
        if outside is not None:
            # one is enough: the first norm or product spreads it
            rows[..., 0].masked_fill_(outside, math.nan)
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None, None, None]:  # type: ignore[override]
        ids, foreign = ctx.saved_tensors
        target = destination(ctx, 1, ctx.weight)
        if target is Destination.NOWHERE:
            return None, None, None, None, None
        if target is Destination.MAIN:
            total = begin_cleared(ctx.weight)
        else:
            total = torch.zeros_like(ctx.weight)
        # ids of other ranks have looked up row 0, which must not get their gradients
        if foreign is not None:
            grad = grad.masked_fill(foreign.unsqueeze(-1), 0)
        grad_rows = grad.reshape(-1, grad.shape[-1]).to(total.dtype)
        add_rows_(total, ids.reshape(-1), grad_rows)
        return None, None if target is Destination.MAIN else total, None, None, None


def parameter(
    context: Context,
    parts: Sequence[Part],
    std: float,
    partial: bool = False,
    tied: tuple[int, ...] = (),
    mean: float = 0.0,
    again: bool = False,
) -> nn.Parameter:
    """Return a parameter of `parts`, stacked along dim 0, with its `Layout` attached. Its initial
    values are mean + std * normal.

    partial: each tp rank that has the same slice has only an addend of its gradient.
    tied: the pipeline ranks that have the same parameter; empty if only one has it.
    again: this is the second copy on a pipeline rank that has two.
    Its dtype is that of the master weights or its own, whichever is wider. The random numbers are
    keyed by logical name and coordinates, so they are the same in every layout. The parameter is on
    the CPU until an optimizer's buffer or `module.to` moves it. Padding is zero.
    """
    own_dtype = context.plan.param_dtype(parts[0].name)
    masters = context.plan.masters
    dtype = masters if masters.itemsize > own_dtype.itemsize else own_dtype
    values = _initial_values(context, parts, std, mean, dtype)
    layout = Layout(
        tuple(parts),
        partial,
        tied,
        again,
        expert=context.of_experts,
        together=context.together,
        std=std,
        mean=mean,
    )
    return attach(nn.Parameter(values), layout)


def _initial_values(
    context: Context, parts: Sequence[Part], std: float, mean: float, dtype: torch.dtype
) -> Tensor:
    """Return the initial values of `parts`, stacked along dim 0 with their padding, which is zero.

    With `context.blank`, where other values will take their place, all are NaN. They are then one
    element in memory, if there is no padding.
    """
    # NaN: a weight that is then not loaded must not train unseen
    undefined = torch.full((), math.nan, dtype=dtype)
    has_padding = any(part.padded != part.local for part in parts)
    if context.blank and parts[0].local and not has_padding:
        rows = sum(part.local[0] for part in parts)
        shape = (rows, *parts[0].local[1:])
        # A single number has nothing to share, and code that reads its bytes wants no stride of 0.
        if prod(shape) > 1:
            return undefined.expand(shape)
    slices = []
    for part in parts:
        padded = torch.zeros(prod(part.padded), dtype=dtype).view(part.padded)
        # a scalar has no rows, and no padding
        values = padded[: part.local[0]] if part.local else padded
        if context.blank:
            values.copy_(undefined)
        elif std:
            values.copy_(normal_part(part, context.seed, std, dtype).add_(mean))
        else:
            values.fill_(mean)
        slices.append(padded)
    return torch.cat(slices) if slices[0].dim() else slices[0]  # torch.cat takes no scalars
