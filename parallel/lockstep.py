"""Virtual ranks of one process run in lockstep: one at a time, in order, from collective to
collective.

Each virtual rank has a thread of its own, a lane, but no two lanes ever run at once, so a
computation has all of the process's cores and its order never changes. A lane runs until it calls a
collective of its axis. Then the next lane runs to the same collective, and when all have arrived,
the calling thread carries it out for all of them. All communication between processes is therefore
in the calling thread, which also raises the first exception of a lane.

A backward pass stays in the thread of its lane, on a GPU too: autograd's own thread of the GPU,
which all lanes would share, could not wait in one lane for another.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.comm.virtual import VirtualAxis
from megaprec.comm.waiting import Pending

COLLECTIVES: dict[str, Callable[[VirtualAxis, Sequence[Tensor]], Tensor | list[Tensor]]] = {
    "sum": VirtualAxis.sum,
    "max": VirtualAxis.max,
    "gather": VirtualAxis.gather,
    "scatter_sum": VirtualAxis.scatter_sum,
}


class _Ended(BaseException):
    """Unwinds a lane when another one has failed."""


@dataclass(frozen=True)
class _Request:
    """A lane waits for this collective with this tensor."""

    collective: str
    tensor: Tensor


@dataclass(frozen=True)
class _Finished:
    """A lane has returned `result`, or raised `error`."""

    result: Any = None
    error: BaseException | None = None


@dataclass(frozen=True, eq=False)
class _Lane:
    """The two mailboxes of a lane.

    inbox: functions to run, and results of collectives.
    outbox: what the lane waits for, or how it has ended.
    """

    inbox: SimpleQueue[Any] = field(default_factory=SimpleQueue)
    outbox: SimpleQueue[_Request | _Finished] = field(default_factory=SimpleQueue)

    def ask(self, collective: str, tensor: Tensor) -> Tensor:
        """Return this virtual rank's result of a collective. To be called in the lane."""
        self.outbox.put(_Request(collective, tensor))
        answer = self.inbox.get()
        # another lane has failed
        if isinstance(answer, _Ended):
            raise answer
        return answer

    def serve(self) -> None:
        """Run the functions in the inbox, until None comes."""
        while (function := self.inbox.get()) is not None:
            try:
                message = _Finished(function())
            except BaseException as error:
                message = _Finished(error=error)
            # no references while the lane waits: they would keep tensors alive
            del function
            self.outbox.put(message)
            del message


