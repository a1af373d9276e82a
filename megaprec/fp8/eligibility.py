"""Eligibility of weights: for each weight, whether its matrix products run in FP8, and the reason
if they do not."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

from megaprec.comm.layout import Part
from megaprec.errors import UserError
from megaprec.precision.fp8_recipe import SCALE_KINDS, FP8Recipe, Kind

_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True)
class Eligibility:
    """The precision of the matrix products with one weight.

    name: of the first logical tensor that is stacked in the weight. shape: [n, k], as a rank holds
        it.
    fallback_reason: why the products stay in the compute dtype; empty if they run in FP8.
    """

    name: str
    shape: tuple[int, int]
    fallback_reason: str = ""


def eligibility(recipe: FP8Recipe, parts: Sequence[Part], layers: int) -> Eligibility:
    """Return the eligibility, under `recipe`, of a weight that is made of `parts`, in a model of so
    many layers.

    Raises UserError for patterns that match only some of the parts, and for NVFP4 in which only a
    whole tensor fits, not a rank's slice.
    """
    name = parts[0].name
    # parts are stacked by rows; a weight with more dims counts as [n, k]
    outputs = sum(part.padded[0] for part in parts)
    inputs = prod(parts[0].padded[1:])
    shape = (outputs, inputs)
    reasons = [excluded_by(recipe, part.name, layers) for part in parts]
    if any(reasons):
        if not all(reasons):
            names = " and ".join(part.name for part in parts)
            raise UserError.of("fp8.fp8_wide_part_of_weight", names=names)
        return Eligibility(name, shape, reasons[0])
    if recipe.scales.four_bits:
        return Eligibility(name, shape, _misfit_of_parts(parts))
    # padding makes any size fit
    unfit = misfit(recipe.kind, outputs, inputs)
    if unfit and not recipe.pad:
        return Eligibility(name, shape, f"{unfit}, and fp8.pad = false")
    return Eligibility(name, shape)


def _misfit_of_parts(parts: Sequence[Part]) -> str:
    """Return why a weight stacked of `parts` does not suit NVFP4, the same in every layout; empty
    if it does.

    Each part must suit it by itself: a block across two of them would have other numbers where
    parts are cut over tensor-parallel ranks. Raises UserError if a whole tensor suits it and its
    slices do not.
    """
    for part in parts:
        if unfit := misfit("nvfp4", part.shape[0], prod(part.shape[1:])):
            return f"{unfit} ({part.name})"
        if unfit := misfit("nvfp4", part.padded[0], prod(part.padded[1:])):
            raise UserError.of("fp8.nvfp4_slice", name=part.name, slices=part.shards, misfit=unfit)
    return ""


def misfit(kind: Kind, outputs: int, inputs: int) -> str:
    """Return why a weight [outputs, inputs], as one rank holds it, does not suit FP8; empty if it
    does."""
    rows, columns = SCALE_KINDS[kind].multiples
    reasons = []
    if outputs % rows:
        reasons.append(f"{outputs} outputs (dim 0) are no multiple of {rows}")
    if inputs % columns:
        reasons.append(f"{inputs} inputs (dim 1) are no multiple of {columns}")
    return " and ".join(reasons)


def excluded_by(recipe: FP8Recipe, name: str, layers: int) -> str:
    """Return the key that keeps the products with this weight in high precision; empty if there is
    none."""
    for pattern in recipe.wide:
        if fnmatchcase(name, pattern):
            return f'fp8.wide has "{pattern}"'
    match = _LAYER.search(name)
    if match is None:  # a weight outside of the layers, such as the head
        return ""
    layer = int(match[1])
    if layer < recipe.first_layers:
        return f"fp8.first_layers = {recipe.first_layers}"
    if layer >= layers - recipe.last_layers:
        return f"fp8.last_layers = {recipe.last_layers}"
    return ""


def unsupported_settings(recipe: FP8Recipe) -> dict[str, str]:
    """Return the fields that `recipe` turns on but that are not computed: field -> why not, or what
    is computed instead."""
    reasons = {
        "dot_product_attention": "the products inside attention are computed in the compute dtype",
        "multi_head_attention": "the activations in attention have the compute dtype",
    }
    if not recipe.scales.serves_both(is_weight=True):
        reasons["parameters"] = (
            f"with fp8.kind = {recipe.kind} a weight has different codes along its rows and "
            "its columns, and both together take as much memory as bf16"
        )
    return {key: why for key, why in reasons.items() if getattr(recipe, key)}
