"""The engine: a model placed on a mesh, ready to train, with its stages, schedule, connections and optimizer.

It does the whole of a training step. It takes batches and does not know their source; the trainer decides when to log,
to save and to stop.

A skipped step is run a second time to find the micro-batch in which it became non-finite (`models.replay`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis, device_of
from megaprec.diagnose.position import Position
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

    trace: run a skipped step again to find the micro-batch and the samples that broke it.
    make_optimizer: builds the optimizer over this rank's stages. It must sum over dp, because each rank's loss is
        divided by the tokens of the global batch.
    layers: the number of layers of each stage; empty: decided by cost.
    recompute: the activations that the backward pass recomputes.
    make_stage: builds each of this rank's stages.
    observers: additional observers of the optimizer's steps.
    position: told of each instruction of the passes.
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
        position: Position | None = None,
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
            config,
            schedule,
            self.stages,
            self.optimizer,
            self.fp8,
            links,
            context.deferred,
            micro_batch,
            position or Position(),
        )
        self.last, self.micro_batch = self.passes.last, micro_batch  # last: number of the model's last stage
        self._evaluation = evaluation.programs[self.pp.rank]
        self.optimizer.observers += observers

    def step(self, share: Share, lr: float, number: int, recording: Recording | None = None) -> StepReport:
        """Run training step `number`; every rank gets the same report. Collective over the whole mesh.

        recording: receives the time span of each instruction.
        Raises NonFiniteStep, on every rank, if the step is not finite and the precision plan asks for an error.
        """
        return self.update(self.accumulate(share, number, recording), lr)

    def accumulate(self, share: Share, number: int, recording: Recording | None = None) -> Running:
        """Run the first half of `step`: all passes. Returns the argument of the second half."""
        run = self.passes.begin(share, number, self.optimizer.scale)
        with self.fp8.autocast():
            self.passes.executor(run, spans=recording.spans if recording else None).run()
        self.passes.position.at("gradient reduction")
        return run

    def update(self, run: Running, lr: float) -> StepReport:
        """Run the second half of `step`: apply or skip it."""
        try:
            return self.explain(self.optimizer.step(lr, run.loss), run)
        except NonFiniteStep as error:
            raise NonFiniteStep(self.explain(error.report, run)) from None

    @torch.no_grad()
    def evaluate(self, share: Share) -> float:
        """Return the mean loss over the tokens of all shares. Collective over the whole mesh."""
        self.optimizer.wait()
        run = self.passes.begin(share, None, self.optimizer.scale)
        with self.fp8.autocast():
            self.passes.executor(run, self._evaluation).run()
        loss = self.optimizer.world.sum_(run.loss).item()
        if math.isnan(loss):
            self.passes.require_ids(run)
        return loss

    def explain(self, report: StepReport, run: Running) -> StepReport:
        """Return the report of a skipped step with its offenders traced, and any other report unchanged.

        Collective: the step may be run again. Raises OutsideVocabulary, on every rank, if the step had ids outside the
        vocabulary.
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
        """Return True if the loss scale is still falling to its first usable value.

        A skip is then due to the scale, and says nothing about the samples.
        """
        scaling = self.optimizer.plan.scaling
        falls = scaling.kind == "dynamic" and report.loss_scale > scaling.minimum and math.isfinite(report.loss)
        return falls and self.optimizer.numbers()["steps"] == 0
