"""Records of loss spikes in metrics.jsonl and events.jsonl."""

from typing import Any

from megaprec.diagnose.spike_monitor import Spike
from megaprec.optim.decision.step_report import SPIKE, StepReport
from tools.journal.records import SPIKE_EVENT


def spike_event(
    spike: Spike, report: StepReport, step: int, samples: range, in_a_row: int
) -> dict[str, Any]:
    """Return the event of a step whose loss or gradient norm has left its band.

    samples: positions of the global batch in the run's order. in_a_row: spikes since the last step
    inside of its band, this one included.
    """
    said = f"spike: {spike.describe()}"
    if report.outcome == SPIKE:
        said += "; not applied"
    return {
        "event": SPIKE_EVENT,
        "step": step,
        "outcome": report.outcome,
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "loss_limit": spike.limits.loss,
        "norm_limit": spike.limits.norm,
        "lr": report.lr,
        "first_sample": samples.start,
        "num_samples": len(samples),
        "in_a_row": in_a_row,
        "said": said,
    }
