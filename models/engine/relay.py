"""Forward passes of batches of any shape through a model in any layout, without a schedule.

Each rank takes its stages in the order of their numbers and sends the activations of the last one
on. It does not wait for later stages, so it computes the next batch while they compute this one. No
message goes back, so no rank waits for one that waits for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.comm.waiting import waiting
from models.attention.context_limits import require_uncut_sequences
from models.decoder.stages import Stage


@dataclass(frozen=True)
class Relay:
    """A model whose stages lie on the pipeline ranks `rank_of_stage`.

    stages: those of this rank, by number.
    rank_of_stage: the pipeline rank of each stage of the model.
    pp: the pipeline ranks.
    dp: the replicas.
    world: all ranks.
    device: that of the stages.
    """

    stages: Mapping[int, Stage]
    rank_of_stage: Sequence[int]
    pp: Axis = Axis("pp")
    dp: Axis = Axis("dp")
    world: Axis = Axis("world")
    device: torch.device = torch.device("cpu")

    @staticmethod
    def over(mesh: DeviceMesh | None, stage: Stage) -> "Relay":
        """Return the relay of a model with one stage on each pipeline rank, of which this rank has
        `stage`."""
        pp = Axis.of(mesh, "pp")
        dp = Axis.of(mesh, "dp")
        device = next(stage.parameters()).device
        return Relay({pp.rank: stage}, range(pp.size), pp, dp, Axis.world(mesh), device)

    @cached_property
    def last_stage(self) -> Stage | None:
        """Return the model's last stage; None on ranks that do not hold it."""
        return self.stages.get(len(self.rank_of_stage) - 1)

    @property
    def local_stage(self) -> Stage:
        """Return a stage of this rank, for what all of them know: configuration and context."""
        return next(iter(self.stages.values()))

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor | None:
        """Return the logits of a batch, [s, b, own vocabulary], on ranks of the last stage; None on
        others.

        tokens: int64 [s, b], the same on all ranks of pp and tp. Collective over both.
        """
        # the tokens of such a batch need not divide over cp
        require_uncut_sequences(self.local_stage.context.cp.size, "run batches of any shape")
        x = tokens.to(self.device)
        # In the order of their numbers, whatever other ranks hold between them.
        for number, stage in sorted(self.stages.items()):
            plan = stage.context.plan
            if number == 0:
                x = stage(x)
            else:
                source = self.rank_of_stage[number - 1]
                if source != self.pp.rank:
                    x = self._receive(source, stage, tokens.shape)
                x = stage(x.to(plan.residual))
            if stage is self.last_stage:
                return x
            # rounded between stages of one rank too, so that a layout does not change the numbers
            x = x.to(plan.pipeline)
            target = self.rank_of_stage[number + 1]
            if target != self.pp.rank:
                with waiting():
                    dist.send(x.contiguous(), group=self.pp.group, group_dst=target)
        return None

    def _receive(
        self,
        source: int,
        stage: Stage,
        tokens_shape: torch.Size,
    ) -> Tensor:
        """Return the activations that `stage` reads, received from rank `source` of pp: [s, b,
        hidden], or this rank's shard of them under sequence parallelism.

        tokens_shape: [s, b].
        """
        context = stage.context
        length, batch = tokens_shape
        # Each rank of tp has sent its own shard.
        if context.cut_sequence:
            length //= context.tp.size
        shape = (length, batch, stage.config.hidden)
        activations = torch.empty(shape, dtype=context.plan.pipeline, device=self.device)
        with waiting():
            dist.recv(activations, group=self.pp.group, group_src=source)
        return activations
