"""The spikes of a run that has ended, or is under way, by the records of its steps.

The rule is that of `SpikeMonitor`, so that the steps are those that the run itself has noted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from megaprec.diagnose.spike_monitor import WINDOW, Spike, SpikeMonitor
from megaprec.optim.decision.step_report import StepReport
from tools.journal.records import SPIKE_EVENT

RECENT = 16  # steps before a spike in which a learning rate may have caused it


@dataclass(frozen=True)
class RecordedSpike:
    """One or several steps in a row above their bands, by the first of them.

    numbers: loss, gradient norm and limits of the first step. limits are inf if the run has skipped
        it by a window that its records do not have.
    outcome, lr: of the first step. tokens: of its global batch. steps: how many are in a row.
    usual_lr: the median of the learning rates before the last RECENT steps; None for none.
    highest_lr: of the last RECENT steps before the spike.
    usual_tokens: the median of the global batches before; None for none.
    """

    step: int
    numbers: Spike
    outcome: str
    lr: float
    tokens: int
    steps: int
    usual_lr: float | None
    highest_lr: float
    usual_tokens: float | None


@dataclass(frozen=True)
class FoundSpikes:
    """judged: number of steps that had a band. not_finite: steps without a finite loss or norm."""

    spikes: Sequence[RecordedSpike]
    judged: int
    not_finite: Sequence[int]


def find_spikes(records: Sequence[Mapping[str, Any]]) -> FoundSpikes:
    """Return the spikes among a run's records, oldest first; `with_speed` of them are judged."""
    monitor = SpikeMonitor()
    spikes: list[RecordedSpike] = []
    not_finite: list[int] = []
    judged = 0
    records = with_speed(records)
    for position, record in enumerate(records):
        tokens = step_tokens(record)
        limits = monitor.limits(tokens)
        if limits.has_any:
            judged += 1
        report = _report(record)
        if report.overflowed:
            not_finite.append(record["step"])
        spike = monitor.note(report, limits, tokens)
        # noted by the run, which knew steps before these records
        if spike is None and SPIKE_EVENT in record:
            spike = Spike(report.loss, report.grad_norm, limits)
        if spike is None:
            continue
        previous = spikes[-1] if spikes else None
        if previous is not None and previous.step + previous.steps == record["step"]:
            spikes[-1] = _one_longer(previous)
        else:
            spikes.append(_first_of(spike, record, records[:position]))
    return FoundSpikes(spikes, judged, not_finite)


def recorded_step(records: Sequence[Mapping[str, Any]], step: int) -> RecordedSpike | None:
    """Return a step, spike or not, with its limits; None if there is no record of it."""
    monitor = SpikeMonitor()
    records = with_speed(records)
    for position, record in enumerate(records):
        tokens = step_tokens(record)
        limits = monitor.limits(tokens)
        report = _report(record)
        monitor.note(report, limits, tokens)
        if record["step"] == step:
            spike = Spike(report.loss, report.grad_norm, limits)
            return _first_of(spike, record, records[:position])
    return None


def with_speed(records: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the records that have what a limit depends on, as all do that a run has written."""
    needed = {"lr", "seconds", "tokens_per_s"}
    return [record for record in records if needed <= record.keys()]


def step_tokens(record: Mapping[str, Any]) -> int:
    """Return the tokens of a step's global batch."""
    return max(1, round(record["tokens_per_s"] * record["seconds"]))


def _report(record: Mapping[str, Any]) -> StepReport:
    """Return the report of a step from its record in the log."""
    return StepReport(
        outcome=record["outcome"],
        loss=float(record["loss"]),
        grad_norm=float(record["grad_norm"]),
        num_zeros=0,
        zero_ratio=0.0,
        stage_zeros=(),
        loss_scale=float(record["loss_scale"]),
        lr=float(record["lr"]),
    )


def _first_of(
    spike: Spike, record: Mapping[str, Any], before: Sequence[Mapping[str, Any]]
) -> RecordedSpike:
    """Return the spike that begins with a record. before: the records of earlier steps."""
    recent = before[-RECENT:]
    earlier_rates = [earlier["lr"] for earlier in before[-WINDOW:-RECENT]]
    earlier_tokens = [step_tokens(earlier) for earlier in before[-WINDOW:]]
    recent_rates = [earlier["lr"] for earlier in recent]
    return RecordedSpike(
        step=record["step"],
        numbers=spike,
        outcome=record["outcome"],
        lr=record["lr"],
        tokens=step_tokens(record),
        steps=1,
        usual_lr=median(earlier_rates) if earlier_rates else None,
        highest_lr=max(recent_rates, default=record["lr"]),
        usual_tokens=median(earlier_tokens) if earlier_tokens else None,
    )


def _one_longer(spike: RecordedSpike) -> RecordedSpike:
    return replace(spike, steps=spike.steps + 1)
