"""Statistics of a step: mean, root mean square and shape of each weight, gradient and update, and
the size of what each layer puts out. They are the same in every layout, but for rounding.

Each rank reads the elements that it counts, in float64, twice: the mean over all ranks comes first,
and the powers of the distance from it after that, which loses no digits where the mean is much
larger than the spread. A copy of this rank's slice of the masters is kept during the step, from
which the update is told.

Frozen parameters have no gradient and are in no buffer: they are left out.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megaprec.comm.gathered_texts import gather_entries
from megaprec.diagnose.state_digest import masters_of
from megaprec.optim.decision.step_report import StepObserver
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.state.flat_buffer import Buffer

BLOCK = 1 << 20  # elements that are read at once, so that temporaries are small
Source = TypeVar("Source")


class Moments(NamedTuple):
    """The statistics of one tensor.

    mean, rms: of all elements, padding left out.
    largest: the largest magnitude.
    zeros: the share of elements that are 0.
    kurtosis: the fourth central moment over the square of the second: 3 for a normal distribution,
        large if few elements are much larger than the others; NaN if all are equal.
    """

    mean: float
    rms: float
    largest: float
    zeros: float
    kurtosis: float


@dataclass(frozen=True)
class StepStatistics:
    """The statistics of a step, the same on every rank.

    weights: after the step, of the masters. gradients: without the loss scale, before clipping.
    updates: weights after the step minus those before it; all 0 in a skipped step. outputs: the
    root mean square of a layer's output over the tokens of the step. Each by logical name.
    """

    weights: Mapping[str, Moments]
    gradients: Mapping[str, Moments]
    updates: Mapping[str, Moments]
    outputs: Mapping[str, float]


class _Block(NamedTuple):
    """Elements of a buffer that this rank counts, of one tensor and at most BLOCK: `span` of the
    buffer."""

    buffer: Buffer
    name: str
    span: range

    @property
    def in_shard(self) -> slice:
        """Return the positions of the elements in this rank's slice of the buffer."""
        start = self.buffer.start
        return slice(self.span.start - start, self.span.stop - start)


