"""The feed-forward of a decoder layer: a column-parallel and a row-parallel layer around an activation function."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import ModelConfig
from parallel.context import Context
from parallel.layers import ColumnParallelLinear, RowParallelLinear, Rows


class MLP(nn.Module):
    """The feed-forward gelu(x up) down, or with a gate (silu(x gate) * (x up)) down."""

    def __init__(self, config: ModelConfig, context: Context, name: str, layer: int = 0) -> None:
        super().__init__()
        self.kind, self.recompute = config.mlp, context.recompute
        stack = [Rows(f"{name}.{part}", config.ffn) for part in (("gate", "up") if self.kind == "swiglu" else ("up",))]
        up, down = config.initial_std("up", layer), config.initial_std("down", layer)
        self.inner = ColumnParallelLinear(context, config.hidden, stack, bias=config.mlp_bias, std=up)
        self.down = RowParallelLinear(
            context, config.ffn, config.hidden, name=f"{name}.down", bias=config.mlp_bias, std=down
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map x [s, b, hidden], or [s / tp, b, hidden] under sequence parallelism, to a tensor of the same shape."""
        return self.recompute.run("activation", self.activate, self.inner(x)[0], into=lambda y: self.down(y)[0])

    def activate(self, y: Tensor) -> Tensor:
        """Apply the activation function: y [..., own features of `inner`] -> [..., own features of `down`]."""
        if self.kind == "swiglu":
            return Swiglu.apply(y)
        return F.gelu(y, approximate="tanh" if self.kind == "gelu" else "none")


class Swiglu(torch.autograd.Function):
    """y [..., 2 n] -> silu(first half) * second half, [..., n].

    Autograd would also keep silu(gate), a seventh of the memory that a Llama layer keeps. It is recomputed here; the
    cost equals that of the copy with which autograd would join the gradients of the halves.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        gate, up = y.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        gate, up = y.chunk(2, -1)
        grad_y = torch.empty_like(y)
        grad_gate, grad_up = grad_y.chunk(2, -1)
        torch.mul(grad, F.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return grad_y