class Lockstep:
    """Runs functions of the virtual ranks of this process in lockstep.

    virtual: the axis of all virtual ranks.
    axes: the tensor-parallel axis of each virtual rank of this process, in order, to build its
        layers with.
    """

    def __init__(self, virtual: VirtualAxis) -> None:
        self.virtual = virtual
        # one virtual rank needs no thread: it communicates by itself
        self._lanes: list[_Lane] = []
        if virtual.num_local > 1:
            self._lanes = [_Lane() for _ in virtual.ranks]
        lanes = self._lanes or [None]
        self.axes = [
            LaneAxis(
                virtual.real.name,
                rank,
                virtual.size,
                virtual=virtual,
                lane=lane,
            )
            for rank, lane in zip(virtual.ranks, lanes, strict=True)
        ]
        for rank, lane in zip(virtual.ranks, self._lanes, strict=False):
            threading.Thread(target=lane.serve, daemon=True, name=f"virtual rank {rank}").start()
            # the thread has no reference to this object, and ends with it
            weakref.finalize(self, lane.inbox.put, None)

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run one function for each virtual rank of this process and return the results.

        Collective over `virtual`. Gradients are enabled in the functions if they are in the caller.
        An exception in one of them is raised here, with its traceback, when the other functions
        have been ended where they are. Raises RuntimeError unless all call the same collectives.
        """
        if not self._lanes:
            return [function() for function in functions]
        running: int | None = None  # the number of the lane that runs now
        messages: dict[int, _Request | _Finished] = {}  # the last message of each lane
        # what each lane is given: first its function, then the result of each collective
        answers: Sequence[Any] = [_with_thread_settings(function) for function in functions]
        try:
            while True:
                for number, (lane, answer) in enumerate(zip(self._lanes, answers, strict=True)):
                    lane.inbox.put(answer)
                    running = number
                    # the lane runs until it calls a collective or ends
                    messages[number] = lane.outbox.get()
                    running = None
                    _raise_error(messages[number])
                requests = _requests(messages)
                # all have ended
                if not requests:
                    break
                answers = self._carry_out([*requests.values()])
        except BaseException:
            if running is not None:  # this thread was interrupted while the lane ran
                messages[running] = self._lanes[running].outbox.get()
            self._end(_requests(messages))
            raise
        finished = [message for message in messages.values() if isinstance(message, _Finished)]
        return [message.result for message in finished]

    def _carry_out(self, requests: Sequence[_Request]) -> Sequence[Tensor]:
        """Return the result of a collective for each lane.

        requests: of all lanes, in their order. Raises RuntimeError if not all lanes wait for the
        same collective.
        """
        names = {request.collective for request in requests}
        if len(requests) != len(self._lanes) or len(names) > 1:
            raise RuntimeError(
                f"{len(requests)} of {len(self._lanes)} virtual ranks wait for "
                f"{' and '.join(sorted(names))}: all of them must call the same collectives in the "
                "same order"
            )
        with torch.no_grad():
            tensors = [request.tensor for request in requests]
            result = COLLECTIVES[names.pop()](self.virtual, tensors)
        if isinstance(result, list):
            return result
        # a tensor of its own for the graph of each lane
        return [result.detach() for _ in requests]

    def _end(self, numbers: Iterable[int]) -> None:
        """End the functions in the lanes of these numbers, which wait for a collective: it raises
        in place of returning."""
        for number in numbers:
            lane = self._lanes[number]
            message: _Request | _Finished | None = None
            # a function that ends may still call another collective, which raises too
            while not isinstance(message, _Finished):
                lane.inbox.put(_Ended())
                message = lane.outbox.get()


@dataclass(frozen=True)
class LaneAxis(Axis):
    """The tensor-parallel axis as one virtual rank sees it: virtual rank `rank` of `size`.

    lane: of this virtual rank; None if the process has only one, which then communicates by itself.
    The result of `gather` may be shared with the other virtual ranks of the process: it must not be
    written to.
    """

    virtual: VirtualAxis = VirtualAxis(Axis("tp"), 1)
    lane: _Lane | None = None

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum over all virtual ranks, in place."""
        return tensor.copy_(self._result("sum", tensor))

    def max_(self, tensor: Tensor) -> Tensor:
        """Maximum over all virtual ranks, in place."""
        return tensor.copy_(self._result("max", tensor))

    def start_sum_(self, tensor: Tensor) -> Callable[[], object]:
        """Carry `sum_` out; the returned function does nothing."""
        return Pending((), self.sum_(tensor))

    def start_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Carry `gather` out; the returned function returns the result."""
        return Pending((), self._result("gather", tensor))

    def start_scatter_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Carry `scatter_sum` out; the returned function returns the result."""
        return Pending((), self._result("scatter_sum", tensor))

    def _result(self, collective: str, tensor: Tensor) -> Tensor:
        if self.lane is not None:
            return self.lane.ask(collective, tensor)
        result = COLLECTIVES[collective](self.virtual, [tensor])
        return result[0] if isinstance(result, list) else result


def _with_thread_settings(function: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that runs `function` in another thread as in this one: gradients are
    enabled or not, and the CUDA device is current, as here."""
    # torch keeps these settings for each thread, and a lane begins with the defaults
    grad_enabled = torch.is_grad_enabled()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> Any:
        if device is not None:
            torch.cuda.set_device(device)
        with (
            torch.set_grad_enabled(grad_enabled),
            # a backward pass stays in the thread of its lane
            torch.autograd.set_multithreading_enabled(False),
        ):
            return function()

    return run


def _requests(messages: Mapping[int, _Request | _Finished]) -> dict[int, _Request]:
    """Return the messages of the lanes that wait for a collective, by lane."""
    requests: dict[int, _Request] = {}
    for number, message in messages.items():
        if isinstance(message, _Request):
            requests[number] = message
    return requests


def _raise_error(message: _Request | _Finished) -> None:
    if isinstance(message, _Finished) and message.error is not None:
        raise message.error
