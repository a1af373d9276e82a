"""Repeating a skipped step on one process, to find the module whose result was not finite."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaprec.diagnose.nonfinite_trace import Trace
from models.engine.replay import trace_modules
from tools.config.run_file import RunConfig, saved_run
from tools.journal.records import read_metrics
from tools.training.trainer import Trainer
from tools.verify.replay.repeated_run import SavedRun, catch_up, require_repeatable


@dataclass(frozen=True)
class OverflowReplay:
    """The result of a replay. start: name of the checkpoint it started from, "" for the initial
    weights.

    trace: of the first micro-batch that was not finite, or of the last if all were finite. samples:
    its sample ids and texts. layout: of the run itself, in words; "" for one process.
    """

    step: int
    start: str
    microbatch: int
    samples: tuple[tuple[int | str, str], ...]
    trace: Trace
    layout: str


def replay(folder: Path, event: dict[str, Any]) -> OverflowReplay:
    """Repeat the run in `folder` up to the skipped step of `event`, trace that one, and return what
    was not finite.

    Raises UserError if the run folder lacks what is needed: run.toml, data.
    """
    step = event["step"]
    saved = saved_run(folder)
    require_repeatable(saved, event, folder)
    records = {record["step"]: record for record in read_metrics(folder)}
    run = SavedRun.open(folder, saved, records)
    start = run.start_before(step)
    with run.trainer(start) as trainer:
        catch_up(trainer, step, start)
        microbatch, trace = _trace_step(trainer, event)

    # samples of a step are consecutive in the order of training
    size = saved.train.micro_batch
    first_sample = event["first_sample"] + microbatch * size
    samples = tuple(run.sample_texts(first_sample, size))
    start_name = "" if start is None else start.name
    return OverflowReplay(step, start_name, microbatch, samples, trace, run.layout)


def _trace_step(trainer: Trainer, event: dict[str, Any]) -> tuple[int, Trace]:
    """Return the first micro-batch that was not finite, or the last one, and its trace; suspects
    are traced first."""
    share = trainer.share(event["first_sample"])
    passes = trainer.engine.passes_for(share)
    step = event["step"] - 1  # engines count steps from 0
    scale = float(event["loss_scale"])
    traced: tuple[int, Trace] | None = None
    for microbatch in _suspects(event, trainer.config):
        trace = trace_modules(passes, share, step, microbatch, scale)
        traced = microbatch, trace
        if trace.found is not None:
            break
    # a step has at least one micro-batch
    assert traced
    return traced


def _suspects(event: dict[str, Any], config: RunConfig) -> Iterator[int]:
    """Yield every micro-batch of the step once, as numbers within the global batch, those that the
    event names first.
    """
    size = config.train.micro_batch
    accused = list[int]()
    for offender in event["offenders"]:
        # those of the micro-batch in which it began; absent if that was not traced
        samples = offender.get("samples")
        if samples:
            sample_in_batch = samples[0] - event["first_sample"]
            accused.append(sample_in_batch // size)
    all_microbatches = range(event["num_samples"] // size)
    yield from dict.fromkeys([*accused, *all_microbatches])
