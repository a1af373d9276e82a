"""A product whose weight is whole on every rank of tp: of few features, which all heads share."""

from torch import Tensor, nn

from megaprec.comm.layout import Part
from parallel import collectives
from parallel.context import Context
from parallel.layers import Rows, parameter
from parallel.linear import InputLayout, Linear


class ReplicatedLinear(nn.Module):
    """y = x @ W.T + b without collectives, with all of W on every tp rank.

    x: [s, b, input_size], or a shard of it.
    stack: the logical matrices that are stacked in W. Under sequence parallelism each rank has
        partial gradients.
    """

    def __init__(
        self,
        context: Context,
        input_size: int,
        stack: list[Rows],
        *,
        bias: bool,
        std: float,
    ) -> None:
        super().__init__()
        self.context = context
        partial_gradients = context.cut_sequence
        # Cut along no dimension: every tp rank has all rows.
        weights = [
            Part.cut(
                f"{matrix.name}.weight",
                (matrix.rows, input_size),
                None,
                context.tp,
                heads=matrix.heads,
            )
            for matrix in stack
        ]
        self.weight = parameter(context, weights, std, partial_gradients)
        self.products = context.products(self.weight)
        self.bias = None
        if bias:
            biases = [
                Part.cut(f"{matrix.name}.bias", (matrix.rows,), None, context.tp)
                for matrix in stack
            ]
            self.bias = parameter(context, biases, 0.0, partial_gradients)

    def forward(self, x: Tensor) -> Tensor:
        context = self.context
        return Linear.apply(
            x,
            self.weight,
            self.bias,
            InputLayout.OWN,
            context.tp,
            context.deferred,
            self.products,
        )


def whole_on_all_ranks(shared: Tensor, context: Context) -> Tensor:
    """Return the result of a `ReplicatedLinear` whole on all ranks of tp, [whole s, b, features],
    where each rank's own heads read it.

    shared: that result, [s, b, features], or [s / tp, b, features] under sequence parallelism.
    Collective over tp: under sequence parallelism the forward pass gathers it; the backward pass
    sums the gradients of the ranks' heads in any case.
    """
    if context.cut_sequence:
        return collectives.gather(shared, context.tp)
    return collectives.copy(shared, context.tp)
