"""The plan of each module of a model: the dtypes of its tensors and the bytes they take."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import NamedTuple

from megaprec.fp8.eligibility import excluded_by
from megaprec.precision.fp8_recipe import FP8Recipe
from megaprec.precision.plan import PrecisionPlan, dtype_name
from models.config import ModelConfig
from models.logical_shapes import logical_shapes

ROLES: tuple[str, ...] = ("compute", "parameter", "gradient", "reduce", "master", "moment")
BYTES = {
    "fp64": 8,
    "fp32": 4,
    "bf16": 2,
    "fp16": 2,
    "16 bits": 2,
    "fp8": 1,
    "nvfp4": 1,
}
NOT_LINEAR = ("norm", "router", "shared_gate", "convolution")  # parts of the names of other weights


@dataclass(frozen=True)
class ModuleRow:
    """One module, or equal modules of several layers: "layers.0-5.attention". dtypes: dtype name by
    role.

    bytes: by role, of the whole model; moments count twice. Roles without memory of their own are
        missing.
    """

    name: str
    dtypes: dict[str, str]
    bytes: dict[str, int]


class ModuleDtypes(NamedTuple):
    """Modules of several layers with equal dtypes. module: "layers.*.attention". dtypes: in the
    order of ROLES."""

    module: str
    dtypes: tuple[str, ...]


def rows(plan: PrecisionPlan, config: ModelConfig) -> list[ModuleRow]:
    """Return a row per module, equal ones of all layers together, in the order of the model."""
    # elements by layer of the modules that are one row, or several if layers between them differ
    elements = defaultdict[ModuleDtypes, Counter[int]](Counter)
    for name, shape in logical_shapes(config).items():
        module, layer = _split_layer(name)
        dtypes = _dtypes(plan, name, layer, config.layers)
        same_modules = ModuleDtypes(module, tuple(dtypes.values()))
        elements[same_modules][layer] += prod(shape)

    module_rows = list[ModuleRow]()
    for same_modules, by_layer in elements.items():
        dtypes = dict(zip(ROLES, same_modules.dtypes, strict=True))
        for span, count in layer_spans(by_layer):
            row_name = same_modules.module.replace("*", span)
            module_rows.append(_row(row_name, count, dtypes))
    return module_rows


def _split_layer(name: str) -> tuple[str, int]:
    """Return ("layers.*.attention", 3) for "layers.3.attention.query.weight"; other modules have
    layer -1."""
    first, *parts = name.split(".")
    if first == "layers":
        layer, module, *_ = parts
        return f"layers.*.{module}", int(layer)
    return first, -1


def layer_spans(counts: Mapping[int, int]) -> Iterator[tuple[str, int]]:
    """Yield ranges of consecutive layers as "0-5", with the sum of their elements.

    counts: elements by layer.
    """

    def layer_minus_place(place_and_layer: tuple[int, int]) -> int:
        """Return a number that is the same for all layers of a range without gaps."""
        place, layer = place_and_layer
        return layer - place

    for _, group in groupby(enumerate(sorted(counts)), key=layer_minus_place):
        layers = [layer for _, layer in group]
        first = layers[0]
        last = layers[-1]
        span = f"{first}-{last}" if last > first else f"{first}"
        yield span, sum(counts[layer] for layer in layers)


def _dtypes(plan: PrecisionPlan, name: str, layer: int, layers: int) -> dict[str, str]:
    """Return the dtype of each role for the parameter of this logical name."""
    dtypes = {
        "compute": plan.compute_dtype(name),
        "parameter": plan.param_dtype(name),
        "gradient": plan.gradients,
        "reduce": plan.reduce,
        "master": plan.masters,
        "moment": plan.moments,
    }
    # a parameter that is computed with in the sensitive dtype has all of its state in it
    if dtypes["compute"] == dtypes["parameter"] == plan.sensitive:
        return dict.fromkeys(dtypes, dtype_name(plan.sensitive))
    names = {role: dtype_name(dtype) for role, dtype in dtypes.items()}
    # FP8 replaces the dtype of products, and of weights where no wide copy is kept
    if plan.fp8 is not None and _in_fp8(plan.fp8, name, layer, layers):
        names["compute"] = "nvfp4" if plan.fp8.scales.four_bits else "fp8"
        if plan.fp8.parameters:
            names["parameter"] = "fp8"
    # a master of 32 bits is the weight of 16 bits and as many more
    if plan.remainders and names["parameter"] != "fp8":
        names["master"] = "16 bits"
    return names


def _in_fp8(recipe: FP8Recipe, name: str, layer: int, layers: int) -> bool:
    """Return True if this is the weight of a linear layer whose products are in FP8."""
    if not name.endswith(".weight") or any(part in name for part in NOT_LINEAR):
        return False
    # embedding and head are in no layer; a recipe that calibrates watches wide products
    return layer >= 0 and not excluded_by(recipe, name, layers) and not recipe.calibrating


def _row(name: str, elements: int, dtypes: dict[str, str]) -> ModuleRow:
    """Return the row of a module with so many elements."""

    def size(role: str) -> int:
        return elements * BYTES[dtypes[role]]

    sizes = {
        "parameter": size("parameter"),
        "gradient": size("gradient"),
        "master": size("master"),
        "moment": 2 * size("moment"),  # AdamW has two
    }
    if dtypes["master"] == dtypes["parameter"]:
        sizes["master"] = 0  # the parameter is its own master
    return ModuleRow(name, dtypes, sizes)
