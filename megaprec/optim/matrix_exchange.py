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
from math import prod
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.comm.layout import Part


class Run(NamedTuple):
    """Elements [first, last) of a flattened slice of a matrix, as one rank holds them.

    matrix: its number among the matrices of the stage. turn: number of the exchange in which the
        run takes part. dim,
    shards, shard: of the slice, as in `Part`; dim is -1 if the slice is the whole matrix.
    given_first, given_last: the elements among them that this rank gives the owner.
    """

    matrix: int
    turn: int
    dim: int
    shards: int
    shard: int
    first: int
    last: int
    given_first: int
    given_last: int

    @property
    def given(self) -> int:
        """Return the number of elements that are given to the owner."""
        return self.given_last - self.given_first

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Return what identifies the slice among the slices of all matrices."""
        return self.matrix, self.dim, self.shards, self.shard


class MatrixExchange:
    """The owners of the matrices of a stage, and the exchanges between them and the ranks that hold
    slices.

    shapes: of all matrices of the stage, by name, the same on every rank. costs: of computing each,
    in any unit. runs: what this rank holds. turns: the number of exchanges of a step. dtype: of the
    exchanged elements.
    mine: numbers of the matrices that this rank owns. Collective over `stage`. Raises RuntimeError
    on every rank if ranks have different matrices, or if elements of a matrix are given by no rank
    or by several.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        costs: Sequence[float],
        runs: Sequence[Run],
        turns: int,
        stage: Axis,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.shapes = tuple(shapes.values())
        self.stage = stage
        self._none = torch.empty(0, dtype=dtype, device=device)
        self.owners = owners_of(costs, stage.size)
        self.mine = [matrix for matrix, owner in enumerate(self.owners) if owner == stage.rank]
        held = _gathered(runs, crc32(json.dumps([dict(shapes), turns]).encode()), stage, device)
        _require_whole(shapes, [run for of_rank in held for run in of_rank])
        self._turns = [
            [[run for run in of_rank if run.turn == n] for of_rank in held] for n in range(turns)
        ]

    def start_collect(
        self, turn: int, values: Sequence[Tensor]
    ) -> Callable[[], list[tuple[Run, Tensor]]]:
        """Start to give the owners their elements. values: flat, of each of this rank's runs of the
        exchange.

        The returned function waits; it returns what this rank received of the matrices that it
        owns.
        """
        outgoing: list[list[Tensor]] = [[] for _ in range(self.stage.size)]
        for run, some in zip(self._turns[turn][self.stage.rank], values, strict=True):
            outgoing[self.owners[run.matrix]].append(
                some[run.given_first - run.first : run.given_last - run.first]
            )
        incoming = [self._owned(turn, rank, self.stage.rank) for rank in range(self.stage.size)]
        finish = self._start(outgoing, [[run.given for run in runs] for runs in incoming])
        return lambda: [pair for pairs in map(zip, incoming, finish()) for pair in pairs]

    def start_return(self, turn: int, results: Mapping[int, Tensor]) -> Callable[[], list[Tensor]]:
        """Start to send every rank the elements that it holds. results: [m, n], of the matrices
        that this rank owns.

        The returned function waits; it returns the flat results of this rank's runs of the
        exchange.
        """
        flat: dict[tuple[int, ...], Tensor] = {}

        def elements(run: Run) -> Tensor:
            if run.place not in flat:
                flat[run.place] = self._slice(run).take(results[run.matrix]).reshape(-1)
            return flat[run.place][run.first : run.last]

        me = self.stage.rank
        ranks = range(self.stage.size)
        outgoing = [[elements(run) for run in self._owned(turn, rank, me)] for rank in ranks]
        finish = self._start(
            outgoing, [[run.last - run.first for run in self._owned(turn, me, r)] for r in ranks]
        )

        def finished() -> list[Tensor]:
            of_owner = [iter(some) for some in finish()]
            return [next(of_owner[self.owners[run.matrix]]) for run in self._turns[turn][me]]

        return finished

    def whole(self, received: Sequence[tuple[Run, Tensor]]) -> dict[int, Tensor]:
        """Return the matrices that this rank owns, by number, from what it received in all
        exchanges of a step."""
        slices = defaultdict[tuple[int, ...], list[tuple[Run, Tensor]]](list)
        for run, values in received:
            slices[run.place].append((run, values))
        made = {matrix: self._none.new_empty(self.shapes[matrix]) for matrix in self.mine}
        for pairs in slices.values():
            part = self._slice(pairs[0][0])
            flat = self._none.new_empty(prod(part.local))
            for run, values in pairs:
                flat[run.given_first : run.given_last] = values
            part.take(made[pairs[0][0].matrix]).copy_(flat.view(part.local))
        return made

    def _start(
        self, outgoing: list[list[Tensor]], sizes: list[list[int]]
    ) -> Callable[[], list[Sequence[Tensor]]]:
        """Start an all-to-all of several flat tensors to and from each rank. sizes: of the tensors
        from each rank."""
        joined = [torch.cat(some) if some else self._none for some in outgoing]
        finish = self.stage.start_uneven_exchange(joined, [sum(some) for some in sizes])
        return lambda: [flat.split(some) for flat, some in zip(finish(), sizes, strict=True)]

    def _owned(self, turn: int, rank: int, owner: int) -> list[Run]:
        """Return the runs of `rank` in an exchange whose matrices belong to `owner`."""
        return [run for run in self._turns[turn][rank] if self.owners[run.matrix] == owner]

    def _slice(self, run: Run) -> Part:
        dim = None if run.dim < 0 else run.dim
        return Part("", self.shapes[run.matrix], dim, run.shards, run.shard)


def owners_of(costs: Sequence[float], ranks: int) -> list[int]:
    """Return the owner of each matrix: by falling cost, each goes to the rank with the least cost
    so far."""
    owners = [0] * len(costs)
    loads = [0.0] * ranks
    for matrix in sorted(range(len(costs)), key=lambda n: (-costs[n], n)):
        owners[matrix] = min(range(ranks), key=lambda rank: (loads[rank], rank))
        loads[owners[matrix]] += costs[matrix]
    return owners


def _gathered(runs: Sequence[Run], same: int, stage: Axis, device: torch.device) -> list[list[Run]]:
    """Return the runs of every rank. same: a number that must be equal on all ranks. Collective
    over `stage`."""
    width = len(Run._fields)
    rows = torch.tensor([(same, len(runs), *[0] * (width - 2)), *runs], device=device)
    most = int(stage.max_(torch.tensor(len(rows), device=device)))
    mine = rows.new_zeros(most, width)
    mine[: len(rows)] = rows
    tables = stage.gather(mine).view(stage.size, most, width).tolist()
    if any(table[0][0] != same for table in tables):
        raise RuntimeError(
            "the ranks of a stage hold different matrices, or hold them in different buffers"
        )
    return [[Run(*row) for row in table[1 : 1 + table[0][1]]] for table in tables]


def _require_whole(shapes: Mapping[str, tuple[int, ...]], runs: Sequence[Run]) -> None:
    given = [0] * len(shapes)
    for run in runs:
        given[run.matrix] += run.given
    for (name, shape), count in zip(shapes.items(), given, strict=True):
        if count != prod(shape):
            raise RuntimeError(
                f"{name}: the ranks of its stage give {count} elements of a matrix {list(shape)}"
            )
