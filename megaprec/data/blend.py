"""Blend of several data sets in exact proportions.

A blend repeats a pattern; one period of it gives the data set of each sample. Weights are ratios of
whole numbers, so there is a period in which each data set has its exact proportion. Within the
period samples are scheduled by deadline: the j-th sample of a data set with proportion w comes no
earlier than position floor(j / w) and before position ceil((j + 1) / w). If the proportions add up
to one, such a schedule always exists, and earliest deadline first finds it (Baruah et al.,
"Proportionate progress", 1996). So for every n, the number of samples of a data set among the first
n samples differs from w * n by less than one.

The sample at a position is a pure function of the position and the seed: no rank keeps a count.
Each data set has its own epochs.
"""

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray

from megaprec.data.indexed import IndexedDataset
from megaprec.data.samples import Batch, Samples
from megaprec.errors import UserError

LONGEST_PERIOD = 1_000_000


class Blend:
    """Samples of several data sets, mixed by weight, with the interface of `Samples`. A blend has
    no epochs.

    names: name of each data set. totals: number of all samples of each data set, including those
        not in `parts`.
    """

    def __init__(
        self,
        parts: Sequence[Samples],
        weights: Sequence[float],
        names: Sequence[str],
        totals: Sequence[int],
    ) -> None:
        self.parts = parts
        self._names = names
        self._pattern = pattern(shares(weights))
        self._offsets = np.concatenate(([0], np.cumsum(totals)))
        self._per_period = np.bincount(self._pattern, minlength=len(parts))
        # number of earlier samples of the same data set in the period
        self._before = np.empty_like(self._pattern)
        for part, count in enumerate(self._per_period):
            self._before[self._pattern == part] = np.arange(count)

    def __len__(self) -> int:
        """Return the number of samples in all data sets together."""
        return sum(map(len, self.parts))

    def batch(self, position: int, count: int) -> Batch:
        """Return the samples at positions [position, position + count); ids continue from one data
        set to the next."""
        periods, places = np.divmod(np.arange(position, position + count), len(self._pattern))
        which = self._pattern[places]
        own = periods * self._per_period[which] + self._before[places]
        found = [(which == part).nonzero()[0] for part in range(len(self.parts))]
        batches = [
            self.parts[part].batch(int(own[rows[0]]), len(rows))
            for part, rows in enumerate(found)
            if len(rows)
        ]
        order = torch.from_numpy(np.argsort(np.concatenate(found)))
        ids = torch.cat([b.ids for b in batches])[order] + torch.from_numpy(self._offsets[which])
        return Batch(
            _joined([b.tokens for b in batches], order),
            _joined([b.targets for b in batches], order),
            ids,
            *(
                None if some[0] is None else _joined(some, order)
                for some in zip(*((b.mask, b.documents, b.positions) for b in batches), strict=True)
            ),
        )

    def place(self, position: int) -> tuple[IndexedDataset, int, int]:
        """Return what `Samples.place` returns, for the sample's data set."""
        period, place = divmod(position, len(self._pattern))
        part = int(self._pattern[place])
        return self.parts[part].place(int(period * self._per_period[part] + self._before[place]))

    def labels(self, ids: torch.Tensor) -> list[str]:
        """Return "name:number" for each sample: its data set and its number there."""
        parts = np.searchsorted(self._offsets, ids.numpy(), side="right") - 1
        return [
            f"{self._names[part]}:{int(id) - self._offsets[part]}"
            for part, id in zip(parts, ids, strict=True)
        ]

    def taken(self, samples: int) -> list[int]:
        """Return, for each data set, how many of the first `samples` samples come from it."""
        periods, rest = divmod(samples, len(self._pattern))
        some = np.bincount(self._pattern[:rest], minlength=len(self.parts))
        return (periods * self._per_period + some).tolist()


def shares(weights: Sequence[float]) -> list[int]:
    """Return the smallest whole numbers in the ratio of the weights, read as exact decimals.

    Raises UserError if their sum, the period of the blend, is more than LONGEST_PERIOD.
    """
    exact = [Fraction(repr(weight)) for weight in weights]
    whole = [int(f * math.lcm(*(f.denominator for f in exact))) for f in exact]
    least = [n // math.gcd(*whole) for n in whole]
    if sum(least) > LONGEST_PERIOD:
        raise UserError(
            f"weights {', '.join(map(repr, weights))} need {sum(least):,} samples, the shortest "
            f"stretch with exact proportions; at most {LONGEST_PERIOD:,} are supported: give "
            "weights with fewer digits"
        )
    return least


def pattern(shares: Sequence[int]) -> NDArray[np.int64]:
    """Return one period of the pattern: the data set at each position, int64 [sum(shares)]."""
    period = sum(shares)
    made = np.empty(period, dtype=np.int64)
    # (earliest position, data set, index of its sample)
    waiting = [(0, part, 0) for part in range(len(shares))]
    ready: list[
        tuple[int, int, int]
    ] = []  # (deadline: a position that it must precede, data set, index of its sample)
    for position in range(period):
        while waiting and waiting[0][0] <= position:
            _, part, number = heapq.heappop(waiting)
            heapq.heappush(ready, (-(-(number + 1) * period // shares[part]), part, number))
        _, part, number = heapq.heappop(ready)
        made[position] = part
        heapq.heappush(waiting, ((number + 1) * period // shares[part], part, number + 1))
    return made


def _joined(parts: Sequence[torch.Tensor], order: torch.Tensor) -> torch.Tensor:
    return torch.cat(tuple(parts))[order]
