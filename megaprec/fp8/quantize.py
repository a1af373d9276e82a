"""Quantization of high-precision numbers to eight-bit codes, and back.

A product sums over one dim of each factor. If numbers share a scale along that dim only in blocks,
a matrix that is summed over its last dim in one product and over its first in another is rounded
twice, each time from the high-precision numbers. If blocks have as many rows as columns, as those
of whole tensors and of some kinds' weights, one set of codes serves both (`serves_both`).

`Codes` are always summed over their last dim: a sum over the first dim uses the codes of the
transposed matrix. `megaprec.fp8.nvfp4` makes those of NVFP4.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from megaprec.fp8.formats import Role, cast, format_of, limit
from megaprec.fp8.scaling import mx_inverse, scale_of
from megaprec.fp8.transformer_engine import encode
from megaprec.leaf_calls import CallLeaf, uncompiled
from megaprec.precision.fp8_recipe import FP8Recipe


@dataclass(frozen=True)
class Codes:
    """A matrix [m, k] in FP8 or NVFP4, to be summed over k.

    values: float8_e4m3fn or float8_e5m2 [m, k]; of NVFP4 numbers of E2M1 in float8_e4m3fn. inverse:
    the inverse scales, [m / block[0], k / block[1]] rounded up; float32, of MX float8_e8m0fnu, of
    NVFP4 float8_e4m3fn. block: how many rows and columns share one. tensor: of NVFP4 the inverse
    scale of the whole tensor, float32 [1, 1], by which those of blocks are multiplied.
    """

    values: Tensor
    inverse: Tensor
    block: tuple[int, int]
    tensor: Tensor | None = None

    def t(self) -> "Codes":
        """Return the transposed matrix [k, m] in the same codes; copied on a GPU, whose kernels
        read along rows, and on the meta device, which stands for one."""
        values = self.values.t()
        if values.is_cuda or values.is_meta:
            values = values.contiguous()
        block_rows, block_columns = self.block
        return Codes(values, self.inverse.t(), (block_columns, block_rows), self.tensor)

    def wide(self) -> Tensor:
        """Return the dequantized numbers, float32 [m, k]."""
        scaled = self.scaled_by_blocks()
        return scaled if self.tensor is None else scaled * self.tensor

    def scaled_by_blocks(self) -> Tensor:
        """Return the numbers before the inverse scale of the tensor, float32 [m, k]: exact in
        NVFP4, whose factors have two and four significant bits."""
        inverse = expand_blocks(self.inverse.float(), self.block, self.values.shape)
        return self.values.float() * inverse


def quantize(
    x: Tensor,
    recipe: FP8Recipe,
    role: Role,
    scale: Tensor | None = None,
    reduce_max: Callable[[Tensor], None] | None = None,
) -> Codes:
    """Return x [m, k], fp32, bf16 or fp16, in codes to be summed over k.

    scale: float32 of one element, for delayed scaling only. reduce_max: reduces an amax [1, 1] in
    place to its maximum over the ranks that hold parts of x, for current scaling; the other kinds
    share no scale between ranks.
    """
    if recipe.scales.keeps_history:
        assert scale is not None, "delayed scaling needs the scale of its history"
        return _scale_and_cast(x, recipe, role, scale)
    amax = amax_of(x, block_of(recipe, role, x.shape))
    if recipe.scales.per_tensor and reduce_max is not None:
        reduce_max(amax)  # before the scale is computed: all ranks then compute the same one
    return _scale_and_cast(x, recipe, role, amax)


def _scale_and_cast(
    x: Tensor,
    recipe: FP8Recipe,
    role: Role,
    scale_or_amax: Tensor,
) -> Codes:
    """Return x [m, k] in codes. scale_or_amax: the delayed scale, or the amaxes of x's blocks."""
    dtype = format_of(recipe, role)
    block = block_of(recipe, role, x.shape)
    if recipe.scales.keeps_history:
        # the scale is that of earlier passes, whatever is in x
        inverse = scale_or_amax.reshape(1, 1).reciprocal()
        return Codes(cast(x, dtype, scale_or_amax), inverse, block)
    if recipe.scales.power_2:
        # E8M0 has only powers of two, whose reciprocals are exact
        inverse = mx_inverse(scale_or_amax, limit(dtype))
        factors = inverse.float().reciprocal()
    else:
        factors = scale_of(scale_or_amax, limit(dtype), power_2=recipe.power_2_scales)
        inverse = factors.reciprocal()
    codes = cast(x, dtype, expand_blocks(factors, block, x.shape))
    return Codes(codes, inverse, block)


