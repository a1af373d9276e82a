"""A model placed on a mesh, ready to train: stages, schedule, links and optimizer put together.

This is the whole of a training step. It knows batches, not where they come from; what to log, when to save and
when to stop is the trainer's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm import Axis, device_of
from megaprec.events import StepReport
from megaprec.optimizer import ParallelAMPOptimizer
from megaprec.plan import PrecisionPlan
from models.config import ModelConfig
from models.stages import Stage, build, cuts
from parallel.check import check
from parallel.context import Context
from parallel.dropout import Place
from parallel.executor import Executor
from parallel.links import Links
from parallel.recording import Recording
from parallel.schedule import Schedule, forward_only
from parallel.simulate import sends_under_way

MakeOptimizer = Callable[[list[Stage], PrecisionPlan, DeviceMesh | None], ParallelAMPOptimizer]


@dataclass(frozen=True)
class Share:
    """One dp rank's share of a global batch.

    tokens, targets: int64 [micro-batches * micro_batch, s]. mask: float [same], which targets count; None for all.
    first: number of the share's first sample within the global batch.
    """

    tokens: Tensor
    targets: Tensor
    mask: Tensor | None = None
    first: int = 0


@dataclass
class _Running:
    """The step under way. place is None in evaluation; loss is this rank's part of the mean."""

    share: Share
    num_tokens: Tensor
    step: int | None
    loss: Tensor


class Engine:
    """Trains a model of `config` over a (pp, dp, tp) mesh, by `schedule`, in micro-batches of `micro_batch` samples.

    make_optimizer: builds the optimizer over this rank's stages. layers: how many each stage has; by cost if empty.
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
        make_optimizer: MakeOptimizer = ParallelAMPOptimizer,
        layers: Sequence[int] = (),
    ) -> None:
        evaluation = forward_only(schedule)
        for every in (schedule, evaluation):
            check(every)
        self.schedule = schedule
        self.device, self.micro_batch = device_of(mesh), micro_batch
        self.pp, self.dp, self.tp = (Axis.of(mesh, name) for name in ("pp", "dp", "tp"))
        self.last = len(schedule.rank_of_stage) - 1
        self._rows = schedule.microbatches * micro_batch  # samples in a share
        context = Context(plan, self.tp, sequence, seed)
        cut = cuts(config, self.last + 1, seq_length, layers)
        self.stages = build(config, context, cut, schedule.rank_of_stage, self.pp.rank)
        self.optimizer = make_optimizer(list(self.stages.values()), plan, mesh)
        self._chunk = {stage: chunk for chunk, stage in enumerate(self.stages)}
        shape = (seq_length // (self.tp.size if context.cut_sequence else 1), micro_batch, config.hidden)
        sends = max(sends_under_way(schedule), sends_under_way(evaluation))
        links = Links.open(self.pp, schedule.rank_of_stage, shape, plan.compute, self.device, sends=sends)
        train, evaluate = schedule.programs[self.pp.rank], evaluation.programs[self.pp.rank]
        ends = {schedule.rank_of_stage[0], schedule.rank_of_stage[-1]}
        self._shared_ends = config.tied and ends == {self.pp.rank} and self.last > 0
        self._train = Executor(train, links, self._forward, self._reduce, deferred=context.deferred)
        self._evaluate = Executor(evaluate, links, self._forward)

    def step(self, share: Share, lr: float, number: int, recording: Recording | None = None) -> StepReport:
        """One training step, the `number`-th; every rank gets the same report. Collective over the whole mesh.

        recording: receives when each instruction ran.
        """
        self._running = self._begin(share, number)
        self._train.spans = recording.spans if recording else None
        self._train.run()
        return self.optimizer.step(lr, self._running.loss)

    @torch.no_grad()
    def evaluate(self, share: Share) -> float:
        """Mean loss over the tokens of all shares. Collective over the whole mesh."""
        self._running = self._begin(share, None)
        self._evaluate.run()
        return self.optimizer.world.sum_(self._running.loss).item()

    def _begin(self, share: Share, step: int | None) -> _Running:
        if len(share.tokens) != self._rows:
            raise ValueError(f"a share has {len(share.tokens)} samples, but the schedule takes {self._rows}")
        count = torch.tensor(float(share.targets.numel())) if share.mask is None else share.mask.sum()
        num_tokens = self.dp.sum_(count.double().to(self.device)).clamp(min=1)
        return _Running(share, num_tokens, step, torch.zeros((), dtype=torch.float64, device=self.device))

    def _forward(self, stage: int, microbatch: int, received: Tensor | None) -> Tensor:
        run = self._running
        rows = slice(microbatch * self.micro_batch, (microbatch + 1) * self.micro_batch)
        place = None
        if run.step is not None:
            samples = torch.arange(rows.start, rows.stop, device=self.device) + run.share.first
            place = Place(run.step, samples)
        x = self._columns(run.share.tokens[rows]) if received is None else received
        y = self.stages[stage](x, place)
        return y if stage < self.last else self._scaled_loss(stage, y, rows)

    def _scaled_loss(self, stage: int, logits: Tensor, rows: slice) -> Tensor:
        """This micro-batch's part of the mean loss, times the loss scale. The only place where the scale is applied."""
        run = self._running
        losses = self.stages[stage].losses(logits, self._columns(run.share.targets[rows]))
        if run.share.mask is not None:
            losses = losses * self._columns(run.share.mask[rows]).to(losses.dtype)
        loss = losses.sum() / run.num_tokens.to(losses.dtype)
        if self.tp.rank == 0:  # the other tp ranks hold the same loss, and shares are summed over the world
            run.loss += loss.detach()
        return loss * self.optimizer.scale

    def _reduce(self, stage: int) -> None:
        """A head tied to the embedding on the same rank adds to the first stage's gradients, perhaps after the first
        stage is done: they are reduced by the optimizer's step, which takes what is left."""
        if not (stage == 0 and self._shared_ends):
            self.optimizer.reduce(self._chunk[stage])

    def _columns(self, samples: Tensor) -> Tensor:
        """[b, s] of the data set to [s, b] of the model, on its device."""
        return samples.t().contiguous().to(self.device)
