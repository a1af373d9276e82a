"""Random numbers that do not depend on the layout.

Every number is a function of a key (the seed and a name) and of the logical index of the element
for which it is drawn. There is no generator state, so the numbers do not depend on which rank draws
them, in which order, or how often: initial weights and dropout masks are equal in every layout, on
every device and in recomputation, and a checkpoint contains no random state.

The numbers are SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
2014) used as a counter-based generator, in torch's wrapping int64 arithmetic.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from hashlib import blake2b
from itertools import pairwise, product
from math import prod
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from megaprec.comm.layout import Part

# the constants of SplitMix64, less 2**64: as signed 64-bit numbers
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX2 = 0x94D049BB133111EB - 2**64
# elements that a thread draws at a time: fewer than those for which torch starts threads of its own
_BLOCK = 24_000
# 2**_SEGMENTS lines approximate the quantile within each factor of two of a probability
_SEGMENTS = 8


def key(seed: int, *names: object) -> int:
    """Return a signed 64-bit hash of the seed and the names."""
    text = repr((seed, *names))
    digest = blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def bits(key: int | Tensor, index: Tensor) -> Tensor:
    """Return 64 random bits (int64) for each int64 element of `index`, in its shape.

    key: a number or a scalar tensor.
    """
    state = index * _GAMMA + key
    state = (state ^ _shift(state, 30)) * _MIX1
    state = (state ^ _shift(state, 27)) * _MIX2
    return state ^ _shift(state, 31)


def keep(
    key: int | Tensor,
    index: Tensor,
    probability: float,
) -> Tensor:
    """Return a bool for each element of `index`, True with `probability`.

    The comparison is in integers, so the result is equal on every device.
    """
    uniform = _shift(bits(key, index), 11)  # 53 bits, as many as a probability in float64 has
    limit = int(probability * 2**53)
    return uniform < limit


def keep_each(
    key: int | Tensor,
    index: Tensor,
    probabilities: Tensor,
) -> Tensor:
    """Return a bool for each element of `index`, True with its own probability, float32 of the same
    shape from 0 to 1: exactly those of `keep`."""
    uniform = _shift(bits(key, index), 11)
    limits = (probabilities.double() * 2**53).to(torch.int64)
    return uniform < limits


def normal(key: int, index: Tensor) -> Tensor:
    """Return a float32 number, standard normal, for each element of `index`."""
    # one word of random bits makes the numbers of two indices
    pairs = _normal_pairs(bits(key, index >> 1))
    number_in_pair = (index & 1).unsqueeze(-1)
    return pairs.gather(-1, number_in_pair).squeeze(-1)


def normal_part(
    part: Part,
    seed: int,
    std: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return the slice `part` of a logical tensor of normal numbers: [*part.local], drawn on the
    CPU."""
    return normal_range(part, 0, prod(part.local), seed, std, dtype).view(part.local)


