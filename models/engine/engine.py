"""The engine: a model placed on a mesh, ready to train.

It has the rank's stages, their schedule and connections, and the optimizer, and does the whole of a
training step. It takes batches and does not know their source; the trainer decides when to log, to
save and to stop.

A skipped step is run a second time to find the micro-batch in which it became non-finite
(`models.engine.replay`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis, device_of
from megaprec.comm.virtual import VirtualAxis
from megaprec.diagnose.position import Position
from megaprec.errors import Problem, UserError
from megaprec.fp8.state import FP8State
from megaprec.optim.canonical.consensus import summed_loss
from megaprec.optim.decision.step_limits import NO_LIMITS, StepLimits
from megaprec.optim.decision.step_report import (
    LOSS,
    NonFiniteStep,
    Offender,
    StepObserver,
    StepReport,
)
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.precision.patterns import require_used
from megaprec.precision.plan import PrecisionPlan
from models import optional_parts
from models.attention.context_limits import require_divisible_context
from models.config import ModelConfig
from models.decoder.cutting import MakeStage, build, cuts
from models.decoder.frozen import freeze
from models.decoder.stages import Stage
from models.decoder.virtual_stage import over_virtual_ranks
from models.engine.options import EngineOptions
from models.engine.passes import OutsideVocabulary, Passes, PassState, Share
from models.engine.replay import trace_offenders
from models.engine.step_sums import StepSums
from models.feed_forward.dispatch import spread_experts
from models.recurrent.kernel_choice import KernelSetting, refused_kernels
from parallel.context import Context
from parallel.fp32_marks import compute_marked_in_fp32
from parallel.fused_products import async_tensor_problems, require_fused_products
from parallel.pipeline.executor import PassObserver
from parallel.pipeline.p2p import P2P
from parallel.pipeline.schedules import Schedule, forward_only
from parallel.pipeline.simulation import sends_under_way
from parallel.pipeline.timeline import Recording
from parallel.pipeline.verify import check

if TYPE_CHECKING:
    from megaprec.optim.rules.row_factors import RowFactors
    from models.engine.attention_logits import AttentionLogits

OptimizerType = TypeVar("OptimizerType", bound=ParallelAMPOptimizer)


@dataclass(frozen=True)
class RankStages:
    """The stages that one rank holds of a model, without an optimizer yet. Built by
    `build_stages`.

    by_number: the stages, by their number in the model.
    context: what their layers share.
    virtual: the virtual tensor-parallel ranks; None unless numerics are canonical.
    other_schedules: for steps of other numbers of micro-batches.
    """

    config: ModelConfig
    plan: PrecisionPlan
    mesh: DeviceMesh | None
    schedule: Schedule
    options: EngineOptions
    by_number: Mapping[int, Stage]
    context: Context
    virtual: VirtualAxis | None
    other_schedules: Sequence[Schedule] = ()

    def make_optimizer(
        self,
        kind: Callable[..., OptimizerType] = ParallelAMPOptimizer,
        **settings: Any,
    ) -> OptimizerType:
        """Return an optimizer over these stages. Collective over the world.

        kind: ParallelAMPOptimizer, a subclass, or a function with its arguments.
        settings: keyword arguments of ParallelAMPOptimizer. `average` is always False, because each
            rank's loss is divided by the tokens of the global batch.
        """
        # The executor sums micro-batches, and the optimizer ranks: both of parts of one mean.
        settings["average"] = False
        if self.virtual is not None:
            settings["virtual"] = self.virtual
            settings["canonical"] = True
        if self.context.experts is not None:
            settings["experts"] = self.context.experts
        # On a CPU torch's own kernels are as fast, and the bits stay those of uncompiled runs.
        if device_of(self.mesh).type == "cuda" and self.options.leaves.compiled:
            settings.setdefault("leaves", self.options.leaves)
        return kind(list(self.by_number.values()), self.plan, self.mesh, **settings)


def build_stages(
    config: ModelConfig,
    plan: PrecisionPlan,
    mesh: DeviceMesh | None,
    schedule: Schedule,
    options: EngineOptions,
    make_stage: MakeStage = Stage,
    other_schedules: Sequence[Schedule] = (),
) -> RankStages:
    """Build the stages that this rank holds by `schedule`. Collective over the world.

    mesh: of AXES; None for one process without torch.distributed.
    make_stage: builds each stage.
    other_schedules: for steps of other numbers of micro-batches, with the same place of each stage.
    Raises UserError for arguments that do not fit together, ValueError for schedules that put a
    stage on different ranks.
    """
    _require_fitting(config, plan, mesh, options, (schedule, *other_schedules))
    canonical = options.canonical_shards > 0
    # Collective from here on: all ranks make their groups in this order.
    fp8 = FP8State.over(mesh, plan.fp8, config.layers)
    virtual = None
    if canonical:
        virtual = VirtualAxis(Axis.of(mesh, "tp"), options.canonical_shards)
        make_stage = over_virtual_ranks(make_stage, virtual)
    context = _make_context(config, plan, mesh, options, fp8)
    rank_of_stage = schedule.rank_of_stage
    stage_cuts = cuts(
        config,
        len(rank_of_stage),
        options.seq_length,
        options.layers,
        rank_of_stage,
        options.recompute,
    )
    stages = build(
        config=config,
        context=context,
        all_cuts=stage_cuts,
        rank_of_stage=rank_of_stage,
        pp_rank=Axis.of(mesh, "pp").rank,
        make=make_stage,
        separate_head=canonical,
    )
    names = freeze(stages.values(), options.frozen)
    require_used("optimizer.frozen", options.frozen, names, Axis.world(mesh), device_of(mesh))
    for stage in stages.values():
        compute_marked_in_fp32(stage, plan)
    return RankStages(
        config=config,
        plan=plan,
        mesh=mesh,
        schedule=schedule,
        options=options,
        by_number=stages,
        context=context,
        virtual=virtual,
        other_schedules=other_schedules,
    )


def _require_fitting(
    config: ModelConfig,
    plan: PrecisionPlan,
    mesh: DeviceMesh | None,
    options: EngineOptions,
    schedules: Sequence[Schedule],
) -> None:
    """Raise UserError for arguments of `build_stages` that do not fit together, before anything is
    built, and ValueError for schedules that put a stage on different ranks. Collective over the
    world with `options.async_tensor`.

    schedules: all of them.
    """
    _require_kinds(config, plan, options, schedules)
    if not config.vocab:
        raise UserError.of("model.vocab_unknown")
    first_schedule = schedules[0]
    for schedule in schedules:
        # it must not deadlock, nor leave anything out, in training and in evaluation
        check(schedule)
        check(forward_only(schedule))
        if schedule.rank_of_stage != first_schedule.rank_of_stage:
            raise ValueError("all schedules must put each stage on the same rank")
    tp_size = Axis.of(mesh, "tp").size
    canonical = options.canonical_shards > 0
    require_divisible_context(
        config,
        plan,
        Axis.of(mesh, "cp").size,
        options.seq_length,
        tp_size if options.sequence else 1,
        canonical,
        head_ranks=tp_size,
    )
    if options.async_tensor:
        problems = async_tensor_problems(plan, tp_size, options.sequence, canonical)
        if problems:
            raise UserError(*problems)
        require_fused_products(mesh, device_of(mesh))


def _require_kinds(
    config: object,
    plan: object,
    options: object,
    schedules: Sequence[object],
) -> None:
    """Raise UserError, naming all, for arguments of `build_stages` that are not of the kind that it
    takes."""
    problems: list[Problem] = []
    if not isinstance(config, ModelConfig):
        problems.append(Problem.of("model.config_kind", config=config))
    if not isinstance(plan, PrecisionPlan):
        problems.append(Problem.of("precision.not_a_plan", plan=plan))
    if not isinstance(options, EngineOptions):
        problems.append(Problem.of("model.options_kind", options=options))
    for schedule in schedules:
        if not isinstance(schedule, Schedule):
            problems.append(Problem.of("model.schedule_kind", schedule=schedule))
    if problems:
        raise UserError(*problems)


def _make_context(
    config: ModelConfig,
    plan: PrecisionPlan,
    mesh: DeviceMesh | None,
    options: EngineOptions,
    fp8: FP8State,
) -> Context:
    """Return the context of the layers of this rank's stages: make the axes of experts, and try the
    kernels of recurrent layers. Collective over the world."""
    tp = Axis.of(mesh, "tp")
    cp = Axis.of(mesh, "cp")
    device = device_of(mesh)
    canonical = options.canonical_shards > 0
    experts = spread_experts(
        config,
        mesh,
        options.expert,
        options.expert_tensor,
        options.canonical_shards,
    )
    setting = KernelSetting(
        device=device.type,
        products=plan.compute,
        canonical=canonical,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    refused = refused_kernels(
        config, tp.size * cp.size, setting, options.seq_length, Axis.world(mesh), device
    )
    return Context(
        plan,
        tp,
        # virtual ranks always cut the sequence
        sequence=options.sequence or canonical,
        seed=options.seed,
        recompute=options.recompute,
        fp8=fp8,
        blank=options.blank,
        experts=experts,
        cp=cp,
        ring=options.ring,
        leaves=options.leaves,
        async_tensor=options.async_tensor,
        refused_kernels=refused,
    )


class Engine:
    """Trains a model over the mesh of its stages, by their schedule.

    The ranks of cp share samples: each is given the share of its dp rank, and computes its part of
    each sequence.

    rank_stages: the stages of this rank.
    optimizer: over these stages, as `RankStages.make_optimizer` makes it.
    observers: additional observers of the optimizer's steps.
    position: told of each instruction of the passes.

    pass_observers: an attribute to which observers of the passes of training steps may be added.
    counted_tokens_so_far: the sum over all steps, skipped ones too, of the tokens that count in
        their losses, or of their weights: float64 []; it stays 0 on ranks without the last stage.

    Collective over the world. Raises ValueError for an optimizer that averages over dp.
    """

    def __init__(
        self,
        rank_stages: RankStages,
        optimizer: ParallelAMPOptimizer,
        observers: Sequence[StepObserver] = (),
        position: Position | None = None,
    ) -> None:
        mesh = rank_stages.mesh
        options = rank_stages.options
        context = rank_stages.context
        # A replay holds the whole gradients of all parameters, for which ZeRO-2 has no memory.
        self.trace = options.trace and not optimizer.shards_gradients
        self.leaves = options.leaves
        self.schedule = rank_stages.schedule
        self.stages = rank_stages.by_number
        self.optimizer = optimizer
        self.device = device_of(mesh)
        self.pp = Axis.of(mesh, "pp")
        self.dp = Axis.of(mesh, "dp")  # without the ranks of cp, which `optimizer.dp` holds too
        self.tp = Axis.of(mesh, "tp")
        self.cp = Axis.of(mesh, "cp")
        self.fp8 = context.fp8
        self.fp8.keeps_casts = not optimizer.shards_weights
        self.experts = context.experts
        self.refused_kernels = context.refused_kernels
        self.pass_observers: list[PassObserver] = []
        self.counted_tokens_so_far = torch.zeros((), dtype=torch.float64, device=self.device)
        # Parity and the sentinel compare the work of ranks in full; this check is for users' loops.
        optimizer.checks_loop = False
        if optimizer.average:
            raise ValueError("the engine's optimizer must sum over dp: build it with average=False")
        schedules = (self.schedule, *rank_stages.other_schedules)
        activation_shape = (options.seq_length, options.micro_batch, rank_stages.config.hidden)
        in_evaluation = [forward_only(schedule) for schedule in schedules]
        links = self._connect(activation_shape, context, (*schedules, *in_evaluation))
        self.passes = Passes(
            config=rank_stages.config,
            schedule=self.schedule,
            stages=self.stages,
            optimizer=optimizer,
            fp8=self.fp8,
            links=links,
            deferred=context.deferred,  # a queue of its own, to which all its layers offer
            micro_batch=options.micro_batch,
            position=position or Position(),
            cp=self.cp,
        )
        # by the number of micro-batches of a share, and the number of sequences that each sample is
        # cut into (`passes_for`)
        self._seq_length = options.seq_length
        self._passes_by_size = {(self.schedule.microbatches, 1): self.passes}
        for schedule in rank_stages.other_schedules:
            passes = replace(self.passes, schedule=schedule)
            self._passes_by_size[schedule.microbatches, 1] = passes
        self.last_stage = self.passes.last_stage  # the number of the model's last stage
        self._step_sums = StepSums(
            rank_stages.config,
            self.stages.values(),
            optimizer.world,
            counts_corrections=optimizer.dp.rank == 0 and self.tp.rank == 0,
            counts_losses=self.last_stage in self.stages and self.tp.rank == 0,
            device=self.device,
        )
        self._attention_logits = _attention_logits(rank_stages, optimizer, self.device)
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
        rank_stages = build_stages(config, plan, mesh, schedule, options, make_stage)
        return cls(rank_stages, rank_stages.make_optimizer(**settings))

    def _connect(
        self,
        activation_shape: tuple[int, int, int],
        context: Context,
        schedules: Sequence[Schedule],
    ) -> P2P:
        """Return the links to other stages. Collective over the world.

        activation_shape: [s, b, hidden], before it is cut over ranks.
        schedules: all whose messages go over these links.
        """
        length, *rest = activation_shape
        sequence_ranks = self.cp.size * context.sequence_ranks
        return P2P.open(
            self.pp,
            self.schedule.rank_of_stage,
            (length // sequence_ranks, *rest),
            context.plan.pipeline,
            self.device,
            sends=max(sends_under_way(schedule) for schedule in schedules),
            # Activations that are not cut are the same on all ranks of tp.
            shared=None if context.cut_sequence else self.tp,
        )

    def passes_for(self, share: Share) -> Passes:
        """Return the passes for a share: those by the schedule for its number of micro-batches.

        The sequences of a share may be shorter than `seq_length`, because each sample is cut into
        several: a micro-batch then has more sequences, and as many tokens.
        """
        length = share.tokens.shape[1]
        pieces = max(1, self._seq_length // length)  # sequences of a sample
        microbatches = len(share.tokens) // (self.passes.micro_batch * pieces)
        of_whole_samples = self._passes_by_size.get((microbatches, 1))
        # of a size that no schedule has: the passes of `schedule` refuse it
        if of_whole_samples is None:
            return self.passes
        size = (microbatches, pieces)
        if size not in self._passes_by_size:
            self._passes_by_size[size] = _in_pieces(of_whole_samples, pieces)
        return self._passes_by_size[size]

    def step(
        self,
        share: Share,
        lr: float,
        number: int,
        recording: Recording | None = None,
        limits: StepLimits = NO_LIMITS,
    ) -> StepReport:
        """Run training step `number`; every rank gets the same report. Collective over the whole
        mesh.

        number: of the step, counted from 0, skipped steps too: dropout is drawn by it.
        recording: observes the time span of each instruction.
        limits: as for `ParallelAMPOptimizer.step`.
        Raises NonFiniteStep, on every rank, if the step is not finite and the precision plan asks
        for an error. After another error in the middle of a step a process without other ranks has
        discarded its gradients and can take the next step; of several ranks others may wait.
        """
        try:
            state = self.accumulate(share, number, recording)
            return self.update(state, lr, limits)
        except (NonFiniteStep, OutsideVocabulary):
            raise  # on all ranks alike, and the next step can be taken
        except Exception:
            # other ranks may be in the middle of the step, and then there is no next one
            if self.optimizer.world.size == 1:
                self.optimizer.zero_grad()
            raise

    def accumulate(
        self,
        share: Share,
        number: int,
        recording: Recording | None = None,
    ) -> PassState:
        """Run the first half of `step`: all passes. Returns their state, the argument of
        `update`."""
        # The numbers that are only reported (routers, z-loss, multi-token prediction) begin at
        # zero: other passes, of the sentinel or of a replay, may have left some.
        self._step_sums.clear()
        if self._attention_logits is not None:
            self._attention_logits.clear()
        # Gradients are not cleared: the first one overwrites `main_grad`. And each layer waits
        # for its own weights (`ParamGatherer`).
        passes = self.passes_for(share)
        state = passes.begin(share, number, self.optimizer.scale)
        observers = [recording] if recording else []
        executor = passes.make_executor(state, observers=[*observers, *self.pass_observers])
        # One autocast around all micro-batches: FP8's scales advance once a step, or with
        # fp8.history = "te" after each pass (`PassHooks.after`).
        with passes.in_fp8():
            executor.run()
        return state

    def update(self, state: PassState, lr: float, limits: StepLimits = NO_LIMITS) -> StepReport:
        """Run the second half of `step`: apply or skip it, and return its report."""
        # The passes have reduced gradients, or begun to; the optimizer's step completes that.
        self.passes.position.note_action("gradient reduction")
        # numbers for the report alone, which reach the host with those of the optimizer
        further = self._step_sums.sum(state)
        # an argument for QK-clip, if that is on: an optimizer of a user's own may not know it
        qk_clip: dict[str, RowFactors] = {}
        if self._attention_logits is not None:
            largest = self._attention_logits.largest()
            factors = self._attention_logits.row_factors(largest)
            if factors is not None:
                qk_clip["row_factors"] = factors
            # these come last: `complete_report` takes them off first
            numbers = [largest.view(-1)] if further is None else [further, largest.view(-1)]
            further = torch.cat(numbers)
        if self.last_stage in self.stages:
            self.counted_tokens_so_far += state.token_count.total  # the host does not wait
        try:
            report = self.optimizer.step(
                lr, state.loss, state.token_count.total, further, limits, **qk_clip
            )
        except NonFiniteStep as error:
            raise NonFiniteStep(self.complete_report(error.report, state)) from None
        return self.complete_report(report, state)

    def evaluate(self, share: Share) -> float:
        """Return the mean loss over the tokens of all shares that count, NaN if none does.
        Collective over the mesh."""
        return mean_loss(self.evaluate_samples(share))

    @torch.no_grad()
    def evaluate_samples(self, share: Share) -> Tensor:
        """Return, for each sample of the global batch, the sum of the losses of its tokens that
        count, and their number or the sum of their weights: float64 [2, samples], on the CPU.

        A sample's numbers do not depend on the others of the batch, nor on where it is computed,
        but for the rounding of products. Collective over the whole mesh.
        """
        # Weights of the last update may still travel between ranks: wait for all of them.
        self.optimizer.wait()
        passes = self.passes_for(share)
        state = passes.begin(share, None, self.optimizer.scale)
        num_samples = len(share.tokens)
        shape = (2, num_samples * self.dp.size)
        # each rank fills in its own samples, and the ranks' sum with zeros is exact
        numbers = torch.zeros(shape, dtype=torch.float64, device=self.device)
        local_numbers = numbers[:, share.first : share.first + num_samples]
        losses, counts = local_numbers.unbind()  # views, which are filled in below
        state.sample_losses = losses
        with passes.in_fp8():
            passes.make_executor(state, passes.evaluation_program).run()
        is_counting = self.last_stage in self.stages and self.tp.rank == 0
        if is_counting and state.share.mask is None:
            counts.fill_(state.share.targets.shape[1])
        elif is_counting and state.share.mask is not None:
            counts.copy_(state.share.mask.sum(1, dtype=torch.float64))
        # Canonical numerics have a loss for each micro-batch, others one, summed over the world.
        loss = summed_loss(state.loss, self.optimizer.dp, self.optimizer.world)
        # Ids outside the vocabulary make the loss NaN on all ranks (`Passes.begin`).
        if math.isnan(loss):
            self.passes.require_ids_in_vocabulary(state)
        state.await_sums()
        return self.optimizer.world.sum_(numbers).cpu()

    def complete_report(self, report: StepReport, state: PassState) -> StepReport:
        """Return the report of a step with the numbers of `StepSums` and the largest attention
        logits, and for a skipped step with the micro-batch and the samples of each offender.

        Collective: the step may be run again. Raises OutsideVocabulary, on every rank, if the step
        had ids outside the vocabulary.
        """
        if math.isnan(report.loss):
            self.passes.require_ids_in_vocabulary(state)
        # an optimizer of a user's own may leave them out of its report
        if self._attention_logits is not None and report.further:
            report = self._attention_logits.read(report)
        report = self._step_sums.read(report, state)
        # Only a step that was skipped for its numbers has offenders to explain.
        if report.changed or not report.overflowed:
            return report
        offenders = report.offenders
        if offenders and offenders[0].name == LOSS:
            # The optimizer does not know which rank computes the loss. The "stage" of an offender
            # is a pipeline rank.
            last_rank = self.schedule.rank_of_stage[-1]
            offenders = (replace(offenders[0], stage=last_rank), *offenders[1:])
        if self.trace and offenders and not self._searches_scale(report):
            passes = self.passes_for(state.full_share)
            offenders = trace_offenders(passes, offenders, report.loss_scale, state)
        return replace(report, offenders=_of_samples(offenders, state.share.pieces))

    def _searches_scale(self, report: StepReport) -> bool:
        """Return True if the loss scale is still falling to its first usable value.

        A skip is then due to the scale, and says nothing about the samples.
        """
        scaling = self.optimizer.plan.scaling
        may_fall = scaling.kind == "dynamic" and report.loss_scale > scaling.minimum
        if not may_fall or not math.isfinite(report.loss):
            return False
        return self.optimizer.saved_numbers()["steps"] == 0


def _attention_logits(
    rank_stages: RankStages, optimizer: ParallelAMPOptimizer, device: torch.device
) -> "AttentionLogits | None":
    """Return what keeps the largest attention logits of a rank's stages; None if neither reports
    nor QK-clip ask for them."""
    options = rank_stages.options
    if not options.attention_logits and options.qk_clip is None:
        return None
    return optional_parts.AttentionLogits(
        rank_stages.config,
        rank_stages.by_number.values(),
        optimizer.world,
        device,
        options.qk_clip,
    )


def _of_samples(offenders: Sequence[Offender], pieces: int) -> tuple[Offender, ...]:
    """Return all offenders, with the numbers of their sequences changed to those of the samples,
    each of which was cut into so many pieces."""
    renamed: list[Offender] = []
    for offender in offenders:
        if offender.samples is not None:
            first, end = offender.samples
            samples = (first // pieces, -(-end // pieces))  # the end rounded up
            offender = replace(offender, samples=samples)
        renamed.append(offender)
    return tuple(renamed)


def _in_pieces(passes: Passes, pieces: int) -> Passes:
    """Return passes of micro-batches with as many tokens, in sequences that are shorter by the
    factor `pieces`, and so many times as many."""
    length, micro_batch, hidden = passes.links.shape
    shape = (length // pieces, micro_batch * pieces, hidden)
    return replace(
        passes,
        micro_batch=passes.micro_batch * pieces,
        links=replace(passes.links, shape=shape),
    )


def mean_loss(numbers: Tensor) -> float:
    """Return the mean loss over the tokens of samples; NaN if no token counts. The sums over
    samples are exact, so that the order of the samples does not matter.

    numbers: float64 [2, samples], as `Engine.evaluate_samples` returns them.
    """
    losses, counts = numbers.tolist()
    tokens = math.fsum(counts)
    if not tokens:
        return math.nan
    # `fsum` refuses infinities of both signs.
    if not all(map(math.isfinite, losses)):
        return sum(losses) / tokens
    return math.fsum(losses) / tokens
