"""A run repeated on one process from a checkpoint, up to a step that is to be explained. Nothing is
written.

The run's own run.toml describes the run. The repetition starts from its newest checkpoint before
the step, or from the initial weights, and repeats the steps in between with the learning rates and
the decisions that the run has recorded. Micro-batches are the same in every layout, and so are
their numbers but for rounding: sums over ranks are taken in another order.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from rich.progress import track

from megaprec.checkpoint.atomic import INDEX, checkpoints, step_of
from megaprec.errors import UserError
from megaprec.optim.decision.step_limits import NO_LIMITS, StepLimits
from megaprec.optim.decision.step_report import SPIKE, StepReport
from megaprec.precision.gemm import fp32_sums
from megaprec.precision.tf32 import tf32
from models.attention.backends import gpu_kernels
from parallel.mesh import make_mesh, world
from tools.config.layouts import in_words
from tools.config.run_file import RunConfig
from tools.config.tables.settings import Parallel
from tools.console.progress_bar import console_of
from tools.journal.records import read_branching
from tools.training.corpus import Corpus, open_run_data
from tools.training.launched import share_of_cores
from tools.training.trainer import Trainer

NOTHING_ALLOWED = StepLimits(-1.0, -1.0)  # no loss and no norm is below: every step is skipped
Records = Mapping[int, Mapping[str, Any]]  # of a run's steps, by their numbers


class RepeatedTrainer(Trainer):
    """A trainer that repeats recorded steps, with their learning rates.

    records: of the run; a step without one takes what the run file says.
    """

    records: Records = MappingProxyType({})
    _highest_rate = math.inf
    _held_since = 0

    def hold_rate(self, rate: float, since: int) -> None:
        """Take no step from `since` on with a higher learning rate."""
        self._highest_rate = rate
        self._held_since = since

    def _learning_rate(self) -> float:
        step = self.progress.step + 1
        record = self.records.get(step)
        rate = super()._learning_rate() if record is None else float(record["lr"])
        return rate if step < self._held_since else min(rate, self._highest_rate)

    def _next_limits(self) -> StepLimits:
        """Return limits that skip a step if the run has skipped it as a spike, and no other."""
        record = self.records.get(self.progress.step + 1, {})
        return NOTHING_ALLOWED if record.get("outcome") == SPIKE else NO_LIMITS


@dataclass(frozen=True)
class SavedRun:
    """A run in its folder, ready to be repeated.

    config: the run on one process. layout: of the run itself, in words; "" for one process.
    """

    folder: Path
    config: RunConfig
    corpus: Corpus
    layout: str
    records: Records

    @staticmethod
    def open(folder: Path, config: RunConfig, records: Records) -> "SavedRun":
        """Open the data of a run. config: as the run has saved it."""
        layout = ""
        if config.world_size > 1:
            # without the number of ranks
            layout, _, _ = in_words(config.parallel).partition(" =")
        on_one = _on_one_process(config, folder)
        return SavedRun(folder, on_one, open_run_data(on_one), layout, records)

    def start_before(self, step: int) -> Path | None:
        """Return the newest checkpoint before the step, or that from which the run branched; None:
        the initial weights."""
        newest = None
        for path in checkpoints(self.config.checkpoint_folder):  # by step
            if step_of(path) < step:
                newest = path
        return newest or _origin(self.folder)

    @contextmanager
    def trainer(self, start: Path | None) -> Iterator[RepeatedTrainer]:
        """Yield a trainer with the state of a checkpoint; None: the initial weights."""
        config = self.config
        device = _replay_device(config)
        torch.set_num_threads(config.train.threads or share_of_cores(1))
        kernels = gpu_kernels(device, config.train.deterministic)
        with world(device), kernels, tf32(config.plan.tf32), fp32_sums():
            trainer = RepeatedTrainer(config, self.corpus, make_mesh(device=device), start)
            trainer.records = self.records
            yield trainer

    def sample_texts(self, first: int, count: int) -> Iterator[tuple[int | str, str]]:
        """Yield the id and the text of samples at positions of the run, "" without a tokenizer."""
        batch = self.corpus.train.batch(first, count)
        texts = [""] * len(batch.ids)
        if self.corpus.tokenizer:
            texts = [self.corpus.tokenizer.decode(row) for row in batch.tokens.tolist()]
        yield from zip(self.corpus.train.labels(batch.ids), texts, strict=True)


def require_repeatable(saved: RunConfig, event: Mapping[str, Any], folder: Path) -> None:
    """Raise UserError if the saved run is another one than that of the event, or if its numbers
    depend on the layout.

    event: with a step, the position of its first sample, and its number of samples.
    """
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
    # the trainer is given the decisions of the run
    train = {"folder": str(folder), "on_spike": "skip"}
    return config.model_copy(
        update={
            "parallel": Parallel(),
            "precision": config.precision.model_copy(update=precision),
            "train": config.train.model_copy(update=train),
        }
    )


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


def catch_up(
    trainer: Trainer,
    step: int,
    start: Path | None,
    before_each: Callable[[], object] = lambda: None,
    after_each: Callable[[StepReport], object] = lambda report: None,
) -> None:
    """Take the steps before `step`, with progress on stderr. start: the checkpoint that the trainer
    has loaded; None: the initial weights."""
    console = console_of(stderr=True)
    done = trainer.progress.step
    title = "no step to repeat"
    if done < step - 1:
        title = f"repeating steps {done + 1} to {step - 1}"
    # also where no bar is shown
    name = "the initial weights" if start is None else start.name
    console.print(f"from {name}: {title}", highlight=False)
    steps = range(done, step - 1)
    hidden = not console.is_terminal
    for _ in track(steps, title, console=console, transient=True, disable=hidden):
        before_each()
        report, _ = trainer.step()
        after_each(report)
