"""The activation functions of feed-forwards by name: one row each.

A gated activation takes both halves of y, the gate and its other factor, which one product has
computed. It has a backward pass of its own, which keeps less than autograd would. An activation may
have parameters, one number each for a layer.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.leaves import PLAIN, Leaves
from parallel.linear import Widen


class ActivationSettings(NamedTuple):
    """Settings that an activation may depend on besides its tensor.

    alpha, limit: of `ClampedGate`.
    leaves: calls leaves in their compiled forms.
    parameters: of the layer, [1] each, in the order of `Activation.parameters`.
    sensitive: the dtype in which parameters are used.
    """

    alpha: float
    limit: float
    leaves: Leaves = PLAIN
    parameters: Iterable[nn.Parameter] = ()
    sensitive: torch.dtype = torch.float32


class Activation(NamedTuple):
    """An activation function.

    apply: y [..., local features of the first linear layer] -> [..., those of the second].
    gated: whether y has two halves, so that the first layer has twice the features of the second.
    parameters: their names, and the values that they begin with.
    """

    apply: Callable[[Tensor, ActivationSettings], Tensor]
    gated: bool = False
    parameters: Mapping[str, float] = MappingProxyType({})


class Gate(NamedTuple):
    """A gated activation as leaves (`parallel.leaves`).

    value: y [..., 2 n] -> [..., n].
    gradient: (gradient of the value, y) -> gradient of y.
    gradient_in_place: computes what `gradient` does, where that is not compiled; None: `gradient`
        itself.
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
    """Return silu(gate) * up [..., n] of both halves of y [..., 2 n]."""
    gate, up = y.chunk(2, -1)
    # in place: silu has made a tensor of its own
    return F.silu(gate).mul_(up)


