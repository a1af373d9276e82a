"""Compiled leaves: one compiled form for each call, tried before it is used.

torch's compiler may be missing, break or compute something else, and a compiled leaf is called in
every step of a run. So each form is compared with its leaf on random numbers, and one that differs
by more than rounding is not taken.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from parallel.leaves import Call

# Units in the last place of the largest number, by which a compiled form may differ on trial. Sums
# of thousands of numbers in another order differ by a few; 0.1 % is 8,000 of them in FP32.
TOLERANCE = 64


def inductor(
    graph: GraphModule,
    examples: list[Tensor],
) -> Callable[..., Any]:
    """Return a graph compiled by torch, a function of tensors like `examples`.

    Raises what torch's compiler raises.
    """
    module: Any = importlib.import_module("torch._inductor")  # here: it takes two seconds
    # each rank is a process already
    return module.compile(graph, examples, options={"compile_threads": 1})


def compiled(call: Call) -> Callable[..., Any]:
    """Return the compiled form of a call: a function of its tensors.

    Raises what torch's compiler raises.
    """
    examples = call.example_tensors()
    graph = make_fx(lambda *tensors: call.run(tensors))(*examples)
    return inductor(graph, examples)


def trial_difference(call: Call, compiled_form: Callable[..., Any]) -> str:
    """Return in words how a compiled form differs from its leaf on trial, "" if it does not."""
    tensors = call.example_tensors()
    # copies, because a leaf may write to its arguments
    first_copies = [_copy(tensor) for tensor in tensors]
    results = _as_tuple(compiled_form(*first_copies))
    second_copies = [_copy(tensor) for tensor in tensors]
    expected = _as_tuple(call.run(second_copies))
    if all(_is_close(*pair) for pair in zip(results, expected, strict=True)):
        return ""
    return "its compiled form computes other numbers"


def _copy(x: Tensor) -> Tensor:
    """Return a copy with the same strides, which a clone need not have."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def _as_tuple(results: Any) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


def _is_close(result: Tensor, expected: Tensor) -> bool:
    """Return True if two results differ by rounding only."""
    if (
        result.shape != expected.shape
        or result.stride() != expected.stride()
        or result.dtype != expected.dtype
    ):
        return False
    if not expected.dtype.is_floating_point:
        return torch.equal(result, expected)
    return differ_by_rounding(result, expected, torch.finfo(expected.dtype).eps)


def differ_by_rounding(
    result: Tensor,
    expected: Tensor,
    eps: float,
) -> bool:
    """Return True if two tensors differ by rounding only.

    eps: of the dtype in which they were rounded.
    """
    difference = (result.double() - expected.double()).abs().max()
    return bool(difference <= TOLERANCE * eps * expected.double().abs().max())
