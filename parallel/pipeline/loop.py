"""`Pipeline`: one training step of a custom model, on any mesh, as one call.

    pipeline = Pipeline([stage], optimizer, loss_fn, microbatches=8, activation=(length, 1, hidden))
    report = pipeline.step(inputs, targets, lr=3e-4)

It handles the details that are easy to get wrong in a training loop. The loss is the mean over the
tokens of the whole batch, over micro-batches and data-parallel ranks, however many targets are
ignored. The loss is multiplied by the loss scale. Gradients are reduced when the schedule says that
they are final.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from megaprec.errors import UserError
from megaprec.optim.decision.step_report import NonFiniteStep, StepReport
from megaprec.optim.guards.step_agreement import require_same_loss
from megaprec.optim.optimizer import ParallelAMPOptimizer
from parallel.context import Context
from parallel.cut_features import CutTensor, unchecked
from parallel.pipeline.executor import Executor, StageHooks
from parallel.pipeline.instructions import INPUT_GRADIENTS, WEIGHT_GRADIENTS, Instruction, Op
from parallel.pipeline.kinds import schedule as make_schedule
from parallel.pipeline.loop_checks import (
    call_loss_fn,
    require_alike,
    require_arguments,
    require_batch,
    require_losses,
    require_same_chunks,
    require_same_samples,
)
from parallel.pipeline.p2p import P2P
from parallel.pipeline.schedules import forward_only
from parallel.pipeline.simulation import sends_under_way

LossFn = Callable[[Tensor, Tensor], Tensor]


class Pipeline:
    """Trains a model whose stages are torch modules, each of which takes one tensor and returns
    one.

    stages: the stages of this pipeline rank, in order; one for most schedules, two or more for
        "interleaved", "zb-v" and "dualpipe-v".
    optimizer: built over the same stages. It may average or sum gradients over dp.
    loss_fn: (output of the last stage, targets) -> the loss of each target, a tensor of the shape
        of `targets`.
    microbatches: the number of micro-batches into which the samples of this data-parallel rank are
        cut.
    activation: shape of the tensor that one stage sends to the next for one micro-batch; not needed
        with one stage.
    schedule: one of `parallel.pipeline.KINDS`.
    ignore_index: targets with this value have no loss and are not counted.
    Raises UserError for arguments that do not fit together. Collective over the whole mesh.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        optimizer: ParallelAMPOptimizer,
        loss_fn: LossFn,
        *,
        microbatches: int,
        activation: Sequence[int] = (),
        schedule: str = "1f1b",
        ignore_index: int = -100,
    ) -> None:
        require_arguments(stages, optimizer, loss_fn, microbatches, activation, ignore_index)
        shared = {
            "schedule": schedule,
            "ignore_index": ignore_index,
            "number of stages": len(stages),
        }
        in_replica = {"microbatches": microbatches, "activation": tuple(activation)}
        require_alike(optimizer, shared, in_replica)
        pp = optimizer.pp
        # a single stage leaves the number to the kind; one that needs several is refused below
        chunks = len(stages) if len(stages) > 1 else 0
        training = make_schedule(schedule, pp.size, microbatches, chunks)
        rank_of_stage = training.rank_of_stage
        local_stages = [stage for stage, rank in enumerate(rank_of_stage) if rank == pp.rank]
        if len(local_stages) != len(stages):
            raise UserError.of(
                "pipeline.stage_count",
                schedule=schedule,
                num_local=len(local_stages),
                num_stages=len(stages),
            )
        if len(rank_of_stage) > 1 and not activation:
            raise UserError.of("pipeline.activation_missing")
        require_same_chunks(stages, optimizer)
        self.optimizer = optimizer
        self.loss_fn = loss_fn
        self.ignore_index = ignore_index
        self.microbatches = microbatches
        self._batches = 0
        self._failed = False
        self._compares_ranks = False
        self._stages = dict(zip(local_stages, stages, strict=True))
        # the optimizer counts the stages of this rank only, and calls them model chunks
        self._chunk_of_stage = {stage: chunk for chunk, stage in enumerate(local_stages)}
        self._last_stage = len(rank_of_stage) - 1
        self._context = _first_context(stages)

        evaluation = forward_only(training)
        # both programs use one set of links
        sends = max(sends_under_way(training), sends_under_way(evaluation))
        dtype = optimizer.plan.pipeline
        links = P2P.open(pp, rank_of_stage, activation, dtype, optimizer.device, sends=sends)
        deferred = self._context.deferred if self._context else None
        self._train = Executor(
            training.programs[pp.rank], links, _TrainingHooks(self), deferred=deferred
        )
        self._evaluate = Executor(evaluation.programs[pp.rank], links, _EvaluationHooks(self))

    def step(
        self,
        inputs: Tensor,
        targets: Tensor,
        lr: float | None = None,
    ) -> StepReport:
        """Train on one batch; every rank gets the same report. Collective over the whole mesh.

        inputs, targets: [sequence, samples, ...] of this data-parallel rank, the same on all its
            tensor and pipeline ranks. The samples are cut evenly into micro-batches.
        lr: the learning rate, unless the optimizer was built with one.

        Gradients that a backward pass outside has left are part of the step, as in torch; zero_grad
        discards them. Raises NonFiniteStep if a step is not finite and the precision plan asks for
        an error. After another error in the middle of a step a process without other ranks has
        discarded its gradients and can take the next step; several ranks cannot go on.
        """
        if not torch.is_grad_enabled():
            raise UserError.of("pipeline.no_gradients")
        self._begin(inputs, targets, self.optimizer.scale)
        try:
            with self._context.fp8.autocast() if self._context else nullcontext():
                self._train.run()
            return self.optimizer.step(lr, self._loss)
        except NonFiniteStep:
            raise  # on all ranks alike, and the next step can be taken
        except Exception:
            self._give_up()
            raise

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor) -> float:
        """Return the mean loss over the targets of all data-parallel ranks. Collective over the
        whole mesh.

        Modules compute in the mode that they are in: call `eval` of each stage first, and `train`
        afterwards, if they have dropout or batch norms.
        """
        # losses are not scaled where there is no backward pass
        self._begin(inputs, targets, torch.ones((), device=self.optimizer.device))
        try:
            self._evaluate.run()
            if self._compares_ranks:
                require_same_loss(
                    self._loss, self.optimizer.tp, self.optimizer.world, self.optimizer.device
                )
        except Exception:
            self._give_up()
            raise
        # all ranks of a tensor-parallel group have the whole loss, which is to be summed once
        if self.optimizer.tp.rank == 0:
            addend = self._loss
        else:
            addend = torch.zeros_like(self._loss)
        total = self.optimizer.world.sum_(addend)
        return float(total) / self._averaged_ranks

    def _begin(
        self,
        inputs: Tensor,
        targets: Tensor,
        scale: Tensor,
    ) -> None:
        """Check a batch and prepare its passes: cut it into micro-batches, and set what the loss of
        each is multiplied by, and the loss to 0. Collective over dp, and over the whole mesh in
        batches 1, 2, 4, 8 and so on.

        scale: the loss scale. Raises UserError for a batch that cannot be trained on.
        """
        if self._failed:
            raise UserError.of("pipeline.failed_before")
        require_batch(inputs, targets, self.microbatches)
        self._batches += 1
        # in batches 1, 2, 4, 8, ...: it costs no time in the long run
        self._compares_ranks = self._batches & (self._batches - 1) == 0
        if self._compares_ranks:
            require_same_samples(inputs, targets, self.optimizer)
        device = self.optimizer.device
        dp = self.optimizer.dp
        self._inputs = inputs.to(device).chunk(self.microbatches, 1)
        self._targets = targets.to(device).chunk(self.microbatches, 1)
        # float64 counts exactly up to 2^53
        local_count = (targets.to(device) != self.ignore_index).sum().double()
        count = dp.sum_(local_count)
        if not count:
            raise UserError.of("pipeline.nothing_counts", ignore_index=self.ignore_index)
        # so that the gradients of all ranks together are those of the mean over `count` targets
        self._loss_weight = self._averaged_ranks / count
        self._scale = scale
        self._loss = torch.zeros((), dtype=torch.float64, device=device)

    @property
    def _averaged_ranks(self) -> int:
        """Return the number of dp ranks by which the optimizer divides gradients, 1 if it does not
        average them: losses are multiplied by it."""
        return self.optimizer.dp.size if self.optimizer.average else 1

    def _forward_stage(
        self,
        stage: int,
        microbatch: int,
        received: Tensor | None,
    ) -> Tensor:
        """Run a micro-batch through a stage. Return what the stage sends on, in the dtype of
        transfers; of the last stage the micro-batch's part of the scaled loss, which is also added
        to the loss of the step.

        received: what the stage before sent; None: the stage takes inputs of the batch.
        """
        plan = self.optimizer.plan
        x = self._inputs[microbatch] if received is None else received.to(plan.residual)
        output = self._stages[stage](x)
        if stage == self._last_stage:
            return self._scaled_loss(output, self._targets[microbatch])
        if not isinstance(output, Tensor):
            raise UserError.of(
                "pipeline.stage_output_type", stage=stage, kind=type(output).__name__
            )
        # the next stage would take this rank's features for all of them
        if isinstance(output, CutTensor) and output.cut.dim == output.dim() - 1:
            raise UserError.of("pipeline.stage_output_slice", stage=stage, source=output.cut.source)
        return unchecked(output).to(plan.pipeline)

    def _scaled_loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return a micro-batch's part of the mean loss, times the loss scale; without that scale it
        is added to the loss of the step. Raises UserError for losses of another shape."""
        counts = targets != self.ignore_index
        # 0 in place of the ignored index, which may be no class that a loss function accepts
        losses = call_loss_fn(self.loss_fn, output, targets.masked_fill(~counts, 0))
        require_losses(losses, targets)
        # a sum in 16 bits has three digits
        losses = losses.to(torch.promote_types(losses.dtype, torch.float32))
        loss = (losses * counts).sum() * self._loss_weight.to(losses.dtype)
        self._loss += loss.detach()
        return loss * self._scale

    def _give_up(self) -> None:
        """Discard what is left of a failed step, so that another can be taken. With other ranks
        there cannot be another: these are still in the middle of the step."""
        if self.optimizer.world.size > 1:
            self._failed = True
            return
        self._train.abandon()
        self._evaluate.abandon()
        self.optimizer.zero_grad()


def _first_context(stages: Sequence[nn.Module]) -> Context | None:
    """Return the context of the parallel layers, which all share one: that of the first layer; None
    if there is no parallel layer."""
    for stage in stages:
        for module in stage.modules():
            context = getattr(module, "context", None)
            if isinstance(context, Context):
                return context
    return None


class _EvaluationHooks(StageHooks):
    """The forward passes of a pipeline's current batch."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def forward(
        self,
        stage: int,
        microbatch: int,
        received: Tensor | None,
    ) -> Tensor:
        return self._pipeline._forward_stage(stage, microbatch, received)


class _TrainingHooks(_EvaluationHooks):
    """The passes of a training step, with the reduction of gradients and the history of FP8."""

    def reduce(self, stage: int) -> None:
        self._pipeline.optimizer.reduce(self._pipeline._chunk_of_stage[stage])

    def expect(self, stage: int, is_last: bool) -> None:
        self._pipeline.optimizer.expect(self._pipeline._chunk_of_stage[stage], is_last)

    def after(self, instruction: Instruction) -> None:
        """Tell the optimizer that a backward pass, or a half of it, has ended, and let FP8's
        histories advance after each pass."""
        if instruction.op in INPUT_GRADIENTS | WEIGHT_GRADIENTS:
            self._pipeline.optimizer.end_microbatch(
                instruction.microbatch,
                self._pipeline.microbatches,
                self._pipeline._chunk_of_stage[instruction.stage],
                complete=instruction.op is not Op.BACKWARD_INPUT,
            )
        passes = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT)
        if self._pipeline._context and instruction.op in passes:
            self._pipeline._context.fp8.advance()
