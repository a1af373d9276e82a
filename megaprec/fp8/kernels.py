"""Matrix products of FP8 codes by torch's kernels, one function for each layout of scales, and by
Transformer Engine's.

All take a [m, k] and b [n, k] and return a @ b.T [m, n], contiguous, accumulated in FP32 and
rounded once. The kernels that a device has, and their layout requirements, depend on hardware and
release: `megaprec.fp8.matmul` tries a kernel before it uses it. Unsupported sizes are padded with
zeros, which changes no sum.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import ScalingType, SwizzleType

from megaprec.fp8 import transformer_engine
from megaprec.fp8.quantize import Codes, spread


def tensorwise(a: Codes, b: Codes, out: torch.dtype, fast: bool) -> Tensor:
    """Multiply matrices with one scale each."""
    return _scaled(a, b, a.inverse.view(()), b.inverse.view(()), out, fast)


def rowwise(a: Codes, b: Codes, out: torch.dtype, fast: bool) -> Tensor:
    """Multiply matrices with one scale per row."""
    return _scaled(a, b, _per_row(a), _per_row(b).t(), out, fast)


def unscaled_rowwise(a: Codes, b: Codes, out: torch.dtype, fast: bool) -> Tensor:
    """Multiply codes without scales, then apply one scale per row: for output dtypes that row-wise
    kernels lack."""
    one = torch.ones((), device=a.values.device)
    return (_scaled(a, b, one, one, torch.float32, fast) * _per_row(a) * _per_row(b).t()).to(out)


def blockwise(a: Codes, b: Codes, out: torch.dtype, fast: bool) -> Tensor:
    """Multiply matrices with one scale per 128 columns of a row, or of 128 rows."""
    a_kind, b_kind = (
        ScalingType.BlockWise1x128 if c.block[0] == 1 else ScalingType.BlockWise128x128
        for c in (a, b)
    )
    m = len(a.values)
    n = len(b.values)
    # Kernels read four rows of scales at a time; scales of single rows are stored column by column.
    a = filled(a, 128, 512)
    b = filled(b, 128, 512)
    scales = [
        c.inverse.t().contiguous().t() if c.block[0] == 1 else c.inverse.contiguous()
        for c in (a, b)
    ]
    b_scale = scales[1] if b.block[0] == 1 else scales[1].t()
    product = F.scaled_mm(
        a.values, b.values.t(), scales[0], a_kind, b_scale, b_kind, output_dtype=out
    )
    return product[:m, :n].contiguous()


def mx(a: Codes, b: Codes, out: torch.dtype, fast: bool) -> Tensor:
    """Multiply matrices with one power-of-two scale per 32 columns of a row."""
    m = len(a.values)
    n = len(b.values)
    a = filled(a, 128, 128)
    b = filled(b, 128, 128)
    kind = ScalingType.BlockWise1x32
    order = SwizzleType.SWIZZLE_32_4_4
    scales = [tiled(c.inverse).view(-1) for c in (a, b)]
    product = F.scaled_mm(
        a.values, b.values.t(), scales[0], kind, scales[1], kind, order, order, output_dtype=out
    )
    return product[:m, :n].contiguous()


def transformer_engine_gemm(a: Codes, b: Codes, out: torch.dtype, fast: bool) -> Tensor:
    """Multiply matrices with one scale each, by Transformer Engine."""
    m = len(a.values)
    n = len(b.values)
    values = [_whole(codes.values, 16, 16) for codes in (a, b)]
    return transformer_engine.product(values[0], a.inverse, values[1], b.inverse, out, fast)[
        :m, :n
    ].contiguous()


def filled(codes: Codes, rows: int, columns: int) -> Codes:
    """Return the matrix, contiguous, padded with zeros to multiples of `rows` and `columns`."""
    values = _whole(codes.values, rows, columns)
    more = [-(-values.shape[dim] // codes.block[dim]) - codes.inverse.shape[dim] for dim in (0, 1)]
    return Codes(values, _more(codes.inverse, *more), codes.block)


def tiled(scales: Tensor) -> Tensor:
    """Return MX scales [m, k / 32], multiples of 128 and 4, in the order in which a tensor core
    reads them.

    Tiles of 128 rows and 4 columns lie one after another; within a tile, row r and column c lie at
    16 * (r % 32) + 4 * (r // 32) + c (cuBLAS's documentation, "1D block scaling factors layout").
    """
    m, columns = scales.shape
    tiles = scales.view(torch.uint8).view(m // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(m, columns).view(scales.dtype)


def _per_row(codes: Codes) -> Tensor:
    m = len(codes.values)
    return spread(codes.inverse, codes.block, codes.values.shape).expand(m, 1).contiguous()


def _scaled(
    a: Codes, b: Codes, a_scale: Tensor, b_scale: Tensor, out: torch.dtype, fast: bool
) -> Tensor:
    a_values = _whole(a.values, 1, 16)
    b_values = _whole(b.values, 16, 16)
    if b_scale.dim() == 2:
        b_scale = _more(b_scale, 0, b_values.shape[0] - b_scale.shape[1])
    product = torch._scaled_mm(
        a_values, b_values.t(), a_scale, b_scale, out_dtype=out, use_fast_accum=fast
    )
    return product[:, : b.values.shape[0]].contiguous()


def _whole(values: Tensor, rows: int, columns: int) -> Tensor:
    m, k = values.shape
    return _more(values.contiguous(), -m % rows, -k % columns)


def _more(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """Append rows and columns of zeros. Zero is all bits zero in FP8; in E8M0 that is 2**-127."""
    if not rows and not columns:
        return matrix
    narrow = matrix.element_size() == 1
    grown = F.pad(matrix.view(torch.uint8) if narrow else matrix, (0, columns, 0, rows))
    return grown.view(matrix.dtype) if narrow else grown
