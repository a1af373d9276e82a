"""The predicted step beside the measured one, in the lines of `megaprec train`.

A prediction needs a GPU of the table, or on a CPU the file that `megaprec calibrate` has written to
the working directory. Otherwise there is none, and no line. For a GPU of the table the file, if it
is of this machine, replaces the table's speeds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from megaprec.errors import UserError
from tools.analysis.calibration.record import differences, read_calibration
from tools.analysis.calibration.speeds import UNKNOWN_CPU, calibrated
from tools.analysis.planning.bottleneck import named_seconds
from tools.analysis.planning.device import DeviceTarget, target_of
from tools.analysis.planning.measured import LEAST_STEPS, WARM_UP
from tools.analysis.planning.reached import assumptions_of
from tools.analysis.planning.report import summary_line
from tools.analysis.planning.seconds.assumptions import Assumptions
from tools.analysis.planning.speed import Prediction, passes_of, predict_of_mean_rank
from tools.config.run_file import RunConfig
from tools.console.units import duration
from tools.console.wrapped import say
from tools.journal.records import PREDICTION, read_metrics

CALIBRATION = Path("calibration.toml")


@dataclass(frozen=True)
class Foreseen:
    """The predicted step of a run on this machine. basis: what its speeds are from."""

    config: RunConfig
    prediction: Prediction
    basis: str

    @property
    def seconds(self) -> float:
        """The predicted seconds of a step."""
        return self.prediction.seconds


def foresee(config: RunConfig) -> Foreseen | None:
    """Return the prediction for a run on this machine; None if its speeds are not known, and for a
    custom model. Raises UserError for a damaged calibration.toml."""
    if config.model.factory:
        return None
    target = target_of(config)
    config = config.on_device(target.device)
    speeds_and_basis = _speeds_here(config, target)
    if speeds_and_basis is None:
        return None
    assumed, basis = speeds_and_basis
    # of the mean rank: bytes of each rank would need layers to be built and run
    prediction = predict_of_mean_rank(config, passes_of(config), assumed)
    return Foreseen(config, prediction, basis)


def _speeds_here(config: RunConfig, target: DeviceTarget) -> tuple[Assumptions, str] | None:
    """Return the speeds of this machine, and what they are from; None if they are not known.

    They are those of the calibration, if it is of this machine and device, or else those of the
    table of GPUs. Those of a GPU outside the table are not known, even with a calibration.
    """
    on_cpu = target.device == "cpu"
    uncalibrated = UNKNOWN_CPU if on_cpu else None
    if target.gpu:
        uncalibrated = assumptions_of(target.gpu, config.plan)
    if uncalibrated is None:
        return None
    of_table = None if on_cpu else (uncalibrated, target.name)
    if not CALIBRATION.is_file():
        return of_table
    calibration = read_calibration(CALIBRATION)
    differs = [*differences(calibration, target.device)]
    if calibration.device != target.device or differs:
        return of_table
    speeds = calibrated(config, calibration, uncalibrated)
    # the table has no CPU, so what was not measured in this dtype is not known
    if on_cpu and speeds.missing:
        return None
    return speeds.assumed, f"{CALIBRATION} of {calibration.date}"


def print_plan(config: RunConfig) -> None:
    """Print the plan of the run, in a line, before ranks start."""
    if line := summary_line(config):
        say(f"plan       {line}")
    try:
        foreseen = foresee(config)
    except UserError as error:
        # a file of this name need not be one of megaprec's, and stops no run
        say(f"predicted  none: {error}")
        return
    if foreseen:
        say(f"predicted  {start_line(foreseen)}")


def start_line(foreseen: Foreseen) -> str:
    """Return the line on the predicted step."""
    speed = foreseen.config.tokens_per_step / foreseen.seconds
    return f"{duration(foreseen.seconds)} a step, {speed:,.0f} tokens/s, by {foreseen.basis}"


def end_line(event: Mapping[str, Any]) -> str:
    """Return the line on the measured step of a `prediction_event`, and how far the prediction was
    from it."""
    predicted = event["seconds"]
    measured = event["measured"]
    error = predicted / measured - 1
    return f"{duration(measured)} a step; predicted {duration(predicted)}, {error:+.0%}"


def measured_prediction(config: RunConfig, step: int) -> tuple[str, dict[str, Any]] | None:
    """Return the line and the event on the measured step beside the predicted one; None without a
    prediction, and for a run of too few steps. step: the newest one. Raises UserError."""
    foreseen = foresee(config)
    if foreseen is None:
        return None
    event = prediction_event(foreseen, Path(config.train.folder), step)
    return (end_line(event), event) if event else None


def prediction_event(foreseen: Foreseen, folder: Path, step: int) -> dict[str, Any] | None:
    """Return the predicted step by kind and the measured one, as events.jsonl keeps them; None for
    a run of too few steps. step: the newest one."""
    measured = _median_step(read_metrics(folder))
    if not measured:
        return None
    return {
        "event": PREDICTION,
        "step": step,
        "seconds": foreseen.seconds,
        "measured": measured,
        "basis": foreseen.basis,
        "kinds": named_seconds(foreseen.prediction),
    }


def _median_step(records: Sequence[dict[str, Any]]) -> float:
    """Return the seconds of the median step after the first ones; 0 if there are too few."""
    seconds = [record["seconds"] for record in records if "seconds" in record]
    steady = seconds[WARM_UP:]
    return median(steady) if len(steady) >= LEAST_STEPS else 0.0
