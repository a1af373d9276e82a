"""The exponential moving average of the weights, kept beside the masters.

It begins as a copy of the masters, when the first step is taken or the state is first saved. After
each applied step, with the masters w that the step has computed, each element e of the average is

    e <- e + (1 - decay) * (w - e)

in this order: the difference, its product with 1 - decay, and the sum, each rounded once to the
dtype of the average. That is FP32, or FP64 beside FP64 masters, and 1 - decay, computed in FP64, is
rounded to it too. The formula is decay * e + (1 - decay) * w in exact numbers. Written so, the
average of a weight that does not change is that weight, bit for bit, which two rounded factors that
do not sum to 1 would miss. Nothing depends on the layout: each element is computed alone, from its
own master.

A skipped step leaves the average as it was. A step that is applied although it was not finite makes
it as non-finite as the masters.

What is no trained weight is not averaged. A frozen weight is its own average. The corrections by
which a router's choice of experts is balanced are moved by counts until the model's own experts are
chosen equally often; beside an average stand the present ones, as `megaprec merge` takes the last
checkpoint's. So do the scales and amax histories of FP8.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from megaprec.fp8.params import FP8Masters, HeldCodes
from megaprec.optim.state.flat_buffer import BLOCK, EMA, Buffer
from megaprec.optim.state.update_tile import Tile


def run_length(device_type: str) -> int:
    """Return the elements of an average that are computed at a time."""
    # a GPU computes longer runs, because each launch has a cost
    return BLOCK if device_type == "cpu" else BLOCK << 6


class AveragedTile(NamedTuple):
    """A tile of a buffer, and the same elements [n] of its average."""

    tile: Tile
    ema: Tensor

    def move(self, decay: float, skip: Tensor) -> None:
        """Move the average towards the masters, or change nothing if `skip` is 1."""
        moved = self.tile.wide_masters() - self.ema
        moved.mul_(1 - decay).add_(self.ema)
        # selected, not multiplied by 0, which would change the sign of a zero
        self.ema.copy_(torch.where(skip == 0, moved, self.ema))


def averaged_on_device(buffer: Buffer, tiles: Iterable[AveragedTile]) -> Iterator[AveragedTile]:
    """Yield tiles of a buffer with masters and average on the device, to be iterated to the end."""
    # the average travels as a moment does
    with_average = (replace(tile, moments=((EMA, ema),)) for tile, ema in tiles)
    for tile in buffer.on_device(with_average, written=(EMA,)):
        ((_, ema),) = tile.moments
        yield AveragedTile(tile, ema)


def averaged_tiles(buffer: Buffer) -> Iterator[AveragedTile]:
    """Yield the tiles of a buffer that keeps an average; none of one that does not."""
    if buffer.ema is None:
        return
    length = run_length(buffer.weights.device.type)
    start = 0
    for tile in buffer.tiles(0, buffer.local_size, length):
        stop = start + len(tile.weights)
        yield AveragedTile(tile, buffer.ema[start:stop])
        start = stop


class _OwnWeights(NamedTuple):
    """This rank's slice of a buffer's weights, and of the masters of FP8 weights, while the
    averages are in their place."""

    weights: Tensor
    masters: Tensor | None


class WeightAverage:
    """The averages of all buffers of a rank.

    decay: the factor of an average in the next one, above 0 and below 1.
    is_swapped_in: True while the averages are in the place of the weights.
    """

    def __init__(self, buffers: Sequence[Buffer], decay: float) -> None:
        self.decay = decay
        self.is_swapped_in = False
        self._buffers = [buffer for buffer in buffers if buffer.ema is not None]
        self._tiles = {buffer: list(averaged_tiles(buffer)) for buffer in self._buffers}

    def begin(self) -> None:
        """Make averages that have not begun copies of the masters."""
        for buffer in self._buffers:
            buffer.begin_ema()

    def restart(self) -> None:
        """Let all averages begin anew, with the masters of the next step."""
        for buffer in self._buffers:
            buffer.ema_has_begun = False

    def follow(self, buffer: Buffer, skip: Tensor) -> None:
        """Move the average of an updated buffer, or change nothing if `skip` is 1."""
        for averaged in averaged_on_device(buffer, self._tiles.get(buffer, ())):
            averaged.move(self.decay, skip)

    @contextmanager
    def swapped_in(
        self,
        fp8_masters: FP8Masters | None,
        gather: Callable[[Iterable[Buffer]], None],
    ) -> Iterator[None]:
        """Put the averages, rounded to nearest, in the place of the weights, and the weights back
        with equal bits.

        Each rank keeps its slice of the weights meanwhile, and of the masters of FP8 weights.
        fp8_masters: computes the codes of FP8 weights. gather: all-gathers the weights of buffers.
        Collective over the ranks that share state, at the beginning and at the end.
        """
        own_weights = [_put_in(buffer) for buffer in self._buffers]
        held_codes: HeldCodes | None = None
        if fp8_masters is not None:
            held_codes = fp8_masters.hold_codes()
            fp8_masters.outdate()  # the next pass computes the codes of the averages, and gathers
        self.is_swapped_in = True
        try:
            gather([buffer for buffer in self._buffers if not buffer.has_fp8_weights])
            yield
        finally:
            for buffer, own in zip(self._buffers, own_weights, strict=True):
                _put_back(buffer, own)
            if held_codes is not None:
                held_codes.put_back()
            self.is_swapped_in = False
            gather(self._buffers)


def own_bytes(buffer: Buffer) -> int:
    """Return the bytes of what a rank keeps of a buffer while the average is in its place."""
    num_bytes = buffer.own_weights.nbytes
    if buffer.has_fp8_weights and buffer.masters is not None:
        num_bytes += buffer.masters.nbytes
    return num_bytes


def _put_in(buffer: Buffer) -> _OwnWeights:
    """Write the average of a buffer, rounded, to this rank's slice of its weights, and return what
    was there. Of FP8 weights, whose codes are computed later, it is written to the masters."""
    assert buffer.ema is not None
    weights = buffer.own_weights
    own_codes_or_weights = weights.clone()
    if not buffer.has_fp8_weights:
        weights.copy_(buffer.ema)
        return _OwnWeights(own_codes_or_weights, None)
    assert buffer.masters is not None
    buffer.wait_for_state()
    own_masters = buffer.masters.clone()
    buffer.masters.copy_(buffer.ema)
    return _OwnWeights(own_codes_or_weights, own_masters)


def _put_back(buffer: Buffer, own: _OwnWeights) -> None:
    """Restore what `_put_in` has returned."""
    buffer.own_weights.copy_(own.weights)
    if own.masters is not None:
        assert buffer.masters is not None
        buffer.wait_for_state()
        buffer.masters.copy_(own.masters)
