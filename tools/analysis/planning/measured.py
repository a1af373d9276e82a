"""The factor between the predicted and the measured speed of a finished run.

One factor stands for all that a prediction does not know of the user's software and machines: of
the same model on the same GPUs software stacks differ by 1.6 and more, and the factor of one model
holds for others (docs/planning.md).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from megaprec.errors import UserError
from tools.config.run_file import RunConfig, load_run, run_file_in
from tools.journal.records import read_metrics

# Steps at the start that do not count: kernels are compiled and memory is allocated.
WARM_UP = 3
LEAST_STEPS = 5  # that are measured


@dataclass(frozen=True)
class MeasuredRun:
    """A run's measured speed.

    seconds: of the median step.
    steps: that were measured.
    """

    folder: Path
    config: RunConfig
    seconds: float
    steps: int


def read_measured(folder: Path) -> MeasuredRun:
    """Return the speed of the run in `folder`. Raises UserError."""
    file = run_file_in(folder, written_by_run=True) or run_file_in(folder)
    if file is None:
        raise UserError.of("planning.measured_no_run", folder=folder)
    seconds = [record["seconds"] for record in read_metrics(folder) if "seconds" in record]
    steady = seconds[WARM_UP:]
    if len(steady) < LEAST_STEPS:
        least = WARM_UP + LEAST_STEPS
        raise UserError.of(
            "planning.measured_few_steps", folder=folder, steps=len(seconds), least=least
        )
    return MeasuredRun(folder, load_run(file), median(steady), len(steady))


def factor_of(run: MeasuredRun, predict: Callable[[RunConfig], float]) -> float:
    """Return the measured seconds of a step divided by those predicted. predict: returns the
    latter."""
    return run.seconds / predict(run.config)
