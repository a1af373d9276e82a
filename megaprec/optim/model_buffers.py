"""The model chunks of a rank, laid out in flat buffers.

Parameters of one kind (same dtype, same tied ranks, sharded over as many ranks) share buffers. Two
kinds of weights are not simply views of a buffer: a DTensor is represented by a `StandIn`, and a
weight that is stored in FP8 has codes, which `FP8Masters` computes at the start of a pass.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.comm.layout import Layout, layout_of, parameters_of
from megaprec.comm.tied import tied_axes
from megaprec.comm.virtual import VirtualAxis
from megaprec.errors import UserError
from megaprec.fp8.params import FP8Group, FP8Masters
from megaprec.optim.buckets import Moments, bucket_elements, buckets
from megaprec.optim.dtensors import StandIn, is_dtensor
from megaprec.optim.flat_buffer import Buffer, require_in_place
from megaprec.optim.group_factors import Group, by_factors
from megaprec.optim.main_grad import reset_accumulation
from megaprec.optim.model_intake import Ranks, move_rest
from megaprec.optim.partial_grads import sum_partial_slices
from megaprec.optim.replicas import Replicas, expert_replicas
from megaprec.optim.same_model import TrainedModel
from megaprec.optim.untrained import Untrained
from megaprec.precision.marks import parameters_of_marked
from megaprec.precision.plan import PrecisionPlan


class ModelBuffers:
    """The buffers of all parameters of `parts`. Tensors that are not trained are moved to the
    ranks' device.

    chunks: the buffers of each part. all: all buffers in one list, in an order that all dp ranks
    share. tied: the buffers whose gradients are summed over pipeline ranks, each with its axis.
    twins: pairs of buffers of this rank whose gradients are summed. untrained: what is in no
    buffer. stand_ins: for DTensors. virtual: as for the optimizer.
    shards, average, canonical, seed: as in `Buffer`. moments: names of the moments of a parameter;
    those of a buffer have the same. bucket: elements of a buffer, as `bucket_elements` takes them;
    its last parameter may exceed this number.
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
        moments: Moments,
        seed: int,
        average: bool,
        canonical: bool = False,
        virtual: VirtualAxis | None = None,
    ) -> None:
        self._canonical = canonical
        self._virtual = virtual
        self._experts = expert_replicas(ranks.experts, ranks.dp.size, ranks.tp.size, shards.size)
        self._bucket = bucket_elements(bucket, ranks.dp.size)
        self._plan = plan
        self._ranks = ranks
        self._shards = shards
        self._groups = groups
        self._moments = moments
        self._seed = seed
        self._average = average
        self._model = TrainedModel(parts)
        spread = {p: StandIn(p, plan, ranks.device) for p in parameters_of(parts) if is_dtensor(p)}
        self.stand_ins = tuple(spread.values())
        axes = tied_axes(mesh, (layout_of(p).tied for p in parameters_of(parts)))
        self.chunks: list[list[Buffer]] = []
        taken = set[nn.Parameter]()
        marked = parameters_of_marked(parts)
        for part in parts:
            trained = list(parameters_of([part]))
            laid = [spread[p].parameter if p in spread else p for p in trained if p not in taken]
            taken.update(trained)
            self.chunks.append([self._buffer(alike) for alike in self._buckets(laid)])
            move_rest(part, plan, ranks.device, marked)
        self.all = [buffer for chunk in self.chunks for buffer in chunk]
        self.untrained = Untrained(
            parts, ranks.pp.rank, lambda layout: self._replicas(layout).every.rank == 0
        )
        tied = [buffer for buffer in self.all if layout_of(buffer.parameters[0]).tied]
        again = [buffer for buffer in tied if layout_of(buffer.parameters[0]).again]
        firsts = {_names(buffer): buffer for buffer in tied if buffer not in again}
        self.twins = [(firsts[_names(buffer)], buffer) for buffer in again]
        alone = (buffer for buffer in tied if not any(buffer in pair for pair in self.twins))
        self.tied = [(buffer, axes[layout_of(buffer.parameters[0]).tied]) for buffer in alone]

    def _buckets(self, laid: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Return the parameters of each buffer. Virtual ranks have buffers of their own, all of the
        same sizes."""
        if self._virtual is None:
            return buckets(laid, self._plan, self._bucket, self._moments)
        of_ranks = (
            [p for p in laid if layout_of(p).parts[0].rank == v] for v in self._virtual.ranks
        )
        cut = (buckets(own, self._plan, self._bucket, self._moments) for own in of_ranks)
        return [alike for same in zip(*cut, strict=True) for alike in same]

    def _buffer(self, alike: Sequence[nn.Parameter]) -> Buffer:
        """Return a buffer for these parameters.

        The slices of DTensors are neither reduced nor sharded again. Counts of loads are whole on
        every rank, because their update needs all counts of a layer.
        """
        spread = any(alike[0] is one.parameter for one in self.stand_ins)
        own = Replicas(Axis("dp"), Axis("zero")) if spread else self._replicas(layout_of(alike[0]))
        return Buffer(
            by_factors(alike, self._groups),
            self._plan,
            own.every,
            own.sharing,
            self._ranks.pp.rank,
            self._ranks.device,
            self._moments(alike[0]),
            self._seed,
            self._average and not spread,
            self._canonical,
        )

    def _replicas(self, layout: Layout) -> Replicas:
        if layout.expert and self._experts is not None:
            return self._experts
        return Replicas(self._ranks.dp, self._shards if layout.balancing is None else Axis("zero"))

    def sum_copies(self) -> None:
        """Sum gradients that are reduced over dp over the copies of a parameter: virtual ranks' and
        tied ones."""
        if self._virtual is not None:
            sum_partial_slices(self.all, self._virtual)
        for buffer, axis in self.tied:
            axis.sum_(buffer.own(buffer.grads))
        for first, second in self.twins:
            first.own(first.grads).add_(second.own(second.grads))
            second.own(second.grads).copy_(first.own(first.grads))

    def fp8_masters(
        self, begin: Callable[[Buffer], None], settle: Callable[[], None]
    ) -> FP8Masters | None:
        """Return the masters of weights that are stored in FP8, or None. Codes are all-gathered
        like other weights.

        begin, settle: of the `ParamGatherer`.
        """
        experts = self._experts
        groups = list[FP8Group]()
        for apart in (False, True):
            among = [
                buffer
                for buffer in self.all
                if buffer.in_codes and self._lies_apart(buffer) is apart
            ]
            shards = self._shards
            tp = self._ranks.tp
            if apart and experts is not None and self._ranks.experts is not None:
                shards = experts.sharing
                tp = self._ranks.experts.tp
            if among:
                groups.append(
                    FP8Group(
                        [(buffer.owned, partial(begin, buffer)) for buffer in among], shards, tp
                    )
                )
        return FP8Masters(groups, settle) if groups else None

    def _lies_apart(self, buffer: Buffer) -> bool:
        """Return True for weights of experts that are on ranks of their own."""
        return self._experts is not None and layout_of(buffer.parameters[0]).expert

    def num_elements(self, world: Axis) -> tuple[int, int]:
        """Return the numbers of elements of the whole model that are trained, and frozen.
        Collective over `world`."""
        own = sum(last - first for buffer in self.all for first, last in buffer.counted())
        count = torch.tensor(
            [own, self.untrained.num_saved()], dtype=torch.float64, device=self._ranks.device
        )
        trained, frozen = map(int, world.sum_(count).tolist())
        if not trained:
            raise UserError(
                "the model has no parameter that is to be trained: all are frozen, or there "
                "are none"
            )
        return trained, frozen

    def counted(self) -> Iterator[torch.Tensor]:
        """Yield flat views of the gradients in this rank's slices that no other rank counts."""
        yield from (
            buffer.own(buffer.grads)[a:b] for buffer in self._trained() for a, b in buffer.counted()
        )

    def copies(self) -> Iterator[torch.Tensor]:
        """Yield flat views of the gradients in this rank's slices that another rank counts."""
        yield from (
            buffer.own(buffer.grads)[a:b] for buffer in self._trained() for a, b in buffer.copies()
        )

    def _trained(self) -> Iterator[Buffer]:
        """Yield the buffers whose gradients are those of a loss."""
        return (buffer for buffer in self.all if not buffer.balances)

    def take_up_model(self, everything: bool, steps: torch.Tensor) -> None:
        """Take weights that someone has written to as they are now.

        everything, steps: as in `Buffer.take_up`. Raises an error that names parameters if the
        model is not the one that the buffers were made for.
        """
        self._model.require_same()
        require_in_place(self.all)
        for one in self.stand_ins:
            one.take_up()
        for buffer in self.all:
            buffer.take_up(everything, steps)

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


def _names(buffer: Buffer) -> tuple[tuple[str, int], ...]:
    """Return the logical slices in the buffer."""
    return tuple((piece.part.name, piece.part.rank) for piece in buffer.pieces)
