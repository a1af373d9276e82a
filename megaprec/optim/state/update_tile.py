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
    """Elements [start, stop) of a tile. part_start: the first of them in the flattened part."""

    part: Part
    part_start: int
    start: int
    stop: int


@dataclass(frozen=True)
class Draw:
    """Random numbers for stochastic rounding: by logical position and step, so that they are equal
    in all layouts.

    length: of the tile.
    spans: of its logical elements; there are none for padding, which stays 0.
    """

    seed: int
    length: int
    spans: Sequence[DrawSpan]
    device: torch.device

    def bits(self, name: str, applied: Tensor) -> Tensor:
        """Return int64 [length]. name: of the rounded tensor. applied: number of applied steps."""
        drawn = torch.zeros(self.length, dtype=torch.int64, device=self.device)
        # the step is above bit 40, so no element of one step has the number of another step
        step = applied.long() << 40
        for span in self.spans:
            part_stop = span.part_start + span.stop - span.start
            index = logical_indices(span.part, span.part_start, part_stop, self.device)
            stream = key(self.seed, "rounding", name, span.part.name)
            drawn[span.start : span.stop] = bits(stream, index + step)
        return drawn


@dataclass(frozen=True)
class Tile:
    """Views [n] of everything that is stored for the same n elements.

    masters: None if the masters are the weights with their 16-bit remainder, the weights themselves
        if the dtypes agree.
    nearest: True if the layers' weights are rounded to nearest. Moments narrower than FP32 are
        always rounded stochastically: rounded to nearest they would stop changing.

    Methods take the number of applied steps as `applied`, by which rounding draws (`Step.applied`).
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
        """Return the moments, FP32 or wider."""
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
        """Store the masters of `wide` after step number `applied`, and round them to the layers'
        weights. Without `applied` weights are rounded to nearest."""
        # masters that are the weights were updated in place
        if _share_memory(wide, self.weights):
            return
        if self.remainder is not None:
            split(wide, self.weights, self.remainder)
            return
        masters = self.masters
        is_stored_wide = masters is not None and masters.dtype == wide.dtype
        # masters of another dtype are the weights, which are written below
        if masters is not None and is_stored_wide and not _share_memory(masters, wide):
            masters.copy_(wide)
        if self.nearest or applied is None:
            self.weights.copy_(wide)
        else:
            self.weights.copy_(self._round(wide, applied))

    def adopt_weights(self, is_written: bool, applied: Tensor) -> None:
        """Make masters of weights that are not their masters, rounded as in step number `applied`.

        is_written: someone has written to weights. Otherwise weights that were rounded
            stochastically are not computed again unless one of them is no neighbour of its master.
        """
        assert self.masters is not None
        can_skip = not self.nearest and not is_written
        if can_skip and _are_neighbours(self.weights, self.masters):
            return
        rounded = self._round(self.masters, applied)
        # a GPU would have to wait for the answer
        is_on_cpu = self.weights.device.type == "cpu"
        if is_on_cpu and _have_same_bits(rounded, self.weights):
            return
        is_same = rounded == self.weights
        written = self.weights.to(self.masters.dtype)
        self.masters.copy_(torch.where(is_same, self.masters, written))

    def _round(self, wide: Tensor, applied: Tensor | None) -> Tensor:
        """Return masters, rounded to the layers' weights. Without `applied`, and at the start, to
        nearest."""
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
    return first.data_ptr() == second.data_ptr()


def _have_same_bits(first: Tensor, second: Tensor) -> bool:
    """Return True if two flat 16-bit tensors have the same bits, which are compared 64 at a time
    where that can be."""
    is_aligned = len(first) % 4 == 0 and second.storage_offset() % 4 == 0
    unit = torch.int64 if is_aligned else torch.int16
    return torch.equal(first.view(unit), second.view(unit))


def _are_neighbours(weights: Tensor, masters: Tensor) -> bool:
    """Return True if each bf16 weight is one of the two values between which its FP32 master
    lies."""
    # the upper half of an FP32 number is the bf16 number next to it on the side of zero
    upper_halves = masters.view(torch.int32) >> 16
    distance = weights.view(torch.int16) - upper_halves.to(torch.int16)
    is_neighbour = (distance == 0) | (distance == 1)
    return bool(is_neighbour.all())


def _widen(values: Tensor) -> Tensor:
    return values if values.itemsize >= 4 else values.float()
