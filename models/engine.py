"""A model placed on a mesh, ready to train: stages, schedule, links and optimizer put together.

This is the whole of a training step. It knows batches, not where they come from; what to log, when to save and
when to stop is the trainer's.

A step that was skipped is run a second time, to learn in which micro-batch it went wrong. Nothing has changed since:
no weight, and dropout depends on the step's number and the samples alone. So the gradients grow as they did before,
but are looked at after each micro-batch and are never reduced. Steps that are applied cost nothing more.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis, device_of, sent
from megaprec.comm.everyones import everyones
from megaprec.diagnose.nonfinite_trace import Trace
from megaprec.errors import UserError
from megaprec.fp8.state import FP8State
from megaprec.optim.attribution import Onset
from megaprec.optim.main_grad import reset_accumulation
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.partial_grads import sum_partial
from megaprec.optim.step_report import LOSS, NonFiniteStep, Offender, StepReport
from megaprec.precision.plan import PrecisionPlan
from models.config import ModelConfig
from models.fp8_shadow import Shadow, compared, lost_by_tensor, weight_gradients
from models.packing import WHOLE, Packing
from models.stages import MakeStage, Stage, build, cuts
from parallel.activation_checkpoint import KEEP, Recompute
from parallel.context import Context
from parallel.dropout import MicrobatchInfo
from parallel.fp32_marks import compute_marked_in_fp32
from parallel.pipeline.executor import Executor
from parallel.pipeline.instructions import Instruction, Message, Op, Schedule, forward_only
from parallel.pipeline.p2p import P2P
from parallel.pipeline.simulate import sends_under_way
from parallel.pipeline.timeline import Recording
from parallel.pipeline.verify import check

MakeOptimizer = Callable[[list[Stage], PrecisionPlan, DeviceMesh | None], ParallelAMPOptimizer]
SUMMING = partial(ParallelAMPOptimizer, average=False)


@dataclass(frozen=True)
class Share:
    """One dp rank's share of a global batch.

    tokens, targets: int64 [micro-batches * micro_batch, s]. mask: float [same], which targets count; None for all.
    first: number of the share's first sample within the global batch. packing: of these samples, known on every stage.
    """

    tokens: Tensor
    targets: Tensor
    mask: Tensor | None = None
    first: int = 0
    packing: Packing = WHOLE

    def on(self, device: torch.device) -> "Share":
        """The same on a device."""
        mask = None if self.mask is None else sent(self.mask, device)
        return replace(
            self,
            tokens=sent(self.tokens, device),
            targets=sent(self.targets, device),
            mask=mask,
            packing=self.packing.on(device),
        )


@dataclass
class _Running:
    """What is under way. step is None in evaluation; loss is this rank's part of the mean, before it is scaled.

    outside: bool [rows, s], where the share had ids that the vocabulary does not hold.
    """

    share: Share
    num_tokens: Tensor
    step: int | None
    scale: Tensor
    loss: Tensor
    outside: Tensor


class OutsideVocabulary(UserError):
    """A step was given an id that the vocabulary does not hold; nothing was changed by it.

    sample: the first such one's number within the global batch.
    """

    def __init__(self, sample: int, vocab: int) -> None:
        super().__init__(
            f"sample {sample} of the global batch has a token id that a vocabulary of {vocab} does not hold"
        )
        self.sample, self.vocab = sample, vocab


class Engine:
    """Trains a model of `config` over a (pp, dp, tp) mesh, by `schedule`, in micro-batches of `micro_batch` samples.

    trace: whether a skipped step is run again to find the micro-batch and the samples that broke it.
    make_optimizer: builds the optimizer over this rank's stages, one that sums over dp: each rank's loss is divided by
    the tokens of the global batch. layers: how many each stage has; by cost if empty.
    recompute: which activations are not kept for the backward pass. make_stage: builds each of this rank's stages.
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
    ) -> None:
        evaluation = forward_only(schedule)
        for every in (schedule, evaluation):
            check(every)
        self.schedule, self._vocab = schedule, config.vocab
        self.device, self.micro_batch, self.trace = device_of(mesh), micro_batch, trace
        self.pp, self.dp, self.tp = (Axis.of(mesh, name) for name in ("pp", "dp", "tp"))
        self.last, self._last_rank = len(schedule.rank_of_stage) - 1, schedule.rank_of_stage[-1]
        self._rows = schedule.microbatches * micro_batch  # samples in a share
        self.fp8 = FP8State.over(mesh, plan.fp8, config.layers)
        context = Context(plan, self.tp, sequence, seed, recompute=recompute, fp8=self.fp8)
        cut = cuts(config, self.last + 1, seq_length, layers, schedule.rank_of_stage, recompute)
        self.stages = build(config, context, cut, schedule.rank_of_stage, self.pp.rank, make_stage)
        for stage in self.stages.values():
            compute_marked_in_fp32(stage, plan)
        self.optimizer = make_optimizer(list(self.stages.values()), plan, mesh)
        if self.optimizer.average:
            raise ValueError("the engine's optimizer must sum over dp: build it with average=False")
        self._chunk = {stage: chunk for chunk, stage in enumerate(self.stages)}
        shape = (seq_length // (self.tp.size if context.cut_sequence else 1), micro_batch, config.hidden)
        sends = max(sends_under_way(schedule), sends_under_way(evaluation))
        self._links = links = P2P.open(self.pp, schedule.rank_of_stage, shape, plan.pipeline, self.device, sends=sends)
        train, evaluate = schedule.programs[self.pp.rank], evaluation.programs[self.pp.rank]
        ends = {schedule.rank_of_stage[0], schedule.rank_of_stage[-1]}
        self._shared_ends = config.tied and ends == {self.pp.rank} and self.last > 0
        self._deferred = context.deferred
        self._train = Executor(
            train,
            links,
            self._forward,
            self._reduce,
            deferred=self._deferred,
            complete=self._complete,
            after=self._after,
        )
        self._evaluate = Executor(evaluate, links, self._forward)

    def step(self, share: Share, lr: float, number: int, recording: Recording | None = None) -> StepReport:
        """One training step, the `number`-th; every rank gets the same report. Collective over the whole mesh.

        recording: receives when each instruction ran.
        Raises NonFiniteStep, on every rank, if the plan says so of a step that is not finite.
        """
        self.accumulate(share, number, recording)
        report = self.update(lr) or self.settle()
        assert report is not None
        return report

    def accumulate(self, share: Share, number: int, recording: Recording | None = None) -> StepReport | None:
        """The first half of `step`: all passes. Returns the report of the step before, if that was still unknown."""
        self._running = self._begin(share, number, self.optimizer.scale)
        self._train.spans = recording.spans if recording else None
        with self.fp8.autocast():
            self._train.run()

    def update(self, lr: float) -> StepReport | None:
        """The second half of `step`: applies or skips it. None if its report is not known yet."""
        run = self._running
        try:
            return self._explained(self.optimizer.step(lr, run.loss), run)
        except NonFiniteStep as error:
            raise NonFiniteStep(self._explained(error.report, run)) from None

    def settle(self) -> StepReport | None:
        """The report of the last step, if it is not known yet. To be called before evaluating or saving."""

    def examine(self, share: Share, number: int, microbatch: int, scale: float) -> Trace:
        """Runs one micro-batch of a step alone, forward and backward, and watches all that passes through the model.

        For an engine of one stage. No weight is changed and no gradient is left.
        """
        if self.last:
            raise ValueError(f"a micro-batch is examined on one stage, not on {self.last + 1}")
        self._require_steady_scales("look at a micro-batch alone")
        self._running = self._begin(share, number, torch.tensor(scale, device=self.device))
        self.fp8.roll()  # the step that this is of has done so
        with self._gradients_aside(), self.fp8.replayed(), Trace(self.stages[0]) as trace:
            scaled = self._forward(0, microbatch, None)
            trace.look("the loss", self._running.loss)
            trace.look("the loss times its scale", scaled)
            scaled.backward()
        return trace

    def shadow(self, share: Share, number: int) -> Shadow:
        """What FP8 does to the first micro-batch, on each dp rank, of the `number`-th step, which must be the next one.

        The micro-batch is run twice more, without FP8 and with it: same weights, same scales, same dropout. Nothing
        that the step comes to is changed. Takes as much memory as the gradients of weights in FP8. Collective over the
        whole mesh.
        """
        self._require_steady_scales("compare a micro-batch with itself")
        self.fp8.roll()  # or the step would begin so
        optimizer, names = self.optimizer, self.fp8.narrow
        with self._gradients_aside(), self.fp8.autocast(enabled=False):
            wide_loss = self._first_alone(share, number)
            wide = {name: values.clone() for name, values in weight_gradients(optimizer.all_buffers(), names).items()}
        with self._gradients_aside():
            with self.fp8.replayed(), self.fp8.watching() as lost:
                loss = self._first_alone(share, number)
            narrow = weight_gradients(optimizer.all_buffers(), names)
            counts = lost_by_tensor(lost, names, optimizer.all_buffers())
            found = compared(wide, narrow, counts, (self.tp, self.dp))
        loss, wide_loss = optimizer.world.sum_(torch.stack([loss, wide_loss])).unbind()
        return Shadow.of(loss.item(), wide_loss.item(), everyones(found, optimizer.world, self.device))

    def _require_steady_scales(self, what: str) -> None:
        if self.fp8.by_microbatch:
            raise UserError(
                f'fp8.history = "te": to {what} is not possible, for its scales come of others; "step" would do'
            )

    def _first_alone(self, share: Share, number: int) -> Tensor:
        """Runs the first micro-batch, forward and backward, through all stages; returns this rank's part of its loss.
        Gradients are left, summed over tp but not over dp."""
        self._running = self._begin(share, number, self.optimizer.scale)
        program = [i for i in self._train.program if i.microbatch == 0 and i.op is not Op.REDUCE]
        Executor(program, self._links, self._forward, deferred=self._deferred).run()
        for buffer in self.optimizer.all_buffers():
            sum_partial(buffer.parameters, self.tp)
        return self._running.loss

    @torch.no_grad()
    def evaluate(self, share: Share) -> float:
        """Mean loss over the tokens of all shares. Collective over the whole mesh."""
        self._running = self._begin(share, None, self.optimizer.scale)
        with self.fp8.autocast():
            self._evaluate.run()
        loss = self.optimizer.world.sum_(self._running.loss).item()
        if math.isnan(loss):
            self._require_ids(self._running)
        return loss

    def _require_ids(self, run: _Running) -> None:
        """Raises OutsideVocabulary if some rank's samples hold such an id. Collective, so only asked where the loss is
        not a number."""
        wrong = (run.outside.any(1).nonzero()[:, 0] + run.share.first).tolist()
        first = torch.tensor(-min(wrong, default=math.inf), dtype=torch.float64, device=self.device)
        sample = -self.optimizer.world.max_(first).item()
        if math.isfinite(sample):
            raise OutsideVocabulary(int(sample), self._vocab)

    def _explained(self, report: StepReport, run: _Running) -> StepReport:
        """The report of a skipped step with all that can be said of its offenders; any other as it is.

        Raises OutsideVocabulary, on every rank, if the step was given ids that the vocabulary does not hold.
        """
        if math.isnan(report.loss):
            self._require_ids(run)
        if report.changed:
            return report
        offenders = report.offenders
        if not math.isfinite(report.loss):
            nan = math.isnan(report.loss)
            offenders = (Offender(LOSS, self._last_rank, 0, int(not nan), int(nan), 1, 0.0), *offenders)
        if self.trace and offenders and not self._searching(report):
            offenders = self._traced(offenders, report.loss_scale, run)
        return replace(report, offenders=offenders)

    def _searching(self, report: StepReport) -> bool:
        """Whether the scale is on its first way down: that it was too high says nothing of the samples."""
        scaling = self.optimizer.plan.scaling
        falls = scaling.kind == "dynamic" and report.loss_scale > scaling.minimum and math.isfinite(report.loss)
        return falls and self.optimizer.numbers()["steps"] == 0

    def _traced(self, offenders: Sequence[Offender], scale: float, run: _Running) -> tuple[Offender, ...]:
        """Runs the skipped step again, with the scale it had, to find where each offender began. Collective."""
        self._running = self._begin(run.share, run.step, torch.tensor(scale, device=self.device))
        onset = Onset(offenders, self.optimizer.all_buffers(), self._running.loss)

        def after(i: Instruction) -> None:
            self._after(i)
            if Message.of(i) is None:
                onset.look(i.microbatch * self.dp.size + self.dp.rank)

        program = [i for i in self._train.program if i.op is not Op.REDUCE]
        with self._gradients_aside(), self.fp8.replayed():
            Executor(program, self._links, self._forward, deferred=self._deferred, after=after).run()
        firsts = self.dp.gather(torch.tensor([run.share.first], device=self.device)).tolist()
        moments = onset.agreed(self.optimizer.world)
        return tuple(self._dated(o, moment, firsts) for o, moment in zip(offenders, moments, strict=True))

    def _dated(self, offender: Offender, moment: int | None, firsts: Sequence[int]) -> Offender:
        """firsts: the number of each dp rank's first sample within the global batch."""
        if moment is None:
            return replace(offender, traced=True)
        microbatch, dp_rank = divmod(moment, self.dp.size)
        first = firsts[dp_rank] + microbatch * self.micro_batch
        samples = (first, first + self.micro_batch)
        return replace(offender, traced=True, microbatch=microbatch, dp_rank=dp_rank, samples=samples)

    @contextmanager
    def _gradients_aside(self) -> Iterator[None]:
        """For passes that are no step's: gradients are zero at first, also where none comes, and forgotten after."""
        buffers = self.optimizer.all_buffers()
        for buffer in buffers:
            buffer.grads.zero_()
        try:
            yield
        finally:
            for buffer in buffers:
                reset_accumulation(buffer.parameters)

    def _begin(self, share: Share, step: int | None, scale: Tensor) -> _Running:
        if len(share.tokens) != self._rows:
            raise ValueError(f"a share has {len(share.tokens)} samples, but the schedule takes {self._rows}")
        share = share.on(self.device)
        count = torch.full((), share.targets.numel(), device=self.device) if share.mask is None else share.mask.sum()
        num_tokens = self.dp.sum_(count.double()).clamp(min=1)
        outside = self._outside(share.tokens) | self._outside(share.targets)
        loss = torch.where(outside.any(), math.nan, 0.0).double()
        return _Running(share, num_tokens, step, scale, loss, outside)

    def _outside(self, ids: Tensor) -> Tensor:
        """Where the vocabulary does not hold an id, bool [rows, s]. The loss is NaN then, and so all ranks learn of it
        with what they agree on anyway: no step is taken."""
        return (ids < 0) | (ids >= self._vocab)

    def _inside(self, ids: Tensor) -> Tensor:
        """Ids of a micro-batch with each that the vocabulary does not hold replaced by one that it does."""
        return self._columns(ids.clamp(0, self._vocab - 1))

    def _forward(self, stage: int, microbatch: int, received: Tensor | None) -> Tensor:
        run = self._running
        rows = slice(microbatch * self.micro_batch, (microbatch + 1) * self.micro_batch)
        place = None
        if run.step is not None:
            samples = torch.arange(rows.start, rows.stop, device=self.device) + run.share.first
            place = MicrobatchInfo(run.step, samples, run.scale / (self._rows * self.dp.size))
        plan = self.optimizer.plan
        x = self._inside(run.share.tokens[rows]) if received is None else received.to(plan.residual)
        y = self.stages[stage](x, place, run.share.packing.rows(rows))
        return y.to(plan.pipeline) if stage < self.last else self._scaled_loss(stage, y, rows)

    def _scaled_loss(self, stage: int, logits: Tensor, rows: slice) -> Tensor:
        """This micro-batch's part of the mean loss, times the loss scale. `MicrobatchInfo` scales the others."""
        run = self._running
        losses = self.stages[stage].losses(logits, self._inside(run.share.targets[rows]))
        if run.share.mask is not None:
            losses = losses * self._columns(run.share.mask[rows]).to(losses.dtype)
        loss = losses.sum() / run.num_tokens.to(losses.dtype)
        if self.tp.rank == 0:  # the other tp ranks hold the same loss, and shares are summed over the world
            run.loss += loss.detach()
        return loss * run.scale

    def _reduce(self, stage: int) -> None:
        """A head tied to the embedding on the same rank adds to the first stage's gradients, perhaps after the first
        stage is done: they are reduced by the optimizer's step, which takes what is left."""
        if not (stage == 0 and self._shared_ends):
            self.optimizer.reduce(self._chunk[stage])

    def _after(self, i: Instruction) -> None:
        """Where FP8's histories advance with each micro-batch, they do after its passes."""
        if i.op in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT):
            self.fp8.advance()

    def _complete(self, stage: int) -> None:
        if not (stage == 0 and self._shared_ends):
            self.optimizer.expect(self._chunk[stage])

    def _columns(self, samples: Tensor) -> Tensor:
        """[b, s] of the data set to [s, b] of the model."""
        return samples.t().contiguous()
