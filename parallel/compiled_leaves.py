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

TOLERANCE = (
    64  # units in the last place of the largest number by which a compiled form may differ on trial
)


def inductor(graph: GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
    """Return a graph compiled by torch, a function of tensors like `examples`. Raises what torch's
    compiler raises."""
    module: Any = importlib.import_module("torch._inductor")  # here: it takes two seconds
    # each rank is a process already
    return module.compile(graph, examples, options={"compile_threads": 1})


def compiled(call: Call) -> Callable[..., Any]:
    """Return the compiled form of a call: a function of its tensors. Raises what torch's compiler
    raises."""
    examples = [a for a in call.made() if isinstance(a, Tensor)]
    return inductor(make_fx(lambda *tensors: call.bound(tensors))(*examples), examples)


def hindrance(call: Call, made: Callable[..., Any]) -> str:
    """Return how a compiled form differs from its leaf on trial, "" if it does not."""
    arguments = call.made()
    tensors = [a for a in arguments if isinstance(a, Tensor)]
    results = made(*map(_copy, tensors))  # copies, because a leaf may write to its arguments
    expected = call.bound(list(map(_copy, tensors)))
    pairs = zip(_all(results), _all(expected), strict=True)
    if all(_close(result, wanted) for result, wanted in pairs):
        return ""
    return "its compiled form computes other numbers"


def _copy(x: Tensor) -> Tensor:
    """Return a copy with the same strides, which a clone need not have."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def _all(results: Any) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


def _close(result: Tensor, wanted: Tensor) -> bool:
    """Return True if two results differ by rounding only."""
    if (result.shape, result.stride(), result.dtype) != (
        wanted.shape,
        wanted.stride(),
        wanted.dtype,
    ):
        return False
    if not wanted.dtype.is_floating_point:
        return torch.equal(result, wanted)
    return rounded_apart(result, wanted, torch.finfo(wanted.dtype).eps)


def rounded_apart(result: Tensor, wanted: Tensor, eps: float) -> bool:
    """Return True if two tensors differ by rounding only. eps: of the dtype in which they were
    rounded."""
    apart = (result.double() - wanted.double()).abs().max()
    return bool(apart <= TOLERANCE * eps * wanted.double().abs().max())
