"""The records of steps: their speed, skipped steps, digests of the state, and sentinel checks."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megaprec.diagnose.overflow_monitor import OverflowMonitor
from megaprec.diagnose.state_digest import StateDigest, fold_digests
from megaprec.optim.decision.step_report import NO_TOKENS, Offender, StepReport, report_fields
from megaprec.tokens.blend import Blend
from megaprec.tokens.held_out import PIECES
from megaprec.tokens.samples import Samples
from models.config import ModelConfig
from models.engine.engine import Engine
from models.engine.passes import Share
from models.estimate.flops import training_flops
from tools.config.run_file import RunConfig
from tools.journal.records import DIGEST, EVALUATION, NO_TOKENS_EVENT, TOLD_WITH_STEP
from tools.parts import optional_parts
from tools.saved.train_state import TrainState
from tools.training.ends import FaultyHardware, TrainingDiverged

if TYPE_CHECKING:
    from models.engine.sentinel import SilentFault

NOTHING_COUNTS = (
    "no token of the batch counts: data.eod_mask_loss leaves out the first token of each document, "
    "data.loss_on what is no answer; take larger batches"
)
# so many as an evaluated part has pieces: a group is a piece of text (`megaprec.tokens.held_out`)
EVALUATED_GROUPS = PIECES
STEP_FIELDS = ("outcome", "loss", "grad_norm", "loss_scale")  # of the report, in digests.jsonl


def is_due(every: int, step: int) -> bool:
    """Return True if what happens after every `every`-th step does so after `step`. every: 0:
    never.
    """
    return bool(every) and step % every == 0


def add_said(record: dict[str, Any], events: Iterable[Mapping[str, Any]]) -> None:
    """Add to the record of a step what its events say: all of one kind in one field.

    A step may break several invariants, and several ranks may be found slow after it.
    """
    for event in events:
        kind = event["event"]
        if kind in TOLD_WITH_STEP:
            said_before = [record[kind]] if kind in record else []
            record[kind] = "; ".join([*said_before, event["said"]])


@dataclass(frozen=True)
class Throughput:
    """The measure of a run's speed: model TFLOP/s of a rank, and MFU.

    MFU (model FLOPs utilization) is the fraction of the device's peak that the model's own matrix
    products use. Recomputed products do not count, so it says how fast the model trains and not how
    busy the device is.

    token_flops: of a token, on one rank, by the length of sequences; empty if they are not known.
    peak_tflops: of a rank's device a second; 0 if not known.
    """

    token_flops: Mapping[int, float]
    peak_tflops: float

    @staticmethod
    def of(config: RunConfig, model: ModelConfig, device: torch.device) -> "Throughput":
        """Return the measure of a run. The FLOPs of a custom model are not known."""
        token_flops = dict[int, float]()
        if not model.factory:
            for length in config.lengths.lengths:
                # Tokens a second are those of all ranks together.
                token_flops[length] = training_flops(model, length) / config.world_size
        return Throughput(token_flops, peak_tflops(config, device))

    def fields(self, tokens_per_s: float, length: int) -> dict[str, float]:
        """Return the fields of a step's record: `tflops` of a rank, and `mfu`.

        length: of the step's sequences.
        """
        # Those of a custom model are not known.
        if not self.token_flops:
            return {}
        tflops = tokens_per_s * self.token_flops[length] / 1e12
        fields = {"tflops": tflops}
        if self.peak_tflops:
            fields["mfu"] = tflops / self.peak_tflops
        return fields


def peak_tflops(config: RunConfig, device: torch.device) -> float:
    """Return the peak TFLOP/s of a device: log.peak_tflops, or that of its data sheet; 0 if neither
    is known.
    """
    if config.log.peak_tflops or device.type != "cuda":
        return config.log.peak_tflops
    gpu = optional_parts.gpu_named(torch.cuda.get_device_name(device))
    return gpu.tflops(config.plan) if gpu else 0.0


def step_fields(
    config: RunConfig,
    report: StepReport,
    progress: TrainState,
    batch: int,
    seconds: float,
    throughput: Throughput,
) -> dict[str, Any]:
    """Return the fields of metrics.jsonl that each step has; with train.batch_schedule also its
    batch, with train.seq_schedule the length of its sequences.

    progress: after the step. batch: samples of the step.
    """
    tokens_per_s = batch * config.train.seq_length / seconds
    length = config.lengths.at(progress.samples - batch)
    fields = {
        "step": progress.step,
        **report_fields(report),
        **(optional_parts.router_fields(report.routers) if report.routers else {}),
        **(optional_parts.attention_fields(report.attentions) if report.attentions else {}),
        "tokens": progress.tokens,
        "learned_tokens": progress.learned_tokens,
        "tokens_per_s": tokens_per_s,
        **throughput.fields(tokens_per_s, length),
        "seconds": seconds,
        "skipped_total": progress.skipped,
    }
    if config.train.batch_schedule:
        fields["global_batch"] = batch
    if config.train.seq_schedule:
        fields["seq_length"] = length
    if report.offenders:
        fields["overflow_in"] = report.offenders[0].name
    return fields


def require_applied(progress: TrainState, overflow_monitor: OverflowMonitor) -> None:
    """Raise TrainingDiverged if a run has ended, with its state saved, and not one of its steps was
    applied.
    """
    if not progress.step or progress.applied:
        return
    # A dynamic scale begins high: a short run may end before it has fallen far enough.
    if overflow_monitor.scaling.kind == "dynamic" and not overflow_monitor.hopeless:
        advice = (
            "the loss scale was still falling: take more steps, or lower precision.initial_scale"
        )
    else:
        advice = overflow_monitor.advice()
    steps = "its only step was"
    if progress.step > 1:
        steps = f"all {progress.step:,} steps were"
    raise TrainingDiverged(
        f"the run has ended, state saved, but {steps} skipped and nothing was learned: {advice}"
    )


def evaluation_event(step: int, set_name: str, numbers: Tensor) -> dict[str, Any]:
    """Return the record for evaluations.jsonl of an evaluation: the losses of its samples, in at
    most EVALUATED_GROUPS groups, so that two evaluations can be compared sample by sample.

    set_name: the field of metrics.jsonl with the mean. numbers: float64 [2, samples], the sums of
    losses and the tokens that count. Sample n is in group n % EVALUATED_GROUPS.
    """
    samples = numbers.shape[1]
    groups = torch.arange(samples) % EVALUATED_GROUPS
    sums = numbers.new_zeros(2, min(samples, EVALUATED_GROUPS))
    losses, tokens = sums.index_add_(1, groups, numbers).tolist()
    return {
        "event": EVALUATION,
        "step": step,
        "set": set_name,
        "samples": samples,
        "losses": losses,
        "tokens": tokens,
    }


def overflow_event(
    report: StepReport,
    step: int,
    samples: range,
    overflow_monitor: OverflowMonitor,
    samples_in_order: Samples | Blend,
) -> dict[str, Any]:
    """Return the record for events.jsonl of a step that was not finite, and was skipped, or applied
    nevertheless.

    samples: positions of the global batch in the run's order. samples_in_order: the samples in that
    order, which have numbers in their data set; in a blend with the name of the data set.
    """
    return {
        "event": "overflow",
        "step": step,
        "outcome": report.outcome,
        "loss": report.loss,
        "loss_scale": report.loss_scale,
        "first_sample": samples.start,  # with the length enough: a batch is consecutive
        "num_samples": len(samples),
        "skipped_in_a_row": overflow_monitor.in_a_row,
        "advice": overflow_monitor.advice(),
        "offenders": [
            _offender_fields(offender, samples.start, samples_in_order)
            for offender in report.offenders
        ],
    }


def no_tokens_event(step: int, samples: range) -> dict[str, Any]:
    """Return the record for events.jsonl of a step that was skipped, for no token counts in its
    loss.

    samples: positions of the global batch in the run's order.
    """
    return {
        "event": NO_TOKENS_EVENT,
        "step": step,
        "outcome": NO_TOKENS,
        "first_sample": samples.start,
        "num_samples": len(samples),
        "advice": NOTHING_COUNTS,
    }


def _offender_fields(
    offender: Offender, first_of_batch: int, samples_in_order: Samples | Blend
) -> dict[str, Any]:
    """Return the fields of an offender, a tensor whose gradient was not finite, with the samples of
    its micro-batch as positions in the run's order and as numbers in the data set.

    first_of_batch: position of the first sample of the global batch.
    """
    fields = asdict(offender)
    if offender.samples is not None:
        first_in_batch, end_in_batch = offender.samples  # numbers within the global batch
        first = first_of_batch + first_in_batch
        end = first_of_batch + end_in_batch
        fields["samples"] = [first, end]
        fields["sample_ids"] = samples_in_order.labels(
            samples_in_order.batch(first, end - first).ids
        )
    return fields


class Digests:
    """The lines of digests.jsonl: in every `log.digests`-th step, digests of the state by logical
    tensor, the same in every layout.

    A line is written after the step, and once after a resume for the state that was loaded. Two
    runs that ought to be the same have the same lines; the first that differs names the step and
    the tensors. Without log.digests none are computed. Methods that return events are collective.
    """

    def __init__(self, engine: Engine, config: RunConfig) -> None:
        self._every = config.log.digests
        self._optimizer = engine.optimizer
        self._state = StateDigest(engine.optimizer, engine.fp8)

    def of_step(self, report: StepReport, progress: TrainState) -> list[dict[str, Any]]:
        """Return the event of a step that was taken: one if it is due, else none."""
        if not is_due(self._every, progress.step):
            return []
        fields = {name: getattr(report, name) for name in STEP_FIELDS}
        return [self._event(progress, fields)]

    def of_loaded(self, progress: TrainState, resumed: object) -> list[dict[str, Any]]:
        """Return the event of a state that was loaded, if there is one.

        resumed: the checkpoint, or None.
        """
        if self._every and resumed:  # whatever the step: it shows that the load was exact
            return [self._event(progress, {"loaded": str(resumed)})]
        return []

    def _event(self, progress: TrainState, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the event of the state as it is now. fields: about the step or the load."""
        tensor_digests = self._state.make()
        # the loss scaler's and counts, beside the tensors
        numbers = self._optimizer.saved_numbers()
        progress_fields = asdict(progress)
        return {
            "event": DIGEST,
            "step": progress.step,
            **fields,
            "state": fold_digests(tensor_digests, numbers, progress_fields),
            "numbers": numbers,
            "progress": progress_fields,
            "tensors": tensor_digests,
        }


