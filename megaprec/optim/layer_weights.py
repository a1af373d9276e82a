"""ZeRO-3: the weights of a layer are whole only while it computes.

Each rank keeps its slice of all weights (`megaprec.optim.state.weight_buffer`). Before the forward
pass of a unit (`megaprec.optim.weight_units`) the ranks all-gather its weights, and give them up
after it. They gather them again when the gradient of its output arrives, and give them up when the
gradients of all its weights are complete. A layer that is recomputed is so between the two, and
gathers nothing of its own. So a layer sends its weights twice for each micro-batch:

    early    gathered before the layers, given up when the first of them begins. Their backward
             pass reads no weights
    layer    as above, unless it is kept
    late     gathered before the first module after the layers and kept until the end of their
             backward pass, which comes next on the last stage of most schedules. So are weights
             that are read throughout a forward pass
    kept     some layers' weights stay whole from the first pass of a step that reads them to its
             update: they are gathered once a step

With `overlap` the gather of the next unit runs beside the computation of this one, in both
directions. It has a process group of its own: ranks reduce gradients as they are complete, which
need not be in the same order beside the gathers.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, pairwise
from typing import Any

from torch import Tensor, nn

from megaprec.comm.layout import has_layout, layout_of
from megaprec.comm.main_grad import watch_gradient
from megaprec.comm.waiting import waiting_for
from megaprec.optim.state.flat_buffer import Buffer
from megaprec.optim.weight_units import Moment, WeightUnit, kept_buffers, weight_units
from megaprec.torch_private import call_after_backward, is_backward_running


class _Unit:
    """A unit of weights with the buffers that hold them.

    tags: a number for each buffer, the same on all ranks, by which gathers are matched.

    name: what the logical names of its weights have in common, or the name of the first.
    given_up: the buffers that nothing reads again in the forward pass after the unit has run.
    previous, following: its neighbours in the forward pass; None at the ends.
    """

    def __init__(self, unit: WeightUnit, tags: Mapping[Buffer, int]) -> None:
        self._tags = tags
        self.name = _common_name(unit.parameters)
        self.entry = unit.entry
        self.moment = unit.moment
        self.previous: _Unit | None = None
        self.following: _Unit | None = None
        weights = set(unit.parameters)
        self.buffers = [buffer for buffer in tags if weights.intersection(buffer.parameters)]
        self.given_up = self.buffers

    def start(self) -> None:
        """Start to gather the weights."""
        for buffer in self.buffers:
            buffer.start_gather_for_layer(self._tags[buffer])

    def wait(self) -> None:
        """Wait until the weights have arrived."""
        with waiting_for(f"the weights of {self.name}"):
            for buffer in self.buffers:
                buffer.wait_for_weights()


class LayerWeights:
    """The weights of `model_parts`, gathered for each unit and given up.

    chunks: the buffers of each model part.
    overlap: gather the next unit's weights while one computes.
    keep_layers, keep_bytes: which layers' weights stay whole (`kept_buffers`).

    keeps: True if layers were to be kept.
    num_layers, num_kept: the number of layers of this rank, and of those that stay whole.
    kept_bytes: of the whole weights of these.
    """

    def __init__(
        self,
        model_parts: Sequence[nn.Module],
        chunks: Sequence[Sequence[Buffer]],
        overlap: bool,
        keep_layers: int = 0,
        keep_bytes: int = 0,
    ) -> None:
        self._overlap = overlap
        self._holds_all = False
        # parameters of buffers in a backward pass whose gradients are not complete yet
        self._awaited: dict[Buffer, set[nn.Parameter]] = {}
        self._is_end_awaited = False  # of a backward pass
        every = [buffer for chunk in chunks for buffer in chunk if buffer.shards_weights]
        self._tags = {buffer: tag for tag, buffer in enumerate(every, 1)}
        parts = [_linked_units(part, self._tags) for part in model_parts]
        units_of_layers = [unit for unit in chain(*parts) if unit.moment is Moment.LAYER]
        layers = [unit.buffers for unit in units_of_layers]
        self._kept = kept_buffers(layers, _whole_bytes, keep_layers, keep_bytes)
        self.keeps = keep_layers > 0 or keep_bytes > 0
        self.num_layers = len(layers)
        self.num_kept = sum(map(self._kept.issuperset, layers))
        self.kept_bytes = sum(map(_whole_bytes, self._kept))
        for part, units in zip(model_parts, parts, strict=True):
            self._add_hooks(part, units)
        # autograd does not keep the nodes alive, and the hooks die with them
        self._nodes: list[object] = []
        for buffer in every:
            for parameter in buffer.parameters:
                on_gradient = partial(self._on_gradient, buffer, parameter)
                self._nodes.append(watch_gradient(parameter, on_gradient))

    def _add_hooks(self, part: nn.Module, units: Sequence[_Unit]) -> None:
        """Have the weights of a model part gathered before the forward of each unit's entry, and
        given up after a layer and after the part."""
        early = [unit for unit in units if unit.moment is Moment.EARLY]
        for unit in units:
            # whatever runs after the part has begun comes after its early weights were read
            is_at_beginning = unit.entry is part
            read_before = () if is_at_beginning else early
            before = partial(self._before_forward, unit, read_before)
            unit.entry.register_forward_pre_hook(before)
            if unit.moment is Moment.LAYER:
                unit.entry.register_forward_hook(partial(self._after_layer, unit))
        if units:
            part.register_forward_hook(partial(self._after_part, units))

    def _before_forward(
        self,
        unit: _Unit,
        early: Sequence[_Unit],
        module: nn.Module,
        args: object,
    ) -> None:
        """Gather the weights of a unit before its forward. early: the early units, if their weights
        have been read by now: these are given up."""
        if is_backward_running():  # a recomputation
            self._gather(unit)
            return
        # a backward pass that has failed did not come to its end
        self._is_end_awaited = False
        self._awaited.clear()
        for read in early:
            self._free(read.given_up)
        self._gather(unit)
        if self._overlap and unit.following is not None:
            unit.following.start()

    def _after_layer(self, unit: _Unit, module: nn.Module, args: object, output: object) -> None:
        """Give up the weights of a layer until its backward pass."""
        if is_backward_running():
            return
        self._free(unit.given_up)
        self._watch_outputs(output, [unit])

    def _after_part(
        self,
        units: Sequence[_Unit],
        module: nn.Module,
        args: object,
        output: object,
    ) -> None:
        """Give up the weights of a part after its forward, but for those that its backward pass
        reads first."""
        if is_backward_running():
            return
        read_first = [unit for unit in units if unit.moment in (Moment.LATE, Moment.THROUGHOUT)]
        has_backward = self._watch_outputs(output, read_first)
        for unit in units:
            if has_backward and unit in read_first:
                continue
            self._free(unit.given_up)

    def _watch_outputs(self, output: object, units: Sequence[_Unit]) -> bool:
        """Have the weights of units gathered when a gradient of an output arrives. Return False if
        none can arrive, because no output requires one."""
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        for tensor in outputs:
            tensor.register_hook(partial(self._before_backward, units))
        return bool(outputs)

    def _before_backward(self, units: Sequence[_Unit], gradient: Tensor) -> None:
        """Gather the weights of units for their backward pass, and with `overlap` start to gather
        those of the layers before them."""
        if not self._is_end_awaited:
            self._is_end_awaited = True
            call_after_backward(self._after_backward)
        for unit in units:
            self._gather(unit)
            for buffer in unit.buffers:
                self._awaited.setdefault(buffer, set(buffer.parameters))
        if not self._overlap:
            return
        for unit in units:
            previous = unit.previous
            if previous is not None and previous.moment is Moment.LAYER:
                previous.start()

    def _on_gradient(self, buffer: Buffer, parameter: nn.Parameter) -> None:
        """Give up the weights of a buffer when its last gradient is complete."""
        awaited = self._awaited.get(buffer)
        if awaited is None:
            return
        awaited.discard(parameter)
        if not awaited:
            del self._awaited[buffer]
            self._free([buffer])

    def _after_backward(self) -> None:
        """Give up all weights at the end of a backward pass: it may not have computed all gradients
        of a unit, for which `_on_gradient` waits."""
        self._is_end_awaited = False
        self._awaited.clear()
        self._free(self._tags)

    def _gather(self, unit: _Unit) -> None:
        unit.start()
        unit.wait()

    def _free(self, buffers: Iterable[Buffer]) -> None:
        if self._holds_all:
            return
        for buffer in buffers:
            if buffer not in self._kept:
                buffer.free_weights()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Gather all weights for a block, in which they may be read and written. Collective over
        the ranks that share them, at the beginning."""
        for buffer, tag in self._tags.items():
            buffer.start_gather_for_layer(tag)
        with waiting_for("all weights"):
            for buffer in self._tags:
                buffer.wait_for_weights()
        self._holds_all = True
        try:
            yield
        finally:
            self._holds_all = False
            for buffer in self._tags:
                buffer.take_written_weights()
                buffer.free_weights()


