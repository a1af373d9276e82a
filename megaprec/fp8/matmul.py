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

from megaprec.errors import UserError
from megaprec.fp8 import kernels
from megaprec.fp8.formats import E5M2, Role, format_of
from megaprec.fp8.quantize import Codes, block_in, expand_blocks, quantize, quantize_both
from megaprec.precision.fp8_recipe import SCALE_KINDS, Backend, FP8Recipe, Kind
from megaprec.torch_private import without_dispatch_modes

Kernel = Callable[[Codes, Codes, torch.dtype, bool], Tensor]

KERNELS: dict[Kind, tuple[Kernel, ...]] = {
    "current": (kernels.tensorwise,),
    "rowwise": (kernels.rowwise, kernels.unscaled_rowwise),
    "blockwise": (kernels.blockwise,),
    "mx": (kernels.mx,),
}
"""The kernels of each kind, the first choice first; a kind without any is emulated on every
device."""
PRODUCTS: dict[str, tuple[Role, Role]] = {
    "forward": ("input", "weight"),
    "input gradient": ("gradient", "weight"),
    "weight gradient": ("gradient", "input"),
}
EMULATED = "emulated in FP32"
SLOW = {"cpu": "torch's kernel for CPUs is no faster, and on some far slower"}  # by device type
REFUSALS = (RuntimeError, ValueError, AssertionError)  # errors of kernels that a device lacks
_TRIAL_SIZE = 256  # rows and columns of a trial product
# Relative error (Frobenius norm) up to which a kernel is right: rounding to BF16 alone is wrong by
# 0.3 % at most, another order of scales by far more.
_KERNEL_TOLERANCE = 0.01


def multiply(
    a: Codes,
    b: Codes,
    out: torch.dtype,
    fast: bool = False,
    backend: Backend = "torch",
) -> Tensor:
    """Return a @ b.T [m, n] of a [m, k] and b [n, k], accumulated in FP32 and rounded to `out`
    once.

    fast: a tensor core may accumulate with fewer bits (Hopper's fast accumulation), as Transformer
        Engine does forward.
    """
    if not a.values.numel() or not b.values.numel():
        return torch.zeros(len(a.values), len(b.values), dtype=out, device=a.values.device)
    kernel = _kernel_for(a, b, out, backend)
    if kernel is None:
        return emulated(a, b, out)
    return kernel(a, b, out, fast)


def add_product_(
    total: Tensor,
    a: Codes,
    b: Codes,
    backend: Backend = "torch",
    first: bool = False,
) -> None:
    """Add a [m, k] @ b [n, k].T to total [m, n], for main gradients. first: overwrite `total`
    instead."""
    if _is_added_in_place(total, a, b, backend, first):
        return
    product = multiply(a, b, total.dtype, backend=backend)
    if first:
        total.copy_(product)
    else:
        total.add_(product)


def _is_added_in_place(total: Tensor, a: Codes, b: Codes, backend: Backend, first: bool) -> bool:
    """Add the product to `total`, or overwrite it, if that takes fewer passes over it than adding
    what `multiply` returns. Return True if it was done."""
    # torch computes no such product of meta tensors
    if not a.values.numel() or not b.values.numel() or a.values.device.type == "meta":
        return False
    kernel = _kernel_for(a, b, total.dtype, backend)
    if kernel is kernels.tensorwise and first and kernels.needs_no_padding(total, b):
        kernels.write_tensorwise(total, a, b)
        return True
    if kernel is kernels.unscaled_rowwise and total.dtype == torch.float32:
        kernels.add_unscaled_rowwise_(total, a, b, first)
        return True
    return False


def _kernel_for(a: Codes, b: Codes, out: torch.dtype, backend: Backend) -> Kernel | None:
    """Return the kernel that computes a @ b.T on its device; None if none does."""
    kind = _kind_of(a, b)
    scales = SCALE_KINDS[kind]
    b_is_weight = scales.differs_for_weights and b.block == scales.weight_block
    device = a.values.device
    kernel, _ = choose_kernel(kind, a.values.dtype, b_is_weight, out, device, backend)
    return kernel


