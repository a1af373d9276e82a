"""Which weights a recipe reaches: whose products are made in FP8, and why the others' are not."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

from megaprec.fp8.align import misfit
from megaprec.fp8.recipe import FP8Recipe
from megaprec.layout import Part

_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True)
class Reach:
    """What becomes of the products with one weight.

    name: of the first logical tensor that is stacked in it. shape: [n, k], as a rank holds it.
    wide: why they stay in the compute dtype; empty if they are in FP8. padded: zeros are added for FP8 to fit.
    """

    name: str
    shape: tuple[int, int]
    wide: str = ""
    padded: bool = False


def reach(recipe: FP8Recipe, parts: Sequence[Part], layers: int) -> Reach:
    """What `recipe` does with the products of a weight that is made of `parts`, in a model of so many layers."""
    name = parts[0].name
    shape = sum(part.padded[0] for part in parts), prod(parts[0].padded[1:])
    if asked := _asked_for(recipe, name, layers):
        return Reach(name, shape, asked)
    unfit = misfit(recipe.kind, *shape)
    if unfit and not recipe.pad:
        return Reach(name, shape, f"{unfit}, and fp8.pad = false")
    return Reach(name, shape, padded=bool(unfit))


def _asked_for(recipe: FP8Recipe, name: str, layers: int) -> str:
    """The key that keeps these products wide; empty if there is none."""
    if pattern := next((pattern for pattern in recipe.wide if fnmatchcase(name, pattern)), None):
        return f'fp8.wide has "{pattern}"'
    found = _LAYER.search(name)
    if found and int(found[1]) < recipe.first_layers:
        return f"fp8.first_layers = {recipe.first_layers}"
    if found and int(found[1]) >= layers - recipe.last_layers:
        return f"fp8.last_layers = {recipe.last_layers}"
    return ""
