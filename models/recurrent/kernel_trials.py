"""Kernels of other packages, each tried once on this GPU with the sizes of its layer: outputs and
gradients of drawn tokens are compared with those of plain torch in float64.

A kernel that compiles need not be right. Triton 3.4 to 3.7.0 gives wrong gradients of the gated
delta rule on GPUs like the H100 (issue 640 of fla-org/flash-linear-attention), and there are
failures and NaNs on GPUs like the B200 (issues 607 and 913 of the same).

Not tried are documents, and a state before the first token.

A kernel is called by a function of `models.recurrent.kernel_calls`. Each function named `..._fault`
draws the inputs of one package's kernel by name, and gives two functions of these inputs to
`_difference`: `plain`, which computes in plain torch, and `by_kernel`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.recurrent import delta_rule, kernel_calls, state_space
from models.recurrent.delta_rule import DeltaInputs
from models.recurrent.short_convolution import short_convolution
from models.recurrent.state_space import StateSpaceInputs

Trial = Callable[[Callable[..., Any], tuple[int, ...], int, torch.dtype], str]
"""Returns what is wrong with a kernel for layers of some sizes, a number of tokens and a dtype of
products; "" if it is right."""

DEVICE = "cuda"
# relative, of the norm of an output or a gradient: as the packages' own tests allow, and half more
TOLERANCE = 0.03
# of a gradient that is a sum over all tokens, whose terms cancel each other
TOLERANCE_OF_SUMS = 0.15
SUMS = ("the gradient of rate", "the gradient of weight")
SAMPLES = 1
# Of longer sequences so many are tried: the state passes through many chunks.
MOST_TOKENS = 2048
# of the head whose state is kept longest; those of others go up to 1
SLOWEST_DECAY = 0.01


def delta_rule_fault(
    kernel: Callable[..., Any],
    sizes: tuple[int, ...],
    tokens: int,
    products: torch.dtype,
) -> str:
    """Return what is wrong with a kernel of the gated delta rule; "" if it is right.

    sizes: heads, and the features of a key and of a value.
    """
    heads, _, _ = sizes
    drawn = _drawn_tokens(sizes, tokens)
    length = min(tokens, MOST_TOKENS)
    rates = _rates(heads).unsqueeze(-1)
    # a number from 0 to 1 for each head and token
    steps = _drawn((SAMPLES, heads, length), seed=3).sigmoid()
    drawn["log_decay"] = -rates * steps
    return _delta_rule_difference(kernel, drawn, products)


def row_decay_rule_fault(
    kernel: Callable[..., Any], sizes: tuple[int, ...], tokens: int, products: torch.dtype
) -> str:
    """Return what is wrong with a kernel of the delta rule of Kimi Delta Attention; "" if it is
    right. sizes: as in `delta_rule_fault`."""
    heads, key_dim, _ = sizes
    drawn = _drawn_tokens(sizes, tokens)
    length = min(tokens, MOST_TOKENS)
    rates = _rates(heads)[:, None, None]
    # a number from 0 to 1 for each head, token and row of a state
    steps = _drawn((SAMPLES, heads, length, key_dim), seed=3).sigmoid()
    drawn["log_decay"] = -rates * steps
    return _delta_rule_difference(kernel, drawn, products)


def _drawn_tokens(sizes: tuple[int, ...], tokens: int) -> dict[str, Tensor]:
    """Return drawn queries and keys of length 1, values and strengths of the gated delta rule, as
    `DeltaInputs` names them. Seed 3 is left to the decays, which the callers add."""
    heads, key_dim, value_dim = sizes
    length = min(tokens, MOST_TOKENS)
    shape = (SAMPLES, heads, length)
    query = _drawn((*shape, key_dim), seed=0)
    key = _drawn((*shape, key_dim), seed=1)
    return {
        "query": F.normalize(query, dim=-1),
        "key": F.normalize(key, dim=-1),
        "value": _drawn((*shape, value_dim), seed=2),
        "strength": _drawn(shape, seed=4).sigmoid(),
    }


def _delta_rule_difference(
    kernel: Callable[..., Any], drawn: Mapping[str, Tensor], products: torch.dtype
) -> str:
    """Return how a kernel of the gated delta rule differs from plain torch, as `_difference` does.

    drawn: the inputs, as `DeltaInputs` names them.
    """

    def plain(**inputs: Tensor) -> Tensor:
        given = DeltaInputs(**inputs)
        outputs, _ = delta_rule.chunked(given)
        return outputs

    def by_kernel(**inputs: Tensor) -> Tensor:
        given = DeltaInputs(**inputs)
        outputs, _ = kernel_calls.delta_rule(kernel, given, None, products)
        return outputs

    return _difference(by_kernel, plain, drawn, products)


def state_space_fault(
    kernel: Callable[..., Any],
    sizes: tuple[int, ...],
    tokens: int,
    products: torch.dtype,
) -> str:
    """Return what is wrong with a kernel of the recurrence of Mamba-2; "" if it is right.

    sizes: groups, heads, and the features of a key and of a value.
    """
    groups, heads, key_dim, value_dim = sizes
    length = min(tokens, MOST_TOKENS)
    key_shape = (SAMPLES, groups, length, key_dim)
    value_shape = (SAMPLES, heads, length, value_dim)
    step_shape = (SAMPLES, heads, length)
    drawn = {
        "query": _drawn(key_shape, seed=0),
        "key": _drawn(key_shape, seed=1),
        "value": _drawn(value_shape, seed=2),
        "step": _drawn(step_shape, seed=3).sigmoid(),
        "rate": _rates(heads),
    }

    def plain(**inputs: Tensor) -> Tensor:
        given = StateSpaceInputs(**inputs)
        outputs, _ = state_space.chunked(given)
        return outputs

    def by_kernel(**inputs: Tensor) -> Tensor:
        given = StateSpaceInputs(**inputs)
        outputs, _ = kernel_calls.state_space(kernel, given, None, products)
        return outputs

    return _difference(by_kernel, plain, drawn, products)


def convolution_fault(
    kernel: Callable[..., Any],
    sizes: tuple[int, ...],
    tokens: int,
    products: torch.dtype,
) -> str:
    """Return what is wrong with a kernel of the convolution and its SiLU; "" if it is right.

    sizes: features, and the tokens that the convolution sees.
    """
    features, tokens_seen = sizes
    length = min(tokens, MOST_TOKENS)
    drawn = {
        "x": _drawn((length, SAMPLES, features), seed=0),
        "weight": _drawn((features, tokens_seen), seed=1),
    }

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return F.silu(short_convolution(x, weight))

    def by_kernel(x: Tensor, weight: Tensor) -> Tensor:
        return kernel_calls.convolution(kernel, x, weight, None, None, None)

    return _difference(by_kernel, plain, drawn, products)


def _rates(heads: int) -> Tensor:
    """Return the rates at which the states of heads decay [heads], from the slowest on."""
    return torch.linspace(SLOWEST_DECAY, 1.0, heads, dtype=torch.float64, device=DEVICE)


def _drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    """Return normally distributed numbers in float64, the same for the same seed."""
    # drawn on the CPU: the same numbers on every device, and no state of a generator is changed
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return numbers.to(DEVICE)


def _difference(
    by_kernel: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    drawn: Mapping[str, Tensor],
    products: torch.dtype,
) -> str:
    """Return how the outputs and gradients of a kernel differ from those of plain torch in float64;
    "" if they are close.

    drawn: the inputs of both, in float64. They are rounded to the dtype of products first.
    """
    rounded = {name: x.to(products) for name, x in drawn.items()}
    exact_inputs = {name: x.double() for name, x in rounded.items()}
    exact = _results(plain, exact_inputs)
    try:
        # as the recurrence has its inputs, FP32; the kernel's caller rounds them again
        inputs = {name: x.float() for name, x in rounded.items()}
        computed = _results(by_kernel, inputs)
        # A kernel that has failed may be seen here: numbers are waited for.
        errors = {name: _relative_error(computed[name], result) for name, result in exact.items()}
    # Triton and compiled extensions raise errors of many kinds.
    except Exception as error:
        lines = str(error).splitlines()
        reason = next(iter(lines), type(error).__name__)
        return f"fails ({reason}) on the GPU"
    for name, relative_error in errors.items():
        tolerance = TOLERANCE_OF_SUMS if name in SUMS else TOLERANCE
        # NaN is no number within the tolerance
        if not relative_error <= tolerance:
            return f"is wrong by {relative_error:.1%} in {name} on the GPU"
    return ""


def _relative_error(computed: Tensor, exact: Tensor) -> float:
    """Return the norm of the error divided by that of the exact numbers; waits for the GPU."""
    error_norm = (computed.double() - exact).norm()
    return float(error_norm / exact.norm())


def _results(function: Callable[..., Tensor], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the outputs of a function, under "outputs", and the gradient of each of its inputs for
    a drawn gradient of the outputs, under "the gradient of NAME"."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    outputs = function(**leaves)
    grad = _drawn(tuple(outputs.shape), seed=9)
    gradients = torch.autograd.grad(outputs, [*leaves.values()], grad.to(outputs.dtype))
    results = {"outputs": outputs.detach()}
    for name, gradient in zip(leaves, gradients, strict=True):
        results[f"the gradient of {name}"] = gradient
    return results
