"""Communication that overlaps with compute: the reduction of gradients and the all-gather of
weights.

A backward pass runs from the last layer to the first, so the gradients of the last layers are final
long before the pass ends. `GradReducer` starts to reduce a buffer after its last gradient has been
accumulated. All ranks start their buffers in one fixed order, whatever the order in which the
buffers become ready, because collectives are matched by order. Under ZeRO-2 this happens in the
backward pass of each micro-batch, and frees the gradients that were reduced.

All-gathering weights under ZeRO-1 is the reverse: the next forward pass needs the first layers
first, so `ParamGatherer` makes each layer wait only for the buffers that hold its own weights.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

import torch
from torch import nn

from megaprec.comm.axis import Axis
from megaprec.comm.main_grad import set_closed, watch_gradient, zero_missing_grads
from megaprec.optim.decision.numerics import RunningSums
from megaprec.optim.state.flat_buffer import Buffer
from megaprec.optim.state.partial_grads import sum_partial
from megaprec.optim.weight_units import forward_order, weight_units

Wait = Callable[[], None]
WaitFor = Callable[[Sequence[Buffer]], None]


def in_forward_order(model_part: nn.Module, buffers: Sequence[Buffer]) -> list[Buffer]:
    """Return the buffers of a model part, sorted by the parameter of each that comes first in a
    forward pass. It is the last one to get its gradient in a backward pass, which then completes
    the buffer."""
    positions = forward_order(model_part)

    def first_position(buffer: Buffer) -> int:
        # a slice of a DTensor is no parameter of the model, and its gradients are not reduced
        return min(positions.get(parameter, 0) for parameter in buffer.parameters)

    return sorted(buffers, key=first_position)


class _Pass:
    """An announced backward pass: what is reduced as soon as it has completed the gradients.

    buffers: in the order in which all ranks reduce them.
    is_last: no gradient of these buffers follows in the step.
    awaited: parameters whose gradients the pass has not computed yet, by buffer.
    """

    def __init__(self, buffers: Sequence[Buffer], is_last: bool) -> None:
        self.buffers = deque(buffers)
        self.is_last = is_last
        self.awaited = {buffer: set(buffer.parameters) for buffer in buffers}


class GradReducer:
    """The reduction of gradients over tp and dp, by model chunk: a stage of this rank, numbered as
    among these.

    chunks: the buffers of each model chunk, in the order of the forward pass.
    early: True to start the reduction during the last backward pass, so that it overlaps with later
        work; otherwise it is complete when `reduce` returns.
    sums: the sums over micro-batches, which are completed first. Only canonical numerics keep them
        apart; otherwise backward passes add to the gradients themselves, and nothing is left to do.

    Buffers that shard their gradients (ZeRO-2) are reduced in each backward pass that is announced,
    and at the end of each micro-batch. One of them at a time is under way, so that few are whole.

    before_reduce: called with a buffer that is about to be reduced.
    num_microbatches: of the step that `finish` has reduced; 0 unless numerics are canonical, which
        alone read it.
    """

    def __init__(
        self,
        chunks: Sequence[Sequence[Buffer]],
        tp: Axis,
        early: bool,
        sums: RunningSums | None = None,
    ) -> None:
        self.sums = sums or RunningSums()
        self.num_microbatches = 0
        self.tp = tp
        self.before_reduce: Callable[[Buffer], None] | None = None
        # in the order in which a backward pass completes them
        self._chunks = [list(reversed(chunk)) for chunk in chunks]
        self._early = early
        # wait functions of the started reductions, by chunk
        self._waits: dict[int, list[Wait]] = {}
        self._reduced: set[int] = set()
        # buffers whose last reduction of the step has started
        self._final: set[Buffer] = set()
        # micro-batches that were announced to have ended, by chunk
        self._num_ended = Counter[int]()
        self._passes: dict[int, _Pass] = {}  # that are under way, by chunk
        # autograd does not keep the nodes alive, and the hooks die with them
        self._nodes: list[object] = []
        for chunk, buffers in enumerate(self._chunks):
            for buffer in buffers:
                if early or buffer.shards_gradients:
                    self._nodes += [self._watch(each, chunk, buffer) for each in buffer.parameters]

    def _watch(self, parameter: nn.Parameter, chunk: int, buffer: Buffer) -> object:
        """Start reductions when a backward pass has finished the gradient; return the autograd node
        to keep."""

        def on_gradient() -> None:
            announced = self._passes.get(chunk)
            if announced is not None and buffer in announced.awaited:
                announced.awaited[buffer].discard(parameter)
                self._start_ready(chunk, announced)

        return watch_gradient(parameter, on_gradient)

    def expect(self, chunk: int, is_last: bool = True) -> None:
        """Announce that the next backward pass completes the gradients of a micro-batch in `chunk`.

        is_last: it is the last pass of the step that accumulates gradients of `chunk`.
        """
        announced = self._passes.get(chunk)
        if announced is not None and not announced.is_last:
            self._end_pass(chunk)
        buffers = [
            buffer
            for buffer in self._open_buffers(chunk)
            if buffer.shards_gradients or (is_last and self._early)
        ]
        if any(buffer.shards_gradients for buffer in buffers):
            # Reductions of the pass before hold memory that this pass needs. They have ended by
            # now.
            self._wait_for_all()
        if buffers:
            self._passes[chunk] = _Pass(buffers, is_last)
            self._start_ready(chunk, self._passes[chunk])

    @torch.no_grad()
    def _start_ready(self, chunk: int, announced: _Pass) -> None:
        """Start the reductions of all buffers whose gradients are final and whose predecessors have
        started."""
        while announced.buffers and not announced.awaited[announced.buffers[0]]:
            self._start(chunk, announced.buffers.popleft(), announced.is_last, in_backward=True)

    def _start(self, chunk: int, buffer: Buffer, is_last: bool, in_backward: bool = False) -> None:
        """Start a reduction of a buffer.

        is_last: of the last reduction of the buffer in the step.
        in_backward: True within the backward pass that completes the gradients.
        """
        if buffer.shards_gradients:
            self._wait_for_all()
        if is_last:
            self._final.add(buffer)
        wait = self._start_reduce(buffer, is_last, in_backward)
        self._waits.setdefault(chunk, []).append(wait)
        if buffer.shards_gradients and not self._early:
            self._wait(chunk)

    def _start_reduce(self, buffer: Buffer, is_last: bool, in_backward: bool) -> Wait:
        """Start to sum the gradients of a buffer over tp and dp, and return the function that waits
        for the sums. Before that the sums over micro-batches are completed, and parameters without
        a gradient get zeros.

        is_last: of the last reduction of the buffer in the step: its gradients are closed.
        in_backward: True within the backward pass that completes the gradients.
        """
        self.sums.finish(buffer.parameters, in_backward=in_backward)
        zero_missing_grads(buffer.parameters)
        if self.before_reduce is not None:
            self.before_reduce(buffer)
        if is_last:
            # from here on a gradient of this rank alone would be lost on the others
            set_closed(buffer.parameters, True)
        sum_partial(buffer.parameters, self.tp)
        return buffer.start_reduce()

    def _open_buffers(self, chunk: int) -> list[Buffer]:
        """Return the buffers of a chunk that are still to be reduced in this step, in order."""
        return [buffer for buffer in self._chunks[chunk] if buffer not in self._final]

    @torch.no_grad()
    def _end_pass(self, chunk: int) -> None:
        """Start the reductions of an announced pass that it has not completed on this rank: others
        may have."""
        announced = self._passes.pop(chunk, None)
        if announced is not None:
            for buffer in announced.buffers:
                self._start(chunk, buffer, announced.is_last)

    def end_microbatch(self, number: int, count: int, chunk: int, complete: bool) -> None:
        """Take the gradients of a micro-batch in a chunk, whose backward pass has ended.

        number, count: of the micro-batch, and of all micro-batches of this rank in the step.
        complete: False if a second pass of the micro-batch computes further gradients.
        """
        self.sums.end(number, count, chunk, complete)
        sharded = [buffer for buffer in self._open_buffers(chunk) if buffer.shards_gradients]
        if not complete or not sharded:
            return
        self._num_ended[chunk] += 1
        is_last = self._num_ended[chunk] == count
        # a pass that was not announced, as one in two halves is not, is reduced as a whole now
        self._passes.setdefault(chunk, _Pass(sharded, is_last))
        self._end_pass(chunk)
        if is_last:
            # also those of a pass that was not announced as the last one
            self._final.update(sharded)
            for buffer in sharded:
                set_closed(buffer.parameters, True)

    def reduce(self, chunk: int) -> None:
        """Start the remaining reductions of `chunk`, whose gradients are final. To be called once
        per step."""
        if chunk in self._reduced:
            raise RuntimeError(
                f"model chunk {chunk} was reduced twice in one step: its gradients would be "
                "summed twice"
            )
        self._reduced.add(chunk)
        self._end_pass(chunk)
        for buffer in self._open_buffers(chunk):
            self._start(chunk, buffer, is_last=True)
        if not self._early:
            self._wait(chunk)

    def finish(self) -> None:
        """Reduce the chunks that were not reduced yet, such as one whose embedding the last stage
        adds to, or all in a loop that calls no `reduce`, and wait for all reductions."""
        for chunk in range(len(self._chunks)):
            if chunk not in self._reduced:
                self.reduce(chunk)
            self._wait(chunk)
        self._reset()

    def drop(self) -> None:
        """Wait for all running reductions, discard their results and begin a new step."""
        self._wait_for_all()
        self._reset()

    def _reset(self) -> None:
        """Forget what was reduced. Gradients stay until they are discarded by their buffers."""
        self._waits.clear()
        self._reduced.clear()
        self._final.clear()
        self._num_ended.clear()
        self._passes.clear()
        for buffer in chain.from_iterable(self._chunks):
            set_closed(buffer.parameters, False)
        self.num_microbatches = self.sums.count
        self.sums.forget()

    def _wait_for_all(self) -> None:
        for chunk in list(self._waits):
            self._wait(chunk)

    def _wait(self, chunk: int) -> None:
        """Wait for the started reductions of a chunk, for each only once."""
        # forgotten too: a wait function holds the memory of what travelled
        for wait in self._waits.pop(chunk, ()):
            wait()


class ParamGatherer:
    """The running all-gathers of weights, and the modules that wait for them.

    Each unit of a model part (`weight_units`) waits for its own weights when its entry is called.
    Code outside a layer's forward must therefore not read the layer's weights before `wait`.
    """

    def __init__(
        self,
        model_parts: Sequence[nn.Module],
        buffers: Sequence[Buffer],
        early: bool,
    ) -> None:
        self._waits: dict[Buffer, Callable[[], object]] = {}
        self._early = early
        if early:
            for model_part in model_parts:
                _add_waiting_hooks(model_part, buffers, self._wait_for)

    def begin(self, buffer: Buffer) -> None:
        """Start to all-gather the weights of a buffer in which this rank's slice has been
        updated."""
        self._waits[buffer] = buffer.start_all_gather()

    def wait(self) -> None:
        """Wait until all weights have arrived."""
        self._wait_for(list(self._waits))

    def finish_update(self) -> None:
        """End an update: wait for all weights, unless the next forward pass waits layer by
        layer."""
        if not self._early:
            self.wait()

    def _wait_for(self, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            wait = self._waits.pop(buffer, None)
            if wait is not None:
                wait()


def _add_waiting_hooks(model_part: nn.Module, buffers: Sequence[Buffer], wait_for: WaitFor) -> None:
    """Make the layers of a model part, and the part itself, wait for their weights when they are
    called."""
    waited_before = set[nn.Parameter]()
    for unit in weight_units(model_part):
        # on NCCL a wait for the last weights is a wait for all of them, so it must not come first
        weights = set(unit.parameters) - waited_before
        waited_before |= weights
        needed = [buffer for buffer in buffers if weights.intersection(buffer.parameters)]
        hook = partial(_before_forward, wait_for, needed)
        unit.entry.register_forward_pre_hook(hook)


def _before_forward(
    wait_for: WaitFor,
    needed: Sequence[Buffer],
    module: nn.Module,
    args: object,
) -> None:
    wait_for(needed)
