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
from math import nan, prod
from typing import Any

import torch
from torch import Tensor, nn

from megaprec.comm.layout import Layout, Part, attach, layout_of
from megaprec.comm.random import normal_part
from megaprec.errors import UserError
from megaprec.optim.main_grad import Destination, cleared, destination
from parallel import collectives
from parallel.context import Context
from parallel.linear import Add, Input, Linear


@dataclass(frozen=True)
class Rows:
    """One of the logical matrices stacked in a column-parallel weight: its name and its number of
    output rows.

    shards: the number of slices over tp, if it is smaller than the number of ranks (key/value
        heads); None: one slice per rank.
    """

    name: str
    rows: int
    shards: int | None = None


class ColumnParallelLinear(nn.Module):
    """y = x @ W.T + b with the output features sharded over tp.

    x: [s, b, input_size], or [s / tp, b, input_size] under sequence parallelism. Returns [s, b, own
    features], or with `gather_output` [s, b, output features].
    output: the number of output features of the logical tensor `name`.weight, or several such
        tensors.
    lies: the layout of x; None: as above. With Input.OWN, x is whole and there is no collective:
        the gradient of x is the addend of this rank, which the caller sums over tp.
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
        lies: Input | None = None,
    ) -> None:
        super().__init__()
        if gather_output and context.cut_sequence:
            raise ValueError(f"{name}: gather_output would undo sequence parallelism")
        self.context = context
        self.gather_output = gather_output
        self.lies = lies or (Input.SEQUENCE if context.cut_sequence else Input.COPIED)
        stack = [Rows(name, output)] if isinstance(output, int) else list(output)
        for rows in stack:
            if rows.rows % (rows.shards or context.tp.size):
                raise ValueError(
                    f"{rows.name}: {rows.rows} output features do not divide by tensor = "
                    f"{context.tp.size}"
                )
        tp = context.tp
        parts = [Part.cut(f"{r.name}.weight", (r.rows, input_size), 0, tp, r.shards) for r in stack]
        self.weight = parameter(context, parts, std, True)
        self.products = context.products(self.weight)
        self.bias = None
        if bias:
            self.bias = parameter(
                context,
                [Part.cut(f"{r.name}.bias", (r.rows,), 0, tp, r.shards) for r in stack],
                0.0,
                True,
            )

    def forward(self, x: Tensor) -> Tensor:
        y = Linear.apply(
            x,
            self.weight,
            self.bias,
            self.lies,
            self.context.tp,
            self.context.deferred,
            self.products,
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
        parts = [Part.cut(f"{name}.weight", (output_size, input_size), 1, context.tp)]
        self.weight = parameter(context, parts, std)
        self.products = context.products(self.weight)
        self.bias = None
        if bias:
            whole = Part.cut(f"{name}.bias", (output_size,), None, context.tp)
            self.bias = parameter(context, [whole], 0.0, partial=context.cut_sequence)

    def forward(self, x: Tensor) -> Tensor:
        tp = self.context.tp
        if not self.input_is_parallel:
            x = collectives.split(x, tp, x.dim() - 1)
        y = Linear.apply(x, self.weight, None, Input.OWN, tp, self.context.deferred, self.products)
        y = collectives.scatter(y, tp) if self.context.cut_sequence else collectives.reduce(y, tp)
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
        self.weight = parameter(
            context, [Part.cut(f"{name}.weight", (vocab, hidden), 0, context.tp)], std, tied=tied
        )
        self.part = layout_of(self.weight).parts[0]

    def forward(self, ids: Tensor) -> Tensor:
        if ids.dtype not in (torch.int32, torch.int64):
            raise UserError(
                f"ids of {self.part.name} are {ids.dtype}: must be torch.int64, as by "
                "ids.long(), because torch reads "
                "bytes and truth values as a mask of rows"
            )
        tp = self.context.tp
        dtype = self.context.plan.residual
        inside = ids.clamp(0, self.part.shape[0] - 1)
        nowhere = inside != ids
        if tp.size == 1:
            return Lookup.apply(inside, self.weight, None, dtype, nowhere)
        local = inside - self.part.start
        foreign = (local < 0) | (local >= self.part.local[0])
        x = Lookup.apply(local.masked_fill(foreign, 0), self.weight, foreign, dtype, nowhere)
        if self.context.cut_sequence:
            return collectives.scatter(x, tp)
        return collectives.reduce(x, tp)


class Lookup(torch.autograd.Function):
    """weight[ids] in `dtype`, zero where `foreign` is True, and with a NaN in each row where
    `nowhere` is True.

    foreign: ids that another tp rank holds. nowhere: ids outside the vocabulary.
    The backward pass sums the rows of the gradient in the dtype of the main gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        ids: Tensor,
        weight: nn.Parameter,
        foreign: Tensor | None,
        dtype: torch.dtype | None = None,
        nowhere: Tensor | None = None,
    ) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(ids, foreign)
        rows = weight[ids].to(dtype or weight.dtype)
        if foreign is not None:
            rows.masked_fill_(foreign.unsqueeze(-1), 0)
        if nowhere is not None:
            # one is enough: the first norm or product spreads it
            rows[..., 0].masked_fill_(nowhere, math.nan)
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None, None, None]:  # type: ignore[override]
        ids, foreign = ctx.saved_tensors
        goes = destination(ctx, 1, ctx.weight)
        if goes is Destination.NOWHERE:
            return None, None, None, None, None
        total = cleared(ctx.weight) if goes is Destination.MAIN else torch.zeros_like(ctx.weight)
        if foreign is not None:
            grad = grad.masked_fill(foreign.unsqueeze(-1), 0)
        total.index_put_(
            (ids.reshape(-1),), grad.reshape(-1, grad.shape[-1]).to(total.dtype), accumulate=True
        )
        return None, None if goes is Destination.MAIN else total, None, None, None


def parameter(
    context: Context,
    parts: Sequence[Part],
    std: float,
    partial: bool = False,
    tied: tuple[int, ...] = (),
    mean: float = 0.0,
    again: bool = False,
) -> nn.Parameter:
    """Return a parameter made of `parts`, in the dtype of its master weights: mean + std * normal.

    The random numbers are keyed by logical name and coordinates, so they are the same in every
    layout. The parameter lies on the CPU until an optimizer's buffer or `module.to` moves it.
    Padding is zero.
    """
    held = context.plan.param_dtype(parts[0].name)
    masters = context.plan.masters
    dtype = masters if masters.itemsize > held.itemsize else held
    slices = []
    for part in parts:
        values = torch.zeros(prod(part.padded), dtype=dtype).view(part.padded)
        filled = values[: part.local[0]] if part.local else values
        if std and not context.blank:
            filled.copy_(normal_part(part, context.seed, std, dtype).add_(mean))
        else:
            filled.fill_(nan if context.blank else mean)
        slices.append(values)
    layout = Layout(tuple(parts), partial, tied, again, expert=context.of_experts)
    return attach(nn.Parameter(torch.cat(slices) if slices[0].dim() else slices[0]), layout)
