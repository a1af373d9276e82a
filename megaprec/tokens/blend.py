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

Weights may change: by a plan (`megaprec.tokens.blend_phases`), or because a run goes on with
others. From that position on the pattern is another one, and each data set goes on with the sample
after its last one: `WeightedStretch` says where that was.
"""

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from megaprec.errors import UserError
from megaprec.tokens.samples import Batch, SampleLocation, Samples

LONGEST_PERIOD = 1_000_000  # samples; a blend holds two int64 for each of a period


class WeightedStretch(NamedTuple):
    """The positions of a blend, from `begin` on, in which its data sets have these weights.

    weights: of each data set; some may be 0.
    taken: the number of samples that each data set has given before `begin`.
    """

    begin: int
    weights: tuple[float, ...]
    taken: tuple[int, ...]

    @classmethod
    def first(cls, weights: Sequence[float]) -> "WeightedStretch":
        """Return the stretch of a run that begins with these weights."""
        none_taken = (0,) * len(weights)
        return cls(0, tuple(weights), none_taken)


class _Mixture:
    """The data sets of the positions of a stretch, and the numbers of their samples."""

    def __init__(self, stretch: WeightedStretch) -> None:
        self.begin = stretch.begin
        self._taken = np.array(stretch.taken, dtype=np.int64)
        shares_of_period = shares(stretch.weights)
        self._pattern = pattern(shares_of_period)
        self._samples_of_period = np.bincount(self._pattern, minlength=len(stretch.weights))
        # for each position in the period, the number of earlier samples of the same data set
        self._num_earlier = np.empty_like(self._pattern)
        for part, samples in enumerate(self._samples_of_period):
            is_of_part = self._pattern == part
            self._num_earlier[is_of_part] = np.arange(samples)

    def locate(self, positions: Any) -> tuple[Any, Any]:
        """Return the data set of the sample at each position of this stretch, and its number among
        the samples of that data set.

        positions: int64, an array or a number, as are the results.
        """
        since_begin = positions - self.begin
        periods, positions_in_period = np.divmod(since_begin, len(self._pattern))
        parts = self._pattern[positions_in_period]
        before_stretch = self._taken[parts]
        in_earlier_periods = periods * self._samples_of_period[parts]
        earlier_in_period = self._num_earlier[positions_in_period]
        numbers = before_stretch + in_earlier_periods + earlier_in_period
        return parts, numbers

    def taken_before(self, position: int) -> list[int]:
        """Return how many samples each data set has given before a position of this stretch."""
        since_begin = position - self.begin
        periods, remainder = divmod(since_begin, len(self._pattern))
        last_period = self._pattern[:remainder]
        of_last_period = np.bincount(last_period, minlength=len(self._taken))
        of_full_periods = periods * self._samples_of_period
        taken = self._taken + of_full_periods + of_last_period
        return taken.tolist()


class Blend:
    """Samples of several data sets, mixed by weight, with the interface of `Samples`. A blend has
    no epochs.

    parts: the samples of each data set.
    stretches: the weights of the data sets, by position.
    names: the name of each data set.
    """

    def __init__(
        self,
        parts: Sequence[Samples],
        stretches: Sequence[WeightedStretch],
        names: Sequence[str],
    ) -> None:
        self.parts = parts
        self.stretches = stretches
        self._names = names
        # of all samples, held-out ones too: an id stays the same whatever is held out
        total_ids = [samples.total_ids for samples in parts]
        ids_so_far = np.cumsum(total_ids)
        self._id_offsets = np.concatenate(([0], ids_so_far))
        self._mixtures = [_Mixture(stretch) for stretch in stretches]
        begins = [stretch.begin for stretch in stretches]
        self._begins = np.array(begins, dtype=np.int64)

    def __len__(self) -> int:
        """Return the number of samples in all data sets together."""
        return sum(map(len, self.parts))

    @property
    def tiled(self) -> "Blend":
        """Return the samples of the same texts without random windows."""
        parts = [samples.tiled for samples in self.parts]
        return Blend(parts, self.stretches, self._names)

    def batch(self, position: int, count: int) -> Batch:
        """Return the samples at positions [position, position + count); ids continue from one data
        set to the next."""
        positions = np.arange(position, position + count)
        part_of_row, number_in_part = self._locate(positions)
        batches: list[Batch] = []  # of each data set that has a sample in the batch
        rows_by_part: list[NDArray[np.int64]] = []  # the places of these samples in the batch
        for part, samples in enumerate(self.parts):
            rows = np.flatnonzero(part_of_row == part)
            if not len(rows):
                continue
            # a data set's samples in a blend follow each other
            first_row = rows[0]
            first_number = int(number_in_part[first_row])
            batches.append(samples.batch(first_number, len(rows)))
            rows_by_part.append(rows)
        # the batches are joined by data set; this brings their rows back into the blend's order
        joined_rows = np.concatenate(rows_by_part)
        blend_order = np.argsort(joined_rows)
        order = torch.from_numpy(blend_order)
        id_offsets = torch.from_numpy(self._id_offsets[part_of_row])
        tokens = torch.cat([batch.tokens for batch in batches])
        targets = torch.cat([batch.targets for batch in batches])
        numbers_in_parts = torch.cat([batch.ids for batch in batches])
        masks = [batch.mask for batch in batches]
        documents = [batch.documents for batch in batches]
        positions_in_documents = [batch.positions for batch in batches]
        return Batch(
            tokens=tokens[order],
            targets=targets[order],
            ids=numbers_in_parts[order] + id_offsets,
            mask=_join_optional(masks, order),
            documents=_join_optional(documents, order),
            positions=_join_optional(positions_in_documents, order),
            sources=torch.from_numpy(part_of_row),
        )

    def location_of(self, position: int) -> SampleLocation:
        """Return what `Samples.location_of` returns, for the sample's data set."""
        part, number = self._locate(np.int64(position))
        samples = self.parts[int(part)]
        return samples.location_of(int(number))

    def _locate(self, positions: Any) -> tuple[Any, Any]:
        """Return the data set of the sample at each position, and its number among those.

        positions: int64, an array or a number, as are the results.
        """
        positions = np.asarray(positions)
        stretches_begun = np.searchsorted(self._begins, positions, side="right")
        # positions before all stretches belong to the first one
        index_of_stretch = np.maximum(stretches_begun - 1, 0)
        parts = np.empty_like(positions)
        numbers = np.empty_like(positions)
        # nearly always there is only one
        distinct_indices = set(index_of_stretch.ravel().tolist())
        for index in distinct_indices:
            is_in_stretch = index_of_stretch == index
            mixture = self._mixtures[index]
            located = mixture.locate(positions[is_in_stretch])
            parts[is_in_stretch], numbers[is_in_stretch] = located
        return parts, numbers

    def labels(self, ids: torch.Tensor) -> list[str]:
        """Return "name:number" for each sample: its data set and its number there."""
        # ids of a data set begin at its offset
        begun_parts = np.searchsorted(self._id_offsets, ids.numpy(), side="right")
        parts = begun_parts - 1
        labels: list[str] = []
        for part, sample_id in zip(parts, ids.tolist(), strict=True):
            name = self._names[part]
            number_in_part = sample_id - self._id_offsets[part]
            labels.append(f"{name}:{number_in_part}")
        return labels

    def samples_taken(self, samples: int) -> list[int]:
        """Return, for each data set, how many of the first `samples` samples come from it."""
        index = _index_at(self.stretches, samples)
        mixture = self._mixtures[index]
        return mixture.taken_before(samples)


