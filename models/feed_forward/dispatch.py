"""The way of tokens to the ranks of their experts, and of the results back.

Where experts are spread over ranks (`megaprec.comm.experts`), each rank sorts the rows of its
tokens by expert and sends each other rank those of its experts; the results come back the same way.
Every row arrives, however many there are. The backward pass is the reverse: gradients of results go
to the experts, gradients of rows come back.

    tokens -> rows sorted by expert -> all-to-all -> rows by source, then expert
           -> rows by expert, then source -> experts

The ranks first exchange how many rows go where. The host waits for these numbers once a layer and
pass, because a message needs a size; products of the rows then need no further wait, grouped or
not. Meanwhile the device sorts the rows. A recomputed layer waits again.

Ranks that hold slices of the same experts also hold the same tokens, and send the same rows along
their own axes. Where experts have fewer slices than there are tp ranks, each tp rank takes a part
of the tokens, so that none is sent twice. The sums of an expert run over its rows by source rank,
then by token; a token's results are summed as they were chosen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.comm.experts import ExpertAxes
from megaprec.errors import UserError
from models.config import ModelConfig


def spread_experts(
    config: ModelConfig,
    mesh: DeviceMesh | None,
    expert: int,
    expert_tensor: int,
    canonical_shards: int = 0,
) -> ExpertAxes | None:
    """Return the axes of ranks that share the experts of each layer, or None if each rank has
    slices of all experts, as of any other feed-forward.

    config: the model.
    mesh: of all ranks; None: one process.
    expert: the number of ranks over which the experts of a layer are spread.
    expert_tensor: the number of slices of each expert; 0: as many as there are tp ranks.
    canonical_shards: above 0 if sums have the same bits in every layout.
    Raises UserError if the model has no experts, or not as many as divide. Collective over the
    world.
    """
    # Experts that are cut as other feed-forwards need no axes of their own.
    if expert == 1 and not (expert_tensor and config.experts):
        return None
    if not config.experts or config.experts % expert:
        raise UserError.of("model.experts_over_ranks", experts=config.experts, expert=expert)
    axes = ExpertAxes.of(mesh, expert, expert_tensor)
    if axes is None:
        return None
    if canonical_shards:
        raise UserError.of("model.experts_canonical")
    if config.ffn % axes.tp.size:
        raise UserError.of("model.experts_slices", ffn=config.ffn, size=axes.tp.size)
    return axes


def rows_of_rank(
    count: int,
    tp: Axis,
    experts: ExpertAxes,
) -> slice:
    """Return the slice of `count` rows that this rank sends to experts, where experts have fewer
    slices than `tp` has ranks, so that no row is sent twice."""
    # as many neighbouring tp ranks as an expert has slices send the same rows
    num_parts = tp.size // experts.tp.size
    part = tp.rank // experts.tp.size
    first = count * part // num_parts
    stop = count * (part + 1) // num_parts
    return slice(first, stop)


@dataclass(frozen=True)
class Dispatch:
    """The exchange of the rows of one layer: how many go to each rank, and come from it.

    axis: the ranks over which experts are spread.
    sent: the number of rows that go to each rank.
    received: the number of rows that come, received[rank][expert of this rank].
    """

    axis: Axis
    sent: tuple[int, ...]
    received: tuple[tuple[int, ...], ...]

    @staticmethod
    def start(counts: Tensor, axis: Axis) -> Callable[[], "Dispatch"]:
        """Start to exchange the counts of rows that are sorted by expert; the returned function
        waits for those of other ranks. Collective over the axis.

        counts: int64, the rows of each expert of the layer. The host waits for them in the returned
        function.
        """
        wait_for_counts = axis.start_exchange_of_counts(counts)

        def finish() -> Dispatch:
            to_experts, from_ranks = wait_for_counts()
            experts_per_rank = len(to_experts) // axis.size
            # an expert's rows are counted apart only where they arrive
            sent = [sum(rank_counts) for rank_counts in _by_rank(to_experts, experts_per_rank)]
            received = _by_rank(from_ranks, experts_per_rank)
            return Dispatch(axis, tuple(sent), tuple(received))

        return finish

    @property
    def received_of_rank(self) -> tuple[int, ...]:
        """Return the number of rows that come from each rank."""
        return tuple(sum(counts) for counts in self.received)

    @property
    def counts(self) -> list[int]:
        """Return the number of rows that each expert of this rank receives."""
        by_expert = zip(*self.received, strict=True)  # of each expert the rows from each rank
        return [sum(rows_from_ranks) for rows_from_ranks in by_expert]

    def send(self, rows: Tensor) -> Tensor:
        """Send rows [n, h], sorted by expert, to the experts' ranks; return the received ones,
        sorted by expert. Collective over the axis."""
        # Each rank's rows arrive sorted by expert, one rank after the other.
        by_source = ExchangeRows.apply(rows, self.axis, self.sent, self.received_of_rank)
        return transpose_groups(by_source, self.received)

    def send_back(self, results: Tensor) -> Tensor:
        """Send the results of received rows back to the ranks that sent the rows, and return those
        of this rank's own rows, in the order in which it sent these. Collective over the axis.

        results: of what `send` has returned, in its order.
        """
        # sorted by expert, then by the rank that the row came from: sorted by rank first to go back
        received_by_expert = list(zip(*self.received, strict=True))
        by_source = transpose_groups(results, received_by_expert)
        return ExchangeRows.apply(by_source, self.axis, self.received_of_rank, self.sent)


def _by_rank(counts: Sequence[int], experts_per_rank: int) -> list[tuple[int, ...]]:
    """Return counts of experts of all ranks as those of each rank, which are neighbouring ones."""
    firsts = range(0, len(counts), experts_per_rank)
    return [tuple(counts[first : first + experts_per_rank]) for first in firsts]


def transpose_groups(rows: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
    """Return rows that are sorted by i, then j, sorted by j, then i.

    counts[i][j]: the number of rows of i and j.
    """
    # in the order in which the groups lie: i by i, and within it j by j
    group_sizes = list(chain.from_iterable(counts))
    groups = rows.split(group_sizes)
    columns = len(counts[0])
    transposed: list[Tensor] = []
    for column in range(columns):
        transposed += groups[column::columns]
    return torch.cat(transposed)


class ExchangeRows(torch.autograd.Function):
    """An all-to-all of rows [n, h] -> [m, h]: `sent` rows to each rank of the axis, `received` rows
    from each.

    The backward pass is the reverse exchange.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        axis: Axis,
        sent: Sequence[int],
        received: Sequence[int],
    ) -> Tensor:
        ctx.axis = axis
        ctx.sent = sent
        ctx.received = received
        return axis.start_exchange_of_rows(rows, sent, received)()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        wait = ctx.axis.start_exchange_of_rows(grad, ctx.received, ctx.sent)
        return wait(), None, None, None
