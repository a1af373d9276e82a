"""What travels between ranks while the model computes: sums of gradients, and weights on their way back.

A backward pass goes from the last layer to the first, so the gradients of the last layers are final long before the
pass is over. `GradReducer` begins to reduce a buffer when the last gradient has been added to it, in one order on all
ranks, whatever the order in which buffers become ready: collectives are matched by order. Gathering weights under
ZeRO-1 is the same the other way round: the next forward pass needs the first layers first, so `ParamGatherer` makes
each layer wait only for the buffers that hold its own weights.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from megaprec.comm.axis import Axis
from megaprec.optim.flat_buffer import Buffer
from megaprec.optim.main_grad import zero_missing_grads
from megaprec.optim.partial_grads import sum_partial

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
WaitFor = Callable[[Sequence[Buffer]], None]


class GradReducer:
    """GradReducer of gradients over tp and dp, by model chunk.

    chunks: the buffers of each, in the order of the forward pass. early: sums begin within the last backward pass and
    go on beside what follows; otherwise each is over when `reduce` returns.
    """

    def __init__(self, chunks: Sequence[Sequence[Buffer]], tp: Axis, early: bool) -> None:
        self._chunks, self._tp, self._early = [list(reversed(chunk)) for chunk in chunks], tp, early
        self._ends: dict[int, list[Callable[[], None]]] = {}  # of the sums that are begun, by chunk
        self._reduced: set[int] = set()
        self._awaited: dict[int, list[set[nn.Parameter]]] = {}  # by chunk and buffer: what is not final
        self._nodes: list[object] = []  # autograd itself does not hold them, and with them went the hooks
        for n, buffers in enumerate(self._chunks) if early else ():
            self._nodes += [self._watch(p, n, k) for k, buffer in enumerate(buffers) for p in buffer.parameters]

    def _watch(self, parameter: nn.Parameter, chunk: int, buffer: int) -> object:
        """Has `_arrived` called when a backward pass has made all that it will of the parameter's gradient."""
        with torch.enable_grad():
            used = parameter.view_as(parameter).grad_fn
        assert used is not None
        node = used.next_functions[0][0]
        assert node is not None

        def arrived(*_: Tensor | tuple[Tensor, ...]) -> None:
            if chunk in self._awaited:
                self._awaited[chunk][buffer].discard(parameter)
                self._begin_ready(chunk)

        node.register_hook(arrived)
        return node

    def expect(self, chunk: int) -> None:
        """The next backward pass is the last that adds to gradients of `chunk`."""
        if self._early:
            self._awaited[chunk] = [set(buffer.parameters) for buffer in self._chunks[chunk]]
            self._begin_ready(chunk)

    @torch.no_grad()
    def _begin_ready(self, chunk: int) -> None:
        """Begins the sums that nothing stands in the way of: neither a gradient that is not final nor another sum."""
        ends, awaited = self._ends.setdefault(chunk, []), self._awaited.get(chunk)
        while len(ends) < len(self._chunks[chunk]) and not (awaited and awaited[len(ends)]):
            buffer = self._chunks[chunk][len(ends)]
            zero_missing_grads(buffer.parameters)
            sum_partial(buffer.parameters, self._tp)
            ends.append(buffer.start_reduce())

    def reduce(self, chunk: int) -> None:
        """The gradients of `chunk` are final: begins what is left of its sums. Once per step."""
        if chunk in self._reduced:
            raise RuntimeError(
                f"model chunk {chunk} was reduced twice in one step: its gradients would be summed twice"
            )
        self._reduced.add(chunk)
        self._awaited.pop(chunk, None)
        self._begin_ready(chunk)
        if not self._early:
            self._end(chunk)

    def finish(self) -> None:
        """Reduces what was not, and returns when nothing is under way."""
        for chunk in range(len(self._chunks)):
            if chunk not in self._reduced:
                self.reduce(chunk)
            self._end(chunk)
        self._ends.clear()
        self._reduced.clear()

    def drop(self) -> None:
        """Waits for what is under way and begins a new step: the sums are of no use."""
        for chunk in self._ends:
            self._end(chunk)
        self._ends.clear()
        self._reduced.clear()
        self._awaited.clear()

    def _end(self, chunk: int) -> None:
        for k, end in enumerate(self._ends[chunk]):
            end()
            self._ends[chunk][k] = _over


def _over() -> None:
    """The end of a sum that is over."""


class ParamGatherer:
    """Weights that are being collected, and who must wait for which of them.

    A layer, which is a module in a list or dict of modules, waits for what lies in or under it. The part as a whole,
    whose forward runs before, waits for all other weights. A layer's weights are therefore not to be read from
    outside of its forward before `wait`.
    """

    def __init__(self, parts: Sequence[nn.Module], buffers: Sequence[Buffer], early: bool) -> None:
        self._under_way: dict[Buffer, Callable[[], object]] = {}
        self._early = early
        for part in parts if early else ():
            _follow(part, buffers, self._wait_for)

    def begin(self, buffer: Buffer) -> None:
        """Starts to collect the weights of a buffer, whose own slice has been updated."""
        self._under_way[buffer] = buffer.start_collect()

    def wait(self) -> None:
        """Returns when all weights have arrived."""
        self._wait_for(list(self._under_way))

    def settle(self) -> None:
        """The end of an update: waits, unless the next forward pass is to do so layer by layer."""
        if not self._early:
            self.wait()

    def _wait_for(self, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            if buffer in self._under_way:
                self._under_way.pop(buffer)()


def _follow(part: nn.Module, buffers: Sequence[Buffer], wait_for: WaitFor) -> None:
    """Makes the layers of `part`, and the part itself, wait for their weights when they are called."""
    layers = [layer for m in part.modules() if isinstance(m, _CONTAINERS) for layer in m.children()]
    waits = {layer: set(layer.parameters()) for layer in layers}
    waits[part] = set(part.parameters()).difference(*waits.values())
    for module, parameters in waits.items():
        needed = [buffer for buffer in buffers if parameters.intersection(buffer.parameters)]
        module.register_forward_pre_hook(partial(_before_forward, wait_for, needed))


def _before_forward(wait_for: WaitFor, needed: Sequence[Buffer], module: nn.Module, args: object) -> None:
    wait_for(needed)
