"""The page and the picture of the reproduced curve."""

import math
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from tests.golden.runs import Curve
from tests.golden.stream import PUBLISHED
from tools.analysis.plots.charts import Chart, ChartRow, Series, draw_rows

ROUNDING = 0.5e-4  # of the published numbers, which have four digits
BOUND = 1e-5
PARTS = {"train": "training text", "held_out": "held-out text"}
COLORS = ("#1f5fa8", "#e07b00")
Curves = Mapping[str, Curve]


def agrees(ours: float, published: float) -> bool:
    """Whether a number is within the bound of those that are rounded to the published one."""
    return abs(ours - published) <= ROUNDING + BOUND


def deviations(curves: Curves) -> list[str]:
    """A line for each number that does not agree with the published one."""
    lines: list[str] = []
    for row in _rows(curves):
        for way, ours in row.ours.items():
            if not agrees(ours, row.published):
                lines.append(f"{way}, {row.name}: {ours:.6f} for {row.published:.4f}")
    return lines


@dataclass(frozen=True)
class _Numbers:
    """A published number and those of each way of running."""

    name: str
    published: float
    ours: dict[str, float]


def _rows(curves: Curves) -> Iterator[_Numbers]:
    yield from _batch_rows(curves)
    yield from _evaluation_rows(curves)


def _batch_rows(curves: Curves) -> Iterator[_Numbers]:
    for point in PUBLISHED["losses"]:
        step = point["step"]
        ours = {way: curve.batches[step] for way, curve in curves.items()}
        yield _Numbers(f"{step}", point["loss"], ours)


def _evaluation_rows(curves: Curves) -> Iterator[_Numbers]:
    for point in PUBLISHED["evaluations"]:
        step = point["step"]
        for part, name in PARTS.items():
            ours = {way: curve.evaluations[step][part] for way, curve in curves.items()}
            yield _Numbers(f"{step}, {name}", point[part], ours)


def _table(rows: Sequence[_Numbers], heading: str) -> list[str]:
    ways = list(rows[0].ours)
    lines = [f"| {heading} | published | {' | '.join(ways)} |"]
    lines.append("|---" * (len(ways) + 2) + "|")
    for row in rows:
        cells = []
        for ours in row.ours.values():
            mark = "" if agrees(ours, row.published) else " **differs**"
            cells.append(f"{ours:.6f}{mark}")
        lines.append(f"| {row.name} | {row.published:.4f} | {' | '.join(cells)} |")
    return lines


def _distances(curves: Curves, plain: str) -> list[str]:
    """The table of the largest differences from the plain loop, over all steps."""
    reference = curves[plain]
    lines = ["| way | loss of a batch | gradient norm, relative |", "|---|---|---|"]
    for way, curve in curves.items():
        if way == plain:
            continue
        losses = zip(curve.batches, reference.batches, strict=True)
        loss = max(abs(ours - theirs) for ours, theirs in losses)
        pairs = zip(curve.norms, reference.norms, strict=True)
        norm = max((abs(ours / theirs - 1) for ours, theirs in pairs), default=math.nan)
        lines.append(f"| {way} | {loss:.1e} | {norm:.1e} |")
    return lines


def page(curves: Curves, plain: str, minutes: float, picture: str) -> str:
    """The page. plain: the name of the way without code of ours."""
    text = PUBLISHED["text"]
    batches = list(_batch_rows(curves))
    evaluations = list(_evaluation_rows(curves))
    differing = deviations(curves)
    count = (len(batches) + len(evaluations)) * len(curves)
    verdict = f"All {count} numbers agree with the published ones."
    if differing:
        verdict = f"{len(differing)} of {count} numbers differ from the published ones:"
    lines = [
        "# Reproduced",
        "",
        "A learning curve that others have published, followed by megaprec to every published digit.",
        "",
        f"The curve is that of {PUBLISHED['program']}, on a CPU, with a fixed seed; independent logs of",
        "other machines agree with it to four digits:",
        "",
        "```text",
        PUBLISHED["command"],
        "```",
        "",
        "Initial weights and batches are drawn as that program draws them, so that every loss is",
        f"compared and not a trend. A number agrees if it is within {BOUND:g} of those that are rounded",
        "to the published one. The first column is a loop of torch's functions, optimizer and clipping",
        "alone; the others are megaprec's layers, schedules and optimizer.",
        "",
        f"![Losses published and reproduced]({picture})",
        "",
        f"**{verdict}**",
        "",
        *[f"- {line}" for line in differing],
        *([""] if differing else []),
        "## How it was run",
        "",
        *_facts(minutes),
        "",
        f"The text is {text['from']} ({text['bytes']:,} bytes, sha256",
        f"`{text['sha256']}`); it is not part of this project.",
        "`make golden TEXT=input.txt` writes this page anew.",
        "",
        "## Losses of single batches",
        "",
        *_table(batches, "step"),
        "",
        "## Evaluations",
        "",
        *_table(evaluations, "step"),
        "",
        "## Every step beside the plain loop",
        "",
        "The largest differences over all steps, also of those whose losses are not published:",
        "",
        *_distances(curves, plain),
        "",
    ]
    return "\n".join(lines)


def _facts(minutes: float) -> Iterator[str]:
    yield "| what | value |"
    yield "|---|---|"
    yield f"| date | {datetime.now(UTC):%Y-%m-%d} |"
    yield "| command | `make golden TEXT=input.txt` |"
    yield f"| commit | `{_commit()}` |"
    yield f"| machine | {platform.system()}, {platform.machine()}, {_cpu()} |"
    yield f"| versions | Python {platform.python_version()}, torch {version('torch')} |"
    yield f"| time | {minutes:.0f} minutes |"


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    described = subprocess.run(command, capture_output=True, text=True, check=False)
    return described.stdout.strip() or "not known"


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "CPU not known"


def draw(curves: Curves, shown: str, path: Path) -> None:
    """Write the picture: the published numbers as dots on the lines of one way of running."""
    curve = curves[shown]
    points = PUBLISHED["losses"]
    batches = Chart(
        "loss of single batches, nats a character",
        [
            Series(f"megaprec, {shown}", range(len(curve.batches)), curve.batches, width=0.8),
            Series(
                "published",
                [point["step"] for point in points],
                [point["loss"] for point in points],
                color="red",
                marker="cross",
                joined=False,
            ),
        ],
        x_label="step",
    )
    series: list[Series] = []
    for (part, name), color in zip(PARTS.items(), COLORS, strict=True):
        ours = [means[part] for means in curve.evaluations.values()]
        series.append(Series(f"megaprec, {name}", list(curve.evaluations), ours, color))
        points = PUBLISHED["evaluations"]
        steps = [point["step"] for point in points]
        losses = [point[part] for point in points]
        series.append(
            Series(f"published, {name}", steps, losses, color, marker="cross", joined=False)
        )
    evaluations = Chart("evaluations, nats a character", series, x_label="step")
    title = "nanoGPT's curve of Shakespeare's characters, published and reproduced"
    draw_rows(title, [ChartRow([batches, evaluations], 2, 300)]).save(path)
