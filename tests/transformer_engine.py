"""A stand-in for what is used of Transformer Engine, on a CPU: its names, arguments and numbers as
releases 2.11 to 2.20 have them, so that the way to it can be tested without a GPU.

Its kernels multiply by the scale in FP32 and round to the nearest; what is too large becomes the
largest number, an infinity as well; a NaN stays one, and the amax passes over it. A product takes
codes as bytes, its first factor being the one whose rows become columns; sizes have to be multiples
of 16.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megaprec.fp8.matmul import choose_kernel

TE_DType = {torch.float8_e4m3fn: "kFloat8E4M3", torch.float8_e5m2: "kFloat8E5M2"}
TORCH = {name: dtype for dtype, name in TE_DType.items()}
CALLS = Counter[str]()


class Float8Tensor:
    """Codes as bytes, and the inverse of their scale."""

    def __init__(
        self,
        shape: torch.Size,
        dtype: torch.dtype,
        *,
        data: Tensor,
        fp8_scale_inv: Tensor,
        fp8_dtype: str,
        data_transpose: Tensor | None = None,
        quantizer: Any = None,
        requires_grad: bool = False,
    ) -> None:
        assert (
            data.dtype == torch.uint8 and data.is_contiguous() and data.shape == torch.Size(shape)
        )
        assert fp8_scale_inv.dtype == torch.float32 and fp8_scale_inv.shape == (1,)
        assert fp8_dtype in TORCH and not requires_grad
        self.dtype = dtype
        self.data = data
        self.inverse = fp8_scale_inv
        self.form = fp8_dtype
        self.transpose = data_transpose
        self.quantizer = quantizer

    def get_metadata(self) -> dict[str, Any]:
        return {
            "data": self.data,
            "fp8_scale_inv": self.inverse,
            "fp8_dtype": self.form,
            "data_transpose": self.transpose,
            "quantizer": self.quantizer,
        }


class Float8Quantizer:
    """Casts with one scale; `amax` grows to the largest magnitude. A GPU that reads columns too
    makes no transpose."""

    reads_columns = False

    def __init__(
        self,
        scale: Tensor,
        amax: Tensor,
        fp8_dtype: str,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        assert all(one.dtype == torch.float32 and one.shape == (1,) for one in (scale, amax))
        assert rowwise and columnwise
        self.scale = scale
        self.amax = amax
        self.form = fp8_dtype

    def quantize(
        self, tensor: Tensor, *, out: Any = None, dtype: torch.dtype | None = None
    ) -> Float8Tensor:
        assert not torch.is_grad_enabled() and out is None and dtype is None
        CALLS["quantize"] += 1
        largest = torch.finfo(TORCH[self.form]).max
        codes = (
            (tensor.float() * self.scale)
            .clamp(-largest, largest)
            .to(TORCH[self.form])
            .view(torch.uint8)
        )
        known = tensor.abs().float().nan_to_num(0.0, torch.inf)
        self.amax.copy_(torch.maximum(self.amax, known.amax()))
        turned = None if self.reads_columns else codes.t().contiguous()
        return Float8Tensor(
            tensor.shape,
            tensor.dtype,
            data=codes.contiguous(),
            fp8_scale_inv=1 / self.scale,
            fp8_dtype=self.form,
            data_transpose=turned,
            quantizer=self,
        )


def general_gemm(
    A: Float8Tensor,
    B: Float8Tensor,
    out_dtype: torch.dtype | None = None,
    quantization_params: Any = None,
    gelu: bool = False,
    gelu_in: Tensor | None = None,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: Tensor | None = None,
    bias: Tensor | None = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
) -> tuple[Tensor, None, None, None]:
    """A [n, k], B [m, k] -> B @ A.T [m, n]."""
    assert layout == "TN" and alpha == 1 and not (quantization_params or gelu or accumulate or grad)
    assert gelu_in is beta is out is bias is None
    assert all(size % 16 == 0 for factor in (A, B) for size in factor.data.shape)
    CALLS["split" if use_split_accumulator else "fast"] += 1
    a, b = (factor.data.view(TORCH[factor.form]) for factor in (A, B))
    product = b.float() @ a.float().t() * B.inverse * A.inverse
    return product.to(out_dtype), None, None, None


def modules(version: str = "2.20.2") -> dict[str, ModuleType]:
    """What importing it finds."""
    contents: dict[str, dict[str, Any]] = {
        "": {"__version__": version},
        ".pytorch": {"Float8Quantizer": Float8Quantizer, "Float8Tensor": Float8Tensor},
        ".pytorch.constants": {"TE_DType": TE_DType},
        ".pytorch.cpp_extensions": {"general_gemm": general_gemm},
    }
    made: dict[str, ModuleType] = {}
    for name, names in contents.items():
        made[f"transformer_engine{name}"] = module = ModuleType(f"transformer_engine{name}")
        vars(module).update(names)
    return made


def install() -> None:
    """Puts it in, for a process that tests nothing else."""
    sys.modules.update(modules())


@contextmanager
def installed(version: str = "2.20.2") -> Iterator[Counter[str]]:
    """Puts it in for a while; how often it is called is counted."""
    choose_kernel.cache_clear()
    CALLS.clear()
    with patch.dict(sys.modules, modules(version)):
        yield CALLS
    choose_kernel.cache_clear()


@contextmanager
def missing() -> Iterator[None]:
    """As if it were not installed, wherever that is so or not."""
    choose_kernel.cache_clear()
    with patch.dict(sys.modules, {"transformer_engine": None}):
        yield