class TensorStatistics(StepObserver):
    """Takes the statistics of chosen steps.

    layers: modules by logical name, those of this rank. Steps outside of `watching` cost nothing.
    """

    def __init__(self, optimizer: ParallelAMPOptimizer, layers: Mapping[str, nn.Module]) -> None:
        self._optimizer = optimizer
        self._layers = layers
        self._names: list[str] | None = None  # of all ranks' tensors
        self._layer_names: list[str] = []  # of all ranks' layers
        self._before: list[Tensor] = []  # masters before the update
        self._gradients: Mapping[str, Moments] = {}
        self._weights: Mapping[str, Moments] = {}
        self._updates: Mapping[str, Moments] = {}
        # by layer: the sum of squares and the number of elements, float64 [2]
        self._outputs: dict[str, Tensor] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Take the statistics of the step that is made inside. Collective over the world, within
        the optimizer's step."""
        self._outputs = {}
        handles: list[RemovableHandle] = []
        for name, module in self._layers.items():
            note = partial(self._note_output, name)
            handles.append(module.register_forward_hook(note))
        self._optimizer.observers.append(self)
        try:
            yield
        finally:
            self._optimizer.observers.remove(self)
            for handle in handles:
                handle.remove()
            self._before = []

    def gradients_ready(self, buffers: Sequence[Buffer], scale: Tensor) -> None:
        """Take the statistics of the gradients, and remember the masters."""
        self._learn_names(buffers)
        blocks = list(_counted(buffers))
        # in place of gradients some buffers have the tokens that experts were given
        with_gradients = [(block, block) for block in blocks if not block.buffer.holds_loads]
        self._gradients = self._moments(with_gradients, _gradient_of, scale.double())
        self._before = [_weights_of(block).clone() for block in blocks]

    def updated(self, buffers: Sequence[Buffer]) -> None:
        """Take the statistics of the masters, and of what the step has changed."""
        blocks = list(_counted(buffers))
        one = torch.ones((), dtype=torch.float64, device=self._optimizer.device)
        with_weights = [(block, block) for block in blocks]
        self._weights = self._moments(with_weights, _weights_of, one)
        after_and_before: list[tuple[_Block, tuple[_Block, Tensor]]] = []
        for block, before in zip(blocks, self._before, strict=True):
            after_and_before.append((block, (block, before)))
        self._updates = self._moments(after_and_before, _update_of, one)

    def result(self) -> StepStatistics:
        """Return the statistics of the watched step. Collective over the world."""
        return StepStatistics(
            weights=self._weights,
            gradients=self._gradients,
            updates=self._updates,
            outputs=self._sizes_of_outputs(),
        )

    def _learn_names(self, buffers: Sequence[Buffer]) -> None:
        """Learn the names of all ranks' tensors and layers, once: they are those of every step."""
        if self._names is not None:
            return
        world = self._optimizer.world
        device = self._optimizer.device
        own_names: dict[str, int] = {}
        for buffer in buffers:
            for piece in buffer.pieces:
                own_names[piece.part.name] = 1
        names_of_all = gather_entries(own_names, world, device)
        self._names = sorted(names_of_all)
        own_layers = dict.fromkeys(self._layers, 1)
        layers_of_all = gather_entries(own_layers, world, device)
        self._layer_names = list(layers_of_all)

    def _moments(
        self,
        blocks: Sequence[tuple[_Block, Source]],
        values_of: Callable[[Source], Tensor],
        divisor: Tensor,
    ) -> dict[str, Moments]:
        """Return the statistics of values divided by `divisor`, by logical name; a name without
        elements on any rank is left out. Collective over the world.

        blocks: each with its source, of which `values_of` makes its values [elements].
        values_of: called twice for each block, so that not all values are in memory.
        """
        names = self._names or []
        world = self._optimizer.world
        row_of_name = {name: number for number, name in enumerate(names)}
        # the means over all ranks first
        sums = torch.zeros(len(names), 2, dtype=torch.float64, device=divisor.device)
        for block, source in blocks:
            row = row_of_name[block.name]
            sums[row] += _sum_and_count(values_of(source))
        sums = world.sum_(sums)
        counts = sums[:, 1].clamp(min=1)
        means = sums[:, 0] / counts
        # then the powers of the distances from them
        powers = torch.zeros(len(names), 3, dtype=torch.float64, device=divisor.device)
        largest = torch.zeros(len(names), dtype=torch.float64, device=divisor.device)
        for block, source in blocks:
            row = row_of_name[block.name]
            values = values_of(source)
            powers[row] += _powers(values, means[row])
            largest_of_block = values.double().abs().amax()
            largest[row] = torch.maximum(largest[row], largest_of_block)
        powers = world.sum_(powers) / counts[:, None]
        largest = world.max_(largest)
        # the central moments, and the share of zeros
        second, fourth, zeros = powers.unbind(1)
        # the mean of squares is the square of the mean and the second central moment
        rms = (means.square() + second).sqrt()
        kurtosis = fourth / second.square()
        # in the order of `Moments`; the last two do not change if all numbers are divided
        columns = (
            means / divisor,
            rms / divisor,
            largest / divisor,
            zeros,
            kurtosis,
        )
        rows = torch.stack(columns, 1).tolist()
        has_elements = (sums[:, 1] > 0).tolist()
        moments: dict[str, Moments] = {}
        for name, numbers, is_there in zip(names, rows, has_elements, strict=True):
            if is_there:
                moments[name] = Moments(*numbers)
        return moments

    def _note_output(self, name: str, module: nn.Module, arguments: object, output: Tensor) -> None:
        """Add the squares of a layer's output and their number. An output that is computed again,
        or by several tensor-parallel ranks, adds to both as often, and their ratio stays the
        same."""
        squares = output.detach().float().square()
        sum_of_squares = squares.sum(dtype=torch.float64)
        count = torch.full_like(sum_of_squares, output.numel())
        of_this_pass = torch.stack((sum_of_squares, count))
        earlier = self._outputs.get(name)
        self._outputs[name] = of_this_pass if earlier is None else earlier + of_this_pass

    def _sizes_of_outputs(self) -> dict[str, float]:
        """Return the root mean square of each layer's output, by its name. Collective over the
        world."""
        names = self._layer_names
        if not names:
            return {}
        device = self._optimizer.device
        nothing = torch.zeros(2, dtype=torch.float64, device=device)
        rows = [self._outputs.get(name, nothing) for name in names]
        table = torch.stack(rows)
        sums = self._optimizer.world.sum_(table).tolist()
        sizes: dict[str, float] = {}
        for name, (squares, count) in zip(names, sums, strict=True):
            if count:
                sizes[name] = math.sqrt(squares / count)
        return sizes


def _counted(buffers: Sequence[Buffer]) -> Iterator[_Block]:
    """Yield the elements that this rank counts, in blocks."""
    for buffer in buffers:
        for piece in buffer.pieces:
            span = piece.overlap(*buffer.share)
            if not piece.counts:
                continue
            for start in range(span.start, span.stop, BLOCK):
                stop = min(start + BLOCK, span.stop)
                yield _Block(buffer, piece.part.name, range(start, stop))


def _gradient_of(block: _Block) -> Tensor:
    """Return the gradients of a block, with the loss scale."""
    return block.buffer.local_grads[block.in_shard].detach()


def _weights_of(block: _Block) -> Tensor:
    """Return the masters of a block; they may be a view."""
    return masters_of(block.buffer, block.span)


def _update_of(after_and_before: tuple[_Block, Tensor]) -> Tensor:
    """Return the masters of a block minus those before the step, float64."""
    block, before = after_and_before
    return _weights_of(block).double() - before.double()


def _sum_and_count(values: Tensor) -> Tensor:
    """Return the sum of values and their number: float64 [2]."""
    total = values.sum(dtype=torch.float64)
    count = torch.full_like(total, values.numel())
    return torch.stack((total, count))


def _powers(values: Tensor, mean: Tensor) -> Tensor:
    """Return the sums of the second and fourth powers of the distance from the mean, and the number
    of zeros: float64 [3]."""
    squares = (values.double() - mean).square()
    zeros = (values == 0).sum(dtype=torch.float64)
    return torch.stack((squares.sum(), squares.square().sum(), zeros))
