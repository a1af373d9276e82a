"""Forward passes of batches of any shape through a model in any layout: evaluation without a
pipeline schedule.

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

from megaprec.comm.axis import Axis, device_of
from megaprec.comm.waiting import waiting
from models.context_limits import require_whole
from models.stages import Stage


@dataclass(frozen=True)
class Relay:
    """A model whose stages lie on the pipeline ranks `rank_of_stage`.

    stages: those of this rank, by number. dp: the replicas. world: all ranks.
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
        return Relay({pp.rank: stage}, range(pp.size), pp, dp, Axis.world(mesh), device_of(mesh))

    @cached_property
    def last(self) -> Stage | None:
        """Return the model's last stage; None on ranks that do not hold it."""
        return self.stages.get(len(self.rank_of_stage) - 1)

    @property
    def any(self) -> Stage:
        """Return a stage of this rank, for what all of them know: configuration and context."""
        return next(iter(self.stages.values()))

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor | None:
        """Return the logits of a batch, [s, b, own vocabulary], on ranks of the last stage; None on
        others.

        tokens: int64 [s, b], the same on all ranks of pp and tp. Collective over both.
        """
        require_whole(self.any.context.cp.size, "run batches of any shape")
        x = tokens.to(self.device)
        for number, stage in sorted(self.stages.items()):
            plan = stage.context.plan
            if number and self.rank_of_stage[number - 1] != self.pp.rank:
                x = self._received(number - 1, stage, tokens.shape)
            x = stage(x if number == 0 else x.to(plan.residual))
            if stage is self.last:
                return x
            x = x.to(plan.pipeline)
            if (to := self.rank_of_stage[number + 1]) != self.pp.rank:
                with waiting():
                    dist.send(x.contiguous(), group=self.pp.group, group_dst=to)
        return None

    def _received(self, number: int, stage: Stage, shape: torch.Size) -> Tensor:
        """Receive the output of a stage, activations of the layout's shape, for the next one, which
        is `stage`."""
        context = stage.context
        length = shape[0] // (context.tp.size if context.cut_sequence else 1)
        x = torch.empty(
            length, shape[1], stage.config.hidden, dtype=context.plan.pipeline, device=self.device
        )
        with waiting():
            dist.recv(x, group=self.pp.group, group_src=self.rank_of_stage[number])
        return x
