"""Tiles: runs of elements of a buffer's own slice, given to an update in FP32 or wider, whatever
their stored dtype.

A CPU updates memory in runs that stay in a core's cache, so that rounding the new masters to the
weights needs no second read of memory; a GPU, on which each launch has a cost, uses long runs.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megaprec.comm.layout import Part
from megaprec.comm.random import bits, key, logical_indices
from megaprec.precision.rounding import join, split, stochastic

TILE_ELEMENTS = 1 << 22  # of a tile that travels between host and device


class Wide(NamedTuple):
    """Tensors of a tile for an update in place, all FP32 or wider."""

    masters: Tensor
    grads: Tensor
    moments: list[Tensor]


class DrawSpan(NamedTuple):
    """Elements [start, stop) of a tile that lie in one part, a rank's slice of a logical tensor.

    part_start: the position of the first of them in the flattened part.
    """

    part: Part
    part_start: int
    start: int
    stop: int


@dataclass(frozen=True)
class Draw:
    """Random numbers for stochastic rounding of a tile. The number of an element depends on its
    place in the logical tensor and on the step, so that it is equal in all layouts.

    length: number of elements of the tile.
    spans: the places of its elements in logical tensors; padding, which stays 0, has none.
    """

    seed: int
    length: int
    spans: Sequence[DrawSpan]
    device: torch.device

    def bits(self, name: str, applied: Tensor) -> Tensor:
        """Return a random number for each element: int64 [length], 0 for padding.

        name: of what is rounded, "weight" or a moment, so that each has numbers of its own.
        applied: number of applied steps.
        """
        drawn = torch.zeros(self.length, dtype=torch.int64, device=self.device)
        # counters of two steps never meet: no tensor has 2^40 elements
        step = applied.long() << 40
        for span in self.spans:
            num_elements = span.stop - span.start
            part_stop = span.part_start + num_elements
            index = logical_indices(span.part, span.part_start, part_stop, self.device)
            stream = key(self.seed, "rounding", name, span.part.name)
            drawn[span.start : span.stop] = bits(stream, index + step)
        return drawn


@dataclass(frozen=True)
class Tile:
    """Views [n] of everything that is stored for the same n elements.

    weights: those that the layers read; of FP8 weights, whose codes are made later, the masters.
    masters: those that the update changes, of which `weights` are the rounding. They are `weights`
        themselves if the dtypes agree, and None if they are stored as `weights` with `remainder`.
    remainder: the lower 16 bits of FP32 masters whose upper bits are in `weights`; else None.
    moments: each with its name.
    nearest: True if masters are rounded to nearest. Moments narrower than FP32 are always rounded
        stochastically: rounded to nearest they would stop changing.

    Methods take the number of applied steps as `applied` (`Step.applied`): stochastic rounding
    draws other numbers in each step.
    """

    weights: Tensor
    grads: Tensor
    masters: Tensor | None
    remainder: Tensor | None
    moments: tuple[tuple[str, Tensor], ...]
    draw: Draw
    nearest: bool

    def without_masters(self) -> "Tile":
        """Return the tile for an update of its moments alone."""
        return replace(self, masters=None, remainder=None)

    def without_moments(self) -> "Tile":
        """Return the tile for an update of its masters alone."""
        return replace(self, moments=())

    def wide(self) -> Wide:
        """Return masters, gradients and moments for an update in place, copied if narrower than
        FP32."""
        return Wide(self.wide_masters(), self.wide_gradients(), self.wide_moments())

    def wide_gradients(self) -> Tensor:
        """Return the gradients, FP32 or wider."""
        return _widen(self.grads)

    def wide_moments(self) -> list[Tensor]:
        """Return the moments in the order of `moments`, FP32 or wider."""
        return [_widen(values) for _, values in self.moments]

    def wide_masters(self) -> Tensor:
        """Return the masters, FP32 or wider."""
        if self.masters is not None:
            return _widen(self.masters)
        assert self.remainder is not None
        return join(self.weights, self.remainder)

    def store(self, masters: Tensor, moments: Sequence[Tensor], applied: Tensor) -> None:
        """Store the tensors of `wide` after step number `applied`, and round the masters to the
        layers' weights."""
        self.store_moments(moments, applied)
        self.store_and_round_masters(masters, applied)

    def store_moments(self, moments: Sequence[Tensor], applied: Tensor) -> None:
        """Store the moments of `wide` after step number `applied`."""
        for (name, stored), values in zip(self.moments, moments, strict=True):
            if stored.dtype != values.dtype:  # else they were updated in place
                drawn = self.draw.bits(name, applied)
                stored.copy_(stochastic(values, drawn))

    def store_and_round_masters(self, wide: Tensor, applied: Tensor | None = None) -> None:
        """Store the updated masters, and round them to the layers' weights.

        wide: the masters as `wide_masters` returned them, after the update.
        applied: the number of applied steps; None to round to nearest.
        """
        # the weights are the masters, and were updated in place
        if _share_memory(wide, self.weights):
            return
        if self.remainder is not None:
            split(wide, self.weights, self.remainder)
            return
        masters = self.masters
        # masters of another dtype are narrow weights, which are written below
        is_stored_wide = masters is not None and masters.dtype == wide.dtype
        if masters is not None and is_stored_wide and not _share_memory(masters, wide):
            masters.copy_(wide)
        if self.nearest or applied is None:
            self.weights.copy_(wide)
        else:
            self.weights.copy_(self._round(wide, applied))

    def adopt_weights(self, is_written: bool, applied: Tensor) -> None:
        """Give each element whose weight is not its rounded master the weight as its master: a loop
        has written to that weight.

        is_written: True if the version of some weight has changed. If not, weights that were
            rounded stochastically are not computed again unless one of them is no neighbour of its
            master.
        applied: the number of the step after which the masters were rounded.
        """
        assert self.masters is not None
        can_skip = not self.nearest and not is_written
        if can_skip and _are_neighbours(self.weights, self.masters):
            return
        rounded = self._round(self.masters, applied)
        # On a CPU alone this saves the pass below: the host would have to wait for a GPU's answer.
        is_on_cpu = self.weights.device.type == "cpu"
        if is_on_cpu and _have_same_bits(rounded, self.weights):
            return
        is_unwritten = rounded == self.weights  # False for NaN, which then becomes the master
        written = self.weights.to(self.masters.dtype)
        self.masters.copy_(torch.where(is_unwritten, self.masters, written))

    def _round(self, wide: Tensor, applied: Tensor | None) -> Tensor:
        """Return masters, rounded to the dtype of the weights after step number `applied`. Without
        `applied`, and before the first step, they are rounded to nearest."""
        if self.nearest or applied is None:
            return wide.to(self.weights.dtype)
        drawn = stochastic(wide, self.draw.bits("weight", applied))
        return torch.where(applied > 0, drawn, wide.bfloat16())


