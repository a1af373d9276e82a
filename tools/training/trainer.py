"""The training loop: steps, records, evaluations and checkpoints. Every rank runs the same loop."""

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec.checkpoint.reader import Store
from megaprec.checkpoint.save_load import load
from megaprec.comm.axis import device_of
from megaprec.diagnose.overflow_monitor import OverflowMonitor
from megaprec.diagnose.position import Phase, Position, StepPosition
from megaprec.diagnose.spike_monitor import SpikeMonitor
from megaprec.errors import UserError
from megaprec.optim.decision.step_limits import NO_LIMITS, StepLimits
from megaprec.optim.decision.step_report import (
    NO_TOKENS,
    SPIKE,
    NonFiniteStep,
    StepObserver,
    StepReport,
)
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.rules.param_groups import Group
from megaprec.precision.gemm import fp32_sums
from megaprec.precision.tf32 import tf32
from megaprec.tokens.blend import Blend
from megaprec.tokens.intact import describe_bad_id
from megaprec.tokens.places import path_of
from megaprec.tokens.samples import Samples
from models.decoder.stages import Stage
from models.engine.engine import Engine, build_stages, mean_loss
from models.engine.passes import OutsideVocabulary, Share
from parallel.leaves import PLAIN, Leaves
from parallel.pipeline.schedules import Schedule
from parallel.pipeline.timeline import Recording
from tools.config.rules.derived import make_rule
from tools.config.run_file import RunConfig
from tools.console.wrapped import say
from tools.journal.invariant_records import broken_event, findings_event
from tools.journal.journal import Journal, format_evaluations
from tools.journal.records import (
    AVERAGE_LOSS,
    FIRST_EVALUATION,
    HELD_OUT_LOSS,
)
from tools.parts import optional_parts
from tools.saved.train_state import TrainState, read_overflow_monitor, read_spike_monitor
from tools.training.batches import Batches, evaluated_samples
from tools.training.corpus import Corpus
from tools.training.ends import TrainingDiverged
from tools.training.invariants import Invariants
from tools.training.learning_rates import LearningRates
from tools.training.recording import record_run
from tools.training.run_folder import RunFolder
from tools.training.saves import Saves, evaluated_entries, extra_entries, held_tokenizer
from tools.training.step_records import (
    Digests,
    SentinelChecks,
    Throughput,
    add_said,
    evaluation_event,
    is_due,
    no_tokens_event,
    overflow_event,
    step_fields,
)
from tools.training.stopping import listening, stop_together

if TYPE_CHECKING:
    from models.engine.fp8_shadow import Shadow
    from models.engine.sentinel import SilentFault


