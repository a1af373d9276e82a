"""The picture of a run's comparisons of FP8 with precision.compute
(`tools.journal.shadow_records`)."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tools.analysis.plots.charts import (
    DASHED,
    DOTTED,
    Chart,
    ChartRow,
    Level,
    Series,
    draw_rows,
    finite_or_nan,
)
from tools.analysis.plots.drawing import has_matplotlib
from tools.config.tables.precision_settings import FP8
from tools.journal.records import read_events
from tools.journal.shadow_records import SHADOW

PICTURE = "fp8-shadow.png"
# Limits of alarms are drawn if the axis then is at most this many times as long.
LONGEST_STRETCH = 4.0
MAX_NAMED = 6  # layers that the legend names at most
ROLE_COLORS = {"input": "main", "weight": "other1", "gradient": "other0"}
# Smaller percentages of lost numbers are shown on a linear axis, down to 0.
LEAST_LOST = 0.01
Event = dict[str, Any]


def plot_shadow(folder: Path, fp8: FP8) -> Path | None:
    """Plot the comparisons in `folder`, with the limits of alarms, to fp8-shadow.png and return its
    path.

    None without comparisons or matplotlib.
    """
    events = read_events(folder, SHADOW)
    if not events or not has_matplotlib():
        return None
    rows = [
        ChartRow([_gap_chart(events, fp8.shadow_loss_gap)], 1, 180),
        ChartRow([_cosine_chart(events, fp8.shadow_cosine)], 1, 250),
        ChartRow([_lost_chart(events)], 1, 210),
    ]
    alarmed = sum(bool(event["alarms"]) for event in events)
    run_name = folder.resolve().name
    title = f"{run_name}: FP8 against no FP8 in {len(events)} micro-batches, {alarmed} alarms"
    draw_rows(title, rows).save(folder / PICTURE)
    return folder / PICTURE


def _steps(events: Sequence[Event]) -> list[int]:
    return [event["step"] for event in events]


def _gap_chart(events: Sequence[Event], alarm_limit: float) -> Chart:
    """Return the chart of the differences of loss, in percent, with alarms and their limit."""
    percent_limit = 100 * alarm_limit
    gaps = [100 * finite_or_nan(event["loss_gap"]) for event in events]
    series = [Series("", _steps(events), gaps, marker="dot")]
    alarmed = [event for event in events if event["alarms"]]
    if alarmed:
        alarmed_gaps = [100 * finite_or_nan(event["loss_gap"]) for event in alarmed]
        crosses = Series(
            "alarm", _steps(alarmed), alarmed_gaps, "red", marker="cross", joined=False
        )
        series.append(crosses)
    limits = (-percent_limit, percent_limit)
    text = f"±{percent_limit:g} %"
    return _with_limits("loss gap, %", series, limits, text, [Level(0.0)])


def _with_limits(
    title: str,
    series: Sequence[Series],
    limits: tuple[float, float],
    text: str,
    levels: Sequence[Level] = (),
) -> Chart:
    """Return a chart with the band of values without an alarm shaded, or with a hint if its limits
    are too far away to be shown.

    limits: of the band; infinite where there is none. text: the limits in words.
    """
    values = [level.y for level in levels]
    for one_series in series:
        values += [y_value for y_value in one_series.y if not math.isnan(y_value)]
    # a cosine has a lower limit only
    finite_limits = [alarm_limit for alarm_limit in limits if math.isfinite(alarm_limit)]
    lowest_value = min(values, default=0.0)
    highest_value = max(values, default=0.0)
    extent = max(highest_value - lowest_value, 1e-12)  # not 0, or no limit of a constant is shown
    # the axis must reach the limits, which are no values of a series
    lowest_shown = min(lowest_value, *finite_limits)
    highest_shown = max(highest_value, *finite_limits)
    if highest_shown - lowest_shown > LONGEST_STRETCH * extent:
        hint = f"alarms begin at {text}, outside of this picture"
        return Chart(title, series, levels=levels, hints=[hint])
    margin = 0.06 * (highest_shown - lowest_shown)
    drawn_limits: list[Level] = []
    for alarm_limit in finite_limits:
        # named once in the legend
        label = "" if drawn_limits else f"limit of alarms: {text}"
        drawn_limits.append(Level(alarm_limit, "red", label, DASHED))
    lower_limit, upper_limit = limits
    return Chart(
        title,
        series,
        levels=[*levels, *drawn_limits],
        band=(max(lower_limit, lowest_shown), min(upper_limit, highest_shown)),
        y_range=(lowest_shown - margin, highest_shown + margin),
    )


def _cosine_chart(events: Sequence[Event], alarm_limit: float) -> Chart:
    """Return a chart with a curve per layer, the lowest cosine of its weights, in which the lowest
    layer of all is named."""
    by_event = [lowest_cosines(event) for event in events]
    numbers: set[int] = set()
    points: list[tuple[float, int, int]] = []  # (cosine, step, layer)
    for event, by_layer in zip(events, by_event, strict=True):
        numbers.update(by_layer)
        for layer, cosine in by_layer.items():
            if not math.isnan(cosine):
                points.append((cosine, event["step"], layer))
    layers = sorted(numbers)
    # of the layers that the legend names
    spacing = max(1, math.ceil((len(layers) - 1) / (MAX_NAMED - 1)))
    series: list[Series] = []
    for layer in layers:
        is_named = layer % spacing == 0 or layer == layers[-1]
        label = f"layer {layer}" if is_named else ""
        cosines = [by_layer.get(layer, math.nan) for by_layer in by_event]
        color = _layer_color(layer / max(1, *layers))
        series.append(Series(label, _steps(events), cosines, color))
    title = "lowest cosine of a layer's gradients"
    limits = (alarm_limit, math.inf)  # a cosine has no upper limit
    chart = _with_limits(title, series, limits, f"{alarm_limit:g}")
    if not points:
        return chart
    cosine, step, layer = min(points)
    return replace(chart, notes=[(step, cosine, f"layer {layer}: {cosine:.3f}")])


def _layer_color(share: float) -> str:
    """Return a colour from blue for the first layer, share 0, to orange for the last, share 1."""
    channels = (0.12 + 0.76 * share, 0.37 + 0.1 * share, 0.66 - 0.66 * share)
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)


def lowest_cosines(event: Event) -> dict[int, float]:
    """Return the lowest cosine of each layer's weights, NaN if none of them has one; layers without
    weights are left out."""
    by_layer: dict[int, float] = {}
    for name, recorded in event["cosines"].items():
        match = re.match(r"layers\.(\d+)\.", name)
        if match is None:
            continue
        layer = int(match[1])
        cosine = finite_or_nan(recorded)
        lowest = by_layer.get(layer, math.nan)
        # a gradient that is zero has no cosine: NaN must not replace a number
        if math.isnan(lowest) or cosine < lowest:
            by_layer[layer] = cosine
    return by_layer


def _lost_chart(events: Sequence[Event]) -> Chart:
    """Return the chart of the numbers that FP8 loses: the shares that saturate and that become
    zero, of each role the largest of all products of a step."""
    return Chart(
        "numbers lost in the worst product, %",
        list(_lost_series(events)),
        x_label="step",
        base=10,
        linear_below=LEAST_LOST,
        from_zero=True,
    )


def _lost_series(events: Sequence[Event]) -> Iterator[Series]:
    """Yield, by role, the saturated and underflowed ratios of the worst product, as far as there
    are any."""
    for kind, dash in (("saturated", ()), ("underflowed", DOTTED)):
        for role, color in ROLE_COLORS.items():
            percentages = [100 * _largest_ratio(event[kind], role) for event in events]
            if any(percentages):
                label = f"{role}s {kind}"
                yield Series(label, _steps(events), percentages, color, 1.3, dash=dash)


def _largest_ratio(ratios: dict[str, float | str], role: str) -> float:
    """Return the largest of the ratios of all products' tensors of this role."""
    of_role: list[float] = []
    for name, ratio in ratios.items():
        if name.endswith(f".{role}"):  # "<weight>.<role>"
            of_role.append(finite_or_nan(ratio))
    return max(of_role, default=0.0)
