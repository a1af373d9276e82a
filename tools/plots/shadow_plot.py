"""The plot of a run's comparisons of FP8 with precision.compute (`models.fp8_shadow`)."""

import math
import re
from pathlib import Path
from typing import Any

from tools.config.precision_settings import FP8
from tools.journal.fp8_shadow import SHADOW
from tools.journal.records import read_events
from tools.plots.run_plots import BLUE, GREY, ORANGE, RED, plain

PICTURE = "fp8-shadow.png"
GREEN = "#2a8f3a"
NEAR = 4.0  # limits of alarms are drawn if the axis then is at most this many times as long
NAMED = 6  # layers that the legend names at most
ROLES = {"input": BLUE, "weight": GREEN, "gradient": ORANGE}


def plot_shadow(folder: Path, fp8: FP8) -> Path | None:
    """Plot the comparisons in `folder`, with the limits of alarms, to fp8-shadow.png and return its
    path.

    None without comparisons or matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  # optional, and slow to import
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError:
        return None
    events = read_events(folder, SHADOW)
    if not events:
        return None
    figure = Figure(figsize=(11, 8.5), layout="constrained")
    FigureCanvasAgg(figure)
    gap, cosines, lost = figure.subplots(3, 1, sharex=True, height_ratios=(1, 1.4, 1.2))
    _draw_gap(gap, events, fp8.shadow_loss_gap)
    _draw_cosines(cosines, events, fp8.shadow_cosine)
    _draw_lost_numbers(lost, events)
    for axes in (gap, cosines, lost):
        plain(axes)
    alarmed = sum(bool(event["alarms"]) for event in events)
    figure.suptitle(
        f"{folder.resolve().name}: FP8 against no FP8 in {len(events)} micro-batches, {alarmed} "
        "alarms"
    )
    figure.savefig(folder / PICTURE, dpi=110)
    return folder / PICTURE


def _steps(events: list[dict[str, Any]]) -> list[int]:
    return [event["step"] for event in events]


def _draw_gap(axes: Any, events: list[dict[str, Any]], limit: float) -> None:
    axes.axhline(0, color=GREY, linewidth=0.8)
    gaps = [100 * _finite_or_nan(event["loss_gap"]) for event in events]
    axes.plot(_steps(events), gaps, color=BLUE, marker=".")
    _draw_limit(axes, 100 * limit, -100 * limit, f"±{100 * limit:g} %")
    alarmed = [event for event in events if event["alarms"]]
    if alarmed:
        alarmed_gaps = [100 * _finite_or_nan(event["loss_gap"]) for event in alarmed]
        axes.plot(_steps(alarmed), alarmed_gaps, "x", color=RED, label="alarm", markersize=8)
    _add_title(axes, "loss gap, %")


def _draw_limit(axes: Any, high: float, low: float, label: str) -> None:
    """Shade the band of values without an alarm, or name its limits if they are too far away to be
    shown."""
    bottom, top = axes.get_ylim()
    limits = [value for value in (low, high) if math.isfinite(value)]
    if max(top, *limits) - min(bottom, *limits) > NEAR * (top - bottom):
        axes.plot([], [], color="none", label=f"alarms begin at {label}, outside of this picture")
        return
    inside = [value if math.isfinite(value) else top for value in (low, high)]
    axes.axhspan(*inside, color=GREEN, alpha=0.08, linewidth=0)
    for number, value in enumerate(limits):
        line_label = None if number else f"limit of alarms: {label}"  # once in the legend
        axes.axhline(value, color=RED, linewidth=1, linestyle="--", label=line_label)


def _draw_cosines(axes: Any, events: list[dict[str, Any]], limit: float) -> None:
    """Plot a line per layer, the lowest cosine of its weights, and name the layer that is lowest of
    all."""
    worst = [_worst_of_layers(event) for event in events]
    numbers: set[int] = set()
    lowest: list[tuple[float, int, int]] = []  # (cosine, step, layer)
    for event, by_layer in zip(events, worst, strict=True):
        numbers.update(by_layer)
        for layer, cosine in by_layer.items():
            if not math.isnan(cosine):
                lowest.append((cosine, event["step"], layer))
    layers = sorted(numbers)
    spacing = -(-(len(layers) - 1) // (NAMED - 1)) or 1  # of the layers that the legend names
    for layer in layers:
        # from blue in the first layer to orange in the last
        share = layer / max(1, *layers)
        color = (0.12 + 0.76 * share, 0.37 + 0.1 * share, 0.66 - 0.66 * share)
        is_named = layer % spacing == 0 or layer == layers[-1]
        label = f"layer {layer}" if is_named else None
        cosines = [by_layer.get(layer, math.nan) for by_layer in worst]
        axes.plot(_steps(events), cosines, color=color, label=label)
    if lowest:
        cosine, step, layer = min(lowest)
        axes.annotate(
            f"layer {layer}: {cosine:.3f}",
            (step, cosine),
            (8, -3),
            textcoords="offset points",
            fontsize=8,
        )
    _draw_limit(axes, math.inf, limit, f"{limit:g}")
    _add_title(axes, "lowest cosine of a layer's gradients")


def _add_title(axes: Any, title: str) -> None:
    """Add the title above the panel on the left, and on the right a legend, which never lies over a
    curve."""
    axes.set_title(title, loc="left", fontsize=10)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(
            loc="lower right",
            bbox_to_anchor=(1, 1),
            frameon=False,
            ncols=10,
            fontsize=7.5,
            borderaxespad=0.2,
            columnspacing=0.9,
            handlelength=1.1,
            handletextpad=0.4,
        )


def _worst_of_layers(event: dict[str, Any]) -> dict[int, float]:
    """Return the lowest cosine of each layer's weights; layers without weights are left out."""
    worst: dict[int, float] = {}
    for name, cosine in event["cosines"].items():
        match = re.match(r"layers\.(\d+)\.", name)
        if match:
            layer = int(match[1])
            # in this order: min(x, NaN) is x
            worst[layer] = min(_finite_or_nan(cosine), worst.get(layer, math.nan))
    return worst


def _draw_lost_numbers(axes: Any, events: list[dict[str, Any]]) -> None:
    """Plot, by role, the saturated and underflowed ratios of the worst product, as far as there are
    any."""
    for kind, style in (("saturated", "-"), ("underflowed", ":")):
        for role, color in ROLES.items():
            worst = [100 * _largest(event[kind], f".{role}") for event in events]
            if any(worst):
                axes.plot(
                    _steps(events),
                    worst,
                    style,
                    color=color,
                    label=f"{role}s {kind}",
                    linewidth=1.2,
                )
    axes.set_yscale("symlog", linthresh=0.01)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step")
    _add_title(axes, "numbers lost in the worst product, %")


def _largest(parts: dict[str, float | str], ending: str) -> float:
    values = [_finite_or_nan(part) for name, part in parts.items() if name.endswith(ending)]
    return max(values, default=0.0)


def _finite_or_nan(value: float | str) -> float:
    return float(value) if math.isfinite(float(value)) else math.nan
