"""The passes of a share of a batch through the stages that a rank holds, and the loss that they come to.

Whatever runs passes (a training step, an evaluation, a step that is run again to be looked at) begins with a `Running`,
and has an executor carry out instructions with it. No pass changes a weight; gradients add up in the optimizer's
buffers.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from megaprec.comm.axis import sent
from megaprec.errors import UserError
from megaprec.fp8.state import FP8State
from megaprec.optim.main_grad import reset_accumulation
from megaprec.optim.optimizer import ParallelAMPOptimizer
from models.config import ModelConfig
from models.packing import WHOLE, Packing
from models.stages import Stage
from parallel.dropout import MicrobatchInfo
from parallel.pipeline.executor import Executor
from parallel.pipeline.instructions import Instruction, Op, Program, Schedule
from parallel.pipeline.p2p import P2P
from parallel.pipeline.simulation import Span
from parallel.weight_grad_queue import WeightGradQueue


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
class Running:
    """A share whose passes are under way. step: its number, None in evaluation. num_tokens: of the global batch.

    scale: what the loss is multiplied by. loss: this rank's part of the mean, before it is scaled. outside: bool
    [rows, s], where the share has ids that the vocabulary does not hold.
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


@dataclass(frozen=True)
class Passes:
    """A rank's stages, by number, with all that passes through them need.

    deferred: the queue that the stages' layers leave weight gradients in.
    """

    config: ModelConfig
    schedule: Schedule
    stages: Mapping[int, Stage]
    optimizer: ParallelAMPOptimizer
    fp8: FP8State
    links: P2P
    deferred: WeightGradQueue
    micro_batch: int

    @cached_property
    def program(self) -> Program:
        """This rank's instructions of a training step."""
        return self.schedule.programs[self.optimizer.pp.rank]

    @cached_property
    def last(self) -> int:
        """The number of the model's last stage."""
        return len(self.schedule.rank_of_stage) - 1

    @cached_property
    def _rows(self) -> int:
        """How many samples a share has."""
        return self.schedule.microbatches * self.micro_batch

    @cached_property
    def _chunk(self) -> dict[int, int]:
        return {stage: chunk for chunk, stage in enumerate(self.stages)}

    @cached_property
    def _shares_ends(self) -> bool:
        """Whether the embedding and a head that is tied to it are two stages of this rank. Then the head adds to the
        first stage's gradients, perhaps after the first stage is done: these are reduced by the optimizer's step, which
        takes what is left."""
        ends = {self.schedule.rank_of_stage[0], self.schedule.rank_of_stage[-1]}
        return self.config.tied and ends == {self.optimizer.pp.rank} and self.last > 0

    def begin(self, share: Share, step: int | None, scale: Tensor) -> Running:
        """Prepares the passes of a share. Collective over dp."""
        if len(share.tokens) != self._rows:
            raise ValueError(f"a share has {len(share.tokens)} samples, but the schedule takes {self._rows}")
        device = self.optimizer.device
        share = share.on(device)
        count = torch.full((), share.targets.numel(), device=device) if share.mask is None else share.mask.sum()
        num_tokens = self.optimizer.dp.sum_(count.double()).clamp(min=1)
        outside = self._outside(share.tokens) | self._outside(share.targets)
        loss = torch.where(outside.any(), math.nan, 0.0).double()
        return Running(share, num_tokens, step, scale, loss, outside)

    def executor(
        self,
        run: Running,
        program: Sequence[Instruction] | None = None,
        spans: list[Span] | None = None,
        after: Callable[[Instruction], None] | None = None,
    ) -> Executor:
        """What carries out instructions with the passes of `run`. program: this rank's of a training step, unless
        given. spans: as in `Executor`. after: called after each instruction."""
        return Executor(
            self.program if program is None else program,
            self.links,
            partial(self.forward, run),
            self._reduce,
            spans,
            self.deferred,
            after=partial(self._after, run, after),
            complete=self._complete,
        )

    def forward(self, run: Running, stage: int, microbatch: int, received: Tensor | None) -> Tensor:
        """One micro-batch through one stage, as `Executor` asks for it."""
        rows = slice(microbatch * self.micro_batch, (microbatch + 1) * self.micro_batch)
        place = None
        if run.step is not None:
            samples = torch.arange(rows.start, rows.stop, device=self.optimizer.device) + run.share.first
            place = MicrobatchInfo(run.step, samples, run.scale / (self._rows * self.optimizer.dp.size))
        plan = self.optimizer.plan
        x = self._inside(run.share.tokens[rows]) if received is None else received.to(plan.residual)
        y = self.stages[stage](x, place, run.share.packing.rows(rows))
        return y.to(plan.pipeline) if stage < self.last else self.scaled_loss(run, stage, y, rows)

    def scaled_loss(self, run: Running, stage: int, logits: Tensor, rows: slice) -> Tensor:
        """A micro-batch's part of the mean loss, times the loss scale. `MicrobatchInfo` scales losses of routers."""
        losses = self.stages[stage].losses(logits, self._inside(run.share.targets[rows]))
        if run.share.mask is not None:
            losses = losses * _columns(run.share.mask[rows]).to(losses.dtype)
        loss = losses.sum() / run.num_tokens.to(losses.dtype)
        if self.optimizer.tp.rank == 0:  # other tp ranks hold the same loss, and shares are summed over the world
            run.loss += loss.detach()
        return loss * run.scale

    def require_ids(self, run: Running) -> None:
        """Raises OutsideVocabulary if some rank's samples hold such an id. Collective, so only asked where the loss is
        not a number."""
        wrong = (run.outside.any(1).nonzero()[:, 0] + run.share.first).tolist()
        first = torch.tensor(-min(wrong, default=math.inf), dtype=torch.float64, device=self.optimizer.device)
        sample = -self.optimizer.world.max_(first).item()
        if math.isfinite(sample):
            raise OutsideVocabulary(int(sample), self.config.vocab)

    @contextmanager
    def gradients_aside(self) -> Iterator[None]:
        """For passes that are no step's: gradients are zero at first, also where none comes, and forgotten after."""
        buffers = self.optimizer.all_buffers()
        for buffer in buffers:
            buffer.grads.zero_()
        try:
            yield
        finally:
            for buffer in buffers:
                reset_accumulation(buffer.parameters)

    def _outside(self, ids: Tensor) -> Tensor:
        """Where the vocabulary does not hold an id, bool [rows, s]. The loss is NaN then, and so all ranks learn of it
        with what they agree on anyway: no step is taken."""
        return (ids < 0) | (ids >= self.config.vocab)

    def _inside(self, ids: Tensor) -> Tensor:
        """Ids of a micro-batch with each that the vocabulary does not hold replaced by one that it does."""
        return _columns(ids.clamp(0, self.config.vocab - 1))

    def _complete(self, stage: int) -> None:
        if not (stage == 0 and self._shares_ends):
            self.optimizer.expect(self._chunk[stage])

    def _reduce(self, stage: int) -> None:
        if not (stage == 0 and self._shares_ends):
            self.optimizer.reduce(self._chunk[stage])

    def _after(self, run: Running, then: Callable[[Instruction], None] | None, i: Instruction) -> None:
        """Where FP8's histories advance with each micro-batch of a step, they do after its passes."""
        if run.step is not None and i.op in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT):
            self.fp8.advance()
        if then is not None:
            then(i)


def require_steady_scales(fp8: FP8State, purpose: str) -> None:
    """Raises UserError where scales come of the micro-batches before. purpose: what a micro-batch is run alone for."""
    if fp8.by_microbatch:
        raise UserError(
            f'fp8.history = "te": to {purpose} is not possible, for its scales come of others; "step" would do'
        )


def _columns(samples: Tensor) -> Tensor:
    """[b, s] of the data set to [s, b] of the model."""
    return samples.t().contiguous()
