"""A model placed on a mesh, ready to train: stages, schedule, links and optimizer put together.

This is the whole of a training step. It knows batches, not where they come from; what to log, when to save and
when to stop is the trainer's.

A step that was skipped is run a second time, to learn in which micro-batch it went wrong (`models.replay`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis, device_of
from megaprec.fp8.state import FP8State
from megaprec.optim.observer import StepObserver
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.step_report import LOSS, NonFiniteStep, Offender, StepReport
from megaprec.precision.plan import PrecisionPlan
from models.config import ModelConfig
from models.passes import OutsideVocabulary as OutsideVocabulary
from models.passes import Passes, Running
from models.passes import Share as Share
from models.replay import trace_offenders
from models.stages import MakeStage, Stage, build, cuts
from parallel.activation_checkpoint import KEEP, Recompute
from parallel.context import Context
from parallel.fp32_marks import compute_marked_in_fp32
from parallel.pipeline.instructions import Schedule, forward_only
from parallel.pipeline.p2p import P2P
from parallel.pipeline.simulation import sends_under_way
from parallel.pipeline.timeline import Recording
from parallel.pipeline.verify import check

MakeOptimizer = Callable[[list[Stage], PrecisionPlan, DeviceMesh | None], ParallelAMPOptimizer]
SUMMING = partial(ParallelAMPOptimizer, average=False)


class Engine:
    """Trains a model of `config` over a (pp, dp, tp) mesh, by `schedule`, in micro-batches of `micro_batch` samples.

    trace: whether a skipped step is run again to find the micro-batch and the samples that broke it.
    make_optimizer: builds the optimizer over this rank's stages, one that sums over dp: each rank's loss is divided by
    the tokens of the global batch. layers: how many each stage has; by cost if empty.
    recompute: which activations are not kept for the backward pass. make_stage: builds each of this rank's stages.
    observers: of the optimizer's steps, besides its own.
    """

    def __init__(
        self,
        config: ModelConfig,
        plan: PrecisionPlan,
        mesh: DeviceMesh | None,
        schedule: Schedule,
        *,
        micro_batch: int,
        seq_length: int,
        sequence: bool = False,
        seed: int = 0,
        trace: bool = True,
        make_optimizer: MakeOptimizer = SUMMING,
        layers: Sequence[int] = (),
        recompute: Recompute = KEEP,
        make_stage: MakeStage = Stage,
        observers: Sequence[StepObserver] = (),
    ) -> None:
        evaluation = forward_only(schedule)
        for every in (schedule, evaluation):
            check(every)
        self.schedule, self.trace, self.device = schedule, trace, device_of(mesh)
        self.pp, self.dp, self.tp = (Axis.of(mesh, name) for name in ("pp", "dp", "tp"))
        self.fp8 = FP8State.over(mesh, plan.fp8, config.layers)
        context = Context(plan, self.tp, sequence, seed, recompute=recompute, fp8=self.fp8)
        cut = cuts(config, len(schedule.rank_of_stage), seq_length, layers, schedule.rank_of_stage, recompute)
        self.stages = build(config, context, cut, schedule.rank_of_stage, self.pp.rank, make_stage)
        for stage in self.stages.values():
            compute_marked_in_fp32(stage, plan)
        self.optimizer = make_optimizer(list(self.stages.values()), plan, mesh)
        if self.optimizer.average:
            raise ValueError("the engine's optimizer must sum over dp: build it with average=False")
        shape = (seq_length // (self.tp.size if context.cut_sequence else 1), micro_batch, config.hidden)
        sends = max(sends_under_way(schedule), sends_under_way(evaluation))
        links = P2P.open(self.pp, schedule.rank_of_stage, shape, plan.pipeline, self.device, sends=sends)
        self.passes = Passes(
            config, schedule, self.stages, self.optimizer, self.fp8, links, context.deferred, micro_batch
        )
        self.last, self.micro_batch = self.passes.last, micro_batch  # the former: number of the model's last stage
        self._evaluation = evaluation.programs[self.pp.rank]
        self.optimizer.observers += observers

    def step(self, share: Share, lr: float, number: int, recording: Recording | None = None) -> StepReport:
        """One training step, the `number`-th; every rank gets the same report. Collective over the whole mesh.

        recording: receives when each instruction ran.
        Raises NonFiniteStep, on every rank, if the plan says so of a step that is not finite.
        """
        return self.update(self.accumulate(share, number, recording), lr)

    def accumulate(self, share: Share, number: int, recording: Recording | None = None) -> Running:
        """The first half of `step`: all passes. Returns what the second half takes."""
        run = self.passes.begin(share, number, self.optimizer.scale)
        with self.fp8.autocast():
            self.passes.executor(run, spans=recording.spans if recording else None).run()
        return run

    def update(self, run: Running, lr: float) -> StepReport:
        """The second half of `step`: applies or skips it."""
        try:
            return self.explain(self.optimizer.step(lr, run.loss), run)
        except NonFiniteStep as error:
            raise NonFiniteStep(self.explain(error.report, run)) from None

    @torch.no_grad()
    def evaluate(self, share: Share) -> float:
        """Mean loss over the tokens of all shares. Collective over the whole mesh."""
        self.optimizer.wait()
        run = self.passes.begin(share, None, self.optimizer.scale)
        with self.fp8.autocast():
            self.passes.executor(run, self._evaluation).run()
        loss = self.optimizer.world.sum_(run.loss).item()
        if math.isnan(loss):
            self.passes.require_ids(run)
        return loss

    def explain(self, report: StepReport, run: Running) -> StepReport:
        """Returns the report of a skipped step with all that can be said of its offenders, and any other as it is.
        Collective: the step may be run again.

        Raises OutsideVocabulary, on every rank, if the step was given ids that the vocabulary does not hold.
        """
        if math.isnan(report.loss):
            self.passes.require_ids(run)
        if report.changed:
            return report
        offenders = report.offenders
        if not math.isfinite(report.loss):
            nan = math.isnan(report.loss)
            last = self.schedule.rank_of_stage[-1]
            offenders = (Offender(LOSS, last, 0, int(not nan), int(nan), 1, 0.0), *offenders)
        if self.trace and offenders and not self._searching(report):
            offenders = trace_offenders(self.passes, offenders, report.loss_scale, run)
        return replace(report, offenders=offenders)

    def _searching(self, report: StepReport) -> bool:
        """Whether the scale is on its first way down: that it was too high says nothing of the samples."""
        scaling = self.optimizer.plan.scaling
        falls = scaling.kind == "dynamic" and report.loss_scale > scaling.minimum and math.isfinite(report.loss)
        return falls and self.optimizer.numbers()["steps"] == 0
