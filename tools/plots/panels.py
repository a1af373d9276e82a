"""The pictures of a run as data: which quantities are shown, over what, smoothed how, and which are
left out.

`training.png` and the page of `megaprec report` draw the same panels. A quantity without a finite
value, or with one value throughout, gets no panel but a remark.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from tools.journal.records import VALIDATION_PREFIX

Over = Literal["steps", "tokens"]
Record = dict[str, Any]
MAX_MEAN_WIDTH = 201  # steps that a mean is taken of, at most


@dataclass(frozen=True)
class Line:
    """One line of a panel; a value that is NaN leaves a gap. raw: the values that another line is
    the mean of."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    look: Literal["main", "raw", "other"] = "main"


@dataclass(frozen=True)
class Panel:
    """One quantity. skipped: x of steps that were not applied. base: of a logarithmic axis, 0 for a
    linear one."""

    title: str
    lines: Sequence[Line]
    skipped: Sequence[float] = ()
    base: int = 0
    from_zero: bool = False
    stepped: bool = False


@dataclass(frozen=True)
class Pictures:
    """The panels of a run. remarks: on quantities that are left out. resumed: x at which the run
    was resumed."""

    panels: Sequence[Panel]
    x_label: str
    remarks: Sequence[str] = ()
    resumed: Sequence[float] = ()
    tokens: Sequence[tuple[float, float]] = ()  # (x, tokens) if x are steps


@dataclass(frozen=True)
class _Quantity:
    key: str
    title: str
    factor: float = 1.0
    smooth: bool = False
    from_zero: bool = False
    base: int = 0
    stepped: bool = False


LOSS = _Quantity("loss", "loss, nats a token", smooth=True)
OTHERS = (
    _Quantity("grad_norm", "gradient norm before clipping", smooth=True, from_zero=True),
    _Quantity("lr", "learning rate", from_zero=True),
    _Quantity("tokens_per_s", "speed, tokens/s", smooth=True, from_zero=True),
    _Quantity("mfu", "model FLOPs utilization, %", 100.0, smooth=True, from_zero=True),
    _Quantity("tflops", "model TFLOP/s a rank", smooth=True, from_zero=True),
    _Quantity("loss_scale", "loss scale", base=2, stepped=True),
)


def pictures(
    records: Sequence[Record], over: Over = "steps", resumes: Sequence[int] = ()
) -> Pictures:
    """Return the panels of the records of a run's steps. resumes: numbers of the steps after which
    it was resumed."""
    x = positions(records, over)
    skipped = skipped_positions(records, over)
    panels: list[Panel] = []
    remarks: list[str] = []
    has_mfu = any("mfu" in record for record in records)
    for quantity in (LOSS, *OTHERS):
        if quantity.key == "tflops" and has_mfu:
            continue  # it is the same curve in another unit
        lines, remark = _lines(quantity, records, x)
        if quantity is LOSS:
            lines += _held_out_lines(records, x)
        if lines:
            panels.append(_panel(quantity, lines, skipped))
        elif remark:
            remarks.append(remark)
    x_of_step = {record["step"]: position for record, position in zip(records, x, strict=True)}
    resumed = [x_of_step[step] for step in sorted(set(resumes)) if step in x_of_step]
    tokens = _token_labels(records) if over == "steps" else ()
    return Pictures(panels, axis_label(over), remarks, resumed, tokens)


def _token_labels(records: Sequence[Record]) -> list[tuple[float, float]]:
    """Return (step, tokens seen) of the records that have both."""
    return [(float(record["step"]), record["tokens"]) for record in records if "tokens" in record]


def skipped_positions(records: Sequence[Record], over: Over) -> list[float]:
    """Return the x of steps that were not applied."""
    skipped = [record for record in records if record["outcome"] != "applied"]
    return positions(skipped, over)


