"""Statistics of the gradients from one read: their norm, the number of zeros, and whether all of
them are finite.

The sum of squares is a complete detector of inf and NaN: in float64 no sum of squares of finite
FP32 numbers can overflow, so it is finite exactly if every element is. (Float64 gradients above
1e154 overflow it, and count as not finite.) Any other norm is computed in addition.

On a CPU, short rows are summed in FP32, and only the sums of the rows in float64, which is three
times as fast as converting each element. A norm is right to 2e-7: the squares of a long block are
too low by 3e-6 and more when they are summed in FP32. If the sum of a row overflows FP32, or if
squares vanish in it, all sums are recomputed in float64. A GPU reads FP32 and accumulates in
float64. The float64 norm of a single tensor would first copy the tensor to float64 there, so
torch's norms of a list of tensors are used, which make no copy.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megaprec.leaf_calls import CallLeaf
from megaprec.optim.decision.one_pass import statistics_in_one_pass
from megaprec.torch_private import foreach_norm

# elements: a block is still in a core's cache when it is read for the second time
_CPU_BLOCK = 1 << 17
# elements: squares that are summed in FP32; the rounding errors of equal ones add up, to 1.3e-7 of
# the norm for 64 and to 2.9e-7 for 256
_CPU_ROW = 64
# below this root mean square, squares of elements that contribute are not normal numbers in FP32
_LEAST_RMS = 1e-14
_GPU_BLOCK = 1 << 24  # elements: the largest count that is exact in FP32


def statistics(
    gradients: Sequence[Tensor],
    counted_elsewhere: Sequence[Tensor],
    device: torch.device,
    call: CallLeaf | None = None,
) -> Tensor:
    """Return float64 [2]: (sum of squares, number of zeros) over flat tensors in which every
    element counts once.

    counted_elsewhere: elements that another rank counts. They make the sum NaN if one is not finite
    and have no effect otherwise.
    call: calls the leaf that computes both numbers in one read; None: two reads compute them.
    """
    counted_blocks = _all_blocks(gradients)
    if counted_blocks and call is not None:
        counted = statistics_in_one_pass(call, gradients, lambda run: _squares_and_zeros([run]))
    elif counted_blocks:
        counted = _squares_and_zeros(counted_blocks)
    else:
        counted = torch.zeros(2, dtype=torch.float64, device=device)
    copied_blocks = _all_blocks(counted_elsewhere)
    if copied_blocks:
        counted[0] += 0 * _sum_of_squares(copied_blocks)  # 0, or NaN if they are not finite
    return counted


def _squares_and_zeros(blocks: Sequence[Tensor]) -> Tensor:
    """Return float64 [2]: (sum of squares, number of zeros) over blocks."""
    squares, num_nonzero = _squares_and_nonzero(blocks)
    num_elements = sum(block.numel() for block in blocks)
    num_zeros = num_elements - num_nonzero
    return torch.stack((squares, num_zeros.double()))  # no wait of the host


def sum_of_squares(values: Tensor) -> Tensor:
    """Return the sum of squares of a flat tensor, float64 of shape []; it is finite exactly if all
    elements are."""
    return _sum_of_squares(_blocks(values))


def _blocks(values: Tensor) -> Sequence[Tensor]:
    """Return views of a flat tensor, each of a length that suits the device."""
    length = _CPU_BLOCK if values.device.type == "cpu" else _GPU_BLOCK
    return values.split(length)


def _all_blocks(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return views of flat tensors, as `_blocks` cuts them, one tensor after the other."""
    blocks: list[Tensor] = []
    for values in tensors:
        blocks += _blocks(values)
    return blocks


def _squares_and_nonzero(blocks: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the sum of squares of `_sum_of_squares` and the number of nonzero elements.

    A CPU computes both for one block after the other, while the block is in the cache.
    """
    if blocks[0].device.type != "cpu":
        num_nonzero = torch.stack([_num_nonzero(block) for block in blocks])
        return _sum_of_squares(blocks), num_nonzero.sum()
    squares: list[Tensor] = []
    counts: list[Tensor] = []
    for block in blocks:
        squares.append(_squares_by_rows(block))
        counts.append(block.count_nonzero())
    sum_of_all = _checked(torch.stack(squares).sum(), blocks)
    num_nonzero = torch.stack(counts).sum()
    return sum_of_all, num_nonzero


def _num_nonzero(block: Tensor) -> Tensor:
    """Return the number of nonzero elements with one read; a GPU's `count_nonzero` writes their
    positions."""
    dtype = torch.promote_types(block.dtype, torch.float32)
    return torch.linalg.vector_norm(block, 0, dtype=dtype).double()


def _sum_of_squares(blocks: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of blocks of one device, float64 of shape []."""
    if blocks[0].device.type != "cpu":
        norms = torch.stack(list(foreach_norm(blocks, 2, torch.float64)))
        return norms.square().sum()
    squares = torch.stack([_squares_by_rows(block) for block in blocks])
    return _checked(squares.sum(), blocks)


def _squares_by_rows(block: Tensor) -> Tensor:
    """Return the sum of squares of a block on a CPU, float64 of shape []: rows are summed in FP32,
    unless the block is float64, and may overflow."""
    if block.dtype != torch.float64:
        block = block.float()
    rows_stop = len(block) // _CPU_ROW * _CPU_ROW  # the end of the last whole row
    rows = block[:rows_stop].view(-1, _CPU_ROW)
    norms = torch.linalg.vector_norm(rows, dim=1).double()
    squares = norms.square().sum()
    if rows_stop < len(block):
        rest_norm = torch.linalg.vector_norm(block[rows_stop:]).double()
        squares += rest_norm.square()
    return squares


def _checked(squares: Tensor, blocks: Sequence[Tensor]) -> Tensor:
    """Return `squares`, the sum over rows of these blocks, or compute it again in float64 if FP32
    may have overflowed or lost small squares."""
    num_elements = sum(block.numel() for block in blocks)
    least_squares = num_elements * _LEAST_RMS**2
    # inf and NaN are computed again too: the gradients may be finite
    if squares.isfinite() and squares >= least_squares:
        return squares
    norms: list[Tensor] = []
    for block in blocks:
        norms.append(torch.linalg.vector_norm(block, dtype=torch.float64))
    return torch.stack(norms).square().sum()


def norm_of(tensors: Iterable[Tensor], order: float, device: torch.device) -> Tensor:
    """Return the norm of all flat tensors together, float64 of shape []; its order may be inf. For
    no tensors it is 0."""
    norms: list[Tensor] = []
    for block in _all_blocks(tensors):
        if len(block):
            magnitudes = block.double().abs()
            norms.append(joined_norm(magnitudes, order))
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return joined_norm(torch.stack(norms), order)


def joined_norm(norms: Tensor, order: float) -> Tensor:
    """Return the norm of all parts together from the norms [n] of the parts.

    The sum is relative to the largest norm, because powers overflow. The result is not finite if
    one of the norms is not.
    """
    largest = norms.max()
    divisor = torch.where(largest > 0, largest, 1.0)  # of zeros alone the norm is 0, not NaN
    return torch.linalg.vector_norm(norms / divisor, order) * divisor