class Trainer:
    """One rank of a run.

    A stage is a part of the model's layers, and a share the part of a batch that a data-parallel
    rank computes. A record has the numbers of a step, for metrics.jsonl; events are for
    events.jsonl.

    mesh: None for one process without torch.distributed.
    checkpoint: from which the run resumes, the same on every rank; None: it starts at step 1.
    observers: of the optimizer's steps.
    position: what this rank does, kept up to date for a watchdog.
    straggler_events: returns events about slow ranks since the last call.
    """

    optimizer_class = ParallelAMPOptimizer

    def __init__(
        self,
        config: RunConfig,
        corpus: Corpus,
        mesh: DeviceMesh | None,
        checkpoint: Path | None = None,
        observers: Sequence[StepObserver] = (),
        position: Position | None = None,
        straggler_events: Callable[[], Sequence[dict[str, Any]]] = tuple,
    ) -> None:
        self.position = position or Position()
        self._straggler_events = straggler_events
        self.config = config
        self.corpus = corpus
        self.resumed = checkpoint
        self._tokenizer = held_tokenizer(corpus)
        self.engine = self._build_engine(mesh, observers)
        self.rank = self.engine.optimizer.world.rank
        self.dp = self.engine.dp
        self._checks = SentinelChecks(self.engine, config)
        self._digests = Digests(self.engine, config)
        self._harness: Any = None  # evaluates the tasks of data.lm_eval, if there are any
        if config.data.lm_eval:
            self._harness = optional_parts.Harness(config, corpus, self.engine, self.position)
        self._throughput = Throughput.of(config, corpus.model, self.engine.device)
        self._batch_sizes = config.batches
        self._rates = LearningRates.of(config.lr, config.train)
        self._batches = Batches(config, corpus.train, self.dp, self.position)
        self.monitor = OverflowMonitor(
            self.engine.optimizer.plan.scaling, config.precision.patience
        )
        self.spike_monitor = SpikeMonitor(config.train.spike_patience)
        # of the newest step, which is a spike if its loss or gradient norm is above them
        self._limits = NO_LIMITS
        model = corpus.model
        self._router_monitor = None
        if model.experts:
            monitor = optional_parts.RouterMonitor
            self._router_monitor = monitor(model.experts, model.experts_per_token)
        self.progress = TrainState()  # after the last step
        # entries for checkpoints: special tokens and settings of generation of the first weights
        self._first_ids: dict[str, Any] = {}
        self._samples_of_step = range(0)  # positions of the last step's global batch
        self._share_of_step: Share | None = None  # of the last step
        self._invariants: Invariants | None = None  # while `run` takes steps
        self._fill_state()
        self._statistics: Any = None  # of weights, gradients and updates, if there are any
        if config.log.statistics:
            layers = _layers_of(self.engine.stages.values())
            self._statistics = optional_parts.TensorStatistics(self.engine.optimizer, layers)
        self._saves = Saves(config, self.engine)
        self._saved_step = self.progress.step  # that of the newest checkpoint
        self._evaluated: dict[str, float] = {}  # losses after the newest step, by field
        self._evaluated_tokens: dict[str, int] = {}  # those of each of these losses
        self._nonfinite_step: NonFiniteStep | None = None  # ends the run, with its state saved
        self._received_signal = 0  # that asked this rank to stop
        self._is_stopping = False  # True when all ranks know that one was asked to stop

    def _build_engine(self, mesh: DeviceMesh | None, observers: Sequence[StepObserver]) -> Engine:
        """Build the stages of this rank and the optimizer over them; return their engine.
        Collective over the world."""
        config = self.config
        options = replace(
            config.engine_options,
            # Weights that are loaded or drawn afterwards need not be drawn by each replica.
            blank=bool(self.resumed or config.train.init_from or self._shares_drawing),
            leaves=self._leaves(mesh),
        )
        stages = build_stages(
            config=self.corpus.model,
            plan=config.plan,
            mesh=mesh,
            schedule=config.schedule,
            options=options,
            make_stage=optional_parts.stage_maker(config.model.factory)
            if config.model.factory
            else Stage,
            other_schedules=config.other_schedules,
        )
        optimizer = stages.make_optimizer(
            self.optimizer_class, **optimizer_options(config, device_of(mesh))
        )
        return Engine(stages, optimizer, [StepPosition(self.position), *observers], self.position)

    def _leaves(self, mesh: DeviceMesh | None) -> Leaves:
        """Return the leaves, compiled or plain, as train.compile asks for: functions without matrix
        products and messages, such as norms and losses (`parallel.leaves`). Collective."""
        is_plain = self.config.compile_mode(device_of(mesh).type) == "off"
        # a resumed run may have been compiled before, and says so
        if is_plain and self.resumed is None:
            return PLAIN
        return optional_parts.compile_leaves(self.config, self.corpus.model, mesh, self.resumed)

    @property
    def _shares_drawing(self) -> bool:
        """Return True if each replica draws a part of the initial weights: the part whose master
        weights it holds by ZeRO. Not with model.factory, whose initial values need not be those
        that the layout of a parameter states."""
        parallel = self.config.parallel
        return bool(parallel.zero) and parallel.copies > 1 and not self.config.model.factory

    def _fill_state(self) -> None:
        """Load the state of the checkpoint or the weights of train.init_from, or draw the initial
        weights if building the stages has not. Collective over the world."""
        train = self.config.train
        if self.resumed:
            self._resume(self.resumed)
        elif train.init_from:
            self._begin_with(path_of(train.init_from))
        elif self._shares_drawing:
            stages = self.engine.stages.values()
            optional_parts.draw_weights(stages, self.engine.optimizer, train.seed)

    def _begin_with(self, folder: Path) -> None:
        """Load the weights of train.init_from, and draw what they lack: rows of new tokens, or
        tensors that they do not have. Keep the special tokens and the settings of generation that
        came with them, for checkpoints. Collective over the world."""
        optimizer = self.engine.optimizer
        stages = self.engine.stages.values()
        drawn = optional_parts.InitialWeights(stages, optimizer.plan, self.config.train.seed)
        growth = optional_parts.growth_of(self.config, self.corpus)
        self._first_ids = optional_parts.start_from(
            folder, optimizer, growth, drawn, self.config.model
        )

    def _resume(self, checkpoint: Path) -> None:
        """Load the state of the run from a checkpoint."""
        # Printed as lines of the run: Python would add the place in the code.
        with warnings.catch_warnings(record=True, action="always") as caught:
            load(
                checkpoint,
                self.engine.optimizer,
                self.engine.fp8,
                begin_ema=True,  # accepted by --allow ema
            )
        for warning in caught:
            print(f"warning    {warning.message}")
        store = Store(checkpoint, self.engine.optimizer.world)
        self.progress = optional_parts.resumed_progress(store, self.config, self.corpus)
        self.monitor.load_state_dict(read_overflow_monitor(store))
        self.spike_monitor.load_state_dict(read_spike_monitor(store))
        self._first_ids = optional_parts.saved_ids(store)

    def run(self) -> None:
        """Take all remaining steps, or those until a signal, and save a checkpoint at the end.

        Raises Stopped after a signal and TrainingDiverged if further steps are of no use; the state
        is saved. Raises FaultyHardware if the sentinel found a rank that is wrong; the state is
        saved if the ranks hold the same.
        """
        if self.rank == 0:
            optional_parts.print_start(
                self.config,
                self.corpus,
                self.engine.device.type,
                self.resumed,
                self.progress.step,
                self.engine.refused_kernels,
            )
            optional_parts.print_memory(self.engine.optimizer)
            optional_parts.print_marked(self.engine.optimizer)
            # Without a step left, run.toml would differ from the steps taken.
            if self.progress.step < self.config.train.steps:
                self.config.save_resolved(Path(self.config.train.folder))
        with listening(self._ask_to_stop):
            # Settings of the process, which are put back after the run.
            with (
                tf32(self.config.plan.tf32),
                fp32_sums(),
                self._memory_history(),
                self._journal() as journal,
            ):
                with self._saves.pinned_ahead(self.progress.step):
                    self._take_steps(journal, RunFolder(Path(self.config.train.folder), self.rank))
                with self.position.in_phase(Phase.SAVE):
                    self._saves.finish(self.progress.step)
            # Gathers of updated weights may still be under way.
            self.engine.optimizer.wait()
            steps_done = self.progress.step
            if self._is_stopping and steps_done < self.config.train.steps:
                optimizer = self.engine.optimizer
                stop_together(self._received_signal, optimizer.world, optimizer.device, steps_done)

    def _take_steps(self, journal: Journal | None, folder: RunFolder) -> None:
        """Take all remaining steps, or those until a signal, and save after those where a save is
        due.
        """
        self._begin(journal)
        profile = self._make_profile()
        leaves = self.engine.leaves
        leaves.misses.clear()  # those of other passes than steps
        self._invariants = self._make_invariants()
        first_step = self.progress.step + 1
        while self.progress.step < self.config.train.steps and not self._is_stopping:
            self.position.enter(Phase.STEP, self.progress.step + 1)
            # A run whose folder was removed has nowhere to save. What one rank asks for here, all
            # learn in the step ("stops" of `consensus.NUMBERS`).
            self.engine.optimizer.stop |= folder.is_gone()
            self._invariants.before(self.progress.step + 1)
            if profile is not None:
                profile.before(self.progress.step + 1)
            start_time = time.perf_counter()
            report, shadow = self._checked_step(journal)
            if profile is not None:
                profile.after(self.progress.step)
            if leaves.names and self.progress.step == first_step:
                self._say_misses(leaves)
            self._evaluate_and_record(journal, report, shadow, time.perf_counter() - start_time)
            self._save_or_end(folder)
        if profile is not None:
            profile.end(self.progress.step)

    def _begin(self, journal: Journal | None) -> None:
        """Write the digests of a loaded state, and evaluate before the first step if asked to."""
        for event in self._digests.of_loaded(self.progress, self.resumed):
            if journal is not None:
                journal.write_event(event)
        if self.config.train.eval_first and not self.progress.step:
            self._evaluate_first(journal)

    def _save_or_end(self, folder: RunFolder) -> None:
        """Save after a step if a save is due. Raises TrainingDiverged, with the state saved, if the
        run has diverged; UserError if a run that stops has no folder left to save to."""
        divergence = self._describe_divergence()
        steps_done = self.progress.step
        if self._is_stopping:
            folder.require_there(steps_done, self.engine.optimizer)
        self._save_if_due(ends=bool(divergence or self._is_stopping))
        # After the save, so that the state is there to look at.
        if divergence:
            self._saves.finish(steps_done, divergence)
            raise TrainingDiverged(f"stopped after step {steps_done}, state saved: {divergence}")

    def _make_profile(self) -> Any:
        """Return the profile of some steps on this rank; None if none is asked for."""
        log = self.config.log
        if not log.profile:
            return None
        return optional_parts.profile_of_steps(
            log.profile,
            self.progress.step + 1,
            log.profile_ranks,
            self.rank,
            self.engine.stages,
            self.engine.device,
            Path(self.config.train.folder),
        )

    def _memory_history(self) -> AbstractContextManager[None]:
        """Return a block that says what holds this rank's GPU's memory if it runs out."""
        config = self.config
        if not config.log.memory_history or self.engine.device.type != "cuda":
            return nullcontext()
        folder = Path(config.train.folder)
        return optional_parts.memory_history(self.rank, self.engine.optimizer, folder)

    def _checked_step(self, journal: Journal | None) -> "tuple[StepReport, Shadow | None]":
        """Take a step, and return what `step` does. Raises FaultyHardware, with the event written,
        if the sentinel finds that the step was computed wrongly."""
        try:
            return self.step()
        except Exception as error:
            if not self._checks.raised(error):
                raise
            self._end_for(cast("SilentFault", error), journal)

    def _make_invariants(self) -> Invariants:
        """Return the invariants of the steps that this process takes. Collective over the world."""
        return Invariants(
            self.config,
            self.corpus.model,
            self.engine,
            self.progress,
            fresh=not self.resumed and not self.config.train.init_from,
            is_saved=self._saves_after,
        )

    def _task_results(self) -> dict[str, float]:
        """Return the results of the tasks of data.lm_eval. Collective over the world."""
        return self._harness.results() if self._harness else {}

    def _say_misses(self, leaves: Leaves) -> None:
        """Say which compiled leaves also ran uncompiled. Collective over the world."""
        lines = optional_parts.missed_lines(leaves, self.engine.optimizer.world, self.engine.device)
        if self.rank == 0:
            for line in lines:
                say(line)

    def _save_if_due(self, ends: bool) -> None:
        """Look after a save that is under way, and begin one that is due. ends: the run does."""
        self._saves.require_savable_once()
        self._saves.poll()
        if ends or self._saves_after(self.progress.step):
            with self.position.in_phase(Phase.SAVE):
                self._save()

    def _ask_to_stop(self, signal_number: int) -> None:
        """Stop after the next step; its consensus tells all ranks."""
        self._received_signal = signal_number
        self.engine.optimizer.stop = True

    def _end_for(self, error: "SilentFault", journal: Journal | None) -> NoReturn:
        """Raise FaultyHardware. The checked step has changed nothing; the state before it is saved
        if it is sound.
        """
        with self.position.in_phase(Phase.SAVE):
            if error.fault.can_be_saved and self.progress.step > self._saved_step:
                self._save()
            self._saves.finish(self.progress.step, str(error))
        event, faulty_hardware = self._checks.outcome(error, self.progress.step, self._saved_step)
        if journal is not None:
            journal.write_event(event)
        raise faulty_hardware

    def _describe_divergence(self) -> str:
        """Return the reason why further steps are of no use; empty if training may go on."""
        if self._nonfinite_step is not None:
            return f'precision.on_nonfinite = "raise", and {self._nonfinite_step}'
        if self.config.train.on_spike == "skip" and self.spike_monitor.hopeless:
            return self.spike_monitor.advice()
        return self.monitor.advice() if self.monitor.hopeless else ""

    def _journal(self) -> AbstractContextManager[Journal | None]:
        """Return the journal, which rank 0 alone writes."""
        if self.rank:
            return nullcontext()
        return record_run(
            self.config, self.corpus, self.resumed, lambda: self.progress, self.engine.optimizer
        )

    def _evaluate_and_record(
        self, journal: Journal | None, report: StepReport, shadow: "Shadow | None", seconds: float
    ) -> None:
        """Evaluate if that is due after the step, let the overflow monitor note the step, and write
        its record and events (rank 0 alone). Collective over the world.

        shadow: the FP8 comparison of the step, if one was due.
        seconds: of the step.
        """
        progress = self.progress
        batch = len(self._samples_of_step)
        record = step_fields(self.config, report, progress, batch, seconds, self._throughput)
        record |= self._source_fields(report)
        record |= self._padding_fields()
        evaluated = self._evaluate_if_due(record)
        record |= self._checks.note_clean(progress.step)
        self.position.end_computation()
        self.monitor.note(report)
        # Evaluations and digests are collective, so every rank gets here; rank 0 alone writes.
        events = [
            evaluation_event(progress.step, field, numbers) for field, numbers in evaluated.items()
        ]
        events += self._step_events(report, progress)
        events += self._told_events(record, report)
        if shadow is not None:
            record |= optional_parts.shadow_fields(shadow, self.config.fp8)
            events.append(optional_parts.shadow_event(shadow, progress.step, self.config.fp8))
        if journal is not None:
            journal.write(record)
            for event in events:
                journal.write_event(event)

    def _source_fields(self, report: StepReport) -> dict[str, Any]:
        """Return the fields of the step's record about the data sets of a blend; none without
        one."""
        samples = self.corpus.train
        names = self.config.data.blend_names
        # A run that goes on with one set after a blend has samples of a blend, and no names.
        if not isinstance(samples, Blend) or not names:
            return {}
        step = self._samples_of_step
        return optional_parts.source_fields(
            names,
            report.sources,
            samples.samples_taken(step.start),
            samples.samples_taken(step.stop),
            self.config.train.seq_length,
        )

    def _padding_fields(self) -> dict[str, float]:
        """Return the field of the step's record about its padding; none unless data are packed."""
        if self.config.data.pack == "none":
            return {}
        seq_length = self.config.train.seq_length
        return optional_parts.padding_fields(self.corpus.train, self._samples_of_step, seq_length)

    def _evaluate_if_due(self, record: dict[str, Any]) -> dict[str, Tensor]:
        """Evaluate if that is due after this step, and add mean losses and results of tasks to its
        record. Return the losses of samples by field, as `_evaluate_all` does; {} if none is due.
        Collective over the world."""
        self._evaluated = {}
        if not self._evaluates_after(self.progress.step):
            return {}
        with self.position.in_phase(Phase.EVALUATION):
            evaluated = self._evaluate_all()
            for field, numbers in evaluated.items():
                tokens_of_samples = numbers[1]
                self._evaluated[field] = mean_loss(numbers)
                self._evaluated_tokens[field] = int(tokens_of_samples.sum())
            record |= self._evaluated
            record |= self._task_results()
        return evaluated

    def _told_events(self, record: dict[str, Any], report: StepReport) -> list[dict[str, Any]]:
        """Return the events of this step about invariants, spikes, routers and stragglers. Add to
        `record` what they say, in a field of each kind, which the line of the step prints.
        Collective over the world.
        """
        events = [
            *self._invariant_events(report),
            *self._spike_events(report),
            *self._router_events(report),
            *self._straggler_events(),
        ]
        add_said(record, events)
        return events

    def _evaluate_first(self, journal: Journal | None) -> None:
        """Evaluate the first weights, and write the losses as an event (rank 0 alone). Collective
        over the world."""
        losses = dict[str, float]()
        with self.position.in_phase(Phase.EVALUATION):
            for field, numbers in self._evaluate_all().items():
                losses[field] = mean_loss(numbers)
            losses |= self._task_results()
        self.position.end_computation()
        if journal is not None:
            journal.write_event({"event": FIRST_EVALUATION, "step": 0, "losses": losses})
            steps = self.config.train.steps
            say("  ".join([f"step 0/{steps}", *format_evaluations(losses)]))

    def _step_events(self, report: StepReport, progress: TrainState) -> list[dict[str, Any]]:
        """Return the event of a step that was skipped, or applied although it was not finite, and
        those of its digests and statistics if they are due. Collective then."""
        events = list[dict[str, Any]]()
        samples = self._samples_of_step
        if report.outcome == NO_TOKENS:
            events.append(no_tokens_event(progress.step, samples))
        elif report.overflowed:
            events.append(
                overflow_event(report, progress.step, samples, self.monitor, self.corpus.train)
            )
        events += self._digests.of_step(report, progress)
        if self._takes_statistics(progress.step):
            statistics = self._statistics.result()
            events.append(
                optional_parts.statistics_event(statistics, progress.step, report.outcome)
            )
        return events

    def _invariant_events(self, report: StepReport) -> Iterator[dict[str, Any]]:
        """Yield an event for each invariant that the step is the first to break, and after the
        last step of this process one with what is known of all. Collective over the world."""
        invariants = self._invariants
        share = self._share_of_step
        if invariants is None or share is None:
            return
        step = self.progress.step
        ends = self._is_stopping or step == self.config.train.steps
        for name, said in invariants.after(report, self.progress, share, ends):
            yield broken_event(name, said, step)
        if ends:
            yield findings_event(invariants.findings, step)

    def _router_events(self, report: StepReport) -> Iterator[dict[str, Any]]:
        """Yield the event of routers that send tokens to few experts, if they do."""
        if self._router_monitor is None:
            return
        if collapsed := self._router_monitor.note(report):
            experts = self.corpus.model.experts
            bound = self._router_monitor.bound
            yield optional_parts.collapse_event(collapsed, self.progress.step, experts, bound)

    def _spike_events(self, report: StepReport) -> list[dict[str, Any]]:
        """Let the monitor note the step, and return its event if it is a spike. Of spikes in a row
        that were applied only the first has one, for the others may be its effect."""
        samples = self._samples_of_step
        tokens = len(samples) * self.config.train.seq_length
        spike = self.spike_monitor.note(report, self._limits, tokens)
        in_a_row = self.spike_monitor.in_a_row
        if spike is None or (in_a_row > 1 and report.outcome != SPIKE):
            return []
        return [optional_parts.spike_event(spike, report, self.progress.step, samples, in_a_row)]

    def _evaluate_all(self) -> dict[str, Tensor]:
        """Return the losses of all evaluated sets by field of a record, as `evaluate` does, and
        those of the average of the weights, if one is kept. Collective over the world."""
        evaluated = dict[str, Tensor]()
        sets = self.corpus.evaluated.items()
        for field, samples in sets:
            evaluated[field] = self.evaluate(samples)
        if self.config.optimizer.ema:
            with self.engine.optimizer.averaged_weights():
                for field, samples in sets:
                    average_field = field.replace(HELD_OUT_LOSS, AVERAGE_LOSS, 1)
                    evaluated[average_field] = self.evaluate(samples)
        return evaluated

    def _evaluates_after(self, step: int) -> bool:
        """Return True if an evaluation is due after this step: that of the end always is, in a run
        that evaluates."""
        train = self.config.train
        return is_due(train.eval_every, step) or (train.eval_every > 0 and step == train.steps)

    def _saves_after(self, step: int) -> bool:
        """Return True if a checkpoint is due after this step."""
        return step == self.config.train.steps or is_due(self.config.checkpoint.every, step)

    def step(self) -> "tuple[StepReport, Shadow | None]":
        """Take the next step. Return its report, and the FP8 comparison if one was due.

        A NonFiniteStep is kept: once the state is saved, TrainingDiverged ends the run for it.
        """
        step_number = self.progress.step  # from 0
        first_sample = self.progress.samples
        recording = None
        if step_number + 1 == self.config.log.timeline:
            recording = Recording.start(self.engine.pp)
        is_last = step_number + 1 >= self.config.train.steps
        # begins to read the share of the next step too, unless this is the last one
        share = self._batches.take(first_sample, is_last)
        self._share_of_step = share
        shadow = None
        if is_due(self.config.fp8.shadow_every, step_number + 1):
            # Before the step, with the weights that it will read.
            with self.position.in_phase(Phase.COMPARISON):
                shadow = optional_parts.run_shadow(
                    self.engine.passes_for(share), share, step_number
                )
        # The sentinel recomputes the share of any data-parallel rank.
        share_of = partial(self.share, first_sample)
        checking = self._checks.checking(step_number, share_of)
        with self._locating(self.corpus.train), checking, self._watching(step_number + 1):
            report = self._engine_step(share, step_number, recording)
        self._advance(report)
        if recording:
            self._write_timeline(recording, self.engine.passes_for(share).schedule)
        return report, shadow

    def _takes_statistics(self, step: int) -> bool:
        """Return True if the statistics of this step are due."""
        return is_due(self.config.log.statistics, step)

    def _watching(self, step: int) -> AbstractContextManager[None]:
        """Return a block in which the step's statistics are taken, if they are due."""
        return self._statistics.watching() if self._takes_statistics(step) else nullcontext()

    def _engine_step(
        self, share: Share, step_number: int, recording: Recording | None
    ) -> StepReport:
        """Train on a share: forward, backward, and the update. Return the report of the step, also
        of one that raises NonFiniteStep.
        """
        self._limits = self._next_limits()
        # under "note" the step is applied, and `_spike_events` tells the spike
        limits = self._limits if self.config.train.on_spike == "skip" else NO_LIMITS
        try:
            return self.engine.step(share, self._learning_rate(), step_number, recording, limits)
        except NonFiniteStep as error:
            # The run ends once the state is saved (`_describe_divergence`).
            self._nonfinite_step = error
            return error.report

    def _learning_rate(self) -> float:
        """Return the rate of the next step. Whoever repeats recorded steps overrides it."""
        return self._rates.at(self.progress)

    def _next_limits(self) -> StepLimits:
        """Return the largest loss and gradient norm of the next step that are no spike, by the
        steps before it. With fewer tokens than usual they are higher, for these have more noise."""
        if self.config.train.on_spike == "ignore":
            return NO_LIMITS
        batch = self._batch_sizes.at(self.progress.samples)
        return self.spike_monitor.limits(batch * self.config.train.seq_length)

    @contextmanager
    def _locating(
        self, samples: Samples | Blend, first_sample: int | None = None
    ) -> Iterator[None]:
        """Raise UserError with the file and place of a token id outside of the vocabulary.

        first_sample: of the global batch; None: of the next step.
        """
        try:
            yield
        except OutsideVocabulary as error:
            start = self.progress.samples if first_sample is None else first_sample
            location = samples.location_of(start + error.sample)
            problem = describe_bad_id(*location, error.vocab) or error.problems[0]
            raise UserError(problem) from error

    def _advance(self, report: StepReport) -> None:
        """Add a step to `progress`, and note whether a rank was asked to stop."""
        self._is_stopping |= report.stop
        before = self.progress
        batch = self._batch_sizes.at(before.samples)
        tokens = batch * self.config.train.seq_length
        # A skipped step has used up its samples: the next one takes others.
        applied = int(report.changed)
        self.progress = TrainState(
            step=before.step + 1,
            applied=before.applied + applied,
            samples=before.samples + batch,
            applied_samples=before.applied_samples + applied * batch,
            tokens=before.tokens + tokens,
            skipped_tokens=before.skipped_tokens + (1 - applied) * tokens,
        )
        self._samples_of_step = range(before.samples, self.progress.samples)

    def _write_timeline(self, recording: Recording, schedule: Schedule) -> None:
        """Gather the recorded spans of all pipeline ranks, and write them (rank 0 alone)."""
        spans = recording.gather(schedule, self.engine.device)
        if self.rank == 0:
            folder = Path(self.config.train.folder)
            optional_parts.write_timeline(folder, spans, title=f"step {self.progress.step}")

    def evaluate(self, samples: Samples | Blend) -> Tensor:
        """Return the sum of the losses of the first samples, and the number of their tokens that
        count: float64 [2, samples].

        These are train.eval_samples samples, or else train.eval_batches global batches, or all if
        there are fewer. Samples that only fill the last batch are left out.
        """
        batches = list[Tensor]()
        end = evaluated_samples(self.config.train, len(samples))
        for first in range(0, end, self.config.train.global_batch):
            with self._locating(samples, first):
                share = self._batches.evaluation_share(samples, first, end)
                batches.append(self.engine.evaluate_samples(share))
        return torch.cat(batches, 1)[:, :end]

    def share(self, first_sample: int, replica: int | None = None) -> Share:
        """Return a data-parallel rank's part of the training batch that begins at `first_sample`,
        as `Batches.share` does.
        """
        return self._batches.share(first_sample, replica)

    def _save(self) -> None:
        """Begin to save the state after the last step."""
        extra = extra_entries(
            self.config,
            self.corpus,
            asdict(self.progress),
            self.monitor.state_dict(),
            self.spike_monitor.state_dict(),
            self._first_ids,
            evaluated_entries(self._evaluated, self._evaluated_tokens),
        )
        self._saves.start(self.progress.step, extra, self._tokenizer, self._evaluated)
        self._saved_step = self.progress.step


def _layers_of(stages: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """Return the layers of stages by logical name, such as "layers.0"; none of a user's own stage
    that does not keep its layers in a ModuleDict."""
    layers: dict[str, nn.Module] = {}
    for stage in stages:
        by_number = getattr(stage, "layers", None)
        if isinstance(by_number, nn.ModuleDict):
            layers |= {f"layers.{number}": layer for number, layer in by_number.items()}
    return layers


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
        "groups": [Group(**group.model_dump()) for group in optimizer.groups],
        "clip": optimizer.clip,
        "norm": optimizer.norm,
        "overlap": parallel.overlaps(device.type),
        "bucket": parallel.bucket,
        "zero_size": parallel.zero_size if parallel.zero else 1,
        "shard_gradients": parallel.shards_gradients,
        "shard_weights": parallel.shards_weights,
        "keep_layers": parallel.keep_layers,
        "keep_bytes": parallel.keep_bytes,
        "seed": config.train.seed,
        "ema": optimizer.ema,
        "offload": optional_parts.HostMemory() if optimizer.offload == "host" else None,
    }