def _panel(quantity: _Quantity, lines: Sequence[Line], skipped: Sequence[float]) -> Panel:
    """Return the panel of a quantity; skipped steps are marked where they matter."""
    return Panel(
        quantity.title,
        lines,
        skipped if quantity.key in ("loss", "loss_scale") else (),
        base=quantity.base,
        from_zero=quantity.from_zero,
        stepped=quantity.stepped,
    )


def positions(records: Sequence[Record], over: Over) -> list[float]:
    """Return the x of each record: its step, or the tokens seen so far."""
    if over == "steps":
        return [float(record["step"]) for record in records]
    return [float(record.get("tokens", math.nan)) for record in records]


def axis_label(over: Over) -> str:
    """Return the label of the horizontal axis."""
    return "step" if over == "steps" else "tokens seen"


def values(records: Sequence[Record], key: str) -> list[float]:
    """Return a field of each record; NaN where it is missing or not finite."""
    return [_finite_or_nan(record.get(key)) for record in records]


def _finite_or_nan(value: object) -> float:
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return math.nan


def smoothed(y: Sequence[float], width: int) -> list[float]:
    """Return the mean of the `width` values around each one, of fewer near the ends. NaN stays and
    is not counted.

    At the start, where a loss falls fast, as many values before as after: the mean begins with the
    first value.
    """
    # The sum of a window is the difference of two running sums. NaN would spoil all later ones, so
    # it is left out of sums and counts.
    sums = [0.0, *accumulate(0.0 if math.isnan(value) else value for value in y)]
    counts = [0, *accumulate(0 if math.isnan(value) else 1 for value in y)]
    half = width // 2
    means: list[float] = []
    for i, value in enumerate(y):
        if math.isnan(value):
            means.append(math.nan)
            continue
        start = max(0, i - half)
        stop = min(i + min(half, i) + 1, len(y))
        means.append((sums[stop] - sums[start]) / max(1, counts[stop] - counts[start]))
    return means


def mean_width(count: int) -> int:
    """Return the odd number of steps that a mean is taken of, for a run of `count` steps; 1 if it
    is a short one."""
    width = min(MAX_MEAN_WIDTH, count // 20 // 2 * 2 + 1)
    return width if width >= 3 else 1


def short(number: float) -> str:
    """Return a number with three digits and a unit: 1.23 M."""
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:.3g}"


def _lines(
    quantity: _Quantity, records: Sequence[Record], x: Sequence[float]
) -> tuple[list[Line], str]:
    """Return the lines of a quantity, or a remark on the reason why there is none."""
    y = [value * quantity.factor for value in values(records, quantity.key)]
    finite = [value for value in y if not math.isnan(value)]
    name = quantity.title.partition(",")[0]
    if not finite:
        is_recorded = any(quantity.key in record for record in records)
        return [], f"no finite {name}" if is_recorded else ""
    if min(finite) == max(finite) and quantity is not LOSS:
        return [], f"{name} {finite[0]:g} throughout"
    width = mean_width(len(y)) if quantity.smooth else 1
    if width == 1:
        return [Line("each step", x, y)], ""
    mean = Line(f"mean of {width} steps", x, smoothed(y, width))
    return [Line("each step", x, y, "raw"), mean], ""


def _held_out_lines(records: Sequence[Record], x: Sequence[float]) -> Iterator[Line]:
    """Yield a line for the held-out text, and for each set of data.validation."""
    curves: dict[str, tuple[list[float], list[Record]]] = {}
    for position, record in zip(x, records, strict=True):
        for key in record:
            if key == "eval_loss" or key.startswith(VALIDATION_PREFIX):
                xs, evaluated = curves.setdefault(key, ([], []))
                xs.append(position)
                evaluated.append(record)
    for key, (xs, evaluated) in curves.items():
        label = "held-out" if key == "eval_loss" else key.removeprefix(VALIDATION_PREFIX)
        yield Line(label, xs, values(evaluated, key), "other")
