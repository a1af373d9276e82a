"""A pipeline stage that consists of this process's virtual ranks (`parallel.lockstep`).

Each virtual rank is a whole stage of its own, with its shard of every weight, built over a
tensor-parallel axis of the fixed size, always with sequence parallelism. To the pipeline the stage
looks like one stage: activations on its borders are the process's shards of the sequence, which are
those of its virtual ranks one after the other. Each virtual rank has an autograd graph of its own
between the borders, and the backward passes through these graphs are in lockstep too.

The process holds the replicated weights (norms, biases of row-parallel layers, routers, positions)
once for each of its virtual ranks. The names of its modules begin with `shardN.`, where N is the
number of the virtual rank.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megaprec.comm.virtual import VirtualAxis
from megaprec.errors import UserError
from models.attention.packing import UNPACKED, Packing
from models.config import ModelConfig
from models.decoder.cutting import MakeStage
from models.decoder.stages import Cut, Stage
from parallel.context import Context
from parallel.dropout import MicrobatchInfo
from parallel.lockstep import Lockstep
from parallel.weight_grad_queue import WeightGradQueue, carry_out


def over_virtual_ranks(make: MakeStage, virtual: VirtualAxis) -> MakeStage:
    """Return a function that builds a stage of the virtual ranks of this process, each by `make`.

    It raises UserError for a model with modules of multi-token prediction.
    """

    def make_virtual(
        config: ModelConfig,
        context: Context,
        cut: Cut,
        tied: tuple[int, ...],
    ) -> Any:
        """Return one stage for all virtual ranks of this process."""
        if config.mtp_layers:
            raise UserError.of("model.mtp_virtual_ranks", mtp_layers=config.mtp_layers)
        lockstep = Lockstep(virtual)
        # A process with one virtual rank has an ordinary stage, whose tp axis sums canonically.
        if virtual.num_local == 1:
            (tp,) = lockstep.axes
            return make(config, replace(context, tp=tp, sequence=True), cut, tied)
        shards: list[Stage] = []
        queues: list[WeightGradQueue] = []
        for tp in lockstep.axes:
            queue = WeightGradQueue()
            shard_context = replace(context, tp=tp, sequence=True, deferred=queue)
            shards.append(make(config, shard_context, cut, tied))
            queues.append(queue)
        return VirtualStage(lockstep, shards, cut, context.deferred, queues)

    return make_virtual


class VirtualStage(nn.Module):
    """The stages of this process's virtual ranks as one stage; forward and losses as in
    `models.decoder.stages.Stage`.

    The logits of the last stage are a tuple, one tensor for each virtual rank.
    deferred: the queue of the executor.
    queues: those of the shards, in whose place it comes.
    """

    def __init__(
        self,
        lockstep: Lockstep,
        shards: Sequence[Stage],
        cut: Cut,
        deferred: WeightGradQueue,
        queues: Sequence[WeightGradQueue],
    ) -> None:
        super().__init__()
        self.lockstep = lockstep
        self.cut = cut
        self.deferred = deferred
        self.queues = tuple(queues)
        # a tuple: a ModuleList would count as a list of layers, which wait for all of their weights
        self.shards = tuple(shards)
        for rank, shard in zip(lockstep.virtual.ranks, shards, strict=True):
            self.add_module(f"shard{rank}", shard)

    def named_parameters(
        self,
        prefix: str = "",
        recurse: bool = True,
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of all virtual ranks, those of the same logical tensor one after the
        other."""
        start = f"{prefix}." if prefix else ""
        ranks = self.lockstep.virtual.ranks
        parameters_of_shards = [
            shard.named_parameters(f"{start}shard{rank}", recurse, remove_duplicate)
            for rank, shard in zip(ranks, self.shards, strict=True)
        ]
        for parameters_of_tensor in zip(*parameters_of_shards, strict=True):
            yield from parameters_of_tensor

    def forward(
        self,
        x: Tensor,
        microbatch: MicrobatchInfo | None = None,
        packing: Packing = UNPACKED,
    ) -> Tensor | tuple[Tensor, ...]:
        # ids are the same for all virtual ranks; activations are cut along the sequence
        if self.cut.first:
            inputs = [x] * len(self.shards)
        else:
            # copies: a view would keep all of x alive in each graph
            inputs = [shard.clone() for shard in x.chunk(len(self.shards))]

        def forward_of(shard: Stage) -> Callable[[Tensor], Tensor]:
            def forward(x: Tensor) -> Tensor:
                # by position: a stage of the user's may name its arguments otherwise
                return shard(x, microbatch, packing)

            return forward

        outputs = self._run([forward_of(shard) for shard in self.shards], inputs)
        return tuple(outputs) if self.cut.last else torch.cat(outputs)

    def losses(self, logits: Sequence[Tensor], targets: Tensor) -> Tensor:
        """Return the loss of each token, [s, b] like `targets`; it is the same for all virtual
        ranks."""
        functions = [partial(shard.losses, targets=targets) for shard in self.shards]
        return _First.apply(*self._run(functions, logits))

    def losses_and_log_sums(self, logits: Sequence[Tensor], targets: Tensor) -> Tensor:
        """Return [2, s, b], the same for all virtual ranks, as `Stage.losses_and_log_sums` does."""
        functions = [partial(shard.losses_and_log_sums, targets=targets) for shard in self.shards]
        return _First.apply(*self._run(functions, logits))

    def _run(
        self, functions: Sequence[Callable[[Tensor], Tensor]], inputs: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return functions[n](inputs[n]) for each virtual rank n of this process, run in lockstep.
        Gradients flow to the inputs and the weights."""
        if not torch.is_grad_enabled():
            return self.lockstep.run(_bind(functions, inputs))
        # Autograd runs the backward pass of a node only if some input of it needs a gradient: ids
        # do not, although the weights behind them do.
        anchor = torch.zeros((), requires_grad=True)
        return list(_Lanes.apply(anchor, self, functions, *inputs))

    def back_propagate(self, ends: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
        """Run the backward pass of each virtual rank's graph, in lockstep; defer weight gradients
        if the executor does.

        ends: where each graph ends. gradients: those of the results there.
        """
        passes = [
            partial(torch.autograd.backward, (end,), (gradient,))
            for end, gradient in zip(ends, gradients, strict=True)
        ]
        # a whole backward pass, in which weight gradients are computed at once
        if not self.deferred.is_collecting:
            self.lockstep.run(passes)
            return
        with ExitStack() as stack:
            # one queue for each: its work runs in its own lane later, where its products may gather
            works = [stack.enter_context(queue.collect()) for queue in self.queues]
            self.lockstep.run(passes)
        weight_passes = [partial(carry_out, work) for work in works]
        self.deferred.offer(partial(self.lockstep.run, weight_passes))


def _bind(
    functions: Sequence[Callable[[Tensor], Tensor]], inputs: Sequence[Tensor]
) -> list[Callable[[], Tensor]]:
    """Return each function with its input."""
    return [partial(function, x) for function, x in zip(functions, inputs, strict=True)]


class _Lanes(torch.autograd.Function):
    """The functions of the virtual ranks, each with a graph of its own, as one node of the outer
    graph."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        stage: VirtualStage,
        functions: Sequence[Callable[[Tensor], Tensor]],
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        # Each virtual rank's graph begins at leaves of its own.
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
        with torch.enable_grad():
            outputs = stage.lockstep.run(_bind(functions, leaves))
        ctx.stage = stage
        ctx.inputs = leaves
        # The edges keep the graphs alive, without the outputs.
        ctx.ends = [get_gradient_edge(output) for output in outputs]
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.stage.back_propagate(ctx.ends, gradients)
        # the graphs are spent: what they keep is not needed any more
        del ctx.ends
        return None, None, None, *(x.grad for x in ctx.inputs)


class _First(torch.autograd.Function):
    """The first of several equal tensors; each of them gets the full gradient."""

    @staticmethod
    def forward(ctx: Any, *equal: Tensor) -> Tensor:
        ctx.count = len(equal)
        return equal[0].view_as(equal[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return (grad,) * ctx.count
