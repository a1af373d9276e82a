"""The activation functions of feed-forwards by name: one row each.

A gated activation takes both halves of y, the gate and its other factor, which one product has
computed. It has a backward pass of its own, which keeps less than autograd would.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.leaves import PLAIN, Leaves


class ActivationSettings(NamedTuple):
    """Settings that an activation may depend on besides its tensor.

    alpha, limit: of `ClampedGate`.
    leaves: calls leaves in their compiled forms.
    """

    alpha: float
    limit: float
    leaves: Leaves = PLAIN


class Activation(NamedTuple):
    """An activation function.

    apply: y [..., local features of the first linear layer] -> [..., those of the second].
    gated: whether y has two halves, so that the first layer has twice the features of the second.
    """

    apply: Callable[[Tensor, ActivationSettings], Tensor]
    gated: bool = False


class Gate(NamedTuple):
    """A gated activation as leaves.

    value: y [..., 2 n] -> [..., n].
    gradient: of y, from (gradient of the value, y).
    gradient_in_place: the same where it is not compiled; None: `gradient`.
    """

    value: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]
    gradient_in_place: Callable[[Tensor, Tensor], Tensor] | None = None


class Gated(torch.autograd.Function):
    """y [..., 2 n] -> gate.value(y) [..., n].

    Autograd would also keep the activated gate, of swiglu a seventh of the memory that a Llama
    layer keeps. It is recomputed here; the cost equals that of the copy with which autograd would
    join the gradients of the halves.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, gate: Gate, leaves: Leaves = PLAIN) -> Tensor:
        ctx.save_for_backward(y)
        ctx.gate = gate
        ctx.leaves = leaves
        return leaves(gate.value, y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        gate: Gate = ctx.gate
        grad_y = ctx.leaves(gate.gradient, grad, y, otherwise=gate.gradient_in_place)
        return grad_y, None, None


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


SWIGLU = Gate(_swiglu, _swiglu_gradient, _swiglu_gradient_in_place)
GEGLU = Gate(_geglu, _geglu_gradient)

ACTIVATIONS: Mapping[str, Activation] = {
    "swiglu": Activation(lambda y, given: Gated.apply(y, SWIGLU, given.leaves), gated=True),
    "geglu": Activation(lambda y, given: Gated.apply(y, GEGLU, given.leaves), gated=True),
    "swiglu_clamped": Activation(
        lambda y, given: ClampedGate.apply(y, given.alpha, given.limit), gated=True
    ),
    "gelu": Activation(lambda y, given: F.gelu(y, approximate="tanh")),
    "gelu_exact": Activation(lambda y, given: F.gelu(y)),
    "relu2": Activation(lambda y, given: F.relu(y).square()),
}
"""The activations by their names in `model.mlp`."""