def taken_before(stretches: Sequence[WeightedStretch], position: int) -> list[int]:
    """Return how many samples each data set has given before a position."""
    index = _index_at(stretches, position)
    mixture = _Mixture(stretches[index])
    return mixture.taken_before(position)


def _index_at(stretches: Sequence[WeightedStretch], position: int) -> int:
    """Return the index of the stretch in which a position is; 0 for a position before all."""
    begun = [stretch for stretch in stretches if stretch.begin <= position]
    return max(0, len(begun) - 1)


def shares(weights: Sequence[float]) -> list[int]:
    """Return the smallest whole numbers in the ratio of the weights, read as exact decimals.

    Raises UserError if their sum, the period of the blend, is more than LONGEST_PERIOD.
    """
    # by their decimals: 0.1 is one tenth, not the float nearest to it, whose period is 2^55
    fractions = [Fraction(repr(weight)) for weight in weights]
    denominators = [fraction.denominator for fraction in fractions]
    denominator = math.lcm(*denominators)
    numerators = [int(fraction * denominator) for fraction in fractions]
    divisor = math.gcd(*numerators)
    ratio = [numerator // divisor for numerator in numerators]
    period = sum(ratio)
    if period > LONGEST_PERIOD:
        listed = ", ".join(map(repr, weights))
        raise UserError.of(
            "data.blend_weights_too_fine",
            weights=listed,
            longest_period=LONGEST_PERIOD,
        )
    return ratio


def pattern(shares: Sequence[int]) -> NDArray[np.int64]:
    """Return one period of the pattern: the data set at each position, int64 [sum(shares)]."""
    period = sum(shares)
    parts = np.empty(period, dtype=np.int64)
    # The next sample of each data set is in one of two heaps. Of equal positions the first data set
    # comes first, so that the pattern is always the same.
    # waiting: (earliest position, data set, number of the sample), as long as it may not come yet
    # ready: (deadline, data set, number), once it may; it must come before position `deadline`
    waiting = [(0, part, 0) for part, share in enumerate(shares) if share]
    ready: list[tuple[int, int, int]] = []
    for position in range(period):
        while waiting:
            earliest, part, number = waiting[0]
            if earliest > position:
                break
            heapq.heappop(waiting)
            end_of_turn = (number + 1) * period
            # rounded up
            deadline = -(-end_of_turn // shares[part])
            heapq.heappush(ready, (deadline, part, number))
        _, part, number = heapq.heappop(ready)
        parts[position] = part
        next_number = number + 1
        next_earliest = next_number * period // shares[part]
        heapq.heappush(waiting, (next_earliest, part, next_number))
    return parts


def _join_optional(
    tensors: Sequence[torch.Tensor | None],
    order: torch.Tensor,
) -> torch.Tensor | None:
    """Return the rows of all tensors, joined and then taken in `order`; None if there are none.

    All data sets have such a tensor, or none has: resets are the same for all.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    if not present:
        return None
    return torch.cat(present)[order]