def emulated(a: Codes, b: Codes, out: torch.dtype) -> Tensor:
    """Return a @ b.T [m, n], computed in FP32 on any device and rounded to `out`. Where it can be,
    the codes are multiplied and the product is scaled; else the factors are scaled first."""
    if a.tensor is not None and b.tensor is not None:
        # As a tensor core does: the terms of the sum are exact, and scales of tensors come last.
        product = a.scaled_by_blocks() @ b.scaled_by_blocks().t()
        return product.mul_(a.tensor).mul_(b.tensor).to(out)
    if _has_blocks_in_rows(a, b):
        return (a.wide() @ b.wide().t()).to(out)
    row_scales = expand_blocks(a.inverse.float(), a.block, a.values.shape)
    column_scales = expand_blocks(b.inverse.float(), b.block, b.values.shape)
    product = a.values.float() @ b.values.float().t()
    return product.mul_(row_scales).mul_(column_scales.t()).to(out)


def describe_kernels(
    recipe: FP8Recipe,
    device: torch.device,
    out: torch.dtype,
    total: torch.dtype,
) -> dict[str, str]:
    """Return how a device computes each of a linear layer's PRODUCTS: the kernel, or that it is
    emulated and why.

    out: dtype of activations and their gradients; total: of main gradients. Raises UserError if
    Transformer Engine is requested and does not compute them.
    """
    kind: Kind = "current" if recipe.kind == "delayed" else recipe.kind
    descriptions: dict[str, str] = {}
    for name, (a_role, b_role) in PRODUCTS.items():
        dtype = total if name == "weight gradient" else out
        b_is_weight = recipe.scales.differs_for_weights and b_role == "weight"
        a_format = format_of(recipe, a_role)
        kernel, why = choose_kernel(kind, a_format, b_is_weight, dtype, device, recipe.backend)
        if kernel is None:
            descriptions[name] = f"{EMULATED}: {why}"
        else:
            descriptions[name] = f"{kernel.__name__} kernel"
    return descriptions


def _kind_of(a: Codes, b: Codes) -> Kind:
    """Return the kind of recipe whose scales lie as those of a and b do.

    It is what a kernel goes by. Delayed scales lie as current ones, so they are "current" here.
    """
    if _has_narrow_scales(a) or _has_blocks_in_rows(a, b):
        return _kind_with_blocks_of(a, b)
    if a.inverse.numel() == b.inverse.numel() == 1:
        return "current"
    return "rowwise"


def _kind_with_blocks_of(a: Codes, b: Codes) -> Kind:
    """Return the kind of recipe that makes codes like these, with the same blocks and the same form
    of scales. b may be a weight, which some kinds cut into other blocks."""
    has_four_bits = a.tensor is not None
    has_powers_of_two = _has_narrow_scales(a)
    for kind, scales in SCALE_KINDS.items():
        if (scales.four_bits, scales.power_2) != (has_four_bits, has_powers_of_two):
            continue
        a_block = block_in(scales.block, a.values.shape)
        b_block = block_in(scales.block, b.values.shape)
        b_block_of_weight = block_in(scales.weight_block, b.values.shape)
        if a.block == a_block and b.block in (b_block, b_block_of_weight):
            return kind
    raise AssertionError(f"no kind has blocks of {a.block} and {b.block}")


def _has_narrow_scales(codes: Codes) -> bool:
    """Return True if scales are not in FP32: those of kinds that have powers of two."""
    return codes.inverse.dtype != torch.float32


def _has_blocks_in_rows(a: Codes, b: Codes) -> bool:
    """Return True if a sum over k has terms of several scales: no factor can be taken out of it."""
    return min(a.block[1], b.block[1]) < a.values.shape[1]


