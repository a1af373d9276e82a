"""Repeating a skipped step on one process, to find the module whose result was not finite. Nothing
is written.

The run's own run.toml describes the run. The replay starts from its newest checkpoint before the
step, or from the initial weights, and repeats the steps in between. Micro-batches are the same in
every layout, and so are their numbers but for rounding: sums over ranks are taken in another order.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from megaprec.checkpoint.atomic import checkpoints, step_of
from megaprec.checkpoint.reader import INDEX
from megaprec.diagnose.nonfinite_trace import Trace
from megaprec.errors import UserError
from megaprec.precision.gemm import fp32_sums
from megaprec.precision.tf32 import tf32
from models.attention.backends import gpu_kernels
from models.engine.replay import trace_modules
from parallel.mesh import make_mesh, world
from tools.config.layouts import in_words
from tools.config.run_file import RunConfig, load_run, run_file_in
from tools.config.settings import Parallel
from tools.journal.records import read_branching
from tools.training.corpus import open_run_data
from tools.training.launch import share_of_cores
from tools.training.trainer import Trainer


@dataclass(frozen=True)
class Replay:
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


def replay(folder: Path, event: dict[str, Any]) -> Replay:
    """Repeat the steps of the run in `folder` up to the skipped one of `event`, and trace that one.

    Raises UserError if the run folder lacks what is needed: run.toml, data.
    """
    step = event["step"]
    saved = _saved_run(folder)
    _require_repeatable(saved, event, folder)
    config = _on_one_process(saved, folder)
    corpus = open_run_data(config)
    start = _last_checkpoint_before(config.checkpoint_folder, step) or _origin(folder)
    device = _replay_device(config)
    torch.set_num_threads(config.train.threads or share_of_cores(1))
    kernels = gpu_kernels(device, config.train.deterministic)
    with world(device), kernels, tf32(config.plan.tf32), fp32_sums():
        trainer = Trainer(config, corpus, make_mesh(device=device), start)
        _catch_up(trainer, step, "the initial weights" if start is None else start.name)
        microbatch, trace = _trace_step(trainer, event)

    # samples of a step are consecutive in the order of training
    first_sample = event["first_sample"] + microbatch * config.train.micro_batch
    batch = corpus.train.batch(first_sample, config.train.micro_batch)
    texts = [""] * len(batch.ids)
    if corpus.tokenizer:
        texts = [corpus.tokenizer.decode(row) for row in batch.tokens.tolist()]
    samples = tuple(zip(corpus.train.labels(batch.ids), texts, strict=True))
    layout = ""
    if saved.world_size > 1:
        # without the number of ranks
        layout, _, _ = in_words(saved.parallel).partition(" =")
    start_name = "" if start is None else start.name
    return Replay(step, start_name, microbatch, samples, trace, layout)


def _require_repeatable(saved: RunConfig, event: dict[str, Any], folder: Path) -> None:
    """Raise UserError if the saved run is another one than that of the event, or if its numbers
    depend on the layout."""
    batch = saved.batches.at(event["first_sample"])
    if batch != event["num_samples"]:
        raise UserError.of(
            "command.replay_batch",
            step=event["step"],
            num_samples=event["num_samples"],
            global_batch=batch,
            folder=folder,
        )
    # Each micro-batch changes the scales of the next: one process would cast with other scales.
    if saved.plan.fp8 is not None and not saved.plan.fp8.repeatable:
        raise UserError.of("command.replay_fp8_history", folder=folder)


def _replay_device(config: RunConfig) -> str:
    """Return the device, as the run itself had it if this machine has one."""
    wants_gpu = config.train.device != "cpu"
    return "cuda" if torch.cuda.is_available() and wants_gpu else "cpu"


def _on_one_process(config: RunConfig, folder: Path) -> RunConfig:
    """Return the run on one rank, with its folder where it is now, without tracing of overflows."""
    # a step that is not finite must not stop the replay
    on_nonfinite = "ignore" if config.precision.on_nonfinite == "ignore" else "skip"
    precision = {"on_nonfinite": on_nonfinite, "trace_overflows": False}
    return config.model_copy(
        update={
            "parallel": Parallel(),
            "precision": config.precision.model_copy(update=precision),
            "train": config.train.model_copy(update={"folder": str(folder)}),
        }
    )


def _last_checkpoint_before(folder: Path, step: int) -> Path | None:
    """Return the newest checkpoint before the step; None if there is none."""
    newest = None
    for path in checkpoints(folder):  # by step
        if step_of(path) < step:
            newest = path
    return newest


def _origin(folder: Path) -> Path | None:
    """Return the checkpoint from which the run branched; None if it did not. Raises UserError if it
    is not there any more."""
    branching = read_branching(folder)
    if branching is None:
        return None
    path = Path(str(branching["checkpoint"]))
    if not (path / INDEX).is_file():
        raise UserError.of("command.replay_no_origin", folder=folder, path=path)
    return path


def _saved_run(folder: Path) -> RunConfig:
    """Return the run that `RunConfig.save_resolved` wrote. Raises UserError if it is not there."""
    path = run_file_in(folder, written_by_run=True)
    if path is None:
        raise UserError.of("command.replay_no_run_file", folder=folder)
    return load_run(path)


def _catch_up(trainer: Trainer, step: int, start: str) -> None:
    """Take the steps before `step`, with progress on stderr."""
    console = Console(stderr=True)
    done = trainer.progress.step
    title = "no step to repeat"
    if done < step - 1:
        title = f"repeating steps {done + 1} to {step - 1}"
    # also where no bar is shown
    console.print(f"from {start}: {title}", highlight=False)
    steps = range(done, step - 1)
    hidden = not console.is_terminal
    for _ in track(steps, title, console=console, transient=True, disable=hidden):
        trainer.step()


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
