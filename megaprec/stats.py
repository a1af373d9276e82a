"""What one look at the gradients says about them: size, holes and whether they are finite.

The sum of squares is the only detector of inf and NaN that is needed: in float64 no sum of squares of finite
FP32 numbers can overflow, so it is finite exactly if every element is. Any other norm is taken besides.

On a CPU blocks that stay in a core's cache are summed in FP32 and only the blocks' sums in float64, which is thirty
times faster than converting each element. If a block's sum overflows FP32, all is done again in float64.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megaprec.native import Kernels

_BLOCK = 1 << 17  # elements: small enough to be found in a core's cache when they are looked at for the second time


def statistics(
    gradients: Sequence[Tensor], copies: Sequence[Tensor], device: torch.device, kernels: Kernels | None = None
) -> Tensor:
    """float64 [2]: (sum of squares, number of zeros) over flat tensors in which every element counts once.

    copies: elements that are counted elsewhere. They make the sum NaN if one is not finite and do nothing otherwise.
    kernels: read what they can; the rest is left to torch's operators.
    """
    if kernels is not None:
        left, copies_left = ([v for v in values if not kernels.reads(v)] for values in (gradients, copies))
        numbers = statistics(left, copies_left, device)
        for values in filter(kernels.reads, gradients):
            numbers += kernels.statistics(values)
        for values in filter(kernels.reads, copies):
            numbers[0] += 0 * kernels.statistics(values)[0]
        return numbers
    counted = [block for values in gradients for block in _blocks(values)]
    looked = [(_norm(block), block.count_nonzero()) for block in counted]
    total = sum(block.numel() for block in counted)
    if not looked:
        numbers = torch.zeros(2, dtype=torch.float64, device=device)
    else:
        norms, filled = (torch.stack(column) for column in zip(*looked, strict=True))
        numbers = torch.stack((_squares(norms, counted), (total - filled.sum()).double()))
    others = [block for values in copies for block in _blocks(values)]
    if others:
        numbers[0] += 0 * _squares(torch.stack([_norm(block) for block in others]), others)
    return numbers


def sum_of_squares(values: Tensor) -> Tensor:
    """Sum of squares of a flat tensor, float64 of shape []; not finite exactly if some element is not."""
    blocks = _blocks(values)
    return _squares(torch.stack([_norm(block) for block in blocks]), blocks)


def _blocks(values: Tensor) -> Sequence[Tensor]:
    return values.split(_BLOCK if values.device.type == "cpu" else max(1, values.numel()))


def _norm(block: Tensor) -> Tensor:
    """L2 norm, in FP32 on a CPU, where it may overflow, else in float64."""
    if block.device.type != "cpu" or block.dtype == torch.float64:
        return torch.linalg.vector_norm(block, dtype=torch.float64)
    return torch.linalg.vector_norm(block.float())


def _squares(norms: Tensor, blocks: Sequence[Tensor]) -> Tensor:
    """The sum of squares of blocks with these norms."""
    squares = norms.double().square().sum()
    if norms.dtype == torch.float32 and not squares.isfinite():
        norms = torch.stack([torch.linalg.vector_norm(block, dtype=torch.float64) for block in blocks])
        squares = norms.square().sum()
    return squares


def norm_of(values: Iterable[Tensor], p: float, device: torch.device) -> Tensor:
    """The p-norm of flat tensors taken together, float64 of shape []; p may be inf. Zero for none."""
    parts = [joined_norm(block.double().abs(), p) for one in values for block in _blocks(one) if len(block)]
    return joined_norm(torch.stack(parts), p) if parts else torch.zeros((), dtype=torch.float64, device=device)


def joined_norm(norms: Tensor, p: float) -> Tensor:
    """The p-norm of the whole, from the p-norms [n] of its parts: relative to the largest, for p-th powers overflow.

    Not finite if one of them is not.
    """
    largest = norms.max()
    safe = torch.where(largest > 0, largest, 1.0)
    return torch.linalg.vector_norm(norms / safe, p) * safe
