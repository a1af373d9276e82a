"""The training loop: steps, records, evaluations and checkpoints. Every rank runs the same loop."""

import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh

from megaprec.checkpoint.reader import Store
from megaprec.checkpoint.save_load import load
from megaprec.comm.axis import device_of
from megaprec.data.blend import Blend
from megaprec.data.intact import describe_bad_id
from megaprec.data.samples import Samples
from megaprec.diagnose.overflow_monitor import OverflowMonitor
from megaprec.diagnose.position import Phase, Position, StepPosition
from megaprec.errors import UserError
from megaprec.optim.group_factors import Group
from megaprec.optim.observer import StepObserver
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.post_validation import PostValidationOptimizer
from megaprec.optim.step_report import NO_TOKENS, NonFiniteStep, StepReport, report_fields
from megaprec.precision.gemm import fp32_sums
from megaprec.precision.tf32 import tf32
from models.engine import Engine, OutsideVocabulary, Share, build_stages
from models.fp8_shadow import Shadow, run_shadow
from models.own_model import stage_maker
from models.post_validation import PostValidation
from models.sentinel import SilentFault
from parallel.pipeline.timeline import Recording
from tools.config.checks import make_rule
from tools.config.run_file import RunConfig
from tools.convert.initial import start_from
from tools.convert.train_state import TrainState, read_watch
from tools.journal.journal import Journal
from tools.journal.shadow_records import shadow_event, shadow_fields
from tools.journal.timeline_file import TIMELINE, write_trace
from tools.training.banner import print_marked, print_memory, print_start
from tools.training.batches import Batches, evaluated_samples
from tools.training.compiling import compile_leaves
from tools.training.corpus import Corpus
from tools.training.harness import Harness
from tools.training.place_in_data import resumed_progress
from tools.training.recording import record_run
from tools.training.run_folder import RunFolder
from tools.training.saves import Saves, extra_entries, tokenizer_files
from tools.training.signals import listening
from tools.training.silent_faults import SentinelChecks
from tools.training.skipped_steps import TrainingDiverged, no_tokens_event, overflow_event
from tools.training.state_digests import Digests
from tools.training.stopping import stop_together
from tools.training.throughput import Throughput


def optimizer_options(config: RunConfig, device: torch.device) -> dict[str, Any]:
    """Return the run's settings as keyword arguments of `RankStages.make_optimizer`. Raises
    UserError.

    device: on which the run trains.
    """
    optimizer = config.optimizer
    parallel = config.parallel
    return {
        "rule": make_rule(optimizer),
        "weight_decay": optimizer.weight_decay,
        "groups": [
            Group(group.pattern, group.lr, group.weight_decay) for group in optimizer.groups
        ],
        "clip": optimizer.clip,
        "norm": optimizer.norm,
        "overlap": parallel.overlaps(device.type),
        "bucket": parallel.bucket,
        "zero_size": parallel.zero_size if parallel.zero else 1,
        "seed": config.train.seed,
        "native": optimizer.native,
    }


