# ruff: noqa: ANN001, ANN202 (Triton would take annotations of a kernel for its own)
"""Weight gradients of several experts, added to their FP32 totals in one kernel of Triton.

    total[e] += grad[rows of e].T @ x[rows of e]

torch's grouped product rounds its result to the dtype of the factors, and a second pass over all of
it adds to the totals. This kernel sums in FP32 and adds at once. Each of its programs computes a
square of one expert's total, over the rows of this expert in their order, so the sums have the same
bits each time; a total whose expert has no rows stays as it is.

Triton is optional, and this module needs it: see `sums_in_triton` in `grouped_products.py`.
"""

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

# The side of a program's square of a total, and the rows that it reads at a time.
_SIDE = 128
_DEPTH = 64
_TRIAL_TOLERANCE = 1e-3


def add_products_(
    totals: Tensor,
    grad: Tensor,
    x: Tensor,
    ends: Tensor,
    first: bool,
) -> None:
    """Add grad[rows of e].T @ x[rows of e] to totals[e], in place.

    totals: FP32 [experts, n, k], whose matrices are contiguous and lie at equal distances.
    grad, x: [m, n] and [m, k], in bf16 or FP16.
    ends: int32 [experts], the end of each expert's rows.
    first: overwrite `totals` instead.
    """
    experts, n, k = totals.shape
    squares = triton.cdiv(n, _SIDE) * triton.cdiv(k, _SIDE)
    _add_square[(squares, experts)](  # pyright: ignore[reportIndexIssue]
        totals,
        grad.contiguous(),
        x.contiguous(),
        ends,
        n,
        k,
        totals.stride(0),
        first,
        _SIDE,
        _DEPTH,
        num_warps=8,
        num_stages=3,
    )


def computes_the_sums(device: torch.device) -> bool:
    """Return True if on this device `add_products_` adds what torch's products give, and writes
    nothing beside the totals. It is tried on drawn numbers."""
    random = torch.Generator().manual_seed(0)
    # more than one block of rows, an expert without rows, and sizes that fill no square
    ends = (70, 70, 100)
    n = 136
    k = 72
    gap = 8  # elements between two totals
    grad = torch.randn(100, n, generator=random).bfloat16()
    x = torch.randn(100, k, generator=random).bfloat16()
    flat = torch.randn(3, n * k + gap, generator=random)
    return all(_adds(flat, grad, x, ends, first, device) for first in (False, True))


def _adds(
    flat: Tensor,
    grad: Tensor,
    x: Tensor,
    ends: tuple[int, ...],
    first: bool,
    device: torch.device,
) -> bool:
    """Return True if the kernel adds products of grad and x to totals as torch does on a CPU.

    flat: [experts, n * k and more], each row of which begins with the total of an expert. grad, x,
    ends and first are those of `add_products_`, on the CPU.
    """
    n = grad.shape[1]
    k = x.shape[1]
    computed = flat.to(device, copy=True)
    add_products_(
        computed[:, : n * k].unflatten(1, (n, k)),
        grad.to(device),
        x.to(device),
        torch.tensor(ends, dtype=torch.int32, device=device),
        first,
    )
    expected = flat.clone()
    start = 0
    for total, stop in zip(expected[:, : n * k], ends, strict=True):
        product = grad[start:stop].float().t() @ x[start:stop].float()
        if first:
            total.zero_()
        total.add_(product.flatten())
        start = stop
    return torch.allclose(computed.cpu(), expected, rtol=_TRIAL_TOLERANCE, atol=_TRIAL_TOLERANCE)


@triton.jit
def _add_square(
    totals,
    grad,
    x,
    ends,
    n,
    k,
    distance,
    first: tl.constexpr,
    side: tl.constexpr,
    depth: tl.constexpr,
):
    """Add the products to one square, side x side elements, of the total of one expert.

    The program's first number is that of the square, its second that of the expert. distance:
    elements from one total to the next. depth: rows that are read at a time. The others are as in
    `add_products_`.
    """
    squares_down = tl.cdiv(n, side)
    squares_across = tl.cdiv(k, side)
    square = tl.program_id(0)
    down = square // squares_across
    across = square % squares_across
    # Programs that run at a time work on neighbouring squares, which share what they read.
    down, across = tl.swizzle2d(down, across, squares_down, squares_across, 8)
    outputs = down * side + tl.arange(0, side)
    inputs = across * side + tl.arange(0, side)
    expert = tl.program_id(1)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    stop = tl.load(ends + expert)
    # Nothing to add; but a first gradient overwrites, with zeros.
    if start == stop and not first:
        return
    result = tl.zeros((side, side), dtype=tl.float32)
    for row in range(start, stop, depth):
        rows = row + tl.arange(0, depth)
        is_row = rows[:, None] < stop
        # 64 bits: rows times features may be more than 2**31 elements
        rows = rows.to(tl.int64)[:, None]
        of_outputs = tl.load(grad + rows * n + outputs, mask=is_row & (outputs < n), other=0.0)
        of_inputs = tl.load(x + rows * k + inputs, mask=is_row & (inputs < k), other=0.0)
        result = tl.dot(tl.trans(of_outputs), of_inputs, result)
    elements = expert.to(tl.int64) * distance + outputs.to(tl.int64)[:, None] * k + inputs
    is_element = (outputs[:, None] < n) & (inputs < k)
    if not first:
        result += tl.load(totals + elements, mask=is_element, other=0.0)
    tl.store(totals + elements, result, mask=is_element)
