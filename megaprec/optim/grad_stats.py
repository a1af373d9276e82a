"""What one look at the gradients says about them: size, holes and whether they are finite.

The sum of squares is the only detector of inf and NaN that is needed: in float64 no sum of squares of finite
FP32 numbers can overflow, so it is finite exactly if every element is. Any other norm is taken besides.

On a CPU blocks that stay in a core's cache are summed in FP32 and only the blocks' sums in float64, which is thirty
times faster than converting each element. If a block's sum overflows FP32, all is done again in float64. A GPU sums in
float64 what it reads as FP32; asked for one tensor's norm in float64 it would make a copy in float64 first, and so
torch's norms of a list of tensors are taken, which do not.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megaprec.optim.native import Kernels

_BLOCK = 1 << 17  # elements: small enough to be found in a core's cache when they are looked at for the second time
_COUNTED = 1 << 24  # elements: so many can be counted in FP32, one by one


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
    if not counted:
        numbers = torch.zeros(2, dtype=torch.float64, device=device)
    else:
        norms, filled = _looked_at(counted)
        total = sum(block.numel() for block in counted)
        numbers = torch.stack((_squares(norms, counted), (total - filled.sum()).double()))
    others = [block for values in copies for block in _blocks(values)]
    if others:
        numbers[0] += 0 * _squares(_norms(others), others)
    return numbers


def sum_of_squares(values: Tensor) -> Tensor:
    """Sum of squares of a flat tensor, float64 of shape []; not finite exactly if some element is not."""
    blocks = _blocks(values)
    return _squares(_norms(blocks), blocks)


def _blocks(values: Tensor) -> Sequence[Tensor]:
    return values.split(_BLOCK if values.device.type == "cpu" else _COUNTED)


def _looked_at(blocks: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Norms as below, and how many elements are not zero, both [blocks]. A CPU takes both of a block in turn, while it
    is in the cache."""
    if blocks[0].device.type == "cpu":
        looked = [(_norm(block), block.count_nonzero()) for block in blocks]
        norms, filled = (torch.stack(column) for column in zip(*looked, strict=True))
        return norms, filled
    return _norms(blocks), torch.stack([_num_filled(block) for block in blocks])


def _num_filled(block: Tensor) -> Tensor:
    """How many elements are not zero, by one read; `count_nonzero` of a GPU writes down which."""
    return torch.linalg.vector_norm(block, 0, dtype=torch.promote_types(block.dtype, torch.float32)).double()


def _norms(blocks: Sequence[Tensor]) -> Tensor:
    """L2 norms [blocks], on a CPU as below, else in float64."""
    if blocks[0].device.type == "cpu":
        return torch.stack([_norm(block) for block in blocks])
    return torch.stack(torch._foreach_norm(tuple(blocks), 2, torch.float64))


def _norm(block: Tensor) -> Tensor:
    """L2 norm of a block that a CPU has, in FP32 but for float64; in FP32 it may overflow."""
    return torch.linalg.vector_norm(block if block.dtype == torch.float64 else block.float())


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
