"""Records of routers in metrics.jsonl and events.jsonl.

The field "router" of a step has a list for each measure, such as "max_load". Position n is layer n;
modules of multi-token prediction follow the model's last layer. null: a layer without experts.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megaprec.diagnose.router_monitor import STEPS
from megaprec.optim.decision.step_report import RouterReport
from tools.journal.records import COLLAPSE

ROUTER = "router"  # the field of a step
MOST_NAMED = 4  # layers in a line
DIGITS = 6  # significant ones of a measure: a model may have many layers


def router_fields(routers: Sequence[RouterReport]) -> dict[str, Any]:
    """Return the fields of a step's record about its routers; none for a model without experts."""
    if not routers:
        return {}
    measures: dict[str, list[float | None]] = {}
    num_layers = 1 + max(router.layer for router in routers)
    for router in routers:
        for name, value in _measures(router):
            column = measures.setdefault(name, [None] * num_layers)
            column[router.layer] = float(f"{value:.{DIGITS}g}")
    return {ROUTER: measures}


def _measures(router: RouterReport) -> Iterator[tuple[str, float]]:
    """Yield the measures that a router has, by the name of their list."""
    yield "max_load", router.max_load
    yield "min_load", router.min_load
    yield "used_experts", router.used_experts
    yield "entropy", router.entropy
    if router.balance_loss is not None:
        yield "balance_loss", router.balance_loss
    if router.z_loss is not None:
        yield "z_loss", router.z_loss
    if router.corrections is not None:
        lowest, highest = router.corrections
        yield "min_correction", lowest
        yield "max_correction", highest


def collapse_event(
    routers: Sequence[RouterReport], step: int, experts: int, bound: float
) -> dict[str, Any]:
    """Return the event of routers that have collapsed with a step.

    experts: of a layer. bound: of `RouterMonitor`.
    """
    worst = min(routers, key=lambda router: router.used_experts)
    described = (
        f"the router of {_name_layers(routers)} has collapsed: for {STEPS} steps in a row fewer "
        f"than {bound:.3g} of its {experts} experts were used, {worst.used_experts:.3g} in this "
        f"one, and the largest load is {worst.max_load:.0%} of the tokens"
    )
    return {
        "event": COLLAPSE,
        "step": step,
        "layers": [router.layer for router in routers],
        "used_experts": [router.used_experts for router in routers],
        "max_load": [router.max_load for router in routers],
        "bound": bound,
        "said": described,
    }


def _name_layers(routers: Sequence[RouterReport]) -> str:
    """Return the layers of routers in words, the first MOST_NAMED of them by number."""
    layers = [str(router.layer) for router in routers]
    unnamed = len(layers) - MOST_NAMED
    if unnamed > 0:
        layers = [*layers[:MOST_NAMED], f"{unnamed} more"]
    if len(layers) == 1:
        return f"layer {layers[0]}"
    return f"each of layers {', '.join(layers[:-1])} and {layers[-1]}"


def router_values(record: Mapping[str, Any], measure: str) -> list[float]:
    """Return a measure of a step's record by layer; NaN for a layer without experts, or whatever is
    no number. It is empty if the record has no such measure."""
    measures = record.get(ROUTER)
    column = measures.get(measure) if isinstance(measures, dict) else None
    if not isinstance(column, list):
        return []
    return [float(value) if type(value) in (int, float) else math.nan for value in column]


def router_scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return all measures of a step's record, by measure and layer: router/max_load/3."""
    measures = record.get(ROUTER)
    names = measures if isinstance(measures, dict) else ()
    scalars: dict[str, float] = {}
    for name in names:
        for layer, value in enumerate(router_values(record, name)):
            if not math.isnan(value):
                scalars[f"{ROUTER}/{name}/{layer}"] = value
    return scalars
