"""Compiled leaves: one compiled form for each call, tried before it is used.

torch's compiler may be missing, break or compute something else, and a compiled leaf is called in
every step of a run. So each form and its leaf are compared, on random numbers, with the leaf in
float64, and a form that is further from it than rounding explains is not taken.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from parallel.leaves import LeafCall

# How much larger the error of a compiled form may be than that of its function. Both are measured
# from the function on the same numbers in float64, which is right where they round.
ERROR_RATIO = 2.0
# What either may be off besides, in units of the last place of FP32 (of float64 for its own
# results) of the largest number: sums of thousands of numbers in another order differ by a few.
SUMMATION_NOISE = 64
SAMPLED_ROWS = 1024  # of a leaf that computes each row by itself


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


def compiled(call: LeafCall) -> Callable[..., Any]:
    """Return the compiled form of a call: a function of its tensors.

    Raises what torch's compiler raises.
    """
    examples = call.example_tensors()
    graph = make_fx(lambda *tensors: call.run(tensors))(*examples)
    return inductor(graph, examples)


def trial_difference(call: LeafCall, compiled_form: Callable[..., Any]) -> str:
    """Return in words how the results of a compiled form differ from those of its leaf on random
    numbers, "" if by rounding only."""
    tensors = call.example_tensors()
    # copies, because a leaf may write to its arguments
    arguments = map(copied, tensors)
    computed = _as_tuple(compiled_form(*arguments))
    if call.is_row_by_row:
        # float64 copies of all logits would not fit
        sample = _sampled_rows(len(tensors[0]), tensors[0].device)
        tensors = [tensor[sample] for tensor in tensors]
        computed = tuple(result[sample] for result in computed)
    arguments = map(copied, tensors)
    plain = _as_tuple(call.run(arguments))
    exact_inputs = [copied(tensor, in_float64=True) for tensor in tensors]
    exact = _as_tuple(call.in_float64().run(exact_inputs))
    for result, expected in zip(computed, plain, strict=True):
        if result.stride() != expected.stride():
            return "its compiled form has other strides"
    return difference(computed, plain, exact)


def _sampled_rows(count: int, device: torch.device) -> Tensor:
    """Return the numbers of at most SAMPLED_ROWS of `count` rows: the first and the last, where a
    kernel's blocks begin and end."""
    rows = torch.arange(count, device=device)
    if count <= SAMPLED_ROWS:
        return rows
    half = SAMPLED_ROWS // 2
    return torch.cat((rows[:half], rows[-half:]))


def difference(
    computed: Sequence[Tensor],
    plain: Sequence[Tensor],
    exact: Sequence[Tensor],
) -> str:
    """Return in words how compiled results differ from those of the plain function, "" if by
    rounding only.

    exact: those of the function on the same numbers in float64.
    """
    for result, expected, reference in zip(computed, plain, exact, strict=True):
        if result.shape != expected.shape or result.dtype != expected.dtype:
            return "its compiled form has results of another form"
        if not _rounds_as_well(result, expected, reference):
            return "its compiled form computes other numbers"
    return ""


def copied(x: Tensor, in_float64: bool = False) -> Tensor:
    """Return a copy with the same strides, which a clone need not have.

    in_float64: floating-point numbers in that dtype.
    """
    dtype = torch.float64 if in_float64 and x.dtype.is_floating_point else x.dtype
    copy = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=x.device)
    return copy.copy_(x)


def _as_tuple(results: Any) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


def _rounds_as_well(
    computed: Tensor,
    plain: Tensor,
    exact: Tensor,
) -> bool:
    """Return True if a compiled result is about as close to the exact one as the plain one is.

    Results that are not of floating point must be equal. exact: of float64.
    """
    if not plain.dtype.is_floating_point:
        return torch.equal(computed, plain)
    if not exact.numel():
        return True
    exact = exact.double()
    error = (computed.double() - exact).abs()
    is_fp8 = plain.dtype.itemsize == 1
    if is_fp8:
        # a number near the middle of two codes may be rounded to either: off by a step at most
        info = torch.finfo(plain.dtype)
        smallest_step = info.tiny * info.eps
        steps = (exact.abs() * info.eps).clamp(min=smallest_step)
        is_within = error <= steps
        return bool(is_within.all())
    sum_dtype = torch.promote_types(plain.dtype, torch.float32)
    noise = SUMMATION_NOISE * torch.finfo(sum_dtype).eps * exact.abs().max()
    plain_error = (plain.double() - exact).abs()
    allowed = ERROR_RATIO * plain_error.max() + noise
    # NaN is not at most anything
    return bool(error.max() <= allowed)
