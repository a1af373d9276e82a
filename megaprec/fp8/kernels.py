"""Matrix products of FP8 codes by torch's kernels, one function for each layout of scales, and by
Transformer Engine's.

All take a [m, k] and b [n, k] and return a @ b.T [m, n], contiguous, accumulated in FP32 and
rounded once. The kernels that a device has, and their layout requirements, depend on hardware and
release: `megaprec.fp8.matmul` tries a kernel before it uses it. Unsupported sizes are padded with
zeros, which changes no sum.

Parameters of every kernel:

    a, b        the factors, in codes
    out_dtype   dtype of the product
    fast        True if a tensor core may accumulate with fewer bits, for which torch's block-wise
                and MX kernels have no switch
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import ScalingType, SwizzleType

from megaprec.fp8 import transformer_engine
from megaprec.fp8.quantize import Codes, expand_blocks
from megaprec.torch_private import scaled_product


def tensorwise(
    a: Codes,
    b: Codes,
    out_dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    """Multiply matrices with one scale each."""
    return _scaled_product(
        a,
        b,
        a.inverse.view(()),
        b.inverse.view(()),
        out_dtype,
        fast,
    )


def write_tensorwise(total: Tensor, a: Codes, b: Codes) -> None:
    """Write the product of `tensorwise` to total [m, n], without a tensor of its own.

    n, the sum over k and total are such as `needs_no_padding` says.
    """
    scaled_product(
        a.values.contiguous(),
        b.values.contiguous().t(),
        a.inverse.view(()),
        b.inverse.view(()),
        out_dtype=total.dtype,
        use_fast_accum=False,
        out=total,
    )


def needs_no_padding(total: Tensor, b: Codes) -> bool:
    """Return True if torch's kernel can write to total [m, n] itself: it is contiguous and begins
    at a multiple of 16 bytes, and n and the sum over k are multiples of 16."""
    n, k = b.values.shape
    is_aligned = total.is_contiguous() and total.data_ptr() % 16 == 0
    return is_aligned and n % 16 == 0 and k % 16 == 0


def rowwise(
    a: Codes,
    b: Codes,
    out_dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    """Multiply matrices with one scale per row."""
    return _scaled_product(
        a,
        b,
        _scale_per_row(a),
        _scale_per_row(b).t(),
        out_dtype,
        fast,
    )


def unscaled_rowwise(
    a: Codes,
    b: Codes,
    out_dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    """Multiply codes without scales, then apply one scale per row: for output dtypes that row-wise
    kernels lack."""
    product = _unscaled_product(a, b, fast)
    scaled = product.mul_(_scale_per_row(a)).mul_(_scale_per_row(b).t())
    return scaled.to(out_dtype)


def add_unscaled_rowwise_(total: Tensor, a: Codes, b: Codes, first: bool) -> None:
    """Add the product of `unscaled_rowwise` to total [m, n], FP32: the last scale within the
    addition. first: overwrite `total` instead."""
    product = _unscaled_product(a, b, fast=False)
    product.mul_(_scale_per_row(a))
    column_scales = _scale_per_row(b).t()
    if first:
        torch.mul(product, column_scales, out=total)
    else:
        total.addcmul_(product, column_scales)


def _unscaled_product(a: Codes, b: Codes, fast: bool) -> Tensor:
    """Return the product of the codes [m, n], FP32."""
    no_scale = torch.ones((), device=a.values.device)
    return _scaled_product(a, b, no_scale, no_scale, torch.float32, fast)


def blockwise(
    a: Codes,
    b: Codes,
    out_dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    """Multiply matrices with one scale per 128 columns of a row, or of 128 rows."""
    rows = len(a.values)
    columns = len(b.values)
    # Kernels read four scales of a row at a time: 4 * 128 columns.
    a = pad_to_multiples(a, 128, 512)
    b = pad_to_multiples(b, 128, 512)
    b_scales = _block_scales(b)
    product = F.scaled_mm(
        a.values,
        b.values.t(),
        _block_scales(a),
        _scaling_type(a),
        b_scales if _has_scales_per_row(b) else b_scales.t(),
        _scaling_type(b),
        output_dtype=out_dtype,
    )
    return product[:rows, :columns].contiguous()


def mx(
    a: Codes,
    b: Codes,
    out_dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    """Multiply matrices with one power-of-two scale per 32 columns of a row."""
    rows = len(a.values)
    columns = len(b.values)
    a = pad_to_multiples(a, 128, 128)
    b = pad_to_multiples(b, 128, 128)
    product = F.scaled_mm(
        a.values,
        b.values.t(),
        swizzle_scales(a.inverse).view(-1),
        ScalingType.BlockWise1x32,
        swizzle_scales(b.inverse).view(-1),
        ScalingType.BlockWise1x32,
        SwizzleType.SWIZZLE_32_4_4,
        SwizzleType.SWIZZLE_32_4_4,
        output_dtype=out_dtype,
    )
    return product[:rows, :columns].contiguous()


def transformer_engine_gemm(
    a: Codes,
    b: Codes,
    out_dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    """Multiply matrices with one scale each, by Transformer Engine."""
    rows = len(a.values)
    columns = len(b.values)
    product = transformer_engine.product(
        _pad_values(a.values, 16, 16),
        a.inverse,
        _pad_values(b.values, 16, 16),
        b.inverse,
        out_dtype,
        fast,
    )
    return product[:rows, :columns].contiguous()


def pad_to_multiples(codes: Codes, rows: int, columns: int) -> Codes:
    """Return the matrix, contiguous, padded with zeros to multiples of `rows` and `columns`."""
    values = _pad_values(codes.values, rows, columns)
    # the padded matrix has a scale for each block, also for one that it has only begun
    block_rows, block_columns = codes.block
    scale_rows = -(-values.shape[0] // block_rows)  # rounded up
    scale_columns = -(-values.shape[1] // block_columns)
    inverse = _append_zeros(
        codes.inverse,
        scale_rows - codes.inverse.shape[0],
        scale_columns - codes.inverse.shape[1],
    )
    return Codes(values, inverse, codes.block)


def swizzle_scales(scales: Tensor) -> Tensor:
    """Return MX scales [m, k / 32], multiples of 128 and 4, in the order in which a tensor core
    reads them.

    Tiles of 128 rows and 4 columns lie one after another; within a tile, row r and column c lie at
    16 * (r % 32) + 4 * (r // 32) + c (cuBLAS's documentation, "1D block scaling factors layout").
    """
    rows, columns = scales.shape
    # as bytes [tile row, r // 32, r % 32, tile column, c], which every device can permute
    tiles = scales.view(torch.uint8).view(
        rows // 128,
        4,
        32,
        columns // 4,
        4,
    )
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns).view(scales.dtype)


def _has_scales_per_row(codes: Codes) -> bool:
    """Return True if each row has scales of its own, False if 128 rows share them."""
    return codes.block[0] == 1


def _scaling_type(codes: Codes) -> ScalingType:
    if _has_scales_per_row(codes):
        return ScalingType.BlockWise1x128
    return ScalingType.BlockWise128x128


def _block_scales(codes: Codes) -> Tensor:
    """Return the inverse scales as the block-wise kernel reads them: those of single rows column by
    column, others row by row."""
    if _has_scales_per_row(codes):
        return codes.inverse.t().contiguous().t()
    return codes.inverse.contiguous()


def _scale_per_row(codes: Codes) -> Tensor:
    """Return the inverse scale of each row, [m, 1], also where all rows share one."""
    rows = len(codes.values)
    scales = expand_blocks(codes.inverse, codes.block, codes.values.shape)
    # a scale of the whole matrix, [1, 1], is repeated
    return scales.expand(rows, 1).contiguous()


def _scaled_product(
    a: Codes,
    b: Codes,
    a_scale: Tensor,
    b_scale: Tensor,
    out_dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    """Return the product by torch's kernel for scales [] of matrices, or [m, 1] and [1, n] of
    rows."""
    # the sum over k and the columns of the product must be multiples of 16; rows need not
    a_values = _pad_values(a.values, 1, 16)
    b_values = _pad_values(b.values, 16, 16)
    if b_scale.dim() == 2:
        b_scale = _append_zeros(b_scale, 0, b_values.shape[0] - b_scale.shape[1])
    product = scaled_product(
        a_values,
        b_values.t(),
        a_scale,
        b_scale,
        out_dtype=out_dtype,
        use_fast_accum=fast,
    )
    return product[:, : b.values.shape[0]].contiguous()


def _pad_values(values: Tensor, rows: int, columns: int) -> Tensor:
    """Return values [m, k], contiguous, padded with zeros to multiples of `rows` and `columns`."""
    m, k = values.shape
    return _append_zeros(values.contiguous(), -m % rows, -k % columns)


def _append_zeros(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """Append rows and columns of zeros. Zero is all bits zero in FP8; in E8M0 that is 2**-127."""
    if not rows and not columns:
        return matrix
    padding = (0, columns, 0, rows)
    if matrix.element_size() > 1:
        return F.pad(matrix, padding)
    # as bytes, which every device can pad
    return F.pad(matrix.view(torch.uint8), padding).view(matrix.dtype)
