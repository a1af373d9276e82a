"""What one look at the gradients says about them: size, holes and whether they are finite.

The sum of squares is the only detector of inf and NaN that is needed: in float64 no sum of squares of finite
FP32 numbers can overflow, so it is finite exactly if every element is. Any other norm is taken besides.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

BLOCK = 1 << 18  # elements: what a CPU works on at a time stays in a core's cache between its uses


def blocks(values: Tensor) -> Sequence[Tensor]:
    """A flat tensor in parts that are worked on one after the other: small on a CPU, large where launching costs."""
    return values.split(BLOCK if values.device.type == "cpu" else BLOCK << 8)


def sum_of_squares(values: Tensor) -> Tensor:
    """Sum of squares of a flat tensor, float64 of shape []; not finite exactly if some element is not.

    On a CPU the blocks of an FP32 tensor are summed in FP32 and only the blocks' sums in float64, which is
    thirty times faster than converting each element. A block whose sum overflows FP32 is done again in float64.
    """
    if values.dtype == torch.float64 or values.device.type != "cpu":
        return torch.linalg.vector_norm(values, dtype=torch.float64).square()
    norms = torch.stack([torch.linalg.vector_norm(block.float()) for block in blocks(values)]).double()
    if not norms.isfinite().all():
        norms = torch.stack([torch.linalg.vector_norm(block, dtype=torch.float64) for block in blocks(values)])
    return norms.square().sum()


def statistics(gradients: Iterable[Tensor], copies: Iterable[Tensor], device: torch.device) -> Tensor:
    """float64 [2]: (sum of squares, number of zeros) over flat tensors in which every element counts once.

    copies: elements that are counted elsewhere. They make the sum NaN if one is not finite and do nothing otherwise.
    """
    squares, zeros = torch.zeros(2, dtype=torch.float64, device=device).unbind()
    for values in gradients:
        for block in blocks(values):
            squares += sum_of_squares(block)
            zeros += block.numel() - torch.count_nonzero(block)
    for values in copies:
        squares += 0 * sum_of_squares(values)
    return torch.stack((squares, zeros))


def norm_of(values: Sequence[Tensor], p: float, device: torch.device) -> Tensor:
    """The p-norm of flat tensors taken together, float64 of shape []; p may be inf. Zero for none."""
    parts = [torch.linalg.vector_norm(block.double(), p) for one in values for block in blocks(one)]
    return joined_norm(torch.stack(parts), p) if parts else torch.zeros((), dtype=torch.float64, device=device)


def joined_norm(norms: Tensor, p: float) -> Tensor:
    """The p-norm of the whole, from the p-norms [n] of its parts: relative to the largest, for p-th powers overflow."""
    largest = norms.max()
    safe = torch.where(largest > 0, largest, 1.0)
    return torch.linalg.vector_norm(norms / safe, p) * safe