def quantize_both(
    x: Tensor,
    recipe: FP8Recipe,
    role: Role,
    scale: Tensor | None = None,
    reduce_max: Callable[[Tensor], None] | None = None,
    leaves: CallLeaf = uncompiled,
    note_amax: Callable[[Tensor], None] | None = None,
) -> tuple[Codes, Codes]:
    """Return `quantize` of x [m, k] and of its transpose [k, m]; one set of codes serves both where
    it can.

    scale, reduce_max: as for `quantize`.
    leaves: calls the passes over x, which may be compiled: one for the amax of all of x, where
    scaling is current, and one for both sets of codes.
    note_amax: called with the amax of x, float32 [1, 1], which delayed scales of later steps want.
    A compiled cast finds it in its own pass over x.
    """
    # an empty matrix has nothing to cast: torch makes its codes
    if recipe.backend == "transformer_engine" and x.numel():
        if note_amax is not None:
            note_amax(leaves(amax_of, x))
        if scale is None:
            scale = _current_scale(x, recipe, role, reduce_max)
        return _by_transformer_engine(x, recipe, role, scale)
    scale_or_amax = scale  # None if x is scaled by blocks: the casts compute those scales
    if recipe.scales.per_tensor and not recipe.scales.keeps_history:
        scale_or_amax = leaves(amax_of, x)
        if reduce_max is not None:
            reduce_max(scale_or_amax)
    cast_arguments = (x, recipe, role, scale_or_amax)
    if note_amax is None:
        casts = leaves(_fp8_casts, *cast_arguments)
    else:
        *casts, amax = leaves(_fp8_casts_and_amax, *cast_arguments, otherwise=_fp8_casts_then_amax)
        note_amax(amax)
    values, inverse, transposed, transposed_inverse = casts
    m, k = x.shape
    codes = Codes(values, inverse, block_of(recipe, role, x.shape))
    rows, columns = codes.block
    block = block_of(recipe, role, torch.Size((k, m)))
    if serves_both(recipe, role):
        block = (columns, rows)
    return codes, Codes(transposed, transposed_inverse, block)


