"""The model chunks of a rank, laid out in flat buffers.

Parameters of one kind (same dtype, same tied ranks, sharded over as many ranks) share buffers. Two kinds of weights are
not simply views of a buffer: a DTensor is represented by a `StandIn`, and a weight that is stored in FP8 has codes,
which `FP8Masters` computes at the start of a pass.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.comm.layout import layout_of, parameters_of
from megaprec.comm.tied import tied_axes
from megaprec.optim.dtensors import StandIn, is_dtensor
from megaprec.optim.flat_buffer import Buffer, buckets
from megaprec.optim.group_factors import Group, by_factors
from megaprec.optim.main_grad import reset_accumulation
from megaprec.optim.model_intake import Ranks, move_rest
from megaprec.precision.marks import parameters_of_marked
from megaprec.precision.plan import PrecisionPlan


class ModelBuffers:
    """The buffers of all parameters of `parts`. Tensors that are not trained are moved to the ranks' device.

    chunks: the buffers of each part. all: all buffers in one list, in an order that all dp ranks share. tied: the
    buffers whose gradients are summed over pipeline ranks, each with its axis. stand_ins: for DTensors.
    shards, average, state, seed: as in `Buffer`. bucket: elements of a buffer; its last
    parameter may exceed this number.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        plan: PrecisionPlan,
        mesh: DeviceMesh | None,
        ranks: Ranks,
        shards: Axis,
        groups: Sequence[Group],
        bucket: int,
        state: Sequence[str],
        seed: int,
        average: bool,
    ) -> None:
        self._plan, self._ranks, self._shards, self._groups = plan, ranks, shards, groups
        self._state, self._seed, self._average = state, seed, average
        spread = {p: StandIn(p, plan, ranks.device) for p in parameters_of(parts) if is_dtensor(p)}
        self.stand_ins = tuple(spread.values())
        axes = tied_axes(mesh, (layout_of(p).tied for p in parameters_of(parts)))
        self.chunks: list[list[Buffer]] = []
        taken, marked = set[nn.Parameter](), parameters_of_marked(parts)
        for part in parts:
            trained = list(parameters_of([part]))
            laid = [spread[p].parameter if p in spread else p for p in trained if p not in taken]
            taken.update(trained)
            self.chunks.append([self._buffer(alike) for alike in buckets(laid, plan, bucket)])
            move_rest(part, plan, ranks.device, marked)
        self.all = [buffer for chunk in self.chunks for buffer in chunk]
        of_buffer = ((buffer, layout_of(buffer.parameters[0]).tied) for buffer in self.all)
        self.tied = [(buffer, axes[pipeline_ranks]) for buffer, pipeline_ranks in of_buffer if pipeline_ranks]

    def _buffer(self, alike: Sequence[nn.Parameter]) -> Buffer:
        """Return a buffer for these parameters. The slices of DTensors are neither reduced nor sharded again."""
        spread = any(alike[0] is one.parameter for one in self.stand_ins)
        return Buffer(
            by_factors(alike, self._groups),
            self._plan,
            Axis("dp") if spread else self._ranks.dp,
            Axis("zero") if spread else self._shards,
            self._ranks.pp.rank,
            self._ranks.device,
            self._state,
            self._seed,
            self._average and not spread,
        )

    def counted(self) -> Iterator[torch.Tensor]:
        """Yield flat views of the gradients in this rank's slices that no other rank counts."""
        yield from (buffer.own(buffer.grads)[a:b] for buffer in self.all for a, b in buffer.counted())

    def copies(self) -> Iterator[torch.Tensor]:
        """Yield flat views of the gradients in this rank's slices that another rank counts."""
        yield from (buffer.own(buffer.grads)[a:b] for buffer in self.all for a, b in buffer.copies())

    def take_gradients(self) -> None:
        """Copy the gradients of DTensors to the buffers."""
        for one in self.stand_ins:
            one.take_gradient()

    def give_back(self) -> None:
        """Write the updated weights of DTensors to the model."""
        for one in self.stand_ins:
            one.give_back()

    def forget_gradients(self) -> None:
        """Discard all gradients, to begin a new step."""
        for buffer in self.all:
            reset_accumulation(buffer.parameters)
        for one in self.stand_ins:
            one.forget_gradient()
