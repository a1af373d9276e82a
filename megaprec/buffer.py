"""Parameters of one kind laid end to end, with their gradients and the slice of optimizer state that is ours.

The layers hold views of one flat weight tensor, the backward pass adds into views of one flat gradient tensor
(`parameter.main_grad`), and the optimizer works on one contiguous slice of both: 1/dp of it under ZeRO-1, all
of it otherwise. Reducing gradients and publishing weights is then one collective on one tensor, and statistics
and the optimizer read memory once, in order.

    weights  [size]   plan.parameters   what the layers see
    grads    [size]   plan.gradients    summed over micro-batches
    masters  [own]    plan.masters      the optimizer's weights; the same memory as `weights` if the dtypes agree
    moments  [own] x2 plan.masters      Adam's two averages
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megaprec.comm import Axis
from megaprec.layout import Part, layout_of
from megaprec.plan import PrecisionPlan

_ALIGNMENT = 64  # elements; every parameter starts where vector loads and GEMMs like it


@dataclass(frozen=True)
class Piece:
    """Where a part of a parameter lies in the buffer: elements [start, stop), row-major, padding left out."""

    part: Part
    start: int
    stop: int
    counts: bool  # this rank's copy is the one that is counted and written


class Buffer:
    """Takes over the memory of `parameters`: afterwards they are views of `weights` and add into `grads`.

    The masters are made from the values that the parameters come with, before those are rounded.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        plan: PrecisionPlan,
        dp: Axis,
        pp_rank: int,
        zero: bool,
        device: torch.device,
    ) -> None:
        self.parameters, self.dp, self.zero = tuple(parameters), dp, zero
        self.starts, end = [], 0
        for parameter in self.parameters:
            self.starts.append(end)
            end += _up(parameter.numel(), _ALIGNMENT)
        self.size = _up(end, dp.size * _ALIGNMENT)
        self.share = self.size // dp.size * dp.rank, self.size // dp.size * (dp.rank + 1)  # counted here
        self.first, self.last = self.share if zero else (0, self.size)
        self.pieces = tuple(self._pieces(pp_rank))
        self._allocate(plan, device)

    def _pieces(self, pp_rank: int) -> Iterator[Piece]:
        for parameter, start in zip(self.parameters, self.starts, strict=True):
            layout = layout_of(parameter)
            for part, first, last in layout.spans():
                yield Piece(part, start + first, start + last, part.copy == 0 and layout.counts(pp_rank))

    def _allocate(self, plan: PrecisionPlan, device: torch.device) -> None:
        self.weights = torch.zeros(self.size, dtype=plan.parameters, device=device)
        self.grads = torch.zeros(self.size, dtype=plan.gradients, device=device)
        shared = plan.parameters == plan.masters
        self.masters = (
            self.own(self.weights) if shared else torch.zeros(self.last - self.first, dtype=plan.masters, device=device)
        )
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.masters), torch.zeros_like(self.masters)
        for parameter, start in zip(self.parameters, self.starts, strict=True):
            self._move_in(parameter, start)

    def _move_in(self, parameter: nn.Parameter, start: int) -> None:
        values = parameter.data.reshape(-1)
        first, last = max(start, self.first), min(start + values.numel(), self.last)
        if first < last:
            self.masters[first - self.first : last - self.first].copy_(values[first - start : last - start])
        view = self.weights[start : start + values.numel()].view_as(parameter)
        parameter.data = view.copy_(parameter.data)
        parameter.main_grad = self.grads[start : start + values.numel()].view_as(parameter)  # type: ignore[attr-defined]
        parameter.register_post_accumulate_grad_hook(_accumulate)

    def own(self, flat: Tensor) -> Tensor:
        """This rank's slice of `weights` or `grads` (a view)."""
        return flat[self.first : self.last]

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps, by name: own slices of the masters and of both moments."""
        return {"weight": self.masters, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    def counted(self) -> list[tuple[int, int]]:
        """Ranges of the own slice that hold logical elements which no other rank counts."""
        first, last = self.share
        return self._ranges((max(p.start, first), min(p.stop, last)) for p in self.pieces if p.counts)

    def copies(self) -> list[tuple[int, int]]:
        """Ranges of the own slice that hold logical elements which another rank counts."""
        first, last = self.share
        counted = [p for p in self.pieces if p.counts]
        outside = [(p.start, min(p.stop, first)) for p in counted] + [(max(p.start, last), p.stop) for p in counted]
        return self._ranges(sorted([(p.start, p.stop) for p in self.pieces if not p.counts] + outside))

    def _ranges(self, spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """What the own slice has of the spans, as positions in it; neighbours are joined."""
        ranges: list[tuple[int, int]] = []
        for start, stop in spans:
            first, last = max(start, self.first) - self.first, min(stop, self.last) - self.first
            if first >= last:
                continue
            if ranges and ranges[-1][1] == first:
                first = ranges.pop()[0]
            ranges.append((first, last))
        return ranges

    def range_of(self, parameters: Sequence[nn.Parameter]) -> tuple[int, int]:
        """Elements of the own slice taken up by `parameters`, which must lie next to each other."""
        places = [i for i, parameter in enumerate(self.parameters) if any(parameter is p for p in parameters)]
        ends = [*self.starts[1:], self.size]
        first, last = self.starts[places[0]], ends[places[-1]]
        first, last = (min(max(place, self.first), self.last) - self.first for place in (first, last))
        return first, last

    def reduce(self) -> None:
        """Sums the gradients over dp: afterwards the own slice of `grads` is final, the rest of it is not."""
        if self.zero:
            self.dp.scatter_sum_(self.grads)
        else:
            self.dp.sum_(self.grads)

    def publish(self) -> None:
        """Rounds the masters into `weights` and, under ZeRO-1, collects the other ranks' slices over dp."""
        own = self.own(self.weights)
        if own.data_ptr() != self.masters.data_ptr():
            own.copy_(self.masters)
        if self.zero:
            self.dp.gather_(self.weights)


def _accumulate(parameter: nn.Parameter) -> None:
    """Takes in a gradient that autograd made itself; layers of ours have added into `main_grad` and left none."""
    if parameter.grad is not None:
        parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
        parameter.grad = None


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
