"""The update of parameters that balance loads: the bias by which a router's choice of experts is
corrected.

No loss has a gradient for such a parameter. What is summed over micro-batches and dp in the place
of one are the counts of a step: how many tokens each expert was given. The update moves every
element by the same amount, the speed, up if its count is below the mean of its layer, down if
above, and not at all if equal:

    new = old + speed * sign(mean of the counts - count)

Counts are whole numbers, which FP32 sums exactly up to 2^24 of one expert in one step, and they are
compared with their mean exactly. So the result has the same bits in every layout. A skipped step
leaves the parameter as it was. (DeepSeek-V3, arXiv 2412.19437, section 2.1.2; Megatron-core
updates the bias in a skipped step too: `finalize_model_grads.py`.)
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megaprec.comm.layout import layout_of
from megaprec.optim.rules.param_groups import NO_FACTORS, StepOf
from megaprec.optim.state.flat_buffer import Buffer
from megaprec.optim.state.update_tile import Tile


class LoadBalance:
    """The updates of all buffers, among those of a rank, whose gradients are counts."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self.buffers = [buffer for buffer in buffers if buffer.holds_loads]
        self._tiles = [list(_tiles(buffer)) for buffer in self.buffers]

    def apply(self, step_of: StepOf, done: Callable[[Buffer], None]) -> None:
        """Update all parameters, or change nothing if the step's `skip` is 1.

        step_of: returns the numbers of the step; neither learning rate nor weight decay applies.
        done: called with each updated buffer.
        """
        step = step_of(NO_FACTORS)
        for buffer, tiles in zip(self.buffers, self._tiles, strict=True):
            for tile, speed in tiles:
                weights = tile.wide_masters()
                directions = corrections(tile.grads).to(weights.dtype)
                updated = weights + directions * speed
                weights.copy_(torch.where(step.skip == 0, updated, weights))
                tile.store_and_round_masters(weights, step.applied)
            done(buffer)


def _tiles(buffer: Buffer) -> Iterator[tuple[Tile, float]]:
    """Yield a tile for each parameter of a buffer, with its speed."""
    for parameter, start in zip(buffer.parameters, buffer.starts, strict=True):
        # whole in one tile, whose mean is that of the layer: such a buffer is not sharded
        (tile,) = buffer.tiles(start, start + parameter.numel(), parameter.numel())
        yield tile, layout_of(parameter).balancing or 0.0


def corrections(counts: Tensor) -> Tensor:
    """Return 1 where a count is below the mean, -1 where above, 0 where equal. counts: whole
    numbers, [n]."""
    # mean - count, multiplied by the number of counts: a mean would be rounded
    wide = counts.double()
    return (wide.sum() - wide * len(wide)).sign()
