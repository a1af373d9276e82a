"""The forward and backward passes of a dp rank's samples through a rank's stages, and their loss.

Every caller of passes (a training step, an evaluation, the replay of a step) starts with a
`PassState` and lets an executor run instructions with it. No pass changes a weight; gradients
accumulate in the optimizer's buffers.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megaprec.comm.axis import Axis, copy_to_device
from megaprec.comm.main_grad import reset_accumulation
from megaprec.diagnose.position import Position
from megaprec.errors import Problem, UserError
from megaprec.fp8.state import FP8State
from megaprec.optim.optimizer import ParallelAMPOptimizer
from models import optional_parts
from models.attention.packing import UNPACKED, Packing
from models.config import ModelConfig
from models.decoder.mtp import MTPBatch, make_mtp_batch
from models.decoder.stages import Stage
from models.decoder.token_count import TokenCount, count_tokens
from models.feed_forward.router_tally import round_to
from parallel.dropout import MicrobatchInfo
from parallel.pipeline.executor import Executor, PassObserver, StageHooks
from parallel.pipeline.instructions import (
    INPUT_GRADIENTS,
    WEIGHT_GRADIENTS,
    Instruction,
    Op,
    Program,
)
from parallel.pipeline.p2p import P2P
from parallel.pipeline.posting import posts
from parallel.pipeline.schedules import Schedule, forward_only
from parallel.sequence_cut import take_own_positions
from parallel.weight_grad_queue import WeightGradQueue

if TYPE_CHECKING:
    from models.engine.source_sums import SourceSums

# Parts of the z-loss are rounded to multiples of it, so that their sum is exact in any order while
# it is less than 2^13.
Z_LOSS_UNIT = 2.0**-40


@dataclass(frozen=True)
class Sources:
    """The data sets of samples in a blend.

    numbers: int64 [samples], the data set of each. count: of all data sets.
    """

    numbers: Tensor
    count: int


@dataclass(frozen=True)
class Share:
    """The part of a global batch that one dp rank trains on.

    tokens, targets: int64 [micro-batches * micro_batch, s].
    mask: float of the same shape, the weights of the targets in the loss; None, on all dp ranks or
        on none: all count.
    first: the number of the first of these samples within the global batch.
    packing: the document boundaries of these samples, required on every stage.
    sources: the data sets of these samples in a blend, whose losses the report of a training step
        has one by one; None, on all ranks or on none: it has one loss.
    pieces: the number of these samples that one sample of the data was cut into. Reports name
        samples of the data.
    """

    tokens: Tensor
    targets: Tensor
    mask: Tensor | None = None
    first: int = 0
    packing: Packing = UNPACKED
    sources: Sources | None = None
    pieces: int = 1

    def cut(self, cp: Axis) -> "Share":
        """Return the part of this share that this rank of cp computes: its tokens of every
        sample."""
        if cp.size == 1:
            return self
        return replace(
            self,
            tokens=take_own_positions(self.tokens, cp, 1),
            targets=take_own_positions(self.targets, cp, 1),
            mask=None if self.mask is None else take_own_positions(self.mask, cp, 1),
            packing=self.packing.cut(cp),
        )

    def on(self, device: torch.device) -> "Share":
        """Return this share on a device."""
        return replace(
            self,
            tokens=copy_to_device(self.tokens, device),
            targets=copy_to_device(self.targets, device),
            mask=None if self.mask is None else copy_to_device(self.mask, device),
            packing=self.packing.on(device),
        )


@dataclass
class PassState:
    """The state of the passes of one share, in progress.

    share: the part of `full_share` that this rank of cp computes.
    token_count: of the tokens in the loss, or of their weights, over the global batch: `total`, NaN
        on ranks without the last stage, and `divisor`, which is 1 where that is 0.
    step: number of the training step, counted from 0; None in evaluation.
    scale: factor of the loss (the loss scale).
    loss: this rank's part of the mean loss, without the scale; of each micro-batch if the optimizer
        is canonical.
    outside_vocabulary: bool [samples, s], True where the share has ids outside the vocabulary.
    full_share: the share of this dp rank.
    mtp_batch: what the modules of multi-token prediction read and predict; None if there are none,
        and in evaluation.
    z_loss: this rank's part of the mean z-loss, without its weight and the scale: float64 [].
    sample_losses: float64 [samples], where the sums of the losses of this rank's tokens of each
        sample are put; None if they are not wanted.
    source_sums: the losses of this rank's tokens by data set; None without `Share.sources`, and in
        evaluation.
    """

    share: Share
    token_count: TokenCount
    step: int | None
    scale: Tensor
    loss: Tensor
    outside_vocabulary: Tensor
    full_share: Share
    z_loss: Tensor
    mtp_batch: MTPBatch | None = None
    sample_losses: Tensor | None = None
    source_sums: "SourceSums | None" = None

    @property
    def divisor(self) -> Tensor:
        """Return what losses are divided by, float64 []: the number of tokens, or the sum of their
        weights; 1 where that is 0, and NaN on ranks without the last stage.

        The first call may wait for a sum over dp.
        """
        return self.token_count.divisor

    def await_sums(self) -> None:
        """Wait for sums under way, of passes that will not divide by them."""
        self.token_count.await_sum()
        if self.mtp_batch is not None:
            for token_count in self.mtp_batch.token_counts:
                token_count.await_sum()


class OutsideVocabulary(UserError):
    """A step had an id outside the vocabulary. It has changed nothing, unless
    precision.on_nonfinite is "ignore".

    sample: the number of the first such sample within the global batch.
    """

    def __init__(self, sample: int, vocab: int) -> None:
        super().__init__(Problem.of("model.outside_vocabulary", sample=sample, vocab=vocab))
        self.sample = sample
        self.vocab = vocab


@dataclass(frozen=True)
class Passes:
    """A rank's stages, by number, with everything that passes through them need.

    deferred: the queue in which the stages' layers put weight gradients.
    position: told of each instruction.
    cp: the ranks that share each sample, of which each computes its part of the sequence.
    """

    config: ModelConfig
    schedule: Schedule
    stages: Mapping[int, Stage]
    optimizer: ParallelAMPOptimizer
    fp8: FP8State
    links: P2P
    deferred: WeightGradQueue
    micro_batch: int
    position: Position
    cp: Axis = Axis("cp")

    @cached_property
    def program(self) -> Program:
        """Return this rank's instructions of a training step."""
        return self.schedule.programs[self.optimizer.pp.rank]

    @cached_property
    def evaluation_program(self) -> Program:
        """Return this rank's instructions of an evaluation."""
        return forward_only(self.schedule).programs[self.optimizer.pp.rank]

    @cached_property
    def _posts(self) -> Mapping[Instruction, int]:
        """Return the index in `program` before which each receive is posted; empty if the links
        post early."""
        # The executor then posts each receive as soon as it can.
        if self.links.posts_early:
            return {}
        return posts(self.schedule)[self.optimizer.pp.rank]

    @cached_property
    def last_stage(self) -> int:
        """Return the number of the model's last stage."""
        return len(self.schedule.rank_of_stage) - 1

    @cached_property
    def _num_samples(self) -> int:
        """Return the number of samples of a share."""
        return self.schedule.microbatches * self.micro_batch

    @cached_property
    def chunk_of_stage(self) -> dict[int, int]:
        """Return, by the number of a stage in the model, its number among the stages of this rank,
        which the optimizer calls model chunks."""
        return {stage: chunk for chunk, stage in enumerate(self.stages)}

    @cached_property
    def _shares_embedding(self) -> bool:
        """Return True if first and last stage are two stages on this rank, and the last one reads
        the embedding of the first one too."""
        end_ranks = {self.schedule.rank_of_stage[0], self.schedule.rank_of_stage[-1]}
        used_twice = self.config.tied or self.config.mtp_layers > 0
        return used_twice and end_ranks == {self.optimizer.pp.rank} and self.last_stage > 0

    def is_reduced_late(self, stage: int) -> bool:
        """Return True if the optimizer's step reduces the gradients of `stage`, and not its
        program.

        The last stage accumulates into the gradients of an embedding that it shares with the first
        one, possibly after the first one has finished.
        """
        return stage == 0 and self._shares_embedding

    def begin(
        self,
        share: Share,
        step: int | None,
        scale: Tensor,
    ) -> PassState:
        """Return the state with which the passes of a share begin. Collective over the optimizer's
        dp if the share has a mask or the model has multi-token prediction.

        step: number of the training step, counted from 0; None in evaluation. scale: the loss
            scale.
        The sum of the mask is under way until `PassState.divisor` is read, by the first loss.
        Raises ValueError for a share of another size than the schedule's.
        """
        if len(share.tokens) != self._num_samples:
            raise ValueError(
                f"a share has {len(share.tokens)} samples, but the schedule takes "
                f"{self._num_samples}"
            )
        device = self.optimizer.device
        canonical = self.optimizer.canonical
        # The full share is kept as it is: the replay of a skipped step begins with it.
        local = share.cut(self.cp).on(device)
        # Only the last stage divides by the number of tokens; on others it may stay unknown (NaN).
        has_last_stage = self.last_stage in self.stages
        token_count = count_tokens(
            tokens=local.targets.numel(),
            mask=local.mask,
            dp=self.optimizer.dp,
            divides=has_last_stage,
            device=device,
            exact=canonical,
        )
        outside = self._is_outside(local.tokens) | self._is_outside(local.targets)
        # NaN from the start: all ranks learn of such ids from the loss, and no host waits.
        loss = torch.where(outside.any(), math.nan, 0.0).double()
        # Canonical sums add the micro-batches in an order of their own.
        if canonical:
            loss = loss.repeat(self.schedule.microbatches)
        z_loss = torch.zeros((), dtype=torch.float64, device=device)
        mtp_batch = self._make_mtp_batch(share, step, scale)
        source_sums = None
        if step is not None and share.sources is not None:
            sources = share.sources
            source_sums = optional_parts.SourceSums(sources.numbers, sources.count, device)
        return PassState(
            share=local,
            token_count=token_count,
            step=step,
            scale=scale,
            loss=loss,
            outside_vocabulary=outside,
            full_share=share,
            z_loss=z_loss,
            mtp_batch=mtp_batch,
            source_sums=source_sums,
        )

    def _make_mtp_batch(
        self,
        share: Share,
        step: int | None,
        scale: Tensor,
    ) -> MTPBatch | None:
        """Return what the modules of multi-token prediction read and predict in training; None if
        there are none, and in evaluation. Collective over dp."""
        config = self.config
        if step is None or not config.mtp_layers:
            return None
        # The full share, because modules read tokens that other ranks of cp hold.
        return make_mtp_batch(
            tokens=share.tokens.clamp(0, config.vocab - 1),
            targets=share.targets.clamp(0, config.vocab - 1),
            mask=share.mask,
            documents=share.packing.documents,
            modules=config.mtp_layers,
            scale=scale.double() * config.mtp_loss_weight,
            cp=self.cp,
            dp=self.optimizer.dp,
            divides=self.last_stage in self.stages,
        )

    def in_fp8(self) -> AbstractContextManager[None]:
        """Return the context of all passes of a step or an evaluation: that of FP8, if the plan has
        FP8 products."""
        return nullcontext() if self.fp8.recipe is None else self.fp8.autocast()

    def make_executor(
        self,
        state: PassState,
        program: Sequence[Instruction] | None = None,
        observers: Sequence[PassObserver] = (),
    ) -> Executor:
        """Return an executor for the passes of `state`.

        program: the instructions; None: this rank's program of a training step.
        observers: as in `Executor`.
        """
        is_training_step = program is None
        hooks = PassHooks(
            self,
            state,
            advances_fp8=state.step is not None and self.fp8.by_microbatch,
            trains=is_training_step,
        )
        return Executor(
            self.program if program is None else program,
            self.links,
            hooks,
            observers=observers,
            deferred=self.deferred,
            position=self.position,
            posts=self._posts if is_training_step else None,
        )

    def forward(
        self,
        state: PassState,
        stage: int,
        microbatch: int,
        received: Tensor | None,
    ) -> Tensor:
        """Run one micro-batch through one stage. Return the activation for the next stage, in the
        dtype of transfers; of the last stage the micro-batch's part of the loss, times the loss
        scale.

        received: the activation of the stage before; None: the stage takes ids of the share.
        """
        rows = slice(microbatch * self.micro_batch, (microbatch + 1) * self.micro_batch)
        plan = self.optimizer.plan
        if received is None:
            x = self._ids_inside(state.share.tokens[rows])
        else:
            x = received.to(plan.residual)
        microbatch_info = self._microbatch_info(state, rows)
        # Documents and positions are read on every stage.
        packing = state.share.packing.rows(rows)
        if state.mtp_batch is not None and stage == self.last_stage:
            mtp_batch = state.mtp_batch.of_samples(rows)
            output = self.stages[stage](x, microbatch_info, packing, mtp_batch)
        else:
            # a stage of the user's takes these three arguments
            output = self.stages[stage](x, microbatch_info, packing)
        if stage < self.last_stage:
            return output.to(plan.pipeline)
        return self.scaled_loss(state, stage, output, rows)

    def _microbatch_info(self, state: PassState, rows: slice) -> MicrobatchInfo | None:
        """Return what dropout and router losses need to know of a micro-batch; None in
        evaluation."""
        if state.step is None:
            return None
        samples = torch.arange(rows.start, rows.stop, device=self.optimizer.device)
        samples = samples + state.share.first
        # The optimizer's dp holds the ranks of cp too, which share samples.
        replicas = self.optimizer.dp.size // self.cp.size
        # Widened before the division: under an FP64 plan its result must not be rounded to FP32.
        scale = state.scale.to(self.optimizer.plan.sensitive)
        return MicrobatchInfo(state.step, samples, weight=scale / (self._num_samples * replicas))

    def scaled_loss(
        self,
        state: PassState,
        stage: int,
        logits: Tensor,
        rows: slice,
    ) -> Tensor:
        """Add a micro-batch's part of the mean loss to `state.loss`, and return it times the loss
        scale.

        logits: of the last stage. rows: the samples of the micro-batch within the share.
        Losses of routers are not in it: each router adds its own to the graph, times the weight in
        `MicrobatchInfo`, as multi-token prediction does, times `MTPBatch.scale`. In training the
        returned loss contains the z-loss times its weight, and `state.loss` does not.
        """
        # An id outside the vocabulary is replaced, and has made `state.loss` NaN already.
        targets = self._ids_inside(state.share.targets[rows])
        trains_z_loss = state.step is not None and self.config.z_loss > 0
        log_sums = None
        if trains_z_loss:
            losses, log_sums = self.stages[stage].losses_and_log_sums(logits, targets)
        else:
            losses = self.stages[stage].losses(logits, targets)
        losses = self._masked(state, losses, rows)
        loss = losses.sum() / state.divisor.to(losses.dtype)
        trained_loss = loss
        if log_sums is not None:
            squares = self._masked(state, log_sums.square(), rows)
            z_loss = squares.sum() / state.divisor.to(squares.dtype)
            trained_loss = loss + self.config.z_loss * z_loss
            if self.optimizer.tp.rank == 0:
                z_loss_of_batch = z_loss.detach().to(torch.float64, copy=True)
                state.z_loss.add_(round_to(Z_LOSS_UNIT, z_loss_of_batch))
        # Kept on the first tp rank alone: an evaluation sums losses over the world, and the
        # optimizer takes 0 from the others.
        if self.optimizer.tp.rank == 0:
            # `state.loss`, or the view of it that is this micro-batch's, is changed in place
            if state.loss.dim() == 0:
                total = state.loss
            else:
                microbatch = rows.start // self.micro_batch
                total = state.loss[microbatch]
            total += loss.detach()
            if state.sample_losses is not None:
                state.sample_losses[rows] = losses.detach().sum(0, dtype=torch.float64)
            if state.source_sums is not None:
                state.source_sums.add(losses, rows)
        return trained_loss * state.scale

    def _masked(
        self,
        state: PassState,
        values: Tensor,
        rows: slice,
    ) -> Tensor:
        """Return numbers of a micro-batch's tokens, [s, b], times the weights of their targets if
        the share has a mask. rows: its samples within the share."""
        if state.share.mask is None:
            return values
        return values * _columns(state.share.mask[rows]).to(values.dtype)

    def require_ids_in_vocabulary(self, state: PassState) -> None:
        """Raise OutsideVocabulary, on every rank, if the samples of some rank have ids outside the
        vocabulary.

        Collective, so it is called only if the loss is NaN.
        """
        rows = state.outside_vocabulary.any(1).nonzero()[:, 0]
        sequences = rows + state.share.first
        samples = (sequences // state.share.pieces).tolist()
        own_first = min(samples, default=math.inf)
        # a minimum over all ranks, by the maximum of negated numbers
        negated = torch.tensor(-own_first, dtype=torch.float64, device=self.optimizer.device)
        first_sample = -self.optimizer.world.max_(negated).item()
        if math.isfinite(first_sample):
            raise OutsideVocabulary(int(first_sample), self.config.vocab)

    @contextmanager
    def scratch_gradients(self) -> Iterator[None]:
        """Provide gradients for passes that belong to no step: they start at zero and are discarded
        at the end. Gradients that were there before are lost."""
        buffers = self.optimizer.all_buffers()
        for buffer in buffers:
            buffer.make_room()
            buffer.grads.zero_()
        try:
            yield
        finally:
            # The first pass of the step overwrites what is left in the buffers.
            for buffer in buffers:
                reset_accumulation(buffer.parameters)
                buffer.forget_gradients()

    def _is_outside(self, ids: Tensor) -> Tensor:
        """Return bool [samples, s], True where an id is outside the vocabulary.

        The loss is NaN in that case. All ranks thus learn of it from the values that they reduce
        anyway, and no step is taken unless precision.on_nonfinite is "ignore".
        """
        return (ids < 0) | (ids >= self.config.vocab)

    def _ids_inside(self, ids: Tensor) -> Tensor:
        """Return the ids of a micro-batch, with each id outside the vocabulary replaced by one
        inside."""
        return _columns(ids.clamp(0, self.config.vocab - 1))


@dataclass(frozen=True)
class PassHooks(StageHooks):
    """The hooks of an executor that runs the passes of one share.

    What an instruction means for gradients goes down one chain: these hooks, `expect`, `reduce` and
    `end_microbatch` of the optimizer, `megaprec.optim.grad_sync`, a flat buffer, its `GradBuffer`,
    and the slot of each parameter (`megaprec.comm.main_grad`).

    advances_fp8: FP8's amax histories advance after each pass.
    trains: the passes are those of a training step, whose gradients the optimizer takes.
    """

    passes: Passes
    state: PassState
    advances_fp8: bool = False
    trains: bool = False

    def forward(
        self,
        stage: int,
        microbatch: int,
        received: Tensor | None,
    ) -> Tensor:
        return self.passes.forward(self.state, stage, microbatch, received)

    def expect(self, stage: int, is_last: bool) -> None:
        passes = self.passes
        if not passes.is_reduced_late(stage):
            passes.optimizer.expect(passes.chunk_of_stage[stage], is_last)

    def reduce(self, stage: int) -> None:
        passes = self.passes
        if not passes.is_reduced_late(stage):
            passes.optimizer.reduce(passes.chunk_of_stage[stage])

    def after(self, instruction: Instruction) -> None:
        """Let FP8's histories advance after a pass, and tell the optimizer that a backward pass, or
        a half of it, has ended, if it wants to know."""
        # after the observers, which see the gradients before canonical numerics add them to their
        # sums (`megaprec.optim.canonical.microbatch_sums`)
        op = instruction.op
        if self.advances_fp8 and op in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT):
            self.passes.fp8.advance()
        if op in INPUT_GRADIENTS | WEIGHT_GRADIENTS and self._announces(instruction.stage):
            self.passes.optimizer.end_microbatch(
                instruction.microbatch,
                self.passes.schedule.microbatches,
                self.passes.chunk_of_stage[instruction.stage],
                complete=op is not Op.BACKWARD_INPUT,
            )

    def _announces(self, stage: int) -> bool:
        """Return True if the optimizer is told of the end of each backward pass through `stage`."""
        optimizer = self.passes.optimizer
        # ZeRO-2 reduces the gradients of each micro-batch, but not of a stage with an embedding to
        # whose gradient the last stage still adds
        by_microbatch = optimizer.shards_gradients and not self.passes.is_reduced_late(stage)
        # canonical numerics sum the gradients of micro-batches by a tree
        return self.trains and (by_microbatch or optimizer.canonical)


def require_steady_scales(fp8: FP8State, purpose: str) -> None:
    """Raise UserError if FP8 scales depend on earlier micro-batches. purpose: the task that needs
    them steady."""
    if fp8.by_microbatch:
        raise UserError.of("model.fp8_history_unsteady", purpose=purpose)


def require_whole_gradients(optimizer: ParallelAMPOptimizer, purpose: str) -> None:
    """Raise UserError if ZeRO-2 frees gradients within a step. purpose: the task that needs all of
    them."""
    if optimizer.shards_gradients:
        raise UserError.of("model.gradients_freed", purpose=purpose)


def _columns(samples: Tensor) -> Tensor:
    """Return samples [b, s] of the data set as [s, b] of the model."""
    return samples.t().contiguous()
