"""The forward and backward passes of one dp rank's samples through the stages of a rank, and their
loss.

Every caller of passes (a training step, an evaluation, the replay of a step) starts with a
`Running` and lets an executor run instructions with it. No pass changes a weight; gradients
accumulate in the optimizer's buffers.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from megaprec.comm.axis import Axis, copy_to_device
from megaprec.diagnose.position import Position
from megaprec.errors import UserError
from megaprec.fp8.state import FP8State
from megaprec.main_grad import reset_accumulation
from megaprec.optim.optimizer import ParallelAMPOptimizer
from models.config import ModelConfig
from models.mtp import FutureTokens, future_tokens
from models.packing import UNPACKED, Packing
from models.stages import Stage
from models.token_count import TokenCount, count_tokens
from parallel.dropout import MicrobatchInfo
from parallel.pipeline.executor import Executor, StageHooks
from parallel.pipeline.instructions import (
    INPUT_GRADIENTS,
    WEIGHT_GRADIENTS,
    Instruction,
    Op,
    Program,
)
from parallel.pipeline.p2p import P2P
from parallel.pipeline.posting import posts
from parallel.pipeline.schedules import Schedule
from parallel.pipeline.simulation import Span
from parallel.sequence_cut import take
from parallel.weight_grad_queue import WeightGradQueue


@dataclass(frozen=True)
class Share:
    """The part of a global batch that one dp rank trains on.

    tokens, targets: int64 [micro-batches * micro_batch, s].
    mask: float of the same shape, the weights of the targets in the loss; None, on all dp ranks or
        on none: all count.
    first: the number of the first of these samples within the global batch.
    packing: the document boundaries of these samples, required on every stage.
    """

    tokens: Tensor
    targets: Tensor
    mask: Tensor | None = None
    first: int = 0
    packing: Packing = UNPACKED

    def cut(self, cp: Axis) -> "Share":
        """Return the part of this share that a rank of cp computes: its tokens of every sample."""
        if cp.size == 1:
            return self
        return replace(
            self,
            tokens=take(self.tokens, cp, 1),
            targets=take(self.targets, cp, 1),
            mask=None if self.mask is None else take(self.mask, cp, 1),
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
class Running:
    """A share whose passes are in progress.

    step: number of the training step; None in evaluation.
    counted: the number of tokens in the loss, over the global batch.
    scale: factor of the loss (the loss scale).
    loss: this rank's part of the mean loss, without the scale; of each micro-batch if the optimizer
        is canonical.
    outside: bool [rows, s], True where the share has ids outside the vocabulary.
    share: the part of `full_share` that this rank of cp computes.
    full_share: the share of this dp rank.
    ahead: what the modules of multi-token prediction read and predict; None if there are none, and
        in evaluation.
    """

    share: Share
    counted: TokenCount
    step: int | None
    scale: Tensor
    loss: Tensor
    outside: Tensor
    full_share: Share
    ahead: FutureTokens | None = None

    @property
    def num_tokens(self) -> Tensor:
        """Return the number of tokens in the loss: float64 []. The first call may wait for a sum
        over dp."""
        return self.counted.total

    def end(self) -> None:
        """Wait for sums under way, of passes that will not divide by them."""
        self.counted.end()
        if self.ahead is not None:
            for count in self.ahead.counted:
                count.end()


class OutsideVocabulary(UserError):
    """A step had an id outside the vocabulary; the step changed nothing.

    sample: the number of the first such sample within the global batch.
    """

    def __init__(self, sample: int, vocab: int) -> None:
        super().__init__(
            f"sample {sample} of the global batch has a token id that a vocabulary of {vocab} "
            "does not hold"
        )
        self.sample = sample
        self.vocab = vocab


@dataclass(frozen=True)
class Passes:
    """A rank's stages, by number, with everything that passes through them need.

    deferred: the queue in which the stages' layers put weight gradients.
    position: told of each instruction.
    watch: if given, called with each new executor of these passes.
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
    watch: Callable[[Executor], None] | None = None
    cp: Axis = Axis("cp")

    @cached_property
    def program(self) -> Program:
        """Return this rank's instructions of a training step."""
        return self.schedule.programs[self.optimizer.pp.rank]

    @cached_property
    def _posts(self) -> Mapping[Instruction, int]:
        """Return the index in `program` before which each receive is posted; empty if the links
        post early."""
        if self.links.early:
            return {}
        return posts(self.schedule)[self.optimizer.pp.rank]

    @cached_property
    def last(self) -> int:
        """Return the number of the model's last stage."""
        return len(self.schedule.rank_of_stage) - 1

    @cached_property
    def _rows(self) -> int:
        """Return the number of samples of a share."""
        return self.schedule.microbatches * self.micro_batch

    @cached_property
    def _chunk_of_stage(self) -> dict[int, int]:
        """Return the index of each stage among the optimizer's parts."""
        return {stage: chunk for chunk, stage in enumerate(self.stages)}

    @cached_property
    def _shares_embedding(self) -> bool:
        """Return True if the first stage's embedding is also that of the last stage, and both are
        on this rank.

        The last stage then accumulates into the gradients of the first stage, possibly after that
        stage has finished. The gradients of the first stage are therefore reduced by the
        optimizer's step, which reduces all that are left.
        """
        end_ranks = {self.schedule.rank_of_stage[0], self.schedule.rank_of_stage[-1]}
        used_twice = self.config.tied or self.config.mtp_layers > 0
        return used_twice and end_ranks == {self.optimizer.pp.rank} and self.last > 0

    def begin(self, share: Share, step: int | None, scale: Tensor) -> Running:
        """Prepare the passes of a share. Collective over dp if the share has a mask.

        The sum of the mask is under way until `Running.num_tokens` is read, as the first loss does.
        """
        if len(share.tokens) != self._rows:
            raise ValueError(
                f"a share has {len(share.tokens)} samples, but the schedule takes {self._rows}"
            )
        device = self.optimizer.device
        canonical = self.optimizer.canonical
        # the full share is kept as it is: the replay of a skipped step begins with it
        local = share.cut(self.cp).on(device)
        counted = count_tokens(
            local.targets.numel(),
            local.mask,
            self.optimizer.dp,
            self.last in self.stages,  # only the last stage divides by the number of tokens
            device,
            canonical,
        )
        outside = self._outside(local.tokens) | self._outside(local.targets)
        # NaN from the start: all ranks learn of such ids from the loss, and no host waits
        loss = torch.where(outside.any(), math.nan, 0.0).double()
        # canonical sums add the micro-batches in an order of their own
        if canonical:
            loss = loss.repeat(self.schedule.microbatches)
        ahead = self._look_ahead(share, step, scale)
        return Running(local, counted, step, scale, loss, outside, share, ahead)

    def _look_ahead(self, share: Share, step: int | None, scale: Tensor) -> FutureTokens | None:
        """Return what the modules of multi-token prediction read and predict in training;
        collective over dp."""
        config = self.config
        if step is None or not config.mtp_layers:
            return None
        # the full share, because modules read tokens that other ranks of cp hold
        return future_tokens(
            share.tokens.clamp(0, config.vocab - 1),
            share.targets.clamp(0, config.vocab - 1),
            share.mask,
            share.packing.documents,
            config.mtp_layers,
            scale.double() * config.mtp_loss_weight,
            self.cp,
            self.optimizer.dp,
            self.last in self.stages,
        )

    def in_fp8(self) -> AbstractContextManager[None]:
        """Return the context of all passes of a step or an evaluation: that of FP8, if the plan has
        FP8 products."""
        return nullcontext() if self.fp8.recipe is None else self.fp8.autocast()

    def executor(
        self,
        run: Running,
        program: Sequence[Instruction] | None = None,
        spans: list[Span] | None = None,
        after: Callable[[Instruction], None] | None = None,
    ) -> Executor:
        """Return an executor for the passes of `run`.

        program: the instructions; None: this rank's program of a training step.
        spans: as in `Executor`.
        after: called after each instruction.
        """
        hooks = RunHooks(
            self,
            run,
            advances_fp8=run.step is not None
            and self.fp8.recipe is not None
            and self.fp8.by_microbatch,
            sums_by_tree=self.optimizer.canonical and program is None,
            then=after,
        )
        executor = Executor(
            self.program if program is None else program,
            self.links,
            hooks,
            spans=spans,
            deferred=self.deferred,
            position=self.position,
            posts=self._posts if program is None else None,
        )
        if self.watch is not None:
            self.watch(executor)
        return executor

    def forward(self, run: Running, stage: int, microbatch: int, received: Tensor | None) -> Tensor:
        """Run one micro-batch through one stage, as `StageHooks.forward` does."""
        rows = slice(microbatch * self.micro_batch, (microbatch + 1) * self.micro_batch)
        plan = self.optimizer.plan
        if received is None:
            x = self._inside(run.share.tokens[rows])
        else:
            x = received.to(plan.residual)
        info = self._microbatch_info(run, rows)
        packing = run.share.packing.rows(rows)
        if run.ahead is not None and stage == self.last:
            output = self.stages[stage](x, info, packing, run.ahead.of(rows))
        else:  # a stage of the user's takes no more than three
            output = self.stages[stage](x, info, packing)
        if stage < self.last:
            return output.to(plan.pipeline)
        return self.scaled_loss(run, stage, output, rows)

    def _microbatch_info(self, run: Running, rows: slice) -> MicrobatchInfo | None:
        """Return what dropout and router losses need to know of a micro-batch; None in
        evaluation."""
        if run.step is None:
            return None
        samples = torch.arange(rows.start, rows.stop, device=self.optimizer.device)
        samples = samples + run.share.first
        # the optimizer's dp holds the ranks of cp too, which share samples
        replicas = self.optimizer.dp.size // self.cp.size
        # in FP64 the weight of a sample is not one of FP32
        scale = run.scale.to(self.optimizer.plan.sensitive)
        return MicrobatchInfo(run.step, samples, scale / (self._rows * replicas))

    def scaled_loss(self, run: Running, stage: int, logits: Tensor, rows: slice) -> Tensor:
        """Return a micro-batch's part of the mean loss, times the loss scale. `MicrobatchInfo`
        scales router losses."""
        losses = self.stages[stage].losses(logits, self._inside(run.share.targets[rows]))
        if run.share.mask is not None:
            losses = losses * _columns(run.share.mask[rows]).to(losses.dtype)
        loss = losses.sum() / run.num_tokens.to(losses.dtype)
        # other tp ranks hold the same loss, and losses are summed over the world
        if self.optimizer.tp.rank == 0:
            by_microbatch = run.loss.dim() > 0
            total = run.loss[rows.start // self.micro_batch] if by_microbatch else run.loss
            total += loss.detach()
        return loss * run.scale

    def require_ids(self, run: Running) -> None:
        """Raise OutsideVocabulary, on every rank, if the samples of some rank have ids outside the
        vocabulary.

        Collective, so it is called only if the loss is NaN.
        """
        samples = (run.outside.any(1).nonzero()[:, 0] + run.share.first).tolist()
        # the smallest number over all ranks, by a maximum
        negated = torch.tensor(
            -min(samples, default=math.inf), dtype=torch.float64, device=self.optimizer.device
        )
        sample = -self.optimizer.world.max_(negated).item()
        if math.isfinite(sample):
            raise OutsideVocabulary(int(sample), self.config.vocab)

    @contextmanager
    def gradients_aside(self) -> Iterator[None]:
        """Provide gradients for passes that belong to no step: they start at zero and are discarded
        at the end."""
        buffers = self.optimizer.all_buffers()
        for buffer in buffers:
            buffer.grads.zero_()
        try:
            yield
        finally:
            for buffer in buffers:
                reset_accumulation(buffer.parameters)

    def _outside(self, ids: Tensor) -> Tensor:
        """Return bool [rows, s], True where an id is outside the vocabulary.

        The loss is NaN in that case. All ranks thus learn of it from the values that they reduce
        anyway, and no step is taken.
        """
        return (ids < 0) | (ids >= self.config.vocab)

    def _inside(self, ids: Tensor) -> Tensor:
        """Return the ids of a micro-batch, with each id outside the vocabulary replaced by one
        inside."""
        return _columns(ids.clamp(0, self.config.vocab - 1))

    def complete(self, stage: int) -> None:
        """Announce the backward pass that completes the gradients of `stage`."""
        if not (stage == 0 and self._shares_embedding):
            self.optimizer.expect(self._chunk_of_stage[stage])

    def reduce(self, stage: int) -> None:
        """Start the reduction of the gradients of `stage`."""
        if not (stage == 0 and self._shares_embedding):
            self.optimizer.reduce(self._chunk_of_stage[stage])

    def end_microbatch(self, i: Instruction) -> None:
        """Tell the optimizer that backward pass `i`, or a half of it, is done."""
        complete = i.op is not Op.BACKWARD_INPUT
        chunk = self._chunk_of_stage[i.stage]
        self.optimizer.end_microbatch(i.microbatch, self.schedule.microbatches, chunk, complete)


@dataclass(frozen=True)
class RunHooks(StageHooks):
    """The hooks of an executor that runs the passes of one run.

    advances_fp8: FP8's amax histories advance after each pass.
    sums_by_tree: the optimizer is told of each backward pass, to sum the gradients of micro-batches
        by a tree.
    then: called after each instruction.
    """

    passes: Passes
    run: Running
    advances_fp8: bool = False
    sums_by_tree: bool = False
    then: Callable[[Instruction], None] | None = None

    def forward(self, stage: int, microbatch: int, received: Tensor | None) -> Tensor:
        return self.passes.forward(self.run, stage, microbatch, received)

    def reduce(self, stage: int) -> None:
        self.passes.reduce(stage)

    def complete(self, stage: int) -> None:
        self.passes.complete(stage)

    def after(self, instruction: Instruction) -> None:
        # the order matters: `then` sees the gradients before they move into the tree
        op = instruction.op
        if self.advances_fp8 and op in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT):
            self.passes.fp8.advance()
        if self.then is not None:
            self.then(instruction)
        if self.sums_by_tree and op in INPUT_GRADIENTS | WEIGHT_GRADIENTS:
            self.passes.end_microbatch(instruction)


def require_steady_scales(fp8: FP8State, purpose: str) -> None:
    """Raise UserError if FP8 scales depend on earlier micro-batches. purpose: the task that needs
    them steady."""
    if fp8.by_microbatch:
        raise UserError.of("model.fp8_history_unsteady", purpose=purpose)


def _columns(samples: Tensor) -> Tensor:
    """Return samples [b, s] of the data set as [s, b] of the model."""
    return samples.t().contiguous()
