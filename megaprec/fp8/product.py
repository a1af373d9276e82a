"""Products of FP8 codes: by the device's own FP8 kernels where it has them, else of the same numbers in FP32.

Which kernels a device has is not looked up but tried: a small product is made once for each way of sharing scales, pair
of formats and dtype of the result, and a kernel that refuses or errs is not used. A CPU has `torch._scaled_mm` for one
scale a matrix or a row, which takes as long as a product in FP32.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from megaprec.fp8 import kernels
from megaprec.fp8.formats import E5M2, Role, format_of
from megaprec.fp8.quantize import Codes, quantize, spread
from megaprec.fp8.recipe import FP8Recipe, Kind

Kernel = Callable[[Codes, Codes, torch.dtype, bool], Tensor]

KERNELS: dict[Kind, tuple[Kernel, ...]] = {
    "current": (kernels.tensorwise,),
    "rowwise": (kernels.rowwise, kernels.unscaled_rowwise),
    "blockwise": (kernels.blockwise,),
    "mx": (kernels.mx,),
}
PRODUCTS: dict[str, tuple[Role, Role]] = {
    "forward": ("input", "weight"),
    "input gradient": ("gradient", "weight"),
    "weight gradient": ("gradient", "input"),
}
EMULATED = "emulated in FP32"
_TRIED = 256  # rows and columns of a trial


def multiply(a: Codes, b: Codes, out: torch.dtype, fast: bool = False) -> Tensor:
    """a [m, k], b [n, k] -> a @ b.T [m, n], summed in FP32 and rounded to `out` once.

    fast: a tensor core may sum with fewer bits (Hopper's fast accumulation), as Transformer Engine does forward.
    """
    if not a.values.numel() or not b.values.numel():
        return torch.zeros(len(a.values), len(b.values), dtype=out, device=a.values.device)
    kernel, _ = chosen(_sharing(a, b), a.values.dtype, b.block[0] == 128, out, a.values.device)
    return emulated(a, b, out) if kernel is None else kernel(a, b, out, fast)


def add_product_(total: Tensor, a: Codes, b: Codes) -> None:
    """total [m, n] += a [m, k] @ b [n, k].T, for main gradients."""
    total.add_(multiply(a, b, total.dtype))


def emulated(a: Codes, b: Codes, out: torch.dtype) -> Tensor:
    """`multiply` in FP32, whatever the device has: of codes, scaled afterwards, or of scaled numbers."""
    if min(a.block[1], b.block[1]) < a.values.shape[1]:
        return (a.wide() @ b.wide().t()).to(out)
    rows, columns = (spread(c.inverse.float(), c.block, c.values.shape) for c in (a, b))
    return (a.values.float() @ b.values.float().t() * rows * columns.t()).to(out)


def ways(recipe: FP8Recipe, device: torch.device, out: torch.dtype, total: torch.dtype) -> dict[str, str]:
    """How a device makes each of a linear layer's PRODUCTS: by which kernel, or that it is emulated and why.

    out: dtype of activations and their gradients; total: of main gradients.
    """
    kind: Kind = "current" if recipe.kind == "delayed" else recipe.kind
    said: dict[str, str] = {}
    for name, (a, b) in PRODUCTS.items():
        dtype = total if name == "weight gradient" else out
        kernel, why = chosen(kind, format_of(recipe, a), kind == "blockwise" and b == "weight", dtype, device)
        said[name] = f"{EMULATED}: {why}" if kernel is None else f"{kernel.__name__} kernel"
    return said


def _sharing(a: Codes, b: Codes) -> Kind:
    """Which scales kernels have to deal with: of delayed ones they see no more than of current ones."""
    if a.inverse.dtype == torch.float8_e8m0fnu:
        return "mx"
    if min(a.block[1], b.block[1]) < a.values.shape[1]:
        return "blockwise"
    return "current" if a.inverse.numel() == b.inverse.numel() == 1 else "rowwise"


@cache
def chosen(
    kind: Kind, a_format: torch.dtype, square: bool, out: torch.dtype, device: torch.device
) -> tuple[Kernel | None, str]:
    """The first kernel that makes such products rightly, or None and why the last one does not.

    a_format: of the first factor; the second is E4M3. square: its blocks, if there are any, are of 128 x 128.
    """
    with unset_fake_temporarily():  # whoever only wants to know sizes must not decide for all that follow
        return _tried(kind, a_format, square, out, device)


def _tried(
    kind: Kind, a_format: torch.dtype, square: bool, out: torch.dtype, device: torch.device
) -> tuple[Kernel | None, str]:
    recipe = FP8Recipe(kind)
    a = quantize(_sample(device), recipe, "gradient" if a_format == E5M2 else "input")
    b = quantize(_sample(device).flip(0), recipe, "weight" if square or kind != "blockwise" else "input")
    right, why = emulated(a, b, torch.float32), ""
    for kernel in KERNELS[kind]:
        try:
            made = torch.stack([kernel(a, b, out, fast).float() for fast in (False, True)])
        except (RuntimeError, ValueError) as error:
            why = f'torch says "{str(error).splitlines()[0].split(". ")[0].rstrip(".")}"'
        else:
            off = (made - right).norm() / right.norm()
            if off < 0.01:
                return kernel, ""
            why = f"its {kernel.__name__} kernel is wrong by {off:.1%}"
    return None, why


def _sample(device: torch.device) -> Tensor:
    """Numbers whose rows and blocks differ in size, drawn from no generator."""
    grid = torch.arange(_TRIED * _TRIED, device=device, dtype=torch.float32).view(_TRIED, _TRIED)
    sizes = torch.linspace(0.1, 0.9, _TRIED, device=device)  # whose sums a half can hold
    return (grid * 0.7).sin() * sizes * sizes[:, None]