def _swiglu_gradient(grad: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of y [..., 2 n] from that of the value of `_swiglu` [..., n]."""
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
    """Return gelu(gate) * up [..., n] of both halves of y [..., 2 n], gelu by its approximation
    with tanh."""
    gate, up = y.chunk(2, -1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def _geglu_gradient(grad: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of y [..., 2 n] from that of the value of `_geglu` [..., n]."""
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
        # copies, so they may be overwritten
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
        grad_gate, grad_up = grad_y.chunk(2, -1)  # views, which are filled in below
        unclamped_gate, unclamped_up = y.chunk(2, -1)
        # what was clamped has no gradient
        up_is_clamped = unclamped_up.abs() > ctx.limit
        grad_of_clamped_up = (sigmoid * gate).mul_(grad)
        grad_up.copy_(grad_of_clamped_up.masked_fill_(up_is_clamped, 0))
        del grad_of_clamped_up  # before the next tensors are made
        # The derivative of gate * sigmoid(alpha * gate) by the gate is
        # sigmoid * (1 + alpha * gate * (1 - sigmoid)).
        slope = (1 - sigmoid).mul_(gate).mul_(ctx.alpha).add_(1).mul_(sigmoid)
        gate_is_clamped = unclamped_gate > ctx.limit
        grad_of_clamped_gate = slope.mul_(up.add_(1)).mul_(grad)
        grad_gate.copy_(grad_of_clamped_gate.masked_fill_(gate_is_clamped, 0))
        return grad_y, None, None


def _clamp(y: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Return gate and up, clamped, as copies in FP32 or wider."""
    wide_dtype = torch.promote_types(y.dtype, torch.float32)
    wide = y.to(wide_dtype)
    gate, up = wide.chunk(2, -1)
    return gate.clamp(max=limit), up.clamp(-limit, limit)


# The constants of xIELU (Huang, 2024, arXiv:2411.13010), as in transformers' XIELUActivation: beta
# and eps of the formula below, and what both alphas begin with. alpha_p is the softplus of a number
# that is learned, alpha_n is XIELU_BETA more than the softplus of another.
XIELU_BETA = 0.5
XIELU_EPS = -1e-6
XIELU_FIRST_ALPHA = 0.8


class Xielu(torch.autograd.Function):
    """xIELU: y [..., n] -> [..., n], from its two alphas [1].

        alpha_p y^2 + beta y                          where y > 0
        alpha_n (exp(min(y, eps)) - 1 - y) + beta y   elsewhere

    The constants beta and eps are XIELU_BETA and XIELU_EPS. Keeps y and the alphas; computes in the
    dtype of the alphas or of y, whichever is wider. The gradient of an alpha is the sum over all
    elements.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
        ctx.save_for_backward(y, alpha_p, alpha_n)
        wide_dtype = torch.promote_types(y.dtype, alpha_p.dtype)
        wide = y.to(wide_dtype)
        curved = torch.where(
            wide > 0,
            alpha_p * wide.square(),
            alpha_n * _exponential_part(wide),
        )
        return curved.add_(wide, alpha=XIELU_BETA).to(y.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        y, alpha_p, alpha_n = ctx.saved_tensors
        wide_dtype = torch.promote_types(y.dtype, alpha_p.dtype)
        wide = y.to(wide_dtype)
        is_positive = wide > 0
        # the derivative of exp(min(y, eps)) - 1 - y: exp(y) - 1, or -1 where y > eps
        slope_of_exponential = wide.exp().masked_fill_(wide > XIELU_EPS, 0).sub_(1)
        slope = torch.where(
            is_positive,
            2 * alpha_p * wide,
            alpha_n * slope_of_exponential,
        )
        slope.add_(XIELU_BETA)
        grad_y = slope.mul_(grad).to(y.dtype)
        del slope, slope_of_exponential  # before the next tensors are made
        # the derivatives by the alphas, of the elements that each one bends
        of_positive = wide.square().mul_(grad).masked_fill_(~is_positive, 0)
        of_negative = _exponential_part(wide).mul_(grad).masked_fill_(is_positive, 0)
        grad_alpha_p = of_positive.sum().view(1)
        grad_alpha_n = of_negative.sum().view(1)
        return grad_y, grad_alpha_p, grad_alpha_n


def _exponential_part(wide: Tensor) -> Tensor:
    """Return exp(min(y, eps)) - 1 - y, which xIELU multiplies by alpha_n for negative numbers."""
    return wide.clamp(max=XIELU_EPS).expm1_().sub_(wide)


def _xielu(y: Tensor, given: ActivationSettings) -> Tensor:
    """Return xIELU of y, with the two learned numbers of the layer."""
    learned_p, learned_n = (
        Widen.apply(parameter, given.sensitive) for parameter in given.parameters
    )
    alpha_p = F.softplus(learned_p)
    alpha_n = XIELU_BETA + F.softplus(learned_n)
    return Xielu.apply(y, alpha_p, alpha_n)


def _inverse_softplus(value: float) -> float:
    """Return the number whose softplus is `value`."""
    return math.log(math.expm1(value))


SWIGLU = Gate(_swiglu, _swiglu_gradient, _swiglu_gradient_in_place)
GEGLU = Gate(_geglu, _geglu_gradient)

ACTIVATIONS: Mapping[str, Activation] = {
    "swiglu": Activation(
        lambda y, given: Gated.apply(y, SWIGLU, given.leaves),
        gated=True,
    ),
    "geglu": Activation(
        lambda y, given: Gated.apply(y, GEGLU, given.leaves),
        gated=True,
    ),
    "swiglu_clamped": Activation(
        lambda y, given: ClampedGate.apply(y, given.alpha, given.limit),
        gated=True,
    ),
    "gelu": Activation(lambda y, given: F.gelu(y, approximate="tanh")),
    "gelu_exact": Activation(lambda y, given: F.gelu(y)),
    "relu2": Activation(lambda y, given: F.relu(y).square()),
    "xielu": Activation(
        _xielu,
        parameters={
            "alpha_p": _inverse_softplus(XIELU_FIRST_ALPHA),
            "alpha_n": _inverse_softplus(XIELU_FIRST_ALPHA - XIELU_BETA),
        },
    ),
}
"""The activations by their names in `model.mlp`."""
