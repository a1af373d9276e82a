"""Multiplication of rows of weights by factors after an update, as QK-clip needs it: it makes the
rows of queries and keys smaller whose logits grew too large.

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
    """A tile of n elements of one logical tensor, and the factor of each element's row, [n]."""

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
        the layers' weights.

        skip: 1 if the step is skipped, in which case nothing changes.
        applied: the number of applied steps, for stochastic rounding.
        """
        factored_tiles = list(self._tiles(buffer))
        tiles = buffer.on_device(factored.tile.without_moments() for factored in factored_tiles)
        for tile, factored in zip(tiles, factored_tiles, strict=True):
            masters = tile.wide_masters()
            factors = torch.where(skip > 0, 1.0, factored.factors)
            masters.mul_(factors.to(masters.dtype))
            tile.store_and_round_masters(masters, applied)

    def _tiles(self, buffer: Buffer) -> Iterator[_FactoredTile]:
        """Yield the tiles of this rank's slice of the buffer whose rows have factors."""
        for owned in buffer.owned_pieces():
            part = owned.piece.part
            if part.name not in self.by_name:
                continue
            factors_of_rows = self.by_name[part.name]
            # only a part that is cut along dim 0 begins at another row than the first
            first_row = part.start if part.dim == 0 else 0
            row_length = prod(part.local[1:])  # elements of a row that the part has
            # positions of the tile's elements in the flattened part
            start = owned.in_part.start
            for tile in buffer.tiles(owned.in_shard.start, owned.in_shard.stop):
                stop = start + len(tile.weights)
                positions = torch.arange(start, stop, device=tile.weights.device)
                rows = first_row + positions // row_length
                yield _FactoredTile(tile, factors_of_rows[rows])
                start = stop
