"""The pictures of a run show what there is to see, and say what they leave out."""

import math
import random
import re
from pathlib import Path
from typing import Any

import pytest

from tools.analysis.plots.charts import (
    STRETCH_WIDTH,
    WIDTH,
    Box,
    Chart,
    ChartRow,
    Series,
    draw_chart,
    draw_rows,
    round_numbers,
    short,
)
from tools.analysis.plots.drawing import Strokes, Text, text_width, to_themed_svg
from tools.analysis.plots.training_plot import Over, mean_width, pictures, plot_run, smoothed


def record(step: int, **more: Any) -> dict[str, Any]:
    made = {
        "outcome": "applied",
        "loss": 5 - step / 100,
        "grad_norm": 1 + step % 3,
        "loss_scale": 1.0,
        "lr": step / 10,
    }
    return {
        "step": step,
        "tokens": 64 * step,
        "tokens_per_s": 100.0 + step,
        "seconds": 0.1,
        **made,
        **more,
    }


def titles(records: list[dict[str, Any]], over: Over = "steps") -> list[str]:
    return [chart.title.partition(",")[0] for chart in pictures(records, over).charts]


def test_a_quantity_without_values_or_without_change_is_a_remark_and_no_panel() -> None:
    records = [record(step, lr=0.1) for step in range(1, 11)]
    assert titles(records) == ["loss", "gradient norm before clipping", "speed"]
    assert pictures(records).remarks == ["learning rate 0.1 throughout", "loss scale 1 throughout"]
    skipped = [
        record(step, outcome="skipped_overflow", grad_norm=math.inf, loss=math.nan)
        for step in range(1, 5)
    ]
    assert titles(skipped) == ["learning rate", "speed"]
    assert pictures(skipped).remarks[:2] == [
        "no finite loss",
        "no finite gradient norm before clipping",
    ]


def test_utilization_is_shown_where_it_is_known_in_place_of_flops() -> None:
    flops = [record(step, tflops=400.0 + step) for step in range(1, 5)]
    assert "model TFLOP/s a rank" in titles(flops)
    both = [one | {"mfu": 0.4 + one["step"] / 100} for one in flops]
    (chart,) = (one for one in pictures(both).charts if one.title.startswith("model FLOPs"))
    assert "model TFLOP/s a rank" not in titles(both)
    assert list(chart.series[-1].y) == pytest.approx([41, 42, 43, 44])


def test_the_mean_is_that_of_its_neighbours_and_gaps_stay() -> None:
    dice = random.Random(0)
    y = [dice.gauss(0, 1) for _ in range(50)]
    y[20] = math.nan
    mean = smoothed(y, 7)
    assert math.isnan(mean[20]) and mean[0] == y[0]
    for at in (3, 10, 30, 46):
        assert mean[at] == pytest.approx(sum(y[at - 3 : at + 4]) / 7)
    assert mean[22] == pytest.approx(sum(v for v in y[19:26] if not math.isnan(v)) / 6)
    assert mean[49] == pytest.approx(sum(y[46:]) / 4)
    assert [mean_width(count) for count in (5, 39, 40, 300, 10**6)] == [1, 1, 3, 15, 201]


def test_skipped_steps_resumes_and_evaluations_are_marked_over_steps_and_over_tokens() -> None:
    records = [record(step) for step in range(1, 7)]
    records[2] |= {"outcome": "skipped_overflow", "loss_scale": 8.0}
    records[3] |= {"eval_loss": 4.0, "eval_loss/code": 3.0}
    cases: list[tuple[Over, int]] = [("steps", 1), ("tokens", 64)]
    for over, factor in cases:
        shown = pictures(records, over, [2])
        loss, *_, scale = shown.charts
        assert loss.crosses[0].x == scale.crosses[0].x == [3 * factor]
        assert loss.resumed == [2 * factor]
        held_out = [
            (one.label, list(one.x), list(one.y)) for one in loss.series if one.marker == "dot"
        ]
        assert held_out == [("held-out", [4 * factor], [4.0]), ("code", [4 * factor], [3.0])]


def test_an_svg_has_a_gap_where_a_value_is_not_finite_and_stays_small() -> None:
    records = [
        record(step, grad_norm=math.inf if step == 3 else 1.0 + step) for step in range(1, 7)
    ]
    norm = next(one for one in pictures(records).charts if one.title.startswith("gradient"))
    assert len(re.findall(r'd="(M[^M"]+)(M[^M"]+)" stroke="var\(--main', drawn(norm))) == 1
    long = pictures([record(step) for step in range(1, 20_001)])
    stretches = WIDTH / STRETCH_WIDTH
    assert max(len(drawn(chart)) for chart in long.charts) < 2 * stretches * 2 * 16 + 9000


def test_a_curve_beyond_its_axes_stays_at_their_edge() -> None:
    series = Series("", [0, 1, 2, 3], [0.5, 90.0, -90.0, 0.5], color="peak")
    axes = Box(50, 30, 100, 40)
    shapes = draw_chart(Chart("", [series], y_range=(0.0, 1.0)), axes)
    (curve,) = (one for one in shapes if isinstance(one, Strokes) and one.color == "peak")
    heights = [point[1] for point in curve.points if point]
    assert heights == [axes.bottom - 20, axes.top, axes.bottom, axes.bottom - 20]


@pytest.mark.parametrize("step", [0, 3, 9, 10])
def test_a_note_beside_a_point_stays_within_the_axes(step: int) -> None:
    series = Series("", range(11), [0.5] * 11)
    axes = Box(50, 30, 300, 40)
    chart = Chart("", [series], notes=[(step, 0.5, "layer 11: 0.988")])
    shapes = draw_chart(chart, axes)
    (note,) = (one for one in shapes if isinstance(one, Text) and one.text.startswith("layer"))
    width = text_width(note.text, note.size)
    left = note.x - width if note.anchor == "end" else note.x
    assert axes.left <= left and left + width <= axes.right


def test_the_narrowest_chart_has_several_ticks() -> None:
    series = Series("", [1, 80], [0.0, 0.84])
    texts = re.findall(r">([^<]*)</text>", drawn(Chart("", [series], x_range=(1, 80)), columns=4))
    assert {"20", "40", "60", "80"} <= set(texts) and {"0", "0.2", "0.4"} <= set(texts)
    assert round_numbers(1, 80, 4) == [20, 40, 60, 80]


def drawn(chart: Chart, columns: int = 1) -> str:
    return to_themed_svg(draw_rows("", [ChartRow([chart], columns, 200)]), chart.title)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_the_shortest_runs_have_a_picture_too(count: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = [
        f'{{"step": {n}, "outcome": "applied", "loss": 1, "grad_norm": 1, "loss_scale": 1}}\n'
        for n in range(count)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert plot_run(tmp_path) == tmp_path / "training.png"


def test_numbers_are_short() -> None:
    assert [short(number) for number in (0, 950, 1234, 5.1e6, 2e9, 3e12)] == [
        "0",
        "950",
        "1.23 k",
        "5.1 M",
        "2 G",
        "3 T",
    ]
