"""What one look at the gradients says about them: size, holes and whether they are finite.

The sum of squares is the only detector of inf and NaN that is needed: in float64 no sum of squares of finite
FP32 numbers can overflow, so it is finite exactly if every element is.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

_BLOCK = 1 << 18  # elements: a block of FP32 gradients stays in a core's cache between its two uses


def sum_of_squares(values: Tensor) -> Tensor:
    """Sum of squares of a flat tensor, float64 of shape []; not finite exactly if some element is not.

    On a CPU the blocks of an FP32 tensor are summed in FP32 and only the blocks' sums in float64, which is
    thirty times faster than converting each element. A block whose sum overflows FP32 is done again in float64.
    """
    if values.dtype != torch.float32 or values.device.type != "cpu":
        return torch.linalg.vector_norm(values, dtype=torch.float64).square()
    norms = torch.stack([torch.linalg.vector_norm(block) for block in values.split(_BLOCK)]).double()
    if not norms.isfinite().all():
        norms = torch.stack([torch.linalg.vector_norm(block, dtype=torch.float64) for block in values.split(_BLOCK)])
    return norms.square().sum()


def statistics(gradients: Iterable[Tensor], copies: Iterable[Tensor], device: torch.device) -> Tensor:
    """float64 [2]: (sum of squares, number of zeros) over flat tensors in which every element counts once.

    copies: elements that are counted elsewhere. They make the sum NaN if one is not finite and do nothing otherwise.
    """
    squares, zeros = torch.zeros(2, dtype=torch.float64, device=device).unbind()
    for values in gradients:
        for block in values.split(_BLOCK if device.type == "cpu" else max(1, values.numel())):
            squares += sum_of_squares(block)
            zeros += block.numel() - torch.count_nonzero(block)
    for values in copies:
        squares += 0 * sum_of_squares(values)
    return torch.stack((squares, zeros))