def _linked_units(part: nn.Module, tags: Mapping[Buffer, int]) -> list[_Unit]:
    """Return the units of a model part that have sharded weights, each with its neighbours."""
    units = [_Unit(unit, tags) for unit in weight_units(part)]
    units = [unit for unit in units if unit.buffers]
    for previous, following in pairwise(units):
        previous.following = following
        following.previous = previous
    late = _buffers_of(unit for unit in units if unit.moment is Moment.LATE)
    for unit in units:
        if unit.moment is Moment.EARLY:
            # a tied head is the embedding, which stays for it
            unit.given_up = [buffer for buffer in unit.buffers if buffer not in late]
    return units


def _whole_bytes(buffer: Buffer) -> int:
    return buffer.size * buffer.weights.dtype.itemsize


def _buffers_of(units: Iterable[_Unit]) -> set[Buffer]:
    return set(chain.from_iterable(unit.buffers for unit in units))


def _common_name(parameters: Sequence[nn.Parameter]) -> str:
    """Return the beginning that the logical names of parameters have in common, such as layers.3.
    If there is none, return the first name and how many there are more."""
    named = filter(has_layout, parameters)  # one that is frozen may have no name
    names = [layout_of(parameter).parts[0].name for parameter in named]
    if not names:
        return "a frozen part"
    common: list[str] = []
    # one word of every name at a time, as far as the shortest name goes
    split_names = [name.split(".") for name in names]
    for words in zip(*split_names, strict=False):
        if len(set(words)) > 1:
            break
        common.append(words[0])
    if common:
        return ".".join(common)
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in the result of a module: a tensor, or tensors in tuples, lists and
    dicts."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from tensors_in(value)
