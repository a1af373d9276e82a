"""Whole logical matrices from the slices that the ranks of a stage hold, and results back to all
who hold a slice.

Tensor parallelism cuts a matrix by rows or columns, ZeRO-1 cuts the flattened slices again, and
replicas hold copies. So that a matrix is computed whole and once, each has an owner among the data-
and tensor-parallel ranks of its pipeline stage. The ranks that hold it give the owner its elements,
each element once, and the owner sends every rank the elements that it holds. Owners are chosen by
the cost of their matrices, the most expensive first, each to the rank that has least to do: a stage
of 16 ranks computes each matrix once and not 16 times.

What each rank holds is gathered once, at the start. Nothing is assumed about other ranks but that
they have the same matrices. This is checked, and so is that the elements which are given add up to
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
    """The identity of a slice among the slices of all matrices; fields as in `HeldElements`."""

    matrix: int
    dim: int
    shards: int
    shard: int


class HeldElements(NamedTuple):
    """Elements [first, last) of a flattened slice of a matrix, as one rank holds them.

    matrix: its number among the matrices of the stage.
    buffer: number of the buffer that they lie in, which has an exchange of its own.
    dim, shards, shard: of the slice, as in `Part`; dim is -1 if the slice is the whole matrix.
    given_first, given_last: the elements among them that this rank gives the owner.
    """

    matrix: int
    buffer: int
    dim: int
    shards: int
    shard: int
    start: int
    stop: int
    given_first: int
    given_last: int

    @property
    def size(self) -> int:
        """Return the number of elements that the rank holds."""
        return self.stop - self.start

    @property
    def given(self) -> int:
        """Return the number of elements that are given to the owner."""
        return self.given_last - self.given_first

    @property
    def given_span(self) -> slice:
        """Return the positions of the given elements among those that the rank holds."""
        return slice(self.given_first - self.start, self.given_last - self.start)

    @property
    def matrix_slice(self) -> MatrixSlice:
        """Return the slice that the elements are of."""
        return MatrixSlice(self.matrix, self.dim, self.shards, self.shard)


class ReceivedElements(NamedTuple):
    """Flat elements of a matrix that an owner has received from a rank that holds them."""

    held: HeldElements
    values: Tensor


class MatrixExchange:
    """The owners of the matrices of a stage, and the exchanges between them and the ranks that hold
    slices.

    shapes: of all matrices of the stage, by name, the same on every rank.
    costs: of computing each, in any unit.
    held: what this rank holds.
    num_buffers: each has an exchange in a step.
    dtype: of the exchanged elements.
    owned: numbers of the matrices that this rank owns.
    Collective over `stage`. Raises RuntimeError on every rank if ranks have different matrices, or
    if elements of a matrix are given by no rank or by several.
    """

    def __init__(
        self,
        shapes: Shapes,
        costs: Sequence[float],
        held: Sequence[HeldElements],
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
        facts = json.dumps([dict(shapes), num_buffers])
        held_by_rank = _gather_held(held, crc32(facts.encode()), stage, device)
        _require_complete(shapes, held_by_rank)
        # Known once, so that a step exchanges elements only. [buffer][rank]: what a rank gives and
        # receives in an exchange.
        self._held: list[list[list[HeldElements]]] = []
        for buffer in range(num_buffers):
            self._held.append([_in_buffer(buffer, of_rank) for of_rank in held_by_rank])

    def start_collect(
        self,
        buffer: int,
        values: Sequence[Tensor],
    ) -> Callable[[], list[ReceivedElements]]:
        """Start to give the owners the elements in a buffer. values: flat, of all that this rank
        holds in it.

        The returned function waits; it returns what this rank received of the matrices that it
        owns.
        """
        local_rank = self.stage.rank
        outgoing: list[list[Tensor]] = [[] for _ in range(self.stage.size)]
        for held, elements in zip(self._held[buffer][local_rank], values, strict=True):
            owner = self.owners[held.matrix]
            outgoing[owner].append(elements[held.given_span])
        incoming: list[list[HeldElements]] = []
        sizes: list[list[int]] = []
        for rank in range(self.stage.size):
            from_rank = self._held_of_owner(buffer, rank, local_rank)
            incoming.append(from_rank)
            sizes.append([held.given for held in from_rank])
        wait = self._start(outgoing, sizes)

        def finish() -> list[ReceivedElements]:
            received: list[ReceivedElements] = []
            for from_rank, tensors in zip(incoming, wait(), strict=True):
                received += map(ReceivedElements, from_rank, tensors)
            return received

        return finish

    def start_return(
        self,
        buffer: int,
        results: Mapping[int, Tensor],
    ) -> Callable[[], list[Tensor]]:
        """Start to send every rank the elements that it holds in a buffer. results: [m, n], of the
        matrices that this rank owns.

        The returned function waits; it returns the flat results of all that this rank holds in the
        buffer.
        """
        # several ranks hold elements of one slice, which is made contiguous once
        flat_slices: dict[MatrixSlice, Tensor] = {}

        def elements_of(held: HeldElements) -> Tensor:
            matrix_slice = held.matrix_slice
            if matrix_slice not in flat_slices:
                part = self._part_of(matrix_slice)
                flat_slices[matrix_slice] = part.take(results[held.matrix]).reshape(-1)
            return flat_slices[matrix_slice][held.start : held.stop]

        local_rank = self.stage.rank
        outgoing: list[list[Tensor]] = []
        sizes: list[list[int]] = []
        for rank in range(self.stage.size):
            sent = self._held_of_owner(buffer, rank, local_rank)
            received = self._held_of_owner(buffer, local_rank, rank)
            outgoing.append([elements_of(held) for held in sent])
            sizes.append([held.size for held in received])
        wait = self._start(outgoing, sizes)

        def finish() -> list[Tensor]:
            # each owner sends in the order in which this rank holds its elements
            from_owners = [iter(tensors) for tensors in wait()]
            in_order: list[Tensor] = []
            for held in self._held[buffer][local_rank]:
                owner = self.owners[held.matrix]
                in_order.append(next(from_owners[owner]))
            return in_order

        return finish

    def assemble(self, received: Sequence[ReceivedElements]) -> dict[int, Tensor]:
        """Return the matrices that this rank owns, by number, from what it received in all
        exchanges of a step."""
        slices: dict[MatrixSlice, list[ReceivedElements]] = defaultdict(list)
        for elements in received:
            slices[elements.held.matrix_slice].append(elements)
        matrices = {number: self._empty.new_empty(self.shapes[number]) for number in self.owned}
        for matrix_slice, of_slice in slices.items():
            part = self._part_of(matrix_slice)
            num_elements = prod(part.local)
            flat = self._empty.new_empty(num_elements)
            for held, values in of_slice:
                flat[held.given_first : held.given_last] = values
            target = part.take(matrices[matrix_slice.matrix])
            target.copy_(flat.view(part.local))
        return matrices

    def _start(
        self,
        outgoing: list[list[Tensor]],
        sizes: list[list[int]],
    ) -> Callable[[], list[Sequence[Tensor]]]:
        """Start an all-to-all of several flat tensors to and from each rank. sizes: of the tensors
        from each rank."""
        joined = [torch.cat(tensors) if tensors else self._empty for tensors in outgoing]
        joined_sizes = [sum(of_rank) for of_rank in sizes]
        wait = self.stage.start_uneven_exchange(joined, joined_sizes)

        def finish() -> list[Sequence[Tensor]]:
            return [flat.split(of_rank) for flat, of_rank in zip(wait(), sizes, strict=True)]

        return finish

    def _held_of_owner(self, buffer: int, rank: int, owner: int) -> list[HeldElements]:
        """Return what `rank` holds in a buffer of the matrices that belong to `owner`."""
        of_rank = self._held[buffer][rank]
        return [held for held in of_rank if self.owners[held.matrix] == owner]

    def _part_of(self, matrix_slice: MatrixSlice) -> Part:
        dim = None if matrix_slice.dim < 0 else matrix_slice.dim
        return Part(
            "", self.shapes[matrix_slice.matrix], dim, matrix_slice.shards, matrix_slice.shard
        )


def _in_buffer(buffer: int, elements: Sequence[HeldElements]) -> list[HeldElements]:
    return [held for held in elements if held.buffer == buffer]


def owners_of(costs: Sequence[float], ranks: int) -> list[int]:
    """Return the owner of each matrix: by falling cost, each goes to the rank with the least cost
    so far."""
    owners = [0] * len(costs)
    loads = [0.0] * ranks
    # `sorted` and `min` keep the order of what is equal, so that all ranks choose alike
    by_cost = sorted(range(len(costs)), key=lambda matrix: -costs[matrix])
    for matrix in by_cost:
        owner = min(range(ranks), key=loads.__getitem__)
        owners[matrix] = owner
        loads[owner] += costs[matrix]
    return owners


def _gather_held(
    held: Sequence[HeldElements],
    fingerprint: int,
    stage: Axis,
    device: torch.device,
) -> list[list[HeldElements]]:
    """Return what every rank holds. fingerprint: a number that must be equal on all ranks.
    Collective over `stage`."""
    width = len(HeldElements._fields)
    # the first row has the fingerprint and the number of rows after it
    padding = [0] * (width - 2)
    rows = torch.tensor([(fingerprint, len(held), *padding), *held], device=device)
    num_rows = torch.tensor(len(rows), device=device)
    height = int(stage.max_(num_rows))
    table = rows.new_zeros(height, width)
    table[: len(rows)] = rows
    tables = stage.gather(table).view(stage.size, height, width).tolist()
    if any(of_rank[0][0] != fingerprint for of_rank in tables):
        raise RuntimeError(
            "the ranks of a stage hold different matrices, or hold them in different buffers"
        )
    held_by_rank: list[list[HeldElements]] = []
    for header, *rows_of_rank in tables:
        num_held = header[1]
        held_by_rank.append([HeldElements(*row) for row in rows_of_rank[:num_held]])
    return held_by_rank


def _require_complete(shapes: Shapes, held_by_rank: Sequence[Sequence[HeldElements]]) -> None:
    """Raise RuntimeError unless the elements that all ranks give add up to each matrix."""
    num_given = [0] * len(shapes)
    for held in chain.from_iterable(held_by_rank):
        num_given[held.matrix] += held.given
    for (name, shape), count in zip(shapes.items(), num_given, strict=True):
        if count != prod(shape):
            raise RuntimeError(
                f"{name}: the ranks of its stage give {count} elements of a matrix {list(shape)}"
            )