@cache
def choose_kernel(
    kind: Kind,
    a_format: torch.dtype,
    b_is_weight: bool,
    out: torch.dtype,
    device: torch.device,
    backend: Backend = "torch",
) -> tuple[Kernel | None, str]:
    """Return the first kernel that computes such products correctly, and ""; or None, and why the
    last one does not.

    a_format: of the codes of the first factor; those of the second are E4M3.
    b_is_weight: True if the second factor has the blocks of a weight, of a kind that has others for
        weights.
    out: dtype of the product.
    On meta tensors, which have no numbers, it is the first kernel. Raises UserError if Transformer
    Engine's casts or products are wrong.
    """
    own_kernels = KERNELS.get(kind, ())
    if not own_kernels:
        return None, f"there is no kernel for {kind} here"
    # Meta tensors stand for those of a GPU, and no product of theirs can be checked.
    if device.type == "meta":
        return own_kernels[0], ""
    # A call with fake tensors must not decide for later ones with real tensors: leave their modes.
    with without_dispatch_modes():
        recipe = FP8Recipe(kind, backend=backend)
        role = "gradient" if a_format == E5M2 else "input"
        if backend == "torch" and device.type in SLOW:
            return None, SLOW[device.type]
        if backend == "torch":
            return _try_kernels(own_kernels, recipe, role, b_is_weight, out, device)
        wrong_casts = _check_casts(recipe, role, device)
        candidates = (kernels.transformer_engine_gemm,)
        kernel, refusal = _try_kernels(candidates, recipe, role, b_is_weight, out, device)
    if why := wrong_casts or refusal:
        raise UserError.of("fp8.fp8_backend_unavailable", backend=backend, device=device, why=why)
    return kernel, ""


def _try_kernels(
    candidates: Sequence[Kernel],
    recipe: FP8Recipe,
    role: Role,
    b_is_weight: bool,
    out: torch.dtype,
    device: torch.device,
) -> tuple[Kernel | None, str]:
    """Return the first of `candidates` that computes such products correctly, and ""; or None, and
    why the last one does not.

    role: of the first factor. b_is_weight: as in `choose_kernel`.
    """
    a = quantize(_sample(device), recipe, role)
    # only blocks depend on the role
    is_activation = recipe.scales.differs_for_weights and not b_is_weight
    b_role: Role = "input" if is_activation else "weight"
    b = quantize(_sample(device).flip(0), recipe, b_role)
    expected = emulated(a, b, torch.float32)
    why = ""
    for kernel in candidates:
        try:
            slow_product = kernel(a, b, out, False).float()
            fast_product = kernel(a, b, out, True).float()
        except REFUSALS as error:
            why = _quote(recipe.backend, error)
            continue
        differences = torch.stack([slow_product - expected, fast_product - expected])
        relative_error = differences.norm() / expected.norm()
        if relative_error < _KERNEL_TOLERANCE:
            return kernel, ""
        why = f"its {kernel.__name__} kernel is wrong by {relative_error:.1%}"
    return None, why


def _check_casts(recipe: FP8Recipe, role: Role, device: torch.device) -> str:
    """Return what is wrong with Transformer Engine's codes; empty if they are equal to torch's."""
    x = _sample(device)[:, :48]
    try:
        both = quantize_both(x, recipe, role)
    except REFUSALS as error:
        return _quote(recipe.backend, error)
    expected = quantize_both(x, replace(recipe, backend="torch"), role)
    for codes, expected_codes in zip(both, expected, strict=True):
        if not torch.equal(codes.values.float(), expected_codes.values.float()):
            return "its casts are not those of torch"
    return ""


def _quote(backend: Backend, error: Exception) -> str:
    """Return the first sentence of an error, as what the backend says."""
    sentence = str(error).splitlines()[0].split(". ")[0].rstrip(".")
    return f'{backend} says "{sentence}"'


def _sample(device: torch.device) -> Tensor:
    """Return numbers whose rows and blocks differ in magnitude, drawn from no generator."""
    count = _TRIAL_SIZE * _TRIAL_SIZE
    numbers = torch.arange(count, device=device, dtype=torch.float32)
    waves = (numbers * 0.7).sin().view(_TRIAL_SIZE, _TRIAL_SIZE)
    sizes = torch.linspace(0.1, 0.9, _TRIAL_SIZE, device=device)  # small enough for FP16 sums
    return waves * sizes * sizes[:, None]
