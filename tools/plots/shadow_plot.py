"""The records, the alarm and the plot of a run's comparisons of FP8 with precision.compute (`models.fp8_shadow`)."""

import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from models.fp8_shadow import Shadow
from tools.config.precision_settings import FP8
from tools.journal.records import read_events
from tools.plots.run_plots import BLUE, ORANGE, RED

SHADOW = "fp8_shadow"
PICTURE = "fp8-shadow.png"
GREEN, GREY = "#2a8f3a", "#8a8f98"
ROLES = {"input": BLUE, "weight": GREEN, "gradient": ORANGE}


def shadow_fields(shadow: Shadow, fp8: FP8) -> dict[str, Any]:
    """Return the fields that a comparison adds to the record of its step in metrics.jsonl."""
    fields: dict[str, Any] = {"shadow_loss_gap": shadow.gap, "shadow_cosine": shadow.worst[1]}
    return fields | ({"shadow_alarm": "; ".join(said)} if (said := alarms(shadow, fp8)) else {})


def shadow_event(shadow: Shadow, step: int, fp8: FP8) -> dict[str, Any]:
    """Return the record of a comparison for events.jsonl."""
    name, cosine = shadow.worst
    return {
        "event": SHADOW,
        "step": step,
        "loss": shadow.loss,
        "wide_loss": shadow.wide_loss,
        "loss_gap": shadow.gap,
        "worst_cosine": cosine,
        "worst_weight": name,
        "alarms": alarms(shadow, fp8),
        "cosines": dict(shadow.cosines),
        "saturated": dict(shadow.saturated),
        "underflowed": dict(shadow.underflowed),
    }


def alarms(shadow: Shadow, fp8: FP8) -> list[str]:
    """Return a line for each value outside of its band; none if the pass without FP8 is not finite, for it says
    nothing of FP8.
    """
    said = []
    if abs(shadow.gap) > fp8.shadow_loss_gap:
        said.append(f"loss gap {shadow.gap:+.2%} is beyond fp8.shadow_loss_gap = {fp8.shadow_loss_gap:g}")
    low = {name: cosine for name, cosine in shadow.cosines.items() if cosine < fp8.shadow_cosine}
    if low:
        name, cosine = shadow.worst
        others = f" and {len(low) - 1} more" if len(low) > 1 else ""
        said.append(f"cosine {cosine:.3f} of {name}{others} is below fp8.shadow_cosine = {fp8.shadow_cosine:g}")
    return said


def plot_shadow(folder: Path) -> Path | None:
    """Plot the comparisons in `folder` to fp8-shadow.png and return its path; None without comparisons or
    matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  # optional, and slow to import
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError:
        return None
    events = read_events(folder, SHADOW)
    if not events:
        return None
    figure = Figure(figsize=(9, 8.5), layout="constrained")
    FigureCanvasAgg(figure)
    gap, cosines, lost = figure.subplots(3, 1, sharex=True, height_ratios=(1, 1.4, 1.2))
    _draw_gap(gap, events)
    _draw_cosines(cosines, events)
    _draw_lost(lost, events)
    for axes in (gap, cosines, lost):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    alarmed = sum(bool(event["alarms"]) for event in events)
    figure.suptitle(f"{folder.resolve().name}: FP8 against no FP8 in {len(events)} micro-batches, {alarmed} alarms")
    figure.savefig(folder / PICTURE, dpi=110)
    return folder / PICTURE


def _steps(events: list[dict[str, Any]]) -> list[int]:
    return [event["step"] for event in events]


def _draw_gap(axes: Any, events: list[dict[str, Any]]) -> None:
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.plot(_steps(events), [_finite(event["loss_gap"]) * 100 for event in events], color=BLUE, marker=".")
    alarmed = [event for event in events if event["alarms"]]
    axes.plot(
        _steps(alarmed), [_finite(e["loss_gap"]) * 100 for e in alarmed], "x", color=RED, label="alarm", markersize=8
    )
    if alarmed:
        axes.legend(loc="upper right", frameon=False)
    axes.set_ylabel("loss gap, %")


def _draw_cosines(axes: Any, events: list[dict[str, Any]]) -> None:
    """Plot a line per layer: the lowest cosine of its weights."""
    layers = defaultdict[int, list[float]](list)
    for event in events:
        for layer, cosine in _worst_of_layers(event).items():
            layers[layer].append(cosine)
    ends = {min(layers), max(layers)} if layers else set()
    for layer, values in sorted(layers.items()):
        share = layer / max(1, *layers)
        color = 0.12 + 0.76 * share, 0.37 + 0.1 * share, 0.66 - 0.66 * share
        axes.plot(_steps(events), values, color=color, label=f"layer {layer}" if layer in ends else None)
    axes.set_ylabel("lowest cosine of a layer's\nweight gradients")
    axes.legend(loc="lower right", frameon=False, fontsize=8)


def _worst_of_layers(event: dict[str, Any]) -> dict[int, float]:
    worst = defaultdict[int, float](lambda: math.nan)
    for name, cosine in event["cosines"].items():
        if found := re.match(r"layers\.(\d+)\.", name):
            worst[int(found[1])] = min(_finite(cosine), worst[int(found[1])])
    return worst


def _draw_lost(axes: Any, events: list[dict[str, Any]]) -> None:
    """Plot, by role, the saturated and underflowed ratios of the worst product."""
    for kind, style in (("saturated", "-"), ("underflowed", ":")):
        for role, color in ROLES.items():
            worst = [100 * _largest(event[kind], f".{role}") for event in events]
            axes.plot(_steps(events), worst, style, color=color, label=f"{role}s {kind}", linewidth=1.2)
    axes.set_yscale("symlog", linthresh=0.01)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("numbers lost in the\nworst product, %")
    axes.set_xlabel("step")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False, ncols=3, fontsize=8)


def _largest(parts: dict[str, float | str], ending: str) -> float:
    return max((_finite(part) for name, part in parts.items() if name.endswith(ending)), default=0.0)


def _finite(value: float | str) -> float:
    return float(value) if math.isfinite(float(value)) else math.nan