class SentinelChecks:
    """The steps of a run that the sentinel checks, and their outcome.

    Without train.sentinel no step is checked.
    """

    def __init__(self, engine: Engine, config: RunConfig) -> None:
        # On a CPU the project's own models compute the same bits each time; others may not.
        exact = engine.device.type == "cpu" and not config.model.factory
        self._every = config.train.sentinel
        self._sentinel = optional_parts.Sentinel(engine, exact) if self._every else None
        self._last_clean = 0

    def checking(
        self, number: int, share_of: Callable[[int], Share]
    ) -> AbstractContextManager[None]:
        """Return the context in which step `number`, counted from 0, is taken.

        share_of: returns the share of a data-parallel rank in this step. Raises SilentFault inside;
            see `Sentinel`.
        """
        if self._sentinel is None or not is_due(self._every, number + 1):
            return nullcontext()
        return self._sentinel.checking(number, share_of)

    def raised(self, error: Exception) -> bool:
        """Return True if `error` is a fault that a check has found."""
        return self._sentinel is not None and isinstance(error, optional_parts.SilentFault)

    def note_clean(self, step: int) -> dict[str, str]:
        """Note that a checked step was clean, and return its field of metrics.jsonl; empty if it
        was not checked.

        step: counted from 1.
        """
        if self._sentinel is None or not is_due(self._every, step):
            return {}
        # Reached only if the check raised nothing.
        self._last_clean = step
        return {"sentinel": "clean" if self._sentinel.recomputes else "not recomputed"}

    def outcome(
        self, silent_fault: "SilentFault", steps_done: int, saved_step: int
    ) -> tuple[dict[str, Any], FaultyHardware]:
        """Return the event of a fault, for events.jsonl, and the exception that ends the run.

        steps_done: number of steps before the checked one, which was taken back. saved_step: step
        of the newest checkpoint, 0 if there is none.
        """
        fault = silent_fault.fault
        event = {
            "event": "silent_fault",
            "step": steps_done,
            "checked_step": steps_done + 1,
            "microbatch": silent_fault.microbatch,
            **fault.fields(),
            "last_clean": self._last_clean,
            "saved": saved_step,
        }
        hosts = tuple(dict.fromkeys(fault.hosts))  # several ranks may share a host
        checkpoint = f"step {saved_step}" if saved_step else "none"
        if self._last_clean:
            last_clean = f"the last clean check was of step {self._last_clean}"
        else:
            last_clean = "no check of this run was clean"
        message = (
            f"stopped in step {steps_done + 1}, which was taken back: {silent_fault}; newest "
            f"checkpoint: {checkpoint}; {last_clean}; start again without host "
            f"{' or '.join(hosts)}"
        )
        return event, FaultyHardware(message, hosts)
