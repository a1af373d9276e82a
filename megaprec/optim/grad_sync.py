"""Communication that overlaps with compute: the reduction of gradients and the all-gather of
weights.

A backward pass runs from the last layer to the first, so the gradients of the last layers are final
long before the pass ends. `GradReducer` starts to reduce a buffer after its last gradient has been
accumulated. All ranks start their buffers in one fixed order, whatever the order in which the
buffers become ready, because collectives are matched by order. All-gathering weights under ZeRO-1
is the reverse: the next forward pass needs the first layers first, so `ParamGatherer` makes each
layer wait only for the buffers that hold its own weights.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from megaprec.comm.axis import Axis
from megaprec.optim.flat_buffer import Buffer
from megaprec.optim.main_grad import close_accumulation, zero_missing_grads
from megaprec.optim.microbatch_sums import MicrobatchSums
from megaprec.optim.partial_grads import sum_partial

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
WaitFor = Callable[[Sequence[Buffer]], None]


@runtime_checkable
class ReadsLate(Protocol):
    """A model part that reads some weights only after its layers, such as those of an output head.

    On NCCL a wait for the last weights is a wait for all of them, so it must not come first.
    """

    def read_late(self) -> Mapping[nn.Module, Sequence[nn.Parameter]]:
        """Return, for modules that run after the layers, the weights that are read in or after
        their forward only."""
        ...


class GradReducer:
    """The reduction of gradients over tp and dp, by model chunk.

    chunks: the buffers of each model chunk, in the order of the forward pass. early: True to start
    the reduction during the last backward pass, so that it overlaps with later work; otherwise it
    is complete when `reduce` returns.
    microbatches: the sums over micro-batches, if they are by a tree, which are completed first.
    """

    def __init__(
        self,
        chunks: Sequence[Sequence[Buffer]],
        tp: Axis,
        early: bool,
        microbatches: MicrobatchSums | None = None,
    ) -> None:
        self.microbatches = microbatches
        self.num_microbatches = 0  # of the last step that was reduced, if they are summed by a tree
        self._chunks = [list(reversed(chunk)) for chunk in chunks]
        self.tp = tp
        self._early = early
        self._ends: dict[
            int, list[Callable[[], None]]
        ] = {}  # wait functions of the started reductions, by chunk
        self._reduced: set[int] = set()
        self._awaited: dict[int, list[set[nn.Parameter]]] = {}  # by chunk and buffer: not final
        self.before: Callable[[Buffer], None] | None = (
            None  # called with a buffer that is about to be reduced
        )
        self._nodes: list[
            object
        ] = []  # autograd does not keep the nodes alive, and the hooks die with them
        for n, buffers in enumerate(self._chunks) if early else ():
            self._nodes += [
                self._watch(p, n, k) for k, buffer in enumerate(buffers) for p in buffer.parameters
            ]

    def _watch(self, parameter: nn.Parameter, chunk: int, buffer: int) -> object:
        """Call `arrived` when a backward pass has finished the gradient; return the autograd node
        to keep."""
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
        """Announce that the next backward pass is the last one that accumulates gradients of
        `chunk`."""
        if self._early:
            self._awaited[chunk] = [set(buffer.parameters) for buffer in self._chunks[chunk]]
            self._begin_ready(chunk)

    @torch.no_grad()
    def _begin_ready(self, chunk: int) -> None:
        """Start the reductions of all buffers whose gradients are final and whose predecessors have
        started."""
        ends = self._ends.setdefault(chunk, [])
        awaited = self._awaited.get(chunk)
        while len(ends) < len(self._chunks[chunk]) and not (awaited and awaited[len(ends)]):
            buffer = self._chunks[chunk][len(ends)]
            if self.microbatches is not None:
                self.microbatches.finish(buffer.parameters, in_flight=awaited is not None)
            zero_missing_grads(buffer.parameters)
            if self.before is not None:
                self.before(buffer)
            close_accumulation(buffer.parameters, True)
            sum_partial(buffer.parameters, self.tp)
            ends.append(buffer.start_reduce())

    def reduce(self, chunk: int) -> None:
        """Start the remaining reductions of `chunk`, whose gradients are final. To be called once
        per step."""
        if chunk in self._reduced:
            raise RuntimeError(
                f"model chunk {chunk} was reduced twice in one step: its gradients would be "
                "summed twice"
            )
        self._reduced.add(chunk)
        self._awaited.pop(chunk, None)
        self._begin_ready(chunk)
        if not self._early:
            self._end(chunk)

    def finish(self) -> None:
        """Reduce the chunks that were not reduced yet, and wait for all reductions."""
        for chunk in range(len(self._chunks)):
            if chunk not in self._reduced:
                self.reduce(chunk)
            self._end(chunk)
        self._ends.clear()
        self._reduced.clear()
        self._open()

    def drop(self) -> None:
        """Wait for all running reductions, discard their results and begin a new step."""
        for chunk in self._ends:
            self._end(chunk)
        self._ends.clear()
        self._reduced.clear()
        self._awaited.clear()
        self._open()

    def _open(self) -> None:
        """Let gradients be accumulated again, for another step."""
        for buffer in chain.from_iterable(self._chunks):
            close_accumulation(buffer.parameters, False)
        if self.microbatches is not None:
            self.num_microbatches = self.microbatches.count
            self.microbatches.forget()

    def _end(self, chunk: int) -> None:
        for k, end in enumerate(self._ends[chunk]):
            end()
            self._ends[chunk][k] = _over


def _over() -> None:
    """Do nothing: this replaces the wait function of a reduction that is complete."""


class ParamGatherer:
    """The running all-gathers of weights, and the modules that wait for them.

    A layer, which is a module in a list or dict of modules, waits for the weights of itself and its
    submodules. The model part as a whole, whose forward runs before, waits for all other weights,
    except those that it reads late (`ReadsLate`). Code outside a layer's forward must therefore not
    read the layer's weights before `wait`.
    """

    def __init__(self, parts: Sequence[nn.Module], buffers: Sequence[Buffer], early: bool) -> None:
        self._under_way: dict[Buffer, Callable[[], object]] = {}
        self._early = early
        for part in parts if early else ():
            _follow(part, buffers, self._wait_for)

    def begin(self, buffer: Buffer) -> None:
        """Start to all-gather the weights of a buffer in which this rank's slice has been
        updated."""
        self._under_way[buffer] = buffer.start_collect()

    def wait(self) -> None:
        """Wait until all weights have arrived."""
        self._wait_for(list(self._under_way))

    def settle(self) -> None:
        """End an update: wait for all weights, unless the next forward pass waits layer by
        layer."""
        if not self._early:
            self.wait()

    def _wait_for(self, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            if buffer in self._under_way:
                self._under_way.pop(buffer)()


def _follow(part: nn.Module, buffers: Sequence[Buffer], wait_for: WaitFor) -> None:
    """Make the layers of `part`, and `part` itself, wait for their weights when they are called."""
    layers = [layer for m in part.modules() if isinstance(m, _CONTAINERS) for layer in m.children()]
    waits = {layer: set(layer.parameters()) for layer in layers}
    waits |= (
        {module: set(late) for module, late in part.read_late().items()}
        if isinstance(part, ReadsLate)
        else {}
    )
    waits[part] = set(part.parameters()).difference(*waits.values())
    for module, parameters in waits.items():
        needed = [buffer for buffer in buffers if parameters.intersection(buffer.parameters)]
        module.register_forward_pre_hook(partial(_before_forward, wait_for, needed))


def _before_forward(
    wait_for: WaitFor, needed: Sequence[Buffer], module: nn.Module, args: object
) -> None:
    wait_for(needed)
