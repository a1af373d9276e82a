"""The engine: a model placed on a mesh, ready to train, with its stages, schedule, connections and
optimizer.

It does the whole of a training step. It takes batches and does not know their source; the trainer
decides when to log, to save and to stop.

A skipped step is run a second time to find the micro-batch in which it became non-finite
(`models.replay`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis, device_of
from megaprec.comm.experts import ExpertAxes
from megaprec.comm.virtual import VirtualAxis
from megaprec.diagnose.position import Position
from megaprec.errors import UserError
from megaprec.fp8.state import FP8State
from megaprec.kinds import quoted
from megaprec.optim.canonical_consensus import summed_loss
from megaprec.optim.observer import StepObserver
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.step_report import LOSS, NonFiniteStep, StepReport
from megaprec.precision.plan import PrecisionPlan
from models.config import ModelConfig
from models.context_limits import require_cut
from models.cutting import MakeStage, build, cuts
from models.dispatch import spread_experts
from models.passes import OutsideVocabulary as OutsideVocabulary
from models.passes import Passes, Running
from models.passes import Share as Share
from models.replay import trace_offenders
from models.stages import Stage
from models.virtual_stage import over_virtual_ranks
from parallel.activation_checkpoint import KEEP, Recompute
from parallel.context import Context
from parallel.fp32_marks import compute_marked_in_fp32
from parallel.leaves import PLAIN, Leaves
from parallel.pipeline.p2p import P2P
from parallel.pipeline.schedules import Schedule, forward_only
from parallel.pipeline.simulation import sends_under_way
from parallel.pipeline.timeline import Recording
from parallel.pipeline.verify import check

MakeOptimizer = Callable[..., ParallelAMPOptimizer]
"""A function of this rank's stages, the precision plan and the mesh. Under canonical numerics it is also given
`virtual`, as a keyword, and with experts on ranks of their own `experts`."""
SUMMING = partial(ParallelAMPOptimizer, average=False)


def _require_given(config: object, plan: object, schedule: object) -> None:
    """Raise UserError, naming all that are wrong, for what no engine can be made of."""
    rules = {
        (
            f"config = {quoted(config)}: must be a ModelConfig, like models.preset('llama-demo', "
            "vocab=512)"
        ): isinstance(config, ModelConfig),
        (
            "config.vocab = 0: no tokenizer has said it: give models.preset(name, vocab=...), or "
            "config.with_vocab(n)"
        ): (getattr(config, "vocab", 1) > 0),
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
    """Trains a model of `config` over a mesh of AXES, by `schedule`, in micro-batches of
    `micro_batch` samples.

    The ranks of cp share samples: each is given the share of its dp rank, and computes its part of
    each sequence.
    ring: keys and values go round the ranks of cp (`models.context_attention`).

    trace: run a skipped step again to find the micro-batch and the samples that broke it.
    make_optimizer: builds the optimizer over this rank's stages. It must sum over dp, because each
        rank's loss is divided by the tokens of the global batch.
    canonical_shards: the number of virtual tensor-parallel ranks, so that all sums are the same
        bits on any number of processes (`models.virtual_stage`); 0: as many as there are processes,
        and sums as they are fastest.
    layers: the number of layers of each stage; empty: decided by cost.
    recompute: the activations that the backward pass recomputes.
    make_stage: builds each of this rank's stages.
    observers: additional observers of the optimizer's steps.
    position: told of each instruction of the passes.
    blank: initial weights are not drawn; the caller loads others before the first pass.
    expert: the number of ranks over which the experts of each layer are spread, of the dp x tp
        ranks of a stage.
    expert_tensor: the number of slices of each expert; 0: as many as there are tp ranks.
    leaves: the form in which norms, rotations, gates, dropout and losses are computed.
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
        canonical_shards: int = 0,
        seed: int = 0,
        trace: bool = True,
        make_optimizer: MakeOptimizer = SUMMING,
        layers: Sequence[int] = (),
        recompute: Recompute = KEEP,
        make_stage: MakeStage = Stage,
        observers: Sequence[StepObserver] = (),
        position: Position | None = None,
        blank: bool = False,
        expert: int = 1,
        expert_tensor: int = 0,
        ring: bool = True,
        leaves: Leaves = PLAIN,
    ) -> None:
        _require_given(config, plan, schedule)
        evaluation = forward_only(schedule)
        for every in (schedule, evaluation):
            check(every)
        self.schedule = schedule
        self.trace = trace
        self.device = device_of(mesh)
        self.leaves = leaves
        self.pp, self.dp, self.tp, self.cp = (
            Axis.of(mesh, name) for name in ("pp", "dp", "tp", "cp")
        )
        require_cut(
            config,
            plan,
            self.cp.size,
            seq_length,
            self.tp.size if sequence else 1,
            canonical_shards > 0,
        )
        self.fp8 = FP8State.over(mesh, plan.fp8, config.layers)
        self.virtual = VirtualAxis(self.tp, canonical_shards) if canonical_shards else None
        if self.virtual is None:
            make_stage = make_stage
        else:
            make_stage = over_virtual_ranks(make_stage, self.virtual)
        self.experts = spread_experts(config, mesh, expert, expert_tensor, canonical_shards)
        context = Context(
            plan, self.tp, sequence or canonical_shards > 0, seed, recompute=recompute, fp8=self.fp8
        )
        context = replace(
            context, blank=blank, experts=self.experts, cp=self.cp, ring=ring, leaves=leaves
        )
        cut = cuts(
            config,
            len(schedule.rank_of_stage),
            seq_length,
            layers,
            schedule.rank_of_stage,
            recompute,
        )
        self.stages = build(
            config,
            context,
            cut,
            schedule.rank_of_stage,
            self.pp.rank,
            make_stage,
            bool(self.virtual),
        )
        for stage in self.stages.values():
            compute_marked_in_fp32(stage, plan)
        self.optimizer = _told(make_optimizer, self.virtual, self.experts)(
            list(self.stages.values()), plan, mesh
        )
        self.optimizer.checks_loop = (
            False  # ours: parity and the sentinel compare the work of ranks in full
        )
        if self.optimizer.average:
            raise ValueError("the engine's optimizer must sum over dp: build it with average=False")
        links = self._connect(
            (seq_length, micro_batch, config.hidden), context, (schedule, evaluation)
        )
        told = position or Position()
        later = context.deferred
        self.passes = Passes(
            config,
            schedule,
            self.stages,
            self.optimizer,
            self.fp8,
            links,
            later,
            micro_batch,
            told,
            cp=self.cp,
        )
        # last: number of the model's last stage
        self.last = self.passes.last
        self.micro_batch = micro_batch
        self._evaluation = evaluation.programs[self.pp.rank]
        self.optimizer.observers += observers

    def _connect(
        self, shape: tuple[int, int, int], context: Context, schedules: Sequence[Schedule]
    ) -> P2P:
        """Return the links to other stages. shape: of a whole activation, [s, b, hidden].
        Collective over the world."""
        length, *rest = shape
        own = length // (self.cp.size * (self.tp.size if context.cut_sequence else 1)), *rest
        sends = max(sends_under_way(schedule) for schedule in schedules)
        shared = None if context.cut_sequence else self.tp
        placed = schedules[0].rank_of_stage
        return P2P.open(
            self.pp, placed, own, context.plan.pipeline, self.device, sends=sends, shared=shared
        )

    def step(
        self, share: Share, lr: float, number: int, recording: Recording | None = None
    ) -> StepReport:
        """Run training step `number`; every rank gets the same report. Collective over the whole
        mesh.

        recording: receives the time span of each instruction. Raises NonFiniteStep, on every rank,
        if the step is not finite and the precision plan asks for an error.
        """
        return self.update(self.accumulate(share, number, recording), lr)

    def accumulate(self, share: Share, number: int, recording: Recording | None = None) -> Running:
        """Run the first half of `step`: all passes. Returns the argument of the second half."""
        run = self.passes.begin(share, number, self.optimizer.scale)
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
        self.optimizer.wait()
        run = self.passes.begin(share, None, self.optimizer.scale)
        with self.passes.in_fp8():
            self.passes.executor(run, self._evaluation).run()
        loss = summed_loss(run.loss, self.optimizer.dp, self.optimizer.world)
        if math.isnan(loss):
            self.passes.require_ids(run)
        # only ranks of the last stage know it
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
            report = replace(
                report, mtp_loss=self.optimizer.world.sum_(run.ahead.losses.clone()).mean().item()
            )
        if report.changed or not report.overflowed:
            return report
        offenders = report.offenders
        if offenders and offenders[0].name == LOSS:
            last = self.schedule.rank_of_stage[-1]  # which the optimizer does not know
            offenders = (replace(offenders[0], stage=last), *offenders[1:])
        if self.trace and offenders and not self._searching(report):
            offenders = trace_offenders(self.passes, offenders, report.loss_scale, run)
        return replace(report, offenders=offenders)

    def _searching(self, report: StepReport) -> bool:
        """Return True if the loss scale is still falling to its first usable value.

        A skip is then due to the scale, and says nothing about the samples.
        """
        scaling = self.optimizer.plan.scaling
        falls = (
            scaling.kind == "dynamic"
            and report.loss_scale > scaling.minimum
            and math.isfinite(report.loss)
        )
        return falls and self.optimizer.numbers()["steps"] == 0


def _told(
    make: MakeOptimizer, virtual: VirtualAxis | None, experts: ExpertAxes | None
) -> MakeOptimizer:
    """Return `make` with the keywords for virtual ranks and for the ranks of experts, if there are
    any."""
    if virtual is not None:
        make = partial(make, virtual=virtual, canonical=True)
    return make if experts is None else partial(make, experts=experts)
