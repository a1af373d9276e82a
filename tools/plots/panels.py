"""The pictures of a run as data: which quantities are shown, over what, smoothed how, and which are
left out.

`training.png` and the page of `megaprec report` draw the same panels. A quantity without a finite
value, or with one value throughout, gets no panel but a remark.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

from tools.journal.records import VALIDATION_PREFIX

Over = Literal["steps", "tokens"]
Record = dict[str, Any]
WIDEST = 201  # steps that a mean is taken of at most


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
    tokens: Sequence[tuple[float, float]] = field(default=())  # (x, tokens) if x are steps


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
    skipped = [at for at, record in zip(x, records, strict=True) if record["outcome"] != "applied"]
    panels = list[Panel]()
    remarks = list[str]()
    has_mfu = any("mfu" in record for record in records)
    for quantity in (LOSS, *OTHERS):
        if quantity.key == "tflops" and has_mfu:
            continue  # it is the same curve in another unit
        lines, remark = _lines(quantity, records, x)
        if quantity is LOSS:
            lines += _held_out(records, x)
        if lines:
            marks = skipped if quantity.key in ("loss", "loss_scale") else ()
            look = quantity.base, quantity.from_zero, quantity.stepped
            panels.append(Panel(quantity.title, lines, marks, *look))
        elif remark:
            remarks.append(remark)
    at = {record["step"]: here for record, here in zip(records, x, strict=True)}
    tokens = [
        (here, record["tokens"])
        for here, record in zip(x, records, strict=True)
        if "tokens" in record
    ]
    resumed = [at[step] for step in sorted(set(resumes)) if step in at]
    return Pictures(panels, axis_label(over), remarks, resumed, tokens if over == "steps" else ())


def positions(records: Sequence[Record], over: Over) -> list[float]:
    """Return the place of each record on the horizontal axis: its step, or the tokens seen so
    far."""
    return [
        float(record["step"] if over == "steps" else record.get("tokens", math.nan))
        for record in records
    ]


def axis_label(over: Over) -> str:
    """Return the label of the horizontal axis."""
    return "step" if over == "steps" else "tokens seen"


def values(records: Sequence[Record], key: str) -> list[float]:
    """Return a field of each record; NaN where it is missing or not finite."""
    found = (record.get(key) for record in records)
    return [
        float(v) if isinstance(v, int | float) and math.isfinite(v) else math.nan for v in found
    ]


def smoothed(y: Sequence[float], width: int) -> list[float]:
    """Return the mean of the `width` values around each one, of fewer near the ends. NaN stays and
    is not counted.

    At the start, where a loss falls fast, as many values before as after: the mean begins with the
    first value.
    """
    sums = [0.0, *accumulate(0.0 if math.isnan(v) else v for v in y)]
    counts = [0, *accumulate(0 if math.isnan(v) else 1 for v in y)]
    half = width // 2
    ends = [(max(0, at - half), min(at + min(half, at) + 1, len(y))) for at in range(len(y))]
    means = [(sums[end] - sums[first]) / max(1, counts[end] - counts[first]) for first, end in ends]
    return [math.nan if math.isnan(v) else mean for v, mean in zip(y, means, strict=True)]


def mean_width(count: int) -> int:
    """Return the odd number of steps that a mean is taken of, for a run of `count` steps; 1 if it
    is a short one."""
    width = min(WIDEST, count // 20 // 2 * 2 + 1)
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
        return [], f"no finite {name}" if any(quantity.key in record for record in records) else ""
    if min(finite) == max(finite) and quantity is not LOSS:
        return [], f"{name} {finite[0]:g} throughout"
    if not quantity.smooth or (width := mean_width(len(y))) == 1:
        return [Line("each step", x, y)], ""
    return [
        Line("each step", x, y, "raw"),
        Line(f"mean of {width} steps", x, smoothed(y, width)),
    ], ""


def _held_out(records: Sequence[Record], x: Sequence[float]) -> Iterator[Line]:
    """Yield a line for the held-out text, and for each set of data.validation."""
    kinds = dict.fromkeys(
        key
        for record in records
        for key in record
        if key == "eval_loss" or key.startswith(VALIDATION_PREFIX)
    )
    for kind in kinds:
        there = [(at, record) for at, record in zip(x, records, strict=True) if kind in record]
        label = "held-out" if kind == "eval_loss" else kind.removeprefix(VALIDATION_PREFIX)
        yield Line(
            label, [at for at, _ in there], values([record for _, record in there], kind), "other"
        )
