"""Casts and products by Transformer Engine, if a recipe asks for it: on a GPU, for tensors with one
scale.

Only arithmetic is left to Transformer Engine. Scales and histories are computed, reduced and saved
by this project, so their documentation holds for both backends. Three names of its Python interface
are used, which are equal in releases 2.11 to 2.20:

    Float8Quantizer   x and a scale into codes, their transpose and the amax, in one kernel;
                      public, documented
    Float8Tensor      codes and their inverse scale, for a product; public, documented
    general_gemm      the product of two of them; called by all of its own layers, not documented

Its casts turn an infinity into the largest number. So that an overflow still reaches the gradients,
the inverse scale of a tensor with an infinity is set to NaN here, which makes the whole product
NaN.
"""

import importlib
import re
from types import ModuleType

import torch
from torch import Tensor

from megaprec.errors import UserError

# the first and the last supported release: their sources were read
FIRST_RELEASE: tuple[int, int] = (2, 11)
LAST_RELEASE: tuple[int, int] = (2, 20)
INSTALL = "pip install --no-build-isolation 'transformer_engine[pytorch]>={}.{},<{}.{}'".format(
    *FIRST_RELEASE, LAST_RELEASE[0], LAST_RELEASE[1] + 1
)


def require() -> None:
    """Raise UserError unless a supported release of Transformer Engine can be imported."""
    try:
        version = importlib.import_module("transformer_engine").__version__
        _pytorch()
    except ModuleNotFoundError as error:
        raise UserError(_problem(f"it is not installed (no module {error.name})")) from error
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        # an assertion often has no text
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(_problem(f"it cannot be imported ({reason})")) from error
    numbers = re.match(r"(\d+)\.(\d+)", version)
    release = tuple(map(int, numbers.groups())) if numbers else (0, 0)
    if not FIRST_RELEASE <= release <= LAST_RELEASE:
        raise UserError(_problem(f"its release is {version}"))


def encode(x: Tensor, dtype: torch.dtype, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes of x * scale, [m, k] of `dtype`, the codes of its transpose, and the inverse
    scale.

    x: [m, k], fp32, bf16 or fp16. scale: float32 of one element. The inverse scale is float32 [1,
    1]; NaN if something in x is infinite.
    """
    amax = torch.zeros(1, device=x.device)
    quantizer = _pytorch().Float8Quantizer(scale.reshape(1), amax, _te_dtype(dtype))
    with torch.no_grad():
        tensors = quantizer.quantize(x).get_metadata()
    values = tensors["data"].view(dtype)
    transposed = tensors["data_transpose"]
    if transposed is None:
        # Transformer Engine makes no transpose for GPUs whose kernels read along columns too.
        transposed = values.t().contiguous()
    else:
        transposed = transposed.view(dtype)
    inverse = scale.reciprocal().where(amax.isfinite(), torch.nan)
    return values, transposed, inverse.view(1, 1)


def product(
    a: Tensor,
    a_inverse: Tensor,
    b: Tensor,
    b_inverse: Tensor,
    out: torch.dtype,
    fast: bool,
) -> Tensor:
    """Return a @ b.T [m, n] of `out` from codes a [m, k], b [n, k] and their inverse scales,
    float32 of one element.

    m, n and k: multiples of 16. fast: tensor cores may sum with fewer bits.
    """
    extensions = importlib.import_module("transformer_engine.pytorch.cpp_extensions")
    # Its operands are column-major: "TN" of (b, a) is a @ b.T in rows.
    first = _wrap(b, b_inverse, out)
    second = _wrap(a, a_inverse, out)
    result, *_ = extensions.general_gemm(
        first,
        second,
        out_dtype=out,
        layout="TN",
        use_split_accumulator=not fast,
    )
    return result


def _wrap(values: Tensor, inverse: Tensor, dtype: torch.dtype) -> Tensor:
    """Return codes and their inverse scale as Transformer Engine's tensor. dtype: that it stands
    for."""
    return _pytorch().Float8Tensor(
        shape=values.shape,
        dtype=dtype,
        data=values.contiguous().view(torch.uint8),
        fp8_scale_inv=inverse.reshape(1),
        fp8_dtype=_te_dtype(values.dtype),
    )


def _te_dtype(dtype: torch.dtype) -> object:
    """Return Transformer Engine's name of a format."""
    constants = importlib.import_module("transformer_engine.pytorch.constants")
    return constants.TE_DType[dtype]


def _pytorch() -> ModuleType:
    return importlib.import_module("transformer_engine.pytorch")


def _problem(why: str) -> str:
    return f'fp8.backend = "transformer_engine": {why}: {INSTALL}, or use backend "torch"'