def normal_range(
    part: Part,
    first: int,
    last: int,
    seed: int,
    std: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return elements [first, last) of the flattened slice `part` of a logical tensor of normal
    numbers, drawn on the CPU.

    The slice is drawn as a matrix: each of its rows is a run of consecutive elements of the logical
    tensor.
    """
    dim = part.dim or 0
    row_length = max(1, prod(part.local[dim:]))  # a slice may have no elements
    row_stride = prod(part.shape[dim:])  # from row to row in the logical tensor
    offset = part.start * prod(part.shape[dim + 1 :])  # of the first row
    values = torch.empty(last - first, dtype=dtype)
    tensor_key = key(seed, part.name)
    # three runs, each a matrix: the rest of a row, whole rows, and the beginning of a row
    whole_start = min(last, -(-first // row_length) * row_length)  # the next beginning of a row
    whole_stop = max(whole_start, last // row_length * row_length)
    for start, stop in pairwise((first, whole_start, whole_stop, last)):
        if start == stop:
            continue
        row, column = divmod(start, row_length)
        num_rows = max(1, (stop - start) // row_length)
        matrix = values[start - first : stop - first].view(num_rows, -1)
        first_index = row * row_stride + offset + column  # in the logical tensor
        _fill_normal(matrix, tensor_key, first_index, row_stride, std)
    return values


def _fill_normal(
    values: Tensor,
    tensor_key: int,
    first_index: int,
    row_stride: int,
    std: float,
) -> None:
    """Fill the matrix `values` with normal numbers of deviation `std`, which several threads draw.

    Row r has the numbers of the consecutive logical indices from first_index + r * row_stride on.
    """
    row_length = values.shape[1]
    rows_in_block = max(1, _BLOCK // row_length)

    def fill_block(first_row: int, first_column: int) -> None:
        rows_of_values = values[first_row : first_row + rows_in_block]
        block = rows_of_values[:, first_column : first_column + _BLOCK]
        rows = torch.arange(first_row, first_row + len(block))
        starts = rows * row_stride + (first_index + first_column)
        drawn = _normal_runs(tensor_key, starts, block.shape[1])
        block.copy_(drawn.to(values.dtype).mul_(std))  # rounded before it is scaled

    first_rows = range(0, len(values), rows_in_block)
    first_columns = range(0, row_length, _BLOCK)
    blocks = list(product(first_rows, first_columns))
    if len(blocks) < 2:
        for first_row, first_column in blocks:
            fill_block(first_row, first_column)
        return
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        futures = [pool.submit(fill_block, *block) for block in blocks]
    for future in futures:
        future.result()  # raises what a block raised


def _normal_runs(
    key: int,
    starts: Tensor,
    length: int,
) -> Tensor:
    """Return the numbers of `length` consecutive indices from each of `starts`: float32 [starts,
    length]."""
    # One word gives the numbers of two indices, so a run from an odd index begins within a word.
    is_odd = starts & 1
    first_words = (starts >> 1).unsqueeze(-1)
    num_words = length // 2 + 1
    words = first_words + torch.arange(num_words, device=starts.device)
    drawn = _normal_pairs(bits(key, words)).flatten(1)
    if bool((is_odd == is_odd[:1]).all()):
        # a view, which is faster than to gather
        first_column = int(is_odd[0])
        return drawn[:, first_column : first_column + length]
    columns = torch.arange(length, device=starts.device)
    return drawn.gather(1, is_odd.unsqueeze(-1) + columns)


def _normal_pairs(words: Tensor) -> Tensor:
    """Return two standard normal numbers for each word of 64 bits: float32 [*words, 2].

    32 bits make one number: a sign, and a probability of at most 1/2 whose quantile is interpolated
    in a table. Every operation is one of integers or a single rounding of IEEE 754, so the numbers
    are equal on every device.
    """
    halves = words.unsqueeze(-1).view(torch.int32)
    probability = (halves & 0x7FFFFFFF).float().add_(0.5)  # in units of 2**-32
    # the exponent and the first _SEGMENTS of the 23 bits of the mantissa
    segments = probability.view(torch.int32) >> (23 - _SEGMENTS)
    segment = segments.flatten()
    lines = _quantile_lines()
    all_values = lines.values.to(words.device)
    all_slopes = lines.slopes.to(words.device)
    values = all_values.index_select(0, segment).view(halves.shape)
    slopes = all_slopes.index_select(0, segment).view(halves.shape)
    quantile = slopes.mul_(probability).add_(values)
    sign = halves.view(torch.float32)  # the highest of the 32 bits
    return torch.copysign(quantile, sign)


class _Lines(NamedTuple):
    """Lines of one variable, one for each segment: their values at 0 and their slopes, float32."""

    values: Tensor
    slopes: Tensor


@cache
def _quantile_lines() -> _Lines:
    """Return the lines that approximate the normal quantile.

    The segment of a probability p, in units of 2**-32, is the exponent and the first bits of the
    float32 p, so each factor of two has 2**_SEGMENTS segments. A line is exact at both ends of its
    segment, and within 2e-6 between them.
    """
    # 127 is the bias of the exponent: the segments of the probabilities 1/2 to 2**31
    first = (127 - 1) << _SEGMENTS
    last = (127 + 31) << _SEGMENTS
    segments = torch.arange(first, last + 1, dtype=torch.int32)
    edge_bits = segments << (23 - _SEGMENTS)
    edges = edge_bits.view(torch.float32).double()
    quantile_of = NormalDist().inv_cdf
    magnitudes: list[float] = []
    for edge in edges.tolist():
        # negated: quantiles of probabilities up to 1/2 are negative, and the sign is drawn
        magnitudes.append(-quantile_of(edge * 2.0**-32))
    quantiles = torch.tensor(magnitudes, dtype=torch.float64)
    slopes = quantiles.diff() / edges.diff()
    values = quantiles[:-1] - slopes * edges[:-1]
    unused = torch.zeros(first)  # no probability is below 1/2 of a unit
    end = torch.zeros(1)  # probabilities that round up to 1/2 are the last segment
    all_values = torch.cat((unused, values.float(), end))
    all_slopes = torch.cat((unused, slopes.float(), end))
    return _Lines(all_values, all_slopes)


def logical_indices(
    part: Part,
    start: int,
    stop: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return where elements [start, stop) of the flattened slice are in the flattened logical
    tensor: int64 [stop - start]."""
    index = torch.arange(start, stop, device=device)
    if part.dim is None:
        return index
    # The slice consists of runs of consecutive elements, whose starts are further apart in the
    # logical tensor.
    row_length = prod(part.local[part.dim :])
    row_stride = prod(part.shape[part.dim :])
    elements_per_index = prod(part.shape[part.dim + 1 :])
    offset = part.start * elements_per_index
    row = index // row_length
    skipped = row * (row_stride - row_length)  # elements of other slices between the runs
    return index + skipped + offset


def _shift(word: Tensor, count: int) -> Tensor:
    """Return the bits of int64 `word` shifted right with zero fill; torch's own shift extends the
    sign."""
    mask = (1 << (64 - count)) - 1
    return (word >> count) & mask
