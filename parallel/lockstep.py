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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.comm.virtual import VirtualAxis

COLLECTIVES: dict[str, Callable[[VirtualAxis, Sequence[Tensor]], Tensor | list[Tensor]]] = {
    "sum": VirtualAxis.sum,
    "max": VirtualAxis.max,
    "gather": VirtualAxis.gather,
    "scatter_sum": VirtualAxis.scatter_sum,
}


class _Ended(BaseException):
    """Unwinds a lane when another one has failed."""


@dataclass(frozen=True)
class _Ask:
    """A lane waits for this collective with this tensor."""

    collective: str
    tensor: Tensor


@dataclass(frozen=True)
class _Done:
    """A lane has returned `result`, or raised `error`."""

    result: Any = None
    error: BaseException | None = None


@dataclass(frozen=True, eq=False)
class _Lane:
    """The two mailboxes of a lane: `told` has functions to run and answers, `says` has _Ask and
    _Done."""

    told: SimpleQueue[Any] = field(default_factory=SimpleQueue)
    says: SimpleQueue[_Ask | _Done] = field(default_factory=SimpleQueue)

    def ask(self, collective: str, tensor: Tensor) -> Tensor:
        """Return this virtual rank's result of a collective. To be called in the lane."""
        self.says.put(_Ask(collective, tensor))
        answer = self.told.get()
        if isinstance(answer, _Ended):
            raise answer
        return answer

    def serve(self) -> None:
        """Run the functions that the lane is told, until it is told None."""
        while (function := self.told.get()) is not None:
            try:
                done = _Done(function())
            except BaseException as error:
                done = _Done(error=error)
            del function
            self.says.put(done)
            del done


class Lockstep:
    """Runs functions of the virtual ranks of this process. axes: theirs, in order, to build their
    layers with."""

    def __init__(self, virtual: VirtualAxis) -> None:
        self.virtual = virtual
        self._lanes = [_Lane() for _ in virtual.ranks] if virtual.held > 1 else []
        self.axes = [
            LaneAxis(
                virtual.real.name,
                rank,
                virtual.size,
                virtual=virtual,
                lane=self._lanes[n] if self._lanes else None,
            )
            for n, rank in enumerate(virtual.ranks)
        ]
        for rank, lane in zip(virtual.ranks, self._lanes, strict=False):
            threading.Thread(target=lane.serve, daemon=True, name=f"virtual rank {rank}").start()
            weakref.finalize(self, lane.told.put, None)

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run one function for each virtual rank of this process and return the results. Collective
        over `virtual`.

        Gradients are enabled in the functions if they are in the caller. An exception in one of
        them is raised here, with its traceback, when the other functions have been ended where they
        are.
        """
        if not self._lanes:
            return [function() for function in functions]
        waiting = dict[int, _Lane]()
        said = dict[int, _Ask | _Done]()
        answers: Sequence[Any] = [_settled(function) for function in functions]
        try:
            while True:
                for n, (lane, answer) in enumerate(zip(self._lanes, answers, strict=True)):
                    lane.told.put(answer)
                    waiting[n] = lane
                    said[n] = lane.says.get()
                    waiting.pop(n)
                    _raise(said[n])
                if all(isinstance(one, _Done) for one in said.values()):
                    return [one.result for one in said.values() if isinstance(one, _Done)]
                answers = self._carried_out([one for one in said.values() if isinstance(one, _Ask)])
        except BaseException:
            said.update((n, lane.says.get()) for n, lane in waiting.items())
            self._end(n for n, one in said.items() if isinstance(one, _Ask))
            raise

    def _carried_out(self, asked: Sequence[_Ask]) -> Sequence[Tensor]:
        """Return the result of a collective for each lane."""
        kinds = {one.collective for one in asked}
        if len(asked) != len(self._lanes) or len(kinds) > 1:
            raise RuntimeError(
                f"{len(asked)} of {len(self._lanes)} virtual ranks wait for "
                f"{' and '.join(sorted(kinds))}: all of them must call the same collectives in the "
                "same order"
            )
        with torch.no_grad():
            made = COLLECTIVES[kinds.pop()](self.virtual, [one.tensor for one in asked])
        # a tensor for the graph of each
        if isinstance(made, list):
            return made
        return [made.detach() for _ in asked]

    def _end(self, numbers: Any) -> None:
        for n in numbers:
            one: _Ask | _Done = _Ask("", torch.empty(0))
            while isinstance(one, _Ask):
                self._lanes[n].told.put(_Ended())
                one = self._lanes[n].says.get()


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
        self.sum_(tensor)
        return lambda: None

    def start_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Carry `gather` out; the returned function returns the result."""
        whole = self._result("gather", tensor)
        return lambda: whole

    def start_scatter_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Carry `scatter_sum` out; the returned function returns the result."""
        part = self._result("scatter_sum", tensor)
        return lambda: part

    def _result(self, collective: str, tensor: Tensor) -> Tensor:
        if self.lane is not None:
            return self.lane.ask(collective, tensor)
        made = COLLECTIVES[collective](self.virtual, [tensor])
        return made[0] if isinstance(made, list) else made


def _settled(function: Callable[[], Any]) -> Callable[[], Any]:
    """Return `function` with the settings of this thread that torch keeps for each thread."""
    learns = torch.is_grad_enabled()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> Any:
        if device is not None:
            torch.cuda.set_device(device)
        with torch.set_grad_enabled(learns), torch.autograd.set_multithreading_enabled(False):
            return function()

    return run


def _raise(said: _Ask | _Done) -> None:
    if isinstance(said, _Done) and said.error is not None:
        raise said.error
