"""The weights that ZeRO-3 holds whole, before any launch.

A pass through a stage gathers and gives up the weights of one unit after the other, as
`megaprec.optim.layer_weights` says. Here the passes of a rank are gone through in the order of its
schedule, with nothing but the bytes of its buffers.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple

from megaprec.optim.state.flat_buffer import Buffer
from megaprec.optim.weight_units import Moment, kept_buffers, weight_units
from models.decoder.stages import Stage
from parallel.pipeline.instructions import Op
from parallel.pipeline.schedules import Schedule

# the weights that a backward pass reads first, by the time at which a forward pass reads them
_READ_FIRST = (Moment.LATE, Moment.THROUGHOUT)


class StagePass(NamedTuple):
    """A pass through a stage.

    stage: its position among those of the rank.
    has_backward: False in an evaluation.
    """

    stage: int
    is_forward: bool
    has_backward: bool = True


@dataclass(frozen=True)
class _Unit:
    """The sharded buffers of a unit of weights, which are gathered together
    (`megaprec.optim.weight_units`).

    moment: when a forward pass reads them.
    buffers: their numbers among the buffers of the rank.
    is_after_late: the unit is a module of multi-token prediction, which runs after the weights that
        are read late.
    """

    moment: Moment
    buffers: frozenset[int]
    is_after_late: bool


@dataclass(frozen=True)
class WholeWeights:
    """The buffers of a rank whose weights are gathered.

    sizes: bytes of each, whole, by number.
    stages: the units of each stage that have such buffers.
    """

    sizes: Mapping[int, int]
    stages: tuple[tuple[_Unit, ...], ...]

    @classmethod
    def of(cls, stages: Sequence[Stage], buffers: Sequence[Buffer]) -> "WholeWeights":
        """Return the weights that passes through a rank's stages gather. buffers: in which the
        parameters of the stages lie."""
        sizes: dict[int, int] = {}
        numbers: dict[object, int] = {}  # by parameter: the number of its buffer
        for number, buffer in enumerate(buffers):
            if buffer.shards_weights:
                itemsize = buffer.weights.dtype.itemsize
                sizes[number] = buffer.size * itemsize
                numbers.update(dict.fromkeys(buffer.parameters, number))
        units_by_stage = tuple(_units_of(stage, numbers) for stage in stages)
        return cls(sizes, units_by_stage)

    def most_bytes(
        self,
        passes: Iterable[StagePass],
        overlap: bool,
        keep_layers: int = 0,
        keep_bytes: int = 0,
    ) -> int:
        """Return the most bytes that are whole at one time in these passes of a step.

        overlap, keep_layers, keep_bytes: as for the optimizer.
        """
        if not self.sizes:
            return 0
        all_units = chain(*self.stages)
        layers = [unit.buffers for unit in all_units if unit.moment is Moment.LAYER]
        kept = kept_buffers(layers, self.sizes.__getitem__, keep_layers, keep_bytes)
        walk = _Walk(self, overlap, kept)
        for stage_pass in passes:
            walk.take(stage_pass)
        return walk.most


def _units_of(stage: Stage, numbers: Mapping[object, int]) -> tuple[_Unit, ...]:
    """Return the units of a stage that have sharded buffers, in the order of a forward pass.
    numbers: by parameter, the number of its buffer if that is sharded."""
    layers = {*stage.layers.values()}
    units: list[_Unit] = []
    for unit in weight_units(stage):
        sharded = [parameter for parameter in unit.parameters if parameter in numbers]
        buffers = frozenset(numbers[parameter] for parameter in sharded)
        # modules of multi-token prediction are gathered as layers, and are none of the stage
        is_after_late = unit.moment is Moment.LAYER and unit.entry not in layers
        if buffers:
            units.append(_Unit(unit.moment, buffers, is_after_late))
    return tuple(units)


def passes_of_rank(schedule: Schedule, rank: int) -> list[StagePass]:
    """Return the passes of a pipeline rank in a step, in order; backward passes are whole."""
    own_stages = [stage for stage, owner in enumerate(schedule.rank_of_stage) if owner == rank]
    passes: list[StagePass] = []
    for instruction in schedule.programs[rank]:
        if instruction.op in (Op.FORWARD, Op.BACKWARD):
            position = own_stages.index(instruction.stage)
            is_forward = instruction.op is Op.FORWARD
            passes.append(StagePass(position, is_forward))
    return passes


def evaluation_passes(schedule: Schedule, rank: int) -> list[StagePass]:
    """Return the passes of a pipeline rank in an evaluation of two micro-batches: in the second one
    the layers that stay whole are so from the beginning."""
    num_stages = list(schedule.rank_of_stage).count(rank)
    of_microbatch: list[StagePass] = []
    for stage in range(num_stages):
        of_microbatch.append(StagePass(stage, is_forward=True, has_backward=False))
    return 2 * of_microbatch


class _Walk:
    """Goes through the passes of a rank.

    kept: the buffers of layers that stay whole.
    most: the most bytes that were whole at one time so far.
    """

    def __init__(self, weights: WholeWeights, overlap: bool, kept: Set[int]) -> None:
        self.most = 0
        self._sizes = weights.sizes
        self._stages = weights.stages
        self._overlap = overlap
        self._kept = kept
        self._whole: set[int] = set()
        # the buffers that are whole after a pass, by the pass and those that were before it
        self._known: dict[tuple[StagePass, frozenset[int]], frozenset[int]] = {}

    def take(self, stage_pass: StagePass) -> None:
        """Go through a pass. One with the same buffers whole before it as an earlier pass is not
        gone through again."""
        whole_before = frozenset(self._whole)
        key = (stage_pass, whole_before)
        if key not in self._known:
            units = self._stages[stage_pass.stage]
            if stage_pass.is_forward:
                self._go_forward(units, stage_pass.has_backward)
            else:
                self._go_backward(units)
            self._known[key] = frozenset(self._whole)
        self._whole = {*self._known[key]}

    def _go_forward(self, units: Sequence[_Unit], has_backward: bool) -> None:
        """Go through a forward pass: gather each unit before it runs, with overlap the next one
        too, and give up each layer after it has run. At the end all is given up but what the
        backward pass reads first, if there is one."""
        # what only the beginning of the stage reads
        early = _buffers_of(units, Moment.EARLY) - _buffers_of(units, Moment.LATE)
        next_unit = dict(pairwise(units))
        in_order_of_run = sorted(units, key=lambda unit: unit.is_after_late)
        for unit in in_order_of_run:
            if unit.moment in (Moment.LAYER, Moment.LATE):
                self._give_up(early)
            self._gather(unit)
            if self._overlap and unit in next_unit:
                self._gather(next_unit[unit])
            if unit.moment is Moment.LAYER:
                self._give_up(unit.buffers)
        given_up = _buffers_of(units, *Moment)
        if has_backward:
            given_up -= _buffers_of(units, *_READ_FIRST)
        self._give_up(given_up)

    def _go_backward(self, units: Sequence[_Unit]) -> None:
        """Go through a backward pass: gather what it reads first, then each layer, from the last
        one on, with overlap the layer before too, and give up each layer after it has run. At the
        end all is given up."""
        previous = {following: unit for unit, following in pairwise(units)}
        # the gradient of an embedding that is the head too is complete at the end
        late = _buffers_of(units, Moment.LATE) - _buffers_of(units, Moment.EARLY)
        layers = [unit for unit in units if unit.moment is Moment.LAYER]
        read_first = [unit for unit in units if unit.moment in _READ_FIRST]
        for unit in read_first:
            self._gather(unit)
        for unit in read_first:
            self._gather_ahead(previous.get(unit))
        for unit in reversed(layers):
            if not unit.is_after_late:
                self._give_up(late)
            self._gather(unit)
            self._gather_ahead(previous.get(unit))
            self._give_up(unit.buffers)
        self._give_up(self._sizes)

    def _gather_ahead(self, previous: _Unit | None) -> None:
        """With overlap, gather the layer whose gradients are computed next. previous: the unit
        before the present one in a forward pass."""
        if self._overlap and previous is not None and previous.moment is Moment.LAYER:
            self._gather(previous)

    def _gather(self, unit: _Unit) -> None:
        """Make the weights of a unit whole, and take note of the bytes that are whole then."""
        self._whole |= unit.buffers
        sizes = [self._sizes[number] for number in self._whole]
        whole_bytes = sum(sizes)
        self.most = max(self.most, whole_bytes)

    def _give_up(self, buffers: Iterable[int]) -> None:
        """Give up the whole weights of these buffers, but for those that stay."""
        self._whole.difference_update(set(buffers) - self._kept)


def _buffers_of(units: Iterable[_Unit], *moments: Moment) -> frozenset[int]:
    """Return the buffers of the units that are read at these moments."""
    at_moments = [unit.buffers for unit in units if unit.moment in moments]
    return frozenset(chain.from_iterable(at_moments))
