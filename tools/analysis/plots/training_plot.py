"""The pictures of a run: which quantities are shown, over what, smoothed how, and which are left
out.

`training.png` and the page of `megaprec report` draw the same charts. A quantity without a finite
value, or with one value throughout, gets no chart but a remark.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, Literal

from tools.analysis.plots.charts import (
    DASHED,
    DOTTED,
    Chart,
    ChartRow,
    Crosses,
    Level,
    Series,
    draw_rows,
    finite_or_nan,
    finite_range,
    short,
)
from tools.analysis.plots.drawing import has_matplotlib
from tools.console.units import counted
from tools.journal.records import (
    AVERAGE_LOSS,
    AVERAGE_PREFIX,
    COLLAPSE,
    FIRST_EVALUATION,
    HELD_OUT_LOSS,
    SOURCE_LOSS_PREFIX,
    SOURCE_SHARE_PREFIX,
    SOURCE_TOKENS_PREFIX,
    VALIDATION_PREFIX,
    read_events,
    read_metrics,
)
from tools.journal.router_records import router_values
from tools.journal.source_records import source_names
from tools.journal.yardsticks import Yardsticks, read_yardsticks

Over = Literal["steps", "tokens"]
Record = dict[str, Any]
PLOT = "training.png"
MAX_MEAN_WIDTH = 201  # steps that a mean is taken of, at most
PAIRED = 2  # charts beside each other, below that of the loss
LOSS_HEIGHT = 300.0
OTHERS_HEIGHT = 155.0
MARGIN = 0.03  # of the range of the loss, above and below it
HELD_OUT_COLORS = ("other0", "other1", "other2", "other3")
SOURCE_COLORS = ("main", *HELD_OUT_COLORS)
MAX_SOURCES = 2 * len(SOURCE_COLORS)  # data sets of a blend in a chart


@dataclass(frozen=True)
class Pictures:
    """The charts of a run, that of the loss first. remarks: on quantities that are left out."""

    charts: Sequence[Chart]
    x_label: str
    remarks: Sequence[str] = ()


@dataclass(frozen=True)
class _Quantity:
    """A field of metrics.jsonl. factor: to the unit of the title. smooth: it is measured, and has
    noise. from_zero, base, stepped: as of a `Chart`."""

    key: str
    title: str
    factor: float = 1.0
    smooth: bool = False
    from_zero: bool = False
    base: int = 0
    stepped: bool = False


@dataclass(frozen=True)
class _RouterMeasure:
    """A measure of routers in metrics.jsonl. furthest: picks the layer furthest from balance, of
    all values of a step. factor: to the unit of the title."""

    key: str
    title: str
    furthest: Callable[[Sequence[float]], float]
    factor: float = 1.0


LOSS = _Quantity("loss", "loss, nats a token", smooth=True)
OTHERS = (
    _Quantity("grad_norm", "gradient norm before clipping", smooth=True, from_zero=True),
    _Quantity("z_loss", "z-loss of the head", smooth=True),
    _Quantity("lr", "learning rate", from_zero=True),
    _Quantity("tokens_per_s", "speed, tokens/s", smooth=True, from_zero=True),
    _Quantity("mfu", "model FLOPs utilization, %", 100.0, smooth=True, from_zero=True),
    _Quantity("tflops", "model TFLOP/s a rank", smooth=True, from_zero=True),
    _Quantity("loss_scale", "loss scale", base=2, stepped=True),
)
# the layers of a model are drawn as the median one and the one that is furthest from balance
FURTHEST = {min: "lowest layer", max: "highest layer"}
ROUTER_MEASURES = (
    _RouterMeasure("used_experts", "used experts of a layer", min),
    _RouterMeasure("max_load", "largest load of an expert, % of the tokens", max, 100.0),
    _RouterMeasure("entropy", "entropy of a router, 1 if balanced", min),
    _RouterMeasure("balance_loss", "balance loss of a router, 1 if balanced", max),
    _RouterMeasure("z_loss", "z-loss of a router", max),
)
# charts in which skipped steps are marked: where they matter
MARKED = ("loss", "loss_scale")


def plot_run(folder: Path, x_axis: Over = "steps") -> Path | None:
    """Plot folder/metrics.jsonl to folder/training.png and return its path; None without
    matplotlib."""
    if not has_matplotlib():
        return None
    records = read_metrics(folder)
    resumes = [event["step"] for event in read_events(folder, "resume")]
    first = first_losses(read_events(folder, FIRST_EVALUATION))
    shown = pictures(records, x_axis, resumes, read_yardsticks(folder), first)
    skipped = len(_skipped_records(records))
    steps = counted(len(records), "step")
    run_name = folder.resolve().name
    title = "; ".join([f"{run_name}: {steps}, {skipped:,} skipped", *shown.remarks])
    drawing = draw_rows(title, list(_rows(shown)))
    drawing.save(folder / PLOT)
    return folder / PLOT


def _rows(shown: Pictures) -> Iterator[ChartRow]:
    """Yield the first chart in a row of its own, and pairs of the others."""
    if not shown.charts:
        return
    first, *others = shown.charts
    x_label = "step, and tokens seen" if first.tick_notes else shown.x_label
    yield ChartRow([replace(first, x_label=x_label)], 1, LOSS_HEIGHT)
    for start in range(0, len(others), PAIRED):
        pair = others[start : start + PAIRED]
        is_last = start + PAIRED >= len(others)
        x_label = shown.x_label if is_last else ""
        charts = [replace(chart, tick_notes={}, x_label=x_label) for chart in pair]
        yield ChartRow(charts, PAIRED, OTHERS_HEIGHT)


def pictures(
    records: Sequence[Record],
    x_axis: Over = "steps",
    resumes: Sequence[int] = (),
    yardsticks: Yardsticks | None = None,
    first: Mapping[str, float] = MappingProxyType({}),
) -> Pictures:
    """Return the charts of the records of a run's steps.

    resumes: numbers of the steps after which the run was resumed. yardsticks: losses that are drawn
    as lines in the chart of the loss. first: losses before the first step, by field.
    """
    x_values = positions(records, x_axis)
    resumed_records = [record for record in records if record["step"] in resumes]
    # what all charts have in common
    frame = Chart(
        "",
        (),
        resumed=positions(resumed_records, x_axis),
        tick_notes=_token_labels(records) if x_axis == "steps" else {},
        # the same for all, although some quantities begin later
        x_range=finite_range([0.0, *x_values] if first else x_values),
    )
    skipped = Crosses(skipped_positions(records, x_axis))
    charts: list[Chart] = []
    remarks: list[str] = []
    for quantity in _quantities(records):
        series, remark = _series(quantity, records, x_values)
        if quantity is LOSS:
            series += _held_out_series(records, x_values, first)
        if series:
            chart = replace(
                frame,
                title=quantity.title,
                series=series,
                crosses=[skipped] if quantity.key in MARKED else (),
                base=quantity.base,
                from_zero=quantity.from_zero,
                stepped=quantity.stepped,
                has_legend=quantity is LOSS,
            )
            if quantity is LOSS and yardsticks is not None:
                chart = _with_yardsticks(chart, yardsticks)
            charts.append(chart)
        elif remark:
            remarks.append(remark)
    charts += _source_charts(frame, records, x_values)
    charts += _router_charts(frame, records, x_values, x_axis)
    return Pictures(charts, axis_label(x_axis), remarks)


def _source_charts(
    frame: Chart, records: Sequence[Record], x_values: Sequence[float]
) -> Iterator[Chart]:
    """Yield a chart of the losses of the data sets of a blend, and one of their shares, if the
    records have them: of those that most tokens were read of."""
    names = [*source_names(records)]
    if len(names) < 2:
        return
    shown = sorted(names, key=lambda name: -_last_number(records, f"{SOURCE_TOKENS_PREFIX}{name}"))
    left_out = len(names) - MAX_SOURCES
    of_most = f" ({MAX_SOURCES} of {len(names)})" if left_out > 0 else ""
    titles = {
        SOURCE_LOSS_PREFIX: (f"loss of each data set{of_most}, nats a token", 1.0),
        SOURCE_SHARE_PREFIX: (f"share of each data set{of_most}, % of the samples", 100.0),
    }
    for prefix, (title, factor) in titles.items():
        series: list[Series] = []
        for number, name in enumerate(shown[:MAX_SOURCES]):
            # a small data set is not in every step
            own_x: list[float] = []
            own_y: list[float] = []
            y_values = values(records, f"{prefix}{name}")
            for x_value, y_value in zip(x_values, y_values, strict=True):
                if math.isfinite(y_value):
                    own_x.append(x_value)
                    own_y.append(y_value * factor)
            means = smoothed(own_y, mean_width(len(own_y)))
            dash = DASHED if number >= len(SOURCE_COLORS) else ()
            color = SOURCE_COLORS[number % len(SOURCE_COLORS)]
            series.append(Series(name, own_x, means, color, dash=dash))
        if finite_range([*chain(*(line.y for line in series))]) is not None:
            yield replace(frame, title=title, series=series)


def _last_number(records: Sequence[Record], field_name: str) -> float:
    """Return a field of the last record that has it; 0 if none has."""
    for value in reversed(values(records, field_name)):
        if math.isfinite(value):
            return value
    return 0.0


def _router_charts(
    frame: Chart, records: Sequence[Record], x_values: Sequence[float], x_axis: Over
) -> Iterator[Chart]:
    """Yield a chart of each measure of routers that the records have."""
    collapses = [record for record in records if COLLAPSE in record]
    crosses = Crosses(positions(collapses, x_axis), "router collapsed")
    for measure in ROUTER_MEASURES:
        furthest: list[float] = []
        medians: list[float] = []
        for record in records:
            every_layer = router_values(record, measure.key)
            layers = [value * measure.factor for value in every_layer if math.isfinite(value)]
            furthest.append(measure.furthest(layers) if layers else math.nan)
            medians.append(median(layers) if layers else math.nan)
        if finite_range(furthest) is None:
            continue
        yield replace(
            frame,
            title=measure.title,
            series=[
                Series("median layer", x_values, medians, "other0"),
                Series(FURTHEST[measure.furthest], x_values, furthest),
            ],
            crosses=[crosses] if collapses else (),
        )


def _with_yardsticks(chart: Chart, yardsticks: Yardsticks) -> Chart:
    """Return the chart with the lines of models that need no training.

    That of the lowest one is always in the chart; the others if the curves come so high.
    """
    levels = (
        Level(yardsticks.guessing, label="guessing", dash=DOTTED),
        Level(yardsticks.unigram, label="counts of single tokens", dash=DASHED),
        Level(yardsticks.bigram, label="counts of pairs"),
    )
    shown_range = finite_range([yardsticks.bigram, *chain(*(line.y for line in chart.series))])
    assert shown_range is not None  # a yardstick is finite
    low, high = shown_range
    shown = [level for level in levels if low <= level.y <= high]
    margin = MARGIN * (high - low)
    return replace(chart, levels=shown, y_range=(low - margin, high + margin))


def _quantities(records: Sequence[Record]) -> Iterator[_Quantity]:
    """Yield the quantities in the order of their charts."""
    has_mfu = any("mfu" in record for record in records)
    for quantity in (LOSS, *OTHERS):
        # beside the utilization it is the same curve in another unit
        if quantity.key != "tflops" or not has_mfu:
            yield quantity


def _token_labels(records: Sequence[Record]) -> dict[float, str]:
    """Return the tokens seen up to each step, as labels."""
    labels: dict[float, str] = {}
    for record in records:
        tokens = record.get("tokens")
        if isinstance(tokens, int | float):  # an edited file may have anything
            labels[float(record["step"])] = short(tokens)
    return labels


def skipped_positions(records: Sequence[Record], x_axis: Over) -> list[float]:
    """Return the x of steps that were not applied."""
    return positions(_skipped_records(records), x_axis)


def _skipped_records(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record["outcome"] != "applied"]


def positions(records: Sequence[Record], x_axis: Over) -> list[float]:
    """Return the x of each record: its step, or the tokens seen so far."""
    if x_axis == "steps":
        return [float(record["step"]) for record in records]
    return [float(record.get("tokens", math.nan)) for record in records]


def axis_label(x_axis: Over) -> str:
    """Return the label of the x axis."""
    return "step" if x_axis == "steps" else "tokens seen"


def values(records: Sequence[Record], field_name: str) -> list[float]:
    """Return a field of each record; NaN where it is missing or not finite."""
    return [finite_or_nan(record.get(field_name)) for record in records]


def smoothed(y_values: Sequence[float], width: int) -> list[float]:
    """Return the mean of the `width` values around each one, of fewer near the ends. NaN stays and
    is not counted.

    At the start, where a loss falls fast, as many values before as after: the mean begins with the
    first value.
    """
    # The sum of a window is the difference of two running sums. NaN would spoil all later ones, so
    # it is left out of sums and counts.
    running_sums = [0.0]
    running_counts = [0]
    for y_value in y_values:
        is_missing = math.isnan(y_value)
        running_sums.append(running_sums[-1] + (0.0 if is_missing else y_value))
        running_counts.append(running_counts[-1] + (0 if is_missing else 1))
    half_width = width // 2
    means: list[float] = []
    for center, y_value in enumerate(y_values):
        if math.isnan(y_value):
            means.append(math.nan)
            continue
        start = max(0, center - half_width)
        stop = min(center + min(half_width, center) + 1, len(y_values))
        window_sum = running_sums[stop] - running_sums[start]
        window_count = running_counts[stop] - running_counts[start]
        means.append(window_sum / max(1, window_count))
    return means


def mean_width(count: int) -> int:
    """Return the odd number of steps that a mean is taken of, for a run of `count` steps; 1 if it
    is a short one."""
    # a twentieth of the run, and odd, so that a mean has a middle
    twentieth = count // 20
    width = min(MAX_MEAN_WIDTH, twentieth // 2 * 2 + 1)
    return width if width >= 3 else 1


def _series(
    quantity: _Quantity, records: Sequence[Record], x_values: Sequence[float]
) -> tuple[list[Series], str]:
    """Return the curves of a quantity, or a remark on the reason why there is none."""
    y_values = [number * quantity.factor for number in values(records, quantity.key)]
    shown_range = finite_range(y_values)
    name = quantity.title.partition(",")[0]
    if shown_range is None:
        is_recorded = any(quantity.key in record for record in records)
        return [], f"no finite {name}" if is_recorded else ""
    lowest, highest = shown_range
    if lowest == highest and quantity is not LOSS:
        return [], f"{name} {lowest:g} throughout"
    # what is set and not measured, such as a learning rate, has no noise
    width = mean_width(len(y_values)) if quantity.smooth else 1
    if width == 1:
        return [Series("each step", x_values, y_values)], ""
    each_step = Series("each step", x_values, y_values, width=0.9, opacity=0.3)
    mean = Series(f"mean of {width} steps", x_values, smoothed(y_values, width))
    return [each_step, mean], ""


def _curve_label(field_name: str) -> str:
    """Return the label of the curve of a field with the losses of evaluations; "" for another
    field."""
    if field_name == HELD_OUT_LOSS:
        return "held-out"
    if field_name == AVERAGE_LOSS:
        return "held-out, average"
    if field_name.startswith(VALIDATION_PREFIX):
        return field_name.removeprefix(VALIDATION_PREFIX)
    if field_name.startswith(AVERAGE_PREFIX):
        return f"{field_name.removeprefix(AVERAGE_PREFIX)}, average"
    return ""


def first_losses(events: Sequence[Record]) -> Record:
    """Return the losses before the first step by field, of the newest such event; none if there is
    none."""
    losses = events[-1]["losses"] if events else {}
    return losses if isinstance(losses, dict) else {}


def _held_out_series(
    records: Sequence[Record], x_values: Sequence[float], first: Mapping[str, float]
) -> Iterator[Series]:
    """Yield a curve for the held-out text, and for each set of data.validation; also for the moving
    average of the weights. first: losses before the first step, by field."""
    # by field, the x and the records of the steps after which it was evaluated
    curves: dict[str, tuple[list[float], list[Record]]] = {}
    for field_name in first:
        if _curve_label(field_name):
            curves[field_name] = ([0.0], [dict(first)])
    for x_value, record in zip(x_values, records, strict=True):
        for field_name in record:
            if _curve_label(field_name):
                evaluated_x, evaluated = curves.setdefault(field_name, ([], []))
                evaluated_x.append(x_value)
                evaluated.append(record)
    for number, (field_name, (evaluated_x, evaluated)) in enumerate(curves.items()):
        color = HELD_OUT_COLORS[number % len(HELD_OUT_COLORS)]
        losses = values(evaluated, field_name)
        yield Series(_curve_label(field_name), evaluated_x, losses, color, marker="dot")