def _fp8_casts(
    x: Tensor,
    recipe: FP8Recipe,
    role: Role,
    scale_or_amax: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return values and inverse scales of the codes of x [m, k], and those of its transpose.

    scale_or_amax: what determines a scale of all of x; None: scales of blocks are computed here.
    """
    if scale_or_amax is None:
        codes = quantize(x, recipe, role)
    else:
        codes = _scale_and_cast(x, recipe, role, scale_or_amax)
    transposed = codes.t() if serves_both(recipe, role) else quantize(x.t(), recipe, role)
    return codes.values, codes.inverse, transposed.values, transposed.inverse


def _fp8_casts_and_amax(
    x: Tensor,
    recipe: FP8Recipe,
    role: Role,
    scale_or_amax: Tensor | None,
) -> tuple[Tensor, ...]:
    """Return `_fp8_casts` of x [m, k], and its amax, float32 [1, 1]: the form to be compiled.

    The amaxes of rows come first. torch's compiler then reads x once for all results; of `amax_of`
    it makes another loop over x.
    """
    casts = _fp8_casts(x, recipe, role, scale_or_amax)
    amax = x.abs().amax(1).amax()
    return *casts, amax.float().view(1, 1)


def _fp8_casts_then_amax(
    x: Tensor,
    recipe: FP8Recipe,
    role: Role,
    scale_or_amax: Tensor | None,
) -> tuple[Tensor, ...]:
    """Return what `_fp8_casts_and_amax` returns, operator by operator, also of an empty x."""
    return *_fp8_casts(x, recipe, role, scale_or_amax), amax_of(x)


def _by_transformer_engine(
    x: Tensor,
    recipe: FP8Recipe,
    role: Role,
    scale: Tensor,
) -> tuple[Codes, Codes]:
    """Return the codes of x [m, k] and of its transpose, cast by Transformer Engine with one
    scale."""
    m, k = x.shape
    values, transposed, inverse = encode(x, format_of(recipe, role), scale)
    codes = Codes(values, inverse, (m, k))
    transposed_codes = Codes(transposed, inverse, (k, m))
    return codes, transposed_codes


def _current_scale(
    x: Tensor,
    recipe: FP8Recipe,
    role: Role,
    reduce_max: Callable[[Tensor], None] | None,
) -> Tensor:
    """Return the scale of all of x: float32 [1, 1]."""
    amax = amax_of(x)
    if reduce_max is not None:
        reduce_max(amax)
    largest = limit(format_of(recipe, role))
    return scale_of(amax, largest, power_2=recipe.power_2_scales)


def serves_both(recipe: FP8Recipe, role: Role) -> bool:
    """Return True if the codes of the transposed matrix are the transposed codes of the matrix."""
    return recipe.scales.serves_both(role == "weight")


def block_of(recipe: FP8Recipe, role: Role, shape: torch.Size) -> tuple[int, int]:
    """Return how many rows and columns of a matrix of this shape share a scale."""
    return block_in(recipe.scales.block_of(role == "weight"), shape)


def block_in(block: tuple[int, int], shape: torch.Size) -> tuple[int, int]:
    """Return the rows and columns of a block of `ScaleKind` in a matrix of this shape."""
    rows, columns = block
    # at least 1: an empty matrix has a block too
    return rows or max(1, shape[0]), columns or max(1, shape[1])


def amax_of(x: Tensor, block: tuple[int, int] | None = None) -> Tensor:
    """Return the largest magnitudes of x [m, k] in blocks, float32 [m / block[0], k / block[1]]
    rounded up.

    block None: one block. The amax of a block with a NaN is NaN. The amax of an empty matrix as a
        whole is 0.
    """
    m, k = x.shape
    height, width = block or (m, k)
    if height >= m and width >= k:
        return _amax(x).float().view(1, 1)
    # numbers of blocks, rounded up; the zeros that fill the last ones change no amax
    rows = -(-m // height)
    columns = -(-k // width)
    missing_columns = columns * width - k
    missing_rows = rows * height - m
    padded = F.pad(x, (0, missing_columns, 0, missing_rows))
    blocks = padded.abs().reshape(rows, height, columns, width)
    return blocks.amax((1, 3)).float()


def _amax(x: Tensor) -> Tensor:
    """Return the largest magnitude of x, [], in its dtype."""
    if not x.numel():
        return x.new_zeros(())
    low, high = x.aminmax()  # one pass, without the copy that abs makes
    return torch.maximum(-low, high)


def expand_blocks(factors: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """Expand one factor per block to factors that broadcast over a matrix [m, k]."""
    for dim in (0, 1):
        # A block of one row broadcasts as it is, and so does one that takes the whole dim.
        if 1 < block[dim] < shape[dim]:
            repeated = factors.repeat_interleave(block[dim], dim)
            factors = repeated.narrow(dim, 0, shape[dim])  # the last block may be short
    return factors


def counts_lost(x: Tensor, codes: Codes) -> Tensor:
    """Return four numbers of elements of x [m, k], float64 [4]: those that are saturated in its
    codes, all, those that have vanished, and those that are not zero.

    saturated: more than half a step above the largest number of the format.
    vanished: not zero in x, and zero in codes.
    """
    bounds = _saturation_bound(codes) * expand_blocks(codes.inverse.float(), codes.block, x.shape)
    if codes.tensor is not None:
        bounds = bounds * codes.tensor
    # where a block's scale is rounded to zero, all of its numbers vanish
    saturated = (x.float().abs() > bounds) & x.isfinite() & (bounds != 0)
    nonzero = x != 0
    vanished = nonzero & ((codes.values.float() == 0) | (bounds == 0))
    num_saturated = saturated.sum()
    num_elements = torch.full_like(num_saturated, x.numel())
    return torch.stack([num_saturated, num_elements, vanished.sum(), nonzero.sum()]).double()


def _saturation_bound(codes: Codes) -> float:
    """Return the number half a step above the largest one of the codes' format."""
    # NVFP4's largest number is 6, a step below it 4
    if codes.tensor is not None:
        return 7.0
    dtype = codes.values.dtype
    # Above the largest number, 1.75 times a power of two, a step is eps times that power of two:
    # half a step is eps / 2 / 1.75 of the number.
    return limit(dtype) * (1 + torch.finfo(dtype).eps / 3.5)
