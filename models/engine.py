"""The engine: a model placed on a mesh, ready to train, with its stages, schedule, connections and
optimizer.

It does the whole of a training step. It takes batches and does not know their source; the trainer
decides when to log, to save and to stop.

A skipped step is run a second time to find the micro-batch in which it became non-finite
(`models.replay`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis, device_of
from megaprec.comm.virtual import VirtualAxis
from megaprec.diagnose.position import Position
from megaprec.errors import UserError
from megaprec.fp8.state import FP8State
from megaprec.kinds import quoted
from megaprec.optim.canonical.consensus import summed_loss
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.step_report import LOSS, NonFiniteStep, StepObserver, StepReport
from megaprec.precision.plan import PrecisionPlan
from models.config import ModelConfig
from models.context_limits import require_divisible_context
from models.cutting import EngineOptions, MakeStage, build, cuts
from models.dispatch import spread_experts
from models.passes import OutsideVocabulary as OutsideVocabulary
from models.passes import Passes, Running
from models.passes import Share as Share
from models.replay import trace_offenders
from models.stages import Stage
from models.virtual_stage import over_virtual_ranks
from parallel.context import Context
from parallel.fp32_marks import compute_marked_in_fp32
from parallel.pipeline.p2p import P2P
from parallel.pipeline.schedules import Schedule, forward_only
from parallel.pipeline.simulation import sends_under_way
from parallel.pipeline.timeline import Recording
from parallel.pipeline.verify import check

OptimizerType = TypeVar("OptimizerType", bound=ParallelAMPOptimizer)


@dataclass(frozen=True)
class RankStages:
    """The stages that one rank holds of a model, without an optimizer yet. Built by
    `build_stages`.

    by_number: the stages, by their number in the model.
    context: what their layers share.
    virtual: the virtual tensor-parallel ranks; None unless numerics are canonical.
    """

    config: ModelConfig
    plan: PrecisionPlan
    mesh: DeviceMesh | None
    schedule: Schedule
    options: EngineOptions
    by_number: Mapping[int, Stage]
    context: Context
    virtual: VirtualAxis | None

    def make_optimizer(
        self, kind: Callable[..., OptimizerType] = ParallelAMPOptimizer, **settings: Any
    ) -> OptimizerType:
        """Return an optimizer over these stages. Collective over the world.

        kind: ParallelAMPOptimizer, a subclass, or a function with its arguments.
        settings: keyword arguments of ParallelAMPOptimizer. `average` is always False, because each
            rank's loss is divided by the tokens of the global batch.
        """
        settings |= {"average": False}
        if self.virtual is not None:
            settings |= {"virtual": self.virtual, "canonical": True}
        if self.context.experts is not None:
            settings |= {"experts": self.context.experts}
        return kind(list(self.by_number.values()), self.plan, self.mesh, **settings)


def build_stages(
    config: ModelConfig,
    plan: PrecisionPlan,
    mesh: DeviceMesh | None,
    schedule: Schedule,
    options: EngineOptions,
    make_stage: MakeStage = Stage,
) -> RankStages:
    """Build the stages that this rank holds by `schedule`. Collective over the world.

    mesh: of AXES; None for one process without torch.distributed.
    make_stage: builds each stage.
    Raises UserError for arguments that do not fit together.
    """
    _require_kinds(config, plan, schedule)
    # a schedule that can deadlock, or leaves something out, is refused before anything is built
    check(schedule)
    check(forward_only(schedule))
    pp, tp, cp = (Axis.of(mesh, name) for name in ("pp", "tp", "cp"))
    canonical = options.canonical_shards > 0
    require_divisible_context(
        config,
        plan,
        cp.size,
        options.seq_length,
        tp.size if options.sequence else 1,
        canonical,
    )
    # collective from here on: all ranks make their groups in this order
    fp8 = FP8State.over(mesh, plan.fp8, config.layers)
    virtual = VirtualAxis(tp, options.canonical_shards) if canonical else None
    if virtual is not None:
        make_stage = over_virtual_ranks(make_stage, virtual)
    experts = spread_experts(
        config, mesh, options.expert, options.expert_tensor, options.canonical_shards
    )
    context = Context(
        plan,
        tp,
        # virtual ranks always cut the sequence
        options.sequence or canonical,
        options.seed,
        recompute=options.recompute,
        fp8=fp8,
        blank=options.blank,
        experts=experts,
        cp=cp,
        ring=options.ring,
        leaves=options.leaves,
    )
    placement = schedule.rank_of_stage
    cut = cuts(
        config, len(placement), options.seq_length, options.layers, placement, options.recompute
    )
    stages = build(config, context, cut, placement, pp.rank, make_stage, canonical)
    for stage in stages.values():
        compute_marked_in_fp32(stage, plan)
    return RankStages(config, plan, mesh, schedule, options, stages, context, virtual)


def _require_kinds(config: object, plan: object, schedule: object) -> None:
    """Raise UserError, naming all that are wrong, for what no engine can be made of."""
    rules = {
        (
            f"config = {quoted(config)}: must be a ModelConfig, like models.preset('llama-demo', "
            "vocab=512)"
        ): isinstance(config, ModelConfig),
        (
            "config.vocab = 0: no tokenizer has said it: give models.preset(name, vocab=...), or "
            "config.with_vocab(n)"
        ): getattr(config, "vocab", 1) > 0,
        f"plan = {quoted(plan)}: must be a PrecisionPlan, like megaprec.plan('bf16')": isinstance(
            plan, PrecisionPlan
        ),
        (
            f"schedule = {quoted(schedule)}: must be a Schedule, like "
            "parallel.pipeline.schedule('1f1b', 1, 4)"
        ): isinstance(schedule, Schedule),
    }
    if broken := [rule for rule, holds in rules.items() if not holds]:
        raise UserError(*broken)


class Engine:
    """Trains the model of `parts` over their mesh, by their schedule.

    The ranks of cp share samples: each is given the share of its dp rank, and computes its part of
    each sequence.

    parts: the stages of this rank.
    optimizer: over these stages, as `RankStages.make_optimizer` makes it.
    observers: additional observers of the optimizer's steps.
    position: told of each instruction of the passes.
    Collective over the world. Raises ValueError for an optimizer that averages over dp.
    """

    def __init__(
        self,
        parts: RankStages,
        optimizer: ParallelAMPOptimizer,
        observers: Sequence[StepObserver] = (),
        position: Position | None = None,
    ) -> None:
        mesh = parts.mesh
        options = parts.options
        context = parts.context
        self.trace = options.trace
        self.leaves = options.leaves
        self.schedule = parts.schedule
        self.stages = parts.by_number
        self.optimizer = optimizer
        self.device = device_of(mesh)
        self.pp, self.dp, self.tp, self.cp = (
            Axis.of(mesh, name) for name in ("pp", "dp", "tp", "cp")
        )
        self.fp8 = context.fp8
        self.experts = context.experts
        # parity and the sentinel compare the work of ranks in full; this check is for loops of
        # users
        optimizer.checks_loop = False
        if optimizer.average:
            raise ValueError("the engine's optimizer must sum over dp: build it with average=False")
        evaluation = forward_only(self.schedule)
        shape = (options.seq_length, options.micro_batch, parts.config.hidden)
        links = self._connect(shape, context, (self.schedule, evaluation))
        self.passes = Passes(
            parts.config,
            self.schedule,
            self.stages,
            optimizer,
            self.fp8,
            links,
            context.deferred,
            options.micro_batch,
            position or Position(),
            cp=self.cp,
        )
        # last: number of the model's last stage
        self.last = self.passes.last
        self._evaluation = evaluation.programs[self.pp.rank]
        optimizer.observers += observers

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        plan: PrecisionPlan,
        mesh: DeviceMesh | None,
        schedule: Schedule,
        options: EngineOptions,
        *,
        make_stage: MakeStage = Stage,
        **settings: Any,
    ) -> "Engine":
        """Build the stages of this rank, a ParallelAMPOptimizer over them, and their engine.
        Collective over the world.

        settings: keyword arguments of `RankStages.make_optimizer`.
        """
        parts = build_stages(config, plan, mesh, schedule, options, make_stage)
        return cls(parts, parts.make_optimizer(**settings))

    def _connect(
        self, shape: tuple[int, int, int], context: Context, schedules: Sequence[Schedule]
    ) -> P2P:
        """Return the links to other stages. shape: of a full activation, [s, b, hidden].
        Collective over the world."""
        length, *rest = shape
        sequence_ranks = self.cp.size * (self.tp.size if context.cut_sequence else 1)
        return P2P.open(
            self.pp,
            self.schedule.rank_of_stage,
            (length // sequence_ranks, *rest),
            context.plan.pipeline,
            self.device,
            sends=max(sends_under_way(schedule) for schedule in schedules),
            # activations that are not cut are the same on all ranks of tp
            shared=None if context.cut_sequence else self.tp,
        )

    def step(
        self, share: Share, lr: float, number: int, recording: Recording | None = None
    ) -> StepReport:
        """Run training step `number`; every rank gets the same report. Collective over the whole
        mesh.

        recording: receives the time span of each instruction.
        Raises NonFiniteStep, on every rank, if the step is not finite and the precision plan asks
        for an error.
        """
        return self.update(self.accumulate(share, number, recording), lr)

    def accumulate(self, share: Share, number: int, recording: Recording | None = None) -> Running:
        """Run the first half of `step`: all passes. Returns the argument of the second half."""
        run = self.passes.begin(share, number, self.optimizer.scale)
        # the outermost autocast of FP8's state is one pass of its histories, so one for the step
        with self.passes.in_fp8():
            self.passes.executor(run, spans=recording.spans if recording else None).run()
        self.passes.position.at("gradient reduction")
        return run

    def update(self, run: Running, lr: float) -> StepReport:
        """Run the second half of `step`: apply or skip it."""
        try:
            return self.explain(self.optimizer.step(lr, run.loss, run.counted.counted), run)
        except NonFiniteStep as error:
            raise NonFiniteStep(self.explain(error.report, run)) from None

    def evaluate(self, share: Share) -> float:
        """Return the mean loss over the tokens of all shares that count, NaN if none does.
        Collective over the mesh."""
        loss, _ = self.evaluate_counted(share)
        return loss

    @torch.no_grad()
    def evaluate_counted(self, share: Share) -> tuple[float, float]:
        """Return the mean loss over the tokens of all shares that count, and their number, or the
        sum of their weights.

        The loss is NaN if none counts. Collective over the whole mesh.
        """
        # weights of the last update may still travel
        self.optimizer.wait()
        run = self.passes.begin(share, None, self.optimizer.scale)
        with self.passes.in_fp8():
            self.passes.executor(run, self._evaluation).run()
        loss = summed_loss(run.loss, self.optimizer.dp, self.optimizer.world)
        # ids outside the vocabulary make the loss NaN on all ranks (`Passes.begin`)
        if math.isnan(loss):
            self.passes.require_ids(run)
        # NaN on ranks that do not hold the last stage, which alone counts them
        counted = run.counted.counted.nan_to_num(nan=-math.inf)
        tokens = self.optimizer.world.max_(counted).item()
        if tokens <= 0:
            return math.nan, 0.0
        return loss, tokens

    def explain(self, report: StepReport, run: Running) -> StepReport:
        """Return the report of a step with the loss of multi-token prediction; of a skipped step
        with offenders traced.

        Collective: the step may be run again. Raises OutsideVocabulary, on every rank, if the step
        had ids outside the vocabulary.
        """
        if math.isnan(report.loss):
            self.passes.require_ids(run)
        if run.ahead is not None:
            losses = self.optimizer.world.sum_(run.ahead.losses.clone())
            report = replace(report, mtp_loss=losses.mean().item())
        if report.changed or not report.overflowed:
            return report
        offenders = report.offenders
        if offenders and offenders[0].name == LOSS:
            last = self.schedule.rank_of_stage[-1]  # which the optimizer does not know
            offenders = (replace(offenders[0], stage=last), *offenders[1:])
        if self.trace and offenders and not self._searches_scale(report):
            offenders = trace_offenders(self.passes, offenders, report.loss_scale, run)
        return replace(report, offenders=offenders)

    def _searches_scale(self, report: StepReport) -> bool:
        """Return True if the loss scale is still falling to its first usable value.

        A skip is then due to the scale, and says nothing about the samples.
        """
        scaling = self.optimizer.plan.scaling
        may_fall = scaling.kind == "dynamic" and report.loss_scale > scaling.minimum
        if not may_fall or not math.isfinite(report.loss):
            return False
        return self.optimizer.numbers()["steps"] == 0
