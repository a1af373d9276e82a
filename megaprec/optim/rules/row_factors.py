"""Factors of the rows of weights, by which an update is followed: weights that a rule outside of
the update rule makes smaller, such as those of queries and keys whose logits grew too large.

Factors are given by logical name and row. So each rank multiplies the elements that it holds,
however weights, masters and moments are cut over ranks. Moments are left as they are.
"""

from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from megaprec.optim.state.flat_buffer import Buffer
from megaprec.optim.state.update_tile import Tile


class _FactoredTile(NamedTuple):
    """Elements of one part, and their factors [n]."""

    tile: Tile
    factors: Tensor


class RowFactors:
    """The factors of some weights in one step.

    by_name: [rows] for a logical tensor [rows, ...], by its name, on the device of the weights.
    """

    def __init__(self, by_name: Mapping[str, Tensor]) -> None:
        self.by_name = by_name

    def multiply(self, buffer: Buffer, skip: Tensor, applied: Tensor) -> None:
        """Multiply the masters of an updated buffer by the factors of their rows, and round them to
        the weights as after step number `applied`.

        skip, applied: as in `Step`; nothing changes if the step is skipped.
        """
        factored = list(self._tiles(buffer))
        tiles = buffer.on_device(tile.without_moments() for tile, _ in factored)
        for tile, (_, factors) in zip(tiles, factored, strict=True):
            masters = tile.wide_masters()
            of_step = torch.where(skip > 0, 1.0, factors)
            masters.mul_(of_step.to(masters.dtype))
            tile.store_and_round_masters(masters, applied)

    def _tiles(self, buffer: Buffer) -> Iterator[_FactoredTile]:
        """Yield the tiles of this rank's slice whose rows have factors."""
        for owned in buffer.owned_pieces():
            part = owned.piece.part
            if part.name not in self.by_name:
                continue
            factors = self.by_name[part.name]
            # a slice along another dim has elements of all rows
            first_row = part.start if part.dim == 0 else 0
            elements_of_row = prod(part.local[1:])
            begin = owned.in_part.start
            for tile in buffer.tiles(owned.in_shard.start, owned.in_shard.stop):
                end = begin + len(tile.weights)
                elements = torch.arange(begin, end, device=tile.weights.device)
                rows = first_row + elements // elements_of_row
                yield _FactoredTile(tile, factors[rows])
                begin = end