class StateMemory(Protocol):
    """Memory other than the device's, for masters, moments and averages
    (`megaprec.optim.state.host_memory`)."""

    tile_elements: int

    def open(self, device: torch.device) -> None: ...
    def zeros(self, num_elements: int, dtype: torch.dtype) -> Tensor: ...
    def visit(
        self, owner: object, tiles: Iterable[Tile], written: Collection[str] | None = None
    ) -> Iterator[Tile]: ...
    def wait(self) -> None: ...


def _share_memory(first: Tensor, second: Tensor) -> bool:
    """Return True if two tensors begin at the same address, as masters that are the weights do."""
    return first.data_ptr() == second.data_ptr()


def _have_same_bits(first: Tensor, second: Tensor) -> bool:
    """Return True if two flat 16-bit tensors have the same bits. They are compared four elements at
    a time if both begin and end at multiples of 64 bits."""
    # `first` was just computed, and begins at the beginning of its memory
    is_aligned = len(first) % 4 == 0 and second.storage_offset() % 4 == 0
    unit = torch.int64 if is_aligned else torch.int16
    return torch.equal(first.view(unit), second.view(unit))


def _are_neighbours(weights: Tensor, masters: Tensor) -> bool:
    """Return True if each bf16 weight is one of the two values between which its FP32 master
    lies."""
    # The upper half of an FP32 number is the bf16 number next to it on the side of zero. The bits
    # of the next bf16 number away from zero are larger by 1.
    upper_halves = masters.view(torch.int32) >> 16
    distance = weights.view(torch.int16) - upper_halves.to(torch.int16)
    is_neighbour = (distance == 0) | (distance == 1)
    return bool(is_neighbour.all())


def _widen(values: Tensor) -> Tensor:
    """Return the values themselves, or as FP32 if they are narrower."""
    return values if values.itemsize >= 4 else values.float()
