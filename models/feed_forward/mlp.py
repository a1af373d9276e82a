"""The feed-forward of a decoder layer: two parallel linear layers around an activation function."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import ModelConfig
from parallel.context import Context
from parallel.layers import ColumnParallelLinear, RowParallelLinear, Rows
from parallel.leaves import PLAIN, Leaves


class MLP(nn.Module):
    """The feed-forward act(x up) down, where act is gelu or the square of relu, or with a gate
    (act(x gate) * (x up)) down, where act is silu or gelu.

    layer: the number of the decoder layer, which may decide how its initial weights are scaled.
    biases: the layers have biases, the first and the second one; None: as `config.mlp_bias` says.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: Context,
        name: str,
        layer: int = 0,
        biases: tuple[bool, bool] | None = None,
    ) -> None:
        super().__init__()
        self.kind = config.mlp
        self.recompute = context.recompute
        self.leaves = context.leaves
        self.alpha = config.swiglu_alpha
        self.limit = config.swiglu_limit
        up_bias, down_bias = biases or (config.mlp_bias, config.mlp_bias)
        # Gate and up are stacked in one weight, so that one product computes both.
        parts = ("gate", "up") if config.gated else ("up",)
        self.inner = ColumnParallelLinear(
            context,
            config.hidden,
            [Rows(f"{name}.{part}", config.ffn) for part in parts],
            bias=up_bias,
            std=config.initial_std("up", layer),
        )
        self.down = RowParallelLinear(
            context,
            config.ffn,
            config.hidden,
            name=f"{name}.down",
            bias=down_bias,
            std=config.initial_std("down", layer),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map x [s, b, hidden], or [s / tp, b, hidden] under sequence parallelism, to a tensor of
        the same shape."""
        return self.recompute.run_forward(
            "activation", self.activate, self.inner(x), then=self.down
        )

    def activate(self, y: Tensor) -> Tensor:
        """Apply the activation function: y [..., local features of `inner`] -> [..., local features
        of `down`]."""
        # Gates have backward passes of their own, which save less than autograd would.
        if self.kind == "swiglu":
            return Swiglu.apply(y, self.leaves)
        if self.kind == "geglu":
            return Geglu.apply(y, self.leaves)
        if self.kind == "swiglu_clamped":
            return ClampedGate.apply(y, self.alpha, self.limit)
        if self.kind == "gelu":
            return F.gelu(y, approximate="tanh")
        if self.kind == "relu2":
            return F.relu(y).square()
        return F.gelu(y)


class Swiglu(torch.autograd.Function):
    """y [..., 2 n] -> silu(first half) * second half, [..., n].

    Autograd would also keep silu(gate), a seventh of the memory that a Llama layer keeps. It is
    recomputed here; the cost equals that of the copy with which autograd would join the gradients
    of the halves.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, leaves: Leaves = PLAIN) -> Tensor:
        ctx.save_for_backward(y)
        ctx.leaves = leaves
        return leaves(_swiglu, y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        return ctx.leaves(_swiglu_gradient, grad, y, otherwise=_swiglu_gradient_in_place), None


def _swiglu(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, -1)
    # in place: silu has made a tensor of its own
    return F.silu(gate).mul_(up)


def _swiglu_gradient(grad: Tensor, y: Tensor) -> Tensor:
    gate, up = y.chunk(2, -1)
    grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
    grad_up = F.silu(gate).mul_(grad)
    return torch.cat((grad_gate, grad_up), -1)


def _swiglu_gradient_in_place(grad: Tensor, y: Tensor) -> Tensor:
    """Return what `_swiglu_gradient` does, written into halves of one tensor in place of joined.

    It saves a copy, but torch's compiler knows no results in views.
    """
    gate, up = y.chunk(2, -1)
    grad_y = torch.empty_like(y)
    grad_gate, grad_up = grad_y.chunk(2, -1)
    torch.mul(grad, F.silu(gate), out=grad_up)
    torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
    return grad_y


class Geglu(torch.autograd.Function):
    """y [..., 2 n] -> gelu(first half) * second half, [..., n], with gelu in the tanh
    approximation.

    As in `Swiglu`, the backward pass recomputes gelu(gate).
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, leaves: Leaves = PLAIN) -> Tensor:
        ctx.save_for_backward(y)
        ctx.leaves = leaves
        return leaves(_geglu, y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        return ctx.leaves(_geglu_gradient, grad, y), None


def _geglu(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, -1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def _geglu_gradient(grad: Tensor, y: Tensor) -> Tensor:
    gate, up = y.chunk(2, -1)
    grad_gate = torch.ops.aten.gelu_backward(grad * up, gate, approximate="tanh")
    grad_up = F.gelu(gate, approximate="tanh").mul_(grad)
    return torch.cat((grad_gate, grad_up), -1)


class ClampedGate(torch.autograd.Function):
    """The gated activation of gpt-oss: gate and up [..., 2 n] -> [..., n].

        gate <= limit, -limit <= up <= limit
        y = (up + 1) * gate * sigmoid(alpha * gate)

    The factors are clamped so that no product of them overflows half precision. With alpha = 1.702
    the second factor is the fast approximation of gelu. Up has an offset of one, so that a token
    whose up is 0 still passes its gate. Computes in FP32 or wider, again in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        alpha: float,
        limit: float,
    ) -> Tensor:
        ctx.save_for_backward(y)
        ctx.alpha = alpha
        ctx.limit = limit
        # Both are copies, so they may be overwritten.
        gate, up = _clamp(y, limit)
        activated_gate = torch.sigmoid(gate * alpha).mul_(gate)
        activated = activated_gate.mul_(up.add_(1))
        return activated.to(y.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        gate, up = _clamp(y, ctx.limit)
        sigmoid = torch.sigmoid(gate * ctx.alpha)
        grad_y = torch.empty_like(y)
        grad_gate, grad_up = grad_y.chunk(2, -1)
        unclamped_gate, unclamped_up = y.chunk(2, -1)
        # What was clamped has no gradient.
        up_is_clamped = unclamped_up.abs() > ctx.limit
        grad_of_clamped_up = (sigmoid * gate).mul_(grad)
        grad_up.copy_(grad_of_clamped_up.masked_fill_(up_is_clamped, 0))
        del grad_of_clamped_up  # before the next tensors are made
        # Of gate * sigmoid(alpha * gate): sigmoid * (1 + alpha * gate * (1 - sigmoid)).
        slope = (1 - sigmoid).mul_(gate).mul_(ctx.alpha).add_(1).mul_(sigmoid)
        gate_is_clamped = unclamped_gate > ctx.limit
        grad_of_clamped_gate = slope.mul_(up.add_(1)).mul_(grad)
        grad_gate.copy_(grad_of_clamped_gate.masked_fill_(gate_is_clamped, 0))
        return grad_y, None, None


def _clamp(y: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Return gate and up, clamped, as copies in FP32 or wider."""
    wide = y.to(torch.promote_types(y.dtype, torch.float32))
    gate, up = wide.chunk(2, -1)
    return gate.clamp(max=limit), up.clamp(-limit, limit)
