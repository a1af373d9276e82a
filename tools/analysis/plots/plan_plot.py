"""The picture of `megaprec plan`: a step as a bar by kind, and the memory of the fullest rank while
the step runs."""

from dataclasses import dataclass

from megaprec.errors import UserError
from tools.analysis.planning.bottleneck import named_seconds
from tools.analysis.planning.device import DeviceTarget
from tools.analysis.planning.memory import (
    ActivationsOverTime,
    MemoryModel,
    activations_over_time,
)
from tools.analysis.planning.search import Planned
from tools.analysis.planning.seconds.assumptions import Assumptions
from tools.analysis.planning.speed import Prediction, passes_of, simulated_spans
from tools.analysis.plots.charts import Box, Chart, Level, Series, draw_chart
from tools.analysis.plots.drawing import Drawing
from tools.analysis.plots.step_plot import MARGIN, WIDTH, StepBar, draw_steps

GIGABYTE = 1e9
MOST_PASSES = 32_768  # forward passes of a step, which are simulated in seconds
LEFT = 70.0  # room for the labels of the memory's axis
CHART_HEIGHT = 200.0
ROOM_ABOVE_CHART = 50.0
ROOM_BELOW_CHART = 60.0


@dataclass(frozen=True)
class _Memory:
    """The memory of one rank over a step.

    title: names the rank.
    state: bytes that are there all the time.
    activations: those that come and go.
    usable: bytes of the device that a run may use; 0 if they are not known.
    """

    title: str
    state: int
    activations: ActivationsOverTime
    usable: int


def draw_plan(
    planned: Planned, predicted: Prediction, target: DeviceTarget, assumed: Assumptions
) -> Drawing:
    """Return a drawing of a run in its own layout: its step above its memory. Raises UserError for
    a step of more passes than can be drawn."""
    num_passes = planned.config.parallel.pipeline * planned.config.num_microbatches
    if num_passes > MOST_PASSES:
        raise UserError.of("planning.plot_passes", passes=num_passes, most=MOST_PASSES)
    drawing = draw_steps([StepBar("predicted", named_seconds(predicted))])
    axes_width = WIDTH - LEFT - 2 * MARGIN
    axes = Box(LEFT, drawing.height + ROOM_ABOVE_CHART, axes_width, CHART_HEIGHT)
    memory = _memory_of_fullest(planned, target, assumed)
    drawing.shapes += draw_chart(_memory_chart(memory), axes)
    drawing.height = axes.bottom + ROOM_BELOW_CHART
    return drawing


def _memory_of_fullest(planned: Planned, target: DeviceTarget, assumed: Assumptions) -> _Memory:
    """Return the memory of the fullest rank over a step of train.global_batch samples."""
    config = planned.config
    passes = passes_of(config, all_passes=True)
    kept = MemoryModel(target.device, target.process).kept(config, passes.costs)
    spans = simulated_spans(config, passes, assumed)
    rank = planned.fullest
    activations = activations_over_time(config, passes, kept, spans, rank)
    title = f"GB on pipeline rank {rank}, the fullest"
    of_rank = planned.ranks[rank]
    state = of_rank.total - of_rank.activations
    return _Memory(title, state, activations, target.usable)


def _memory_chart(memory: _Memory) -> Chart:
    """Return the bytes in use over time, between what is always there and what the device has."""
    in_use = [(memory.state + nbytes) / GIGABYTE for nbytes in memory.activations.nbytes]
    seconds = memory.activations.seconds
    state = memory.state / GIGABYTE
    levels = [Level(state, "other1", "state", dash=(4.0, 2.5))]
    usable = memory.usable / GIGABYTE
    highest = max([state, *in_use])
    if 0 < usable < 1.5 * highest:
        levels.append(Level(usable, "red", "usable", dash=(4.0, 2.5)))
        highest = max(highest, usable)
    return Chart(
        memory.title,
        [Series("in use", seconds, in_use)],
        x_label="seconds",
        stepped=True,
        levels=levels,
        y_range=(0.0, 1.05 * highest),
    )
