"""Whole logical matrices from the slices that the ranks of a stage hold, and results back to all
who hold a slice.

Tensor parallelism cuts a matrix by rows or columns, ZeRO-1 cuts the flattened slices again, and
replicas hold copies. So that a matrix is computed whole and once, each has an owner among the data-
and tensor-parallel ranks of its pipeline stage. The ranks that hold it send the owner its elements,
each element once, and the owner sends every rank the elements that it holds. Owners are chosen by
the cost of their matrices, the most expensive first, each to the rank that has least to do: a stage
of 16 ranks computes each matrix once and not 16 times.

What each rank holds is gathered once, at the start. Nothing is assumed about other ranks but that
they have the same matrices. This is checked, and so is that the elements which are sent add up to
each matrix.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from math import prod
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.comm.layout import Part

Shapes = Mapping[str, tuple[int, ...]]


class MatrixSlice(NamedTuple):
    """A slice of a matrix: the fields of `HeldSpan` that say which."""

    matrix: int
    dim: int
    shards: int
    shard: int


class HeldSpan(NamedTuple):
    """Elements [start, stop) of a flattened slice of a matrix, as one rank holds them.

    matrix: its number among the matrices of the stage.
    buffer: number of the buffer that they lie in, which has an exchange of its own.
    dim, shards, shard: of the slice, as in `Part`; dim is -1 if the slice is the whole matrix.
    sent_start, sent_stop: the elements among them that this rank sends the owner.
    """

    matrix: int
    buffer: int
    dim: int
    shards: int
    shard: int
    start: int
    stop: int
    sent_start: int
    sent_stop: int

    @property
    def size(self) -> int:
        """Return the number of elements that the rank holds."""
        return self.stop - self.start

    @property
    def num_sent(self) -> int:
        """Return the number of elements that are sent to the owner."""
        return self.sent_stop - self.sent_start

    @property
    def sent_span(self) -> slice:
        """Return the positions of the sent elements among those that the rank holds."""
        begin = self.sent_start - self.start
        end = self.sent_stop - self.start
        return slice(begin, end)

    @property
    def matrix_slice(self) -> MatrixSlice:
        """Return the slice that the elements are of."""
        return MatrixSlice(self.matrix, self.dim, self.shards, self.shard)


class ReceivedElements(NamedTuple):
    """Flat elements of a matrix that an owner has received from a rank that holds them."""

    span: HeldSpan
    values: Tensor


class MatrixExchange:
    """The owners of the matrices of a stage, and the exchanges between them and the ranks that hold
    slices.

    shapes: of all matrices of the stage, by name, the same on every rank.
    costs: of computing each matrix, in any unit.
    held_spans: the elements that this rank holds.
    num_buffers: number of buffers; each has an exchange of its own in a step.
    dtype: of the exchanged elements.

    owners: for each matrix, by its number, the rank of `stage` that orthogonalizes it.
    owned: numbers of the matrices that this rank owns.
    Collective over `stage`. Raises RuntimeError on every rank if ranks have different matrices, or
    if elements of a matrix are sent by no rank or by several.
    """

    def __init__(
        self,
        shapes: Shapes,
        costs: Sequence[float],
        held_spans: Sequence[HeldSpan],
        num_buffers: int,
        stage: Axis,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.shapes = tuple(shapes.values())
        self.stage = stage
        self._empty = torch.empty(0, dtype=dtype, device=device)
        self.owners = owners_of(costs, stage.size)
        matrices = range(len(shapes))
        self.owned = [matrix for matrix in matrices if self.owners[matrix] == stage.rank]
        # matrices are sent by their numbers: all ranks must mean the same ones
        common_text = json.dumps([dict(shapes), num_buffers])
        fingerprint = crc32(common_text.encode())
        spans_by_rank = _gather_spans(held_spans, fingerprint, stage, device)
        _require_complete(shapes, spans_by_rank)
        # self._spans[buffer][rank]: the elements that a rank of the stage holds in a buffer. All
        # ranks know all of them from the start, so that a step exchanges elements only.
        self._spans: list[list[list[HeldSpan]]] = []
        for buffer in range(num_buffers):
            in_buffer: list[list[HeldSpan]] = []
            for spans_of_rank in spans_by_rank:
                held = [span for span in spans_of_rank if span.buffer == buffer]
                in_buffer.append(held)
            self._spans.append(in_buffer)

    def start_collect(
        self,
        buffer: int,
        values: Sequence[Tensor],
    ) -> Callable[[], list[ReceivedElements]]:
        """Start to send the elements in a buffer to the owners of their matrices.

        values: flat elements, for each of this rank's `HeldSpan`s in the buffer.

        The returned function waits; it returns what this rank received of the matrices that it
        owns. Collective over `stage`.
        """
        local_rank = self.stage.rank
        # [rank]: the tensors for it
        outgoing: list[list[Tensor]] = [[] for _ in range(self.stage.size)]
        local_spans = self._spans[buffer][local_rank]
        for span, elements in zip(local_spans, values, strict=True):
            owner = self.owners[span.matrix]
            outgoing[owner].append(elements[span.sent_span])
        incoming: list[list[HeldSpan]] = []  # [rank]: what comes from it
        sizes: list[list[int]] = []  # numbers of elements of these
        for rank in range(self.stage.size):
            spans_of_rank = self._spans_of_owner(buffer, rank, local_rank)
            incoming.append(spans_of_rank)
            sizes.append([span.num_sent for span in spans_of_rank])
        wait = self._start(outgoing, sizes)

        def finish() -> list[ReceivedElements]:
            received: list[ReceivedElements] = []
            for spans, tensors in zip(incoming, wait(), strict=True):
                received += map(ReceivedElements, spans, tensors)
            return received

        return finish

    def start_return(
        self,
        buffer: int,
        results: Mapping[int, Tensor],
    ) -> Callable[[], list[Tensor]]:
        """Start to send every rank the results for the elements that it holds in a buffer.

        results: the matrices [m, n] that this rank owns, orthogonalized, by number.

        The returned function waits; it returns flat results for each of this rank's `HeldSpan`s in
        the buffer. Collective over `stage`.
        """
        # several ranks hold elements of one slice, which is made contiguous once
        flat_slices: dict[MatrixSlice, Tensor] = {}

        def results_for(span: HeldSpan) -> Tensor:
            """Return the results for the elements of a span, flat."""
            matrix_slice = span.matrix_slice
            if matrix_slice not in flat_slices:
                part = self._part_of(matrix_slice)
                values_of_slice = part.take(results[span.matrix])
                flat_slices[matrix_slice] = values_of_slice.reshape(-1)
            flat = flat_slices[matrix_slice]
            return flat[span.start : span.stop]

        local_rank = self.stage.rank
        outgoing: list[list[Tensor]] = []
        sizes: list[list[int]] = []
        for rank in range(self.stage.size):
            sent_spans = self._spans_of_owner(buffer, rank, local_rank)
            received_spans = self._spans_of_owner(buffer, local_rank, rank)
            outgoing.append([results_for(span) for span in sent_spans])
            sizes.append([span.size for span in received_spans])
        wait = self._start(outgoing, sizes)

        def finish() -> list[Tensor]:
            # each owner sends in the order in which this rank holds its elements
            from_owners = [iter(tensors) for tensors in wait()]
            in_order: list[Tensor] = []
            for span in self._spans[buffer][local_rank]:
                owner = self.owners[span.matrix]
                in_order.append(next(from_owners[owner]))
            return in_order

        return finish

    def assemble(self, received: Sequence[ReceivedElements]) -> dict[int, Tensor]:
        """Return the matrices that this rank owns, by number, from what it received in all
        exchanges of a step."""
        by_slice: dict[MatrixSlice, list[ReceivedElements]] = defaultdict(list)
        for elements in received:
            matrix_slice = elements.span.matrix_slice
            by_slice[matrix_slice].append(elements)
        # empty, for every element is received: `_require_complete` has counted them
        matrices = {number: self._empty.new_empty(self.shapes[number]) for number in self.owned}
        for matrix_slice, elements_of_slice in by_slice.items():
            part = self._part_of(matrix_slice)
            num_elements = prod(part.local)
            flat = self._empty.new_empty(num_elements)
            for span, values in elements_of_slice:
                flat[span.sent_start : span.sent_stop] = values
            matrix = matrices[matrix_slice.matrix]
            target = part.take(matrix)  # a view of the matrix
            target.copy_(flat.view(part.local))
        return matrices

    def _start(
        self,
        outgoing: list[list[Tensor]],
        sizes: list[list[int]],
    ) -> Callable[[], list[Sequence[Tensor]]]:
        """Start an all-to-all of several flat tensors to and from each rank of `stage`.

        outgoing: [rank], the tensors for that rank.
        sizes: [rank], the numbers of elements of the tensors that come from that rank.

        The returned function waits; it returns the tensors that came from each rank.
        """
        # an all-to-all has one tensor for each pair of ranks
        joined: list[Tensor] = []
        for tensors in outgoing:
            joined.append(torch.cat(tensors) if tensors else self._empty)
        joined_sizes = [sum(sizes_of_rank) for sizes_of_rank in sizes]
        wait = self.stage.start_uneven_exchange(joined, joined_sizes)

        def finish() -> list[Sequence[Tensor]]:
            received: list[Sequence[Tensor]] = []
            for flat, sizes_of_rank in zip(wait(), sizes, strict=True):
                received.append(flat.split(sizes_of_rank))
            return received

        return finish

    def _spans_of_owner(self, buffer: int, rank: int, owner: int) -> list[HeldSpan]:
        """Return the elements that `rank` holds in a buffer, of matrices that `owner` owns."""
        spans = self._spans[buffer][rank]
        return [span for span in spans if self.owners[span.matrix] == owner]

    def _part_of(self, matrix_slice: MatrixSlice) -> Part:
        """Return the part whose `take` returns the slice as a view of its matrix."""
        shape = self.shapes[matrix_slice.matrix]
        dim = None if matrix_slice.dim < 0 else matrix_slice.dim
        # without a name, which `take` does not need
        return Part("", shape, dim, matrix_slice.shards, matrix_slice.shard)


def owners_of(costs: Sequence[float], ranks: int) -> list[int]:
    """Return the owner, from 0 to `ranks` - 1, of each matrix. The most expensive matrix is
    assigned first, and each goes to the rank with the least cost so far."""
    owners = [0] * len(costs)
    loads = [0.0] * ranks  # cost so far
    # `sorted` and `min` keep the order of what is equal, so that all ranks choose alike
    most_expensive_first = sorted(range(len(costs)), key=lambda matrix: -costs[matrix])
    for matrix in most_expensive_first:
        owner = min(range(ranks), key=loads.__getitem__)
        owners[matrix] = owner
        loads[owner] += costs[matrix]
    return owners


def _gather_spans(
    local_spans: Sequence[HeldSpan],
    fingerprint: int,
    stage: Axis,
    device: torch.device,
) -> list[list[HeldSpan]]:
    """Return the elements that each rank of `stage` holds: one all-gather of a table of integers,
    with a row for each span.

    fingerprint: a number that must be equal on all ranks. Raises RuntimeError, on every rank, if it
    is not. Collective over `stage`.
    """
    width = len(HeldSpan._fields)
    # the first row has the fingerprint and the number of rows after it
    padding = [0] * (width - 2)
    header = (fingerprint, len(local_spans), *padding)
    rows = torch.tensor([header, *local_spans], device=device)
    num_rows = torch.tensor(len(rows), device=device)
    # tables of one height, that of the rank with most rows: a gather needs equal shapes
    height = int(stage.max_(num_rows))
    table = rows.new_zeros(height, width)
    table[: len(rows)] = rows
    gathered = stage.gather(table).view(stage.size, height, width)
    spans_by_rank: list[list[HeldSpan]] = []
    for header_of_rank, *rows_of_rank in gathered.tolist():
        fingerprint_of_rank, num_spans, *_ = header_of_rank
        if fingerprint_of_rank != fingerprint:
            raise RuntimeError(
                "the ranks of a stage hold different matrices, or hold them in different buffers"
            )
        # rows beyond these are zeros that fill up the table
        spans_of_rank = [HeldSpan(*row) for row in rows_of_rank[:num_spans]]
        spans_by_rank.append(spans_of_rank)
    return spans_by_rank


def _require_complete(shapes: Shapes, spans_by_rank: Sequence[Sequence[HeldSpan]]) -> None:
    """Raise RuntimeError unless the elements that all ranks send add up to each matrix."""
    num_sent = [0] * len(shapes)
    for span in chain.from_iterable(spans_by_rank):
        num_sent[span.matrix] += span.num_sent
    for (name, shape), count in zip(shapes.items(), num_sent, strict=True):
        if count != prod(shape):
            raise RuntimeError(
                f"{name}: the ranks of its stage give {count} elements of a matrix {list(shape)}"
            )
