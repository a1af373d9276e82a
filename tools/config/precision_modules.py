"""The plan of each module of a model: the dtypes of its tensors and the bytes they take."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from math import prod

from megaprec.fp8.eligibility import asked_for
from megaprec.precision.plan import PrecisionPlan, dtype_name
from models.config import ModelConfig
from tools.convert.core.rules import logical_shapes

ROLES = ("compute", "parameter", "gradient", "reduce", "master", "moment")


@dataclass(frozen=True)
class Row:
    """One module, or equal modules of several layers: "layers.0-5.attention". dtypes: dtype name by
    role.

    bytes: by role, of the whole model; moments count twice. Roles without memory of their own are
        missing.
    """

    name: str
    dtypes: dict[str, str]
    bytes: dict[str, int]


def rows(plan: PrecisionPlan, config: ModelConfig) -> list[Row]:
    """Yield a row per module, equal ones of all layers together, in the order of the model."""
    # (module, dtypes) -> layer -> elements
    tensors = defaultdict[tuple[str, tuple[str, ...]], dict[int, int]](dict)
    for name, shape in logical_shapes(config).items():
        module, layer = _module(name)
        dtypes = tuple(_dtypes(plan, name, layer, config.layers).values())
        counts = tensors[module, dtypes]
        counts[layer] = counts.get(layer, 0) + prod(shape)
    return [
        _row(plan, module.replace("*", span), count, dict(zip(ROLES, dtypes, strict=True)))
        for (module, dtypes), counts in tensors.items()
        for span, count in spans(counts)
    ]


def _module(name: str) -> tuple[str, int]:
    """Return ("layers.*.attention", 3) for "layers.3.attention.query.weight"; other modules have
    layer -1."""
    first, *rest = name.split(".")
    if first == "layers":
        return (f"{first}.*.{rest[1]}", int(rest[0]))
    return (first, -1)


def spans(counts: dict[int, int]) -> Iterator[tuple[str, int]]:
    """Return ranges of consecutive layers as "0-5", with the sum of their elements."""
    numbered = enumerate(sorted(counts))
    for _, run in groupby(numbered, key=lambda pair: pair[1] - pair[0]):
        layers = [layer for _, layer in run]
        span = f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else f"{layers[0]}"
        yield span, sum(counts[layer] for layer in layers)


def _dtypes(plan: PrecisionPlan, name: str, layer: int, layers: int) -> dict[str, str]:
    """Return the dtype of each role for the parameter of this logical name."""
    held = plan.param_dtype(name)
    kept = held == plan.sensitive and plan.compute_dtype(name) == plan.sensitive
    dtypes = {
        "compute": plan.compute_dtype(name),
        "parameter": held,
        "gradient": plan.sensitive if kept else plan.gradients,
        "reduce": plan.sensitive if kept else plan.reduce,
        "master": plan.sensitive if kept else plan.masters,
        "moment": plan.sensitive if kept else plan.moments,
    }
    named = {role: dtype_name(dtype) for role, dtype in dtypes.items()}
    if plan.fp8 is not None and not kept and _in_fp8(plan, name, layer, layers):
        named["compute"] = "fp8"
        named["parameter"] = "fp8" if plan.fp8.parameters else named["parameter"]
    if plan.remainders and not kept and named["parameter"] != "fp8":
        named["master"] = "16 bits"
    return named


def _in_fp8(plan: PrecisionPlan, name: str, layer: int, layers: int) -> bool:
    """Return True if this is the weight of a linear layer whose products are in FP8."""
    assert plan.fp8 is not None
    linear = name.endswith(".weight") and not any(
        other in name for other in ("norm", "router", "shared_gate")
    )
    return (
        linear and layer >= 0 and not asked_for(plan.fp8, name, layers) and not plan.fp8.calibrating
    )


def _row(plan: PrecisionPlan, name: str, elements: int, dtypes: dict[str, str]) -> Row:
    sizes = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "16 bits": 2, "fp8": 1}
    taken = {role: elements * sizes[dtypes[role]] for role in ("parameter", "gradient")}
    if dtypes["master"] == dtypes["parameter"]:
        taken["master"] = 0
    else:
        taken["master"] = elements * sizes[dtypes["master"]]
    taken["moment"] = 2 * elements * sizes[dtypes["moment"]]
    return Row(name, dtypes, taken)
