"""Products of FP8 codes: by the device's own FP8 kernels if it has them, else emulated in FP32.

The kernels of a device are not looked up but tried: a small product is computed once for each
layout of scales, pair of formats and output dtype, and a kernel that refuses or is wrong is not
used. On a CPU all products are emulated: torch's kernel for CPUs takes as long as a product in FP32
at best, and a thousand times as long on some processors with AMX. If a recipe asks for Transformer
Engine, its kernel is used or an error is raised.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from megaprec.errors import UserError
from megaprec.fp8 import kernels
from megaprec.fp8.formats import E5M2, Role, format_of
from megaprec.fp8.quantize import Codes, quantize, quantize_both, spread
from megaprec.precision.fp8_recipe import Backend, FP8Recipe, Kind

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
SLOW = {"cpu": "torch's kernel for CPUs is no faster, and on some far slower"}  # by device type
REFUSALS = (RuntimeError, ValueError, AssertionError)  # errors of kernels that a device lacks
_TRIED = 256  # rows and columns of a trial product


def multiply(
    a: Codes, b: Codes, out: torch.dtype, fast: bool = False, backend: Backend = "torch"
) -> Tensor:
    """Return a @ b.T [m, n] of a [m, k] and b [n, k], accumulated in FP32 and rounded to `out`
    once.

    fast: a tensor core may accumulate with fewer bits (Hopper's fast accumulation), as Transformer
        Engine does forward.
    """
    if not a.values.numel() or not b.values.numel():
        return torch.zeros(len(a.values), len(b.values), dtype=out, device=a.values.device)
    kernel, _ = chosen(
        _sharing(a, b), a.values.dtype, b.block[0] == 128, out, a.values.device, backend
    )
    return emulated(a, b, out) if kernel is None else kernel(a, b, out, fast)


def add_product_(
    total: Tensor, a: Codes, b: Codes, backend: Backend = "torch", first: bool = False
) -> None:
    """Add a [m, k] @ b [n, k].T to total [m, n], for main gradients. first: overwrite `total`
    instead."""
    product = multiply(a, b, total.dtype, backend=backend)
    total.copy_(product) if first else total.add_(product)


def emulated(a: Codes, b: Codes, out: torch.dtype) -> Tensor:
    """Return `multiply` computed in FP32 on any device: from codes, scaled afterwards, or from the
    scaled numbers."""
    if min(a.block[1], b.block[1]) < a.values.shape[1]:
        return (a.wide() @ b.wide().t()).to(out)
    rows, columns = (spread(c.inverse.float(), c.block, c.values.shape) for c in (a, b))
    return (a.values.float() @ b.values.float().t()).mul_(rows).mul_(columns.t()).to(out)


def ways(
    recipe: FP8Recipe, device: torch.device, out: torch.dtype, total: torch.dtype
) -> dict[str, str]:
    """Return how a device computes each of a linear layer's PRODUCTS: the kernel, or that it is
    emulated and why.

    out: dtype of activations and their gradients; total: of main gradients. Raises UserError if
    Transformer Engine is requested and does not compute them.
    """
    kind: Kind = "current" if recipe.kind == "delayed" else recipe.kind
    said: dict[str, str] = {}
    for name, (a, b) in PRODUCTS.items():
        dtype = total if name == "weight gradient" else out
        square = kind == "blockwise" and b == "weight"
        kernel, why = chosen(kind, format_of(recipe, a), square, dtype, device, recipe.backend)
        said[name] = f"{EMULATED}: {why}" if kernel is None else f"{kernel.__name__} kernel"
    return said


def _sharing(a: Codes, b: Codes) -> Kind:
    """Return the layout of scales that kernels see; for them delayed scales are the same as current
    ones."""
    if a.inverse.dtype == torch.float8_e8m0fnu:
        return "mx"
    if min(a.block[1], b.block[1]) < a.values.shape[1]:
        return "blockwise"
    return "current" if a.inverse.numel() == b.inverse.numel() == 1 else "rowwise"


@cache
def chosen(
    kind: Kind,
    a_format: torch.dtype,
    square: bool,
    out: torch.dtype,
    device: torch.device,
    backend: Backend = "torch",
) -> tuple[Kernel | None, str]:
    """Return the first kernel that computes such products correctly, or None and why the last one
    does not.

    a_format: of the first factor; the second is E4M3. square: True if its blocks, if there are any,
    are of 128 x 128. On meta tensors, which have no numbers, that is the first one. Raises
    UserError if Transformer Engine's casts or products are wrong.
    """
    if (
        device.type == "meta"
    ):  # tensors without storage, in place of a GPU's: their products cannot be proven
        return KERNELS[kind][0], ""
    with (
        _disable_current_modes()
    ):  # a call with fake tensors must not decide for later ones with real tensors
        recipe = FP8Recipe(kind, backend=backend)
        role = "gradient" if a_format == E5M2 else "input"
        if backend == "torch" and device.type in SLOW:
            return None, SLOW[device.type]
        if backend == "torch":
            return _tried(KERNELS[kind], recipe, role, square, out, device)
        why = _miscast(recipe, role, device)
        kernel, refused = _tried(
            (kernels.transformer_engine_gemm,), recipe, role, square, out, device
        )
    if why or refused:
        raise UserError(
            f'fp8.backend = "{backend}" on {device}: {why or refused}; use backend "torch"'
        )
    return kernel, ""


def _tried(
    candidates: Sequence[Kernel],
    recipe: FP8Recipe,
    role: Role,
    square: bool,
    out: torch.dtype,
    device: torch.device,
) -> tuple[Kernel | None, str]:
    a = quantize(_sample(device), recipe, role)
    b = quantize(
        _sample(device).flip(0),
        recipe,
        "weight" if square or recipe.kind != "blockwise" else "input",
    )
    right = emulated(a, b, torch.float32)
    why = ""
    for kernel in candidates:
        try:
            made = torch.stack([kernel(a, b, out, fast).float() for fast in (False, True)])
        except REFUSALS as error:
            why = _said(recipe.backend, error)
        else:
            off = (made - right).norm() / right.norm()
            if off < 0.01:
                return kernel, ""
            why = f"its {kernel.__name__} kernel is wrong by {off:.1%}"
    return None, why


def _miscast(recipe: FP8Recipe, role: Role, device: torch.device) -> str:
    """Return what is wrong with Transformer Engine's codes; empty if they are equal to torch's."""
    x = _sample(device)[:, :48]
    try:
        made = quantize_both(x, recipe, role)
    except REFUSALS as error:
        return _said(recipe.backend, error)
    right = quantize_both(x, replace(recipe, backend="torch"), role)
    alike = all(
        torch.equal(a.values.float(), b.values.float()) for a, b in zip(made, right, strict=True)
    )
    return "" if alike else "its casts are not those of torch"


def _said(backend: Backend, error: Exception) -> str:
    return f'{backend} says "{str(error).splitlines()[0].split(". ")[0].rstrip(".")}"'


def _sample(device: torch.device) -> Tensor:
    """Return numbers whose rows and blocks differ in magnitude, drawn from no generator."""
    grid = torch.arange(_TRIED * _TRIED, device=device, dtype=torch.float32).view(_TRIED, _TRIED)
    sizes = torch.linspace(0.1, 0.9, _TRIED, device=device)  # small enough for FP16 sums
    return (grid * 0.7).sin() * sizes * sizes[:, None]
