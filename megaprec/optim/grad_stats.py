"""Statistics of the gradients from one read: their norm, the number of zeros, and whether all of
them are finite.

The sum of squares is a complete detector of inf and NaN: in float64 no sum of squares of finite
FP32 numbers can overflow, so it is finite exactly if every element is. Any other norm is computed
in addition.

On a CPU, blocks that stay in a core's cache are summed in FP32, and only the sums of the blocks in
float64, which is thirty times faster than converting each element. If the sum of a block overflows
FP32, all sums are recomputed in float64. A GPU reads FP32 and accumulates in float64. The float64
norm of a single tensor would first copy the tensor to float64 there, so torch's norms of a list of
tensors are used, which make no copy.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megaprec.optim.native import Kernels

_BLOCK = 1 << 17  # elements: a block is still in a core's cache when it is read for the second time
_COUNTED = 1 << 24  # elements: the largest count that is exact in FP32


def statistics(
    gradients: Sequence[Tensor],
    copies: Sequence[Tensor],
    device: torch.device,
    kernels: Kernels | None = None,
) -> Tensor:
    """Return float64 [2]: (sum of squares, number of zeros) over flat tensors in which every
    element counts once.

    copies: elements that are counted elsewhere. They make the sum NaN if one is not finite and have
    no effect otherwise.
    kernels: C kernels for the tensors that they support; torch's operators read the others.
    """
    if kernels is not None:
        left, copies_left = (
            [v for v in values if not kernels.reads(v)] for values in (gradients, copies)
        )
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
    """Return the sum of squares of a flat tensor, float64 of shape []; it is finite exactly if all
    elements are."""
    blocks = _blocks(values)
    return _squares(_norms(blocks), blocks)


def _blocks(values: Tensor) -> Sequence[Tensor]:
    return values.split(_BLOCK if values.device.type == "cpu" else _COUNTED)


def _looked_at(blocks: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the norms of `_norms` and the numbers of nonzero elements, both [blocks].

    A CPU computes both for one block after the other, while the block is in the cache.
    """
    if blocks[0].device.type == "cpu":
        looked = [(_norm(block), block.count_nonzero()) for block in blocks]
        norms, filled = (torch.stack(column) for column in zip(*looked, strict=True))
        return norms, filled
    return _norms(blocks), torch.stack([_num_filled(block) for block in blocks])


def _num_filled(block: Tensor) -> Tensor:
    """Return the number of nonzero elements with one read; a GPU's `count_nonzero` writes their
    positions."""
    return torch.linalg.vector_norm(
        block, 0, dtype=torch.promote_types(block.dtype, torch.float32)
    ).double()


def _norms(blocks: Sequence[Tensor]) -> Tensor:
    """Return L2 norms [blocks]: on a CPU those of `_norm`, else in float64."""
    if blocks[0].device.type == "cpu":
        return torch.stack([_norm(block) for block in blocks])
    return torch.stack(torch._foreach_norm(tuple(blocks), 2, torch.float64))


def _norm(block: Tensor) -> Tensor:
    """Return the L2 norm of a block on a CPU, in FP32 unless the block is float64; in FP32 it may
    overflow."""
    return torch.linalg.vector_norm(block if block.dtype == torch.float64 else block.float())


def _squares(norms: Tensor, blocks: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of blocks with these norms."""
    squares = norms.double().square().sum()
    if norms.dtype == torch.float32 and not squares.isfinite():
        norms = torch.stack(
            [torch.linalg.vector_norm(block, dtype=torch.float64) for block in blocks]
        )
        squares = norms.square().sum()
    return squares


def norm_of(values: Iterable[Tensor], p: float, device: torch.device) -> Tensor:
    """Return the p-norm of all flat tensors together, float64 of shape []; p may be inf. For no
    tensors it is 0."""
    parts = [
        joined_norm(block.double().abs(), p)
        for one in values
        for block in _blocks(one)
        if len(block)
    ]
    if parts:
        return joined_norm(torch.stack(parts), p)
    return torch.zeros((), dtype=torch.float64, device=device)


def joined_norm(norms: Tensor, p: float) -> Tensor:
    """Return the p-norm of a whole from the p-norms [n] of its parts.

    The sum is relative to the largest norm, because p-th powers overflow. The result is not finite
    if one of the norms is not.
    """
    largest = norms.max()
    safe = torch.where(largest > 0, largest, 1.0)
    return torch.linalg.vector_norm(norms / safe, p) * safe