class Trainer:
    """One rank of a run.

    mesh: None for one process without torch.distributed.
    checkpoint: from which the run resumes, the same on every rank; None: it starts at step 1.
    observers: of the optimizer's steps.
    position: is kept up to date for a watchdog.
    noticed: returns events about stragglers since the last call.
    """

    def __init__(
        self,
        config: RunConfig,
        corpus: Corpus,
        mesh: DeviceMesh | None,
        checkpoint: Path | None = None,
        observers: Sequence[StepObserver] = (),
        position: Position | None = None,
        noticed: Callable[[], Sequence[dict[str, Any]]] = tuple,
    ) -> None:
        self.position = position or Position()
        self._noticed = noticed
        self.config = config
        self.corpus = corpus
        self.resumed = checkpoint
        self.engine = self._build_engine(mesh, observers)
        self._checks = SentinelChecks(self.engine, config)
        self._digests = Digests(self.engine, config)
        self._harness = Harness(config, corpus, self.engine, self.position)
        self._throughput = Throughput.of(config, corpus.model, self.engine.device)
        if config.optimizer.validation == "after":
            self._validation = PostValidation(self.engine)
        else:
            self._validation = None
        self.rank = self.engine.optimizer.world.rank
        self.dp = self.engine.dp
        self._batches = Batches(config, corpus.train, self.dp, self.position)
        # after the last step whose outcome is known; one more step may have been taken
        self.progress = TrainState()
        self._raised: NonFiniteStep | None = None
        # the signal that asked this rank to stop
        self._signal = 0
        # True when all ranks know of one
        self._stops = False
        self.monitor = OverflowMonitor(
            self.engine.optimizer.plan.scaling, config.precision.patience
        )
        if checkpoint:
            self._resume(checkpoint)
        elif config.train.init_from:
            start_from(Path(config.train.init_from), self.engine.optimizer)
        self._saves = Saves(config, self.engine)
        self._taken = self.progress.step  # steps, also those whose outcome is not yet known
        self._saved = self.progress.step  # the step of the newest checkpoint
        # of steps whose outcome is not yet known: comparisons by step number, and durations
        self._shadows: dict[int, Shadow] = {}
        self._seconds: deque[float] = deque()

    def _build_engine(self, mesh: DeviceMesh | None, observers: Sequence[StepObserver]) -> Engine:
        """Build the stages of this rank, the optimizer over them, and their engine. Collective."""
        config = self.config
        options = replace(
            config.engine_options,
            blank=bool(self.resumed or config.train.init_from),
            leaves=compile_leaves(config, self.corpus.model, mesh, self.resumed),
        )
        parts = build_stages(
            self.corpus.model,
            config.plan,
            mesh,
            config.schedule,
            options,
            stage_maker(config.model.factory),
        )
        settings = optimizer_options(config, device_of(mesh))
        optimizer = parts.make_optimizer(self._optimizer_class(config), **settings)
        return Engine(parts, optimizer, [StepPosition(self.position), *observers], self.position)

    @staticmethod
    def _optimizer_class(config: RunConfig) -> type[ParallelAMPOptimizer]:
        """Return the class of the run's optimizer."""
        if config.optimizer.validation == "after":
            return PostValidationOptimizer
        return ParallelAMPOptimizer

    def _resume(self, checkpoint: Path) -> None:
        """Load the state of the run from a checkpoint."""
        with warnings.catch_warnings(record=True, action="always") as caught:
            load(checkpoint, self.engine.optimizer, self.engine.fp8)
        for warning in caught:
            print(f"warning    {warning.message}")
        store = Store(checkpoint, self.engine.optimizer.world)
        self.progress = resumed_progress(store, self.config, self.corpus)
        self.monitor.load_state_dict(read_watch(store))

    def run(self) -> None:
        """Take all remaining steps, or those until a signal, and save a checkpoint at the end.

        Raises Stopped after a signal and TrainingDiverged if further steps are of no use; the state
        is saved. Raises FaultyHardware if the sentinel found a rank that is wrong; the state is
        saved if the ranks hold the same.
        """
        if self.rank == 0:
            print_start(
                self.config, self.corpus, self.engine.device.type, self.resumed, self.progress.step
            )
            print_memory(self.engine.optimizer)
            print_marked(self.engine.optimizer)
            # without a step left, run.toml would differ from the steps taken
            if self.progress.step < self.config.train.steps:
                self.config.save_resolved(Path(self.config.train.folder))
        with listening(self._ask_to_stop):
            with tf32(self.config.plan.tf32), fp32_sums(), self._journal() as journal:
                self._take_steps(journal, RunFolder(Path(self.config.train.folder), self.rank))
                with self.position.during(Phase.SAVE):
                    self._saves.finish(self.progress.step)
            self.engine.optimizer.wait()
            if self._stops and self.progress.step < self.config.train.steps:
                optimizer = self.engine.optimizer
                stop_together(self._signal, optimizer.world, optimizer.device, self.progress.step)

    def _take_steps(self, journal: Journal | None, folder: RunFolder) -> None:
        for event in self._digests.of_loaded(self.progress, self.resumed):
            if journal is not None:
                journal.write_event(event)
        while self.progress.step < self.config.train.steps and not self._stops:
            divergence = ""
            # the step that is taken now, which may be one after the last whose outcome is known
            self.position.enter(Phase.STEP, self._taken + 1)
            # a run whose folder was removed has nowhere to save, and stops on all ranks
            self.engine.optimizer.stop |= folder.is_gone()
            try:
                finished = self._timed_step()
            except SilentFault as error:
                self._end_for(error, journal)
            for report, progress, seconds in finished:
                self._write(journal, report, progress, seconds)
                divergence = divergence or self._describe_divergence()
            done = self.progress.step
            if self._stops:
                folder.require_there(done, self.engine.optimizer)
            # only then do the weights belong to a step whose outcome is known
            if done == self._taken:
                self._save_if_due(ends=bool(divergence or self._stops))
            # after the save, so that the state is there to look at
            if divergence:
                self._saves.finish(done, divergence)
                raise TrainingDiverged(f"stopped after step {done}, state saved: {divergence}")

    def _save_if_due(self, ends: bool) -> None:
        """Look after a save that is under way, and begin one that is due. ends: the run does."""
        self._saves.require_whole()
        self._saves.poll()
        if ends or self._saves_after(self.progress.step):
            with self.position.during(Phase.SAVE):
                self._save()

    def _ask_to_stop(self, number: int) -> None:
        """Stop after the next step; its consensus tells all ranks."""
        self._signal = number
        self.engine.optimizer.stop = True

    def _end_for(self, error: SilentFault, journal: Journal | None) -> NoReturn:
        """Raise FaultyHardware. The checked step has changed nothing; the state before it is saved
        if it is sound."""
        with self.position.during(Phase.SAVE):
            if error.fault.sound and self.progress.step > self._saved:
                self._save()
            self._saves.finish(self.progress.step, str(error))
        event, stop = self._checks.outcome(error, self.progress.step, self._saved)
        if journal is not None:
            journal.write_event(event)
        raise stop

    def _describe_divergence(self) -> str:
        """Return the reason why further steps are of no use; empty if training may go on."""
        if self._raised is not None:
            return f'precision.on_nonfinite = "raise", and {self._raised}'
        return self.monitor.advice() if self.monitor.hopeless else ""

    def _journal(self) -> AbstractContextManager[Journal | None]:
        """Return the journal, which rank 0 alone writes."""
        if self.rank:
            return nullcontext()
        return record_run(
            self.config, self.corpus, self.resumed, lambda: self.progress, self.engine.optimizer
        )

    def _timed_step(self) -> list[tuple[StepReport, TrainState, float]]:
        """Take the next step. Returns the steps whose outcome is now known, with the progress and
        seconds of each."""
        start = time.perf_counter()
        finished = self.step()
        # a step whose outcome comes one step late keeps its own duration
        self._seconds.append(time.perf_counter() - start)
        return [(report, progress, self._seconds.popleft()) for report, progress in finished]

    def _write(
        self, journal: Journal | None, report: StepReport, progress: TrainState, seconds: float
    ) -> None:
        """Run the evaluation that is due after a step, feed the overflow monitor and write the
        step's record."""
        record = self._fields(report, progress, seconds)
        shadow = self._shadows.pop(progress.step, None)
        if self._evaluates_after(progress.step):
            with self.position.during(Phase.EVALUATION):
                for name, samples in self.corpus.evaluated.items():
                    record[name] = self.evaluate(samples)
                record |= self._harness.results()
        record |= self._checks.fields(progress.step)
        self.position.record()
        self.monitor.note(report)
        # evaluations are collective, so every rank gets here; rank 0 alone writes
        events = []
        if report.outcome != "applied":
            events.append(self._skip_event(report, progress))
        events += self._digests.of_step(report, progress)
        if shadow is not None:
            record |= shadow_fields(shadow, self.config.fp8)
            events.append(shadow_event(shadow, progress.step, self.config.fp8))
        for event in self._noticed():
            events.append(event)
            record["straggler"] = event["said"]
        if journal is not None:
            journal.write(record)
            for event in events:
                journal.write_event(event)

    def _fields(self, report: StepReport, progress: TrainState, seconds: float) -> dict[str, Any]:
        """Return the fields of metrics.jsonl for one step, without evaluation and FP8
        comparison."""
        tokens_per_s = self.config.tokens_per_step / seconds
        fields = {
            "step": progress.step,
            **report_fields(report),
            "tokens": progress.tokens,
            "learned_tokens": progress.learned_tokens,
            "tokens_per_s": tokens_per_s,
            **self._throughput.fields(tokens_per_s),
            "seconds": seconds,
            "skipped_total": progress.skipped,
        }
        if report.offenders:
            fields["overflow_in"] = report.offenders[0].name
        return fields

    def _evaluates_after(self, step: int) -> bool:
        """Return True if an evaluation is due after this step."""
        return _due(self.config.train.eval_every, step)

    def _saves_after(self, step: int) -> bool:
        """Return True if a checkpoint is due after this step."""
        return step == self.config.train.steps or _due(self.config.checkpoint.every, step)

    def _skip_event(self, report: StepReport, progress: TrainState) -> dict[str, Any]:
        """Return the event of a step that changed nothing."""
        samples = range(progress.samples - self.config.train.global_batch, progress.samples)
        if report.outcome == NO_TOKENS:
            return no_tokens_event(progress.step, samples)
        return overflow_event(report, progress.step, samples, self.monitor, self.corpus.train)

    def step(self) -> list[tuple[StepReport, TrainState]]:
        """Take the next step. Returns the steps whose outcome is now known, each with the progress
        after it.

        With optimizer.validation = "before" that is this step. With "after" it may be the step
        before, both or none. A NonFiniteStep is kept, to be raised once the state is saved.
        """
        number = self._taken  # from 0
        batch = self.config.train.global_batch
        position = self.progress.samples + (number - self.progress.step) * batch
        if number + 1 == self.config.log.timeline:
            recording = Recording.start(self.engine.pp)
        else:
            recording = None
        share = self._batches.take(position)
        if _due(self.config.fp8.shadow_every, number + 1):
            # before the step, with the weights that it will read
            with self.position.during(Phase.COMPARISON):
                self._shadows[number + 1] = run_shadow(self.engine.passes, share, number)
        share_of = partial(self.share, self.corpus.train, position)
        self._taken = number + 1
        finished = list[tuple[StepReport, TrainState]]()
        with self._locating(self.corpus.train), self._checks.checking(number, share_of):
            for report in self._reports(share, number, recording):
                self._advance(report)
                finished.append((report, self.progress))
        if recording:
            self._write_timeline(recording)
        return finished

    def _reports(
        self, share: Share, number: int, recording: Recording | None
    ) -> Iterator[StepReport]:
        """Take the step. Yield the reports of the steps whose outcome becomes known."""
        if self._validation is not None:
            yield from self._validation.step(
                share, number, self._lr, self._needs_outcome, recording
            )
            return
        try:
            yield self.engine.step(share, self._lr(), number, recording)
        except NonFiniteStep as error:
            # the run ends once the state is saved (`_describe_divergence`)
            self._raised = error
            yield error.report

    @contextmanager
    def _locating(self, samples: Samples | Blend, position: int | None = None) -> Iterator[None]:
        """Raise UserError with the file and place of a token id outside of the vocabulary.

        position: the first sample of the global batch; default: of the first step whose outcome is
            not known.
        """
        try:
            yield
        except OutsideVocabulary as error:
            start = self.progress.samples if position is None else position
            location = samples.place(start + error.sample)
            length = self.config.train.seq_length + 1
            message = describe_bad_id(*location, length, error.vocab) or str(error)
            raise UserError(message) from error

    def _needs_outcome(self) -> bool:
        """Return True if the outcome of the step just taken must be known before the next step
        begins."""
        step = self._taken
        # these repeat a micro-batch of the next step, with weights that are final
        repeats = _due(self.config.fp8.shadow_every, step + 1) or self._checks.due(step + 1)
        reads_weights = (
            self._evaluates_after(step) or self._saves_after(step) or self._digests.due(step)
        )
        return self._stops or reads_weights or repeats or self._saves.under_way

    def _lr(self) -> float:
        """Return the learning rate of the next step."""
        if self.config.lr.unit == "samples":
            return self.config.lr_schedule.at(self.progress.applied_samples)
        return self.config.lr_schedule.at(self.progress.applied)

    def _advance(self, report: StepReport) -> None:
        """Add a step whose outcome is known to `progress`, and note whether a rank was asked to
        stop."""
        self._stops |= report.stop
        before = self.progress
        batch = self.config.train.global_batch
        tokens = self.config.tokens_per_step
        applied = int(report.changed)
        self.progress = TrainState(
            step=before.step + 1,
            applied=before.applied + applied,
            samples=before.samples + batch,
            applied_samples=before.applied_samples + applied * batch,
            tokens=before.tokens + tokens,
            skipped_tokens=before.skipped_tokens + (1 - applied) * tokens,
        )

    def _write_timeline(self, recording: Recording) -> None:
        spans = recording.gather(self.engine.schedule, self.engine.device)
        if self.rank == 0:
            write_trace(Path(self.config.train.folder) / TIMELINE, spans, f"step {self._taken}")

    def evaluate(self, samples: Samples | Blend) -> float:
        """Return the mean loss over the tokens that count of the first samples; NaN if none counts.

        These are train.eval_batches global batches of samples, or all if there are fewer. Each
        counts once, also in a last batch that they do not fill.
        """
        nats = 0.0
        tokens = 0.0
        end = evaluated_samples(self.config.train, len(samples))
        for first in range(0, end, self.config.train.global_batch):
            with self._locating(samples, first):
                loss, counted = self.engine.evaluate_counted(self.share(samples, first, end=end))
            if counted:
                nats += loss * counted
                tokens += counted
        return nats / tokens if tokens else math.nan

    def share(
        self,
        samples: Samples | Blend,
        position: int,
        replica: int | None = None,
        end: int | None = None,
    ) -> Share:
        """Return a data-parallel rank's part of the global batch that begins at `position`, as
        `Batches.share` does."""
        return self._batches.share(samples, position, replica, end)

    def _save(self) -> None:
        extra = extra_entries(
            self.config, self.corpus, asdict(self.progress), self.monitor.state_dict()
        )
        self._saves.start(self.progress.step, extra, tokenizer_files(self.corpus))
        self._saved = self.progress.step


def _due(every: int, step: int) -> bool:
    """Return True if something happens in this step. every: 0: never."""
    return bool(every) and step % every == 0
