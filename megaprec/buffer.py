"""Parameters of one kind laid end to end, with their gradients and the slice of optimizer state that is ours.

The layers hold views of one flat weight tensor, the backward pass adds into views of one flat gradient tensor
(`parameter.main_grad`), and the optimizer works on one contiguous slice of both: a share of it under ZeRO-1, all
of it otherwise. Reducing gradients and collecting weights is then one collective on one tensor, and statistics
and the optimizer read memory once, in order.

    weights    [size]  as the plan holds them    what the layers see
    grads      [size]  plan.gradients            summed over micro-batches
    masters    [own]   plan.masters              the optimizer's weights; the same memory as `weights` if the dtypes
                                                 agree, and absent if the plan keeps remainders
    remainder  [own]   int16                     only then: the bits that `weights` lacks to make FP32 masters
    state      [own]   plan.moments, by name     the optimizer's averages
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megaprec.comm import Axis
from megaprec.errors import UserError
from megaprec.layout import Part, layout_of
from megaprec.plan import PrecisionPlan, dtype_name
from megaprec.random import bits, key, places
from megaprec.rounding import join, split, stochastic

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

    dp: over which gradients are summed. shards: over which masters and state are cut; of size one without ZeRO-1.
    state: names of the optimizer's averages. seed: of stochastic rounding.
    The masters are made from the values that the parameters come with, before those are rounded.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        plan: PrecisionPlan,
        dp: Axis,
        shards: Axis,
        pp_rank: int,
        device: torch.device,
        state: Sequence[str] = (),
        seed: int = 0,
    ) -> None:
        self.parameters, self.plan, self.dp, self.shards, self.seed = tuple(parameters), plan, dp, shards, seed
        self.starts, end = [], 0
        for parameter in self.parameters:
            self.starts.append(end)
            end += _up(parameter.numel(), _ALIGNMENT)
        self.size = _up(end, dp.size * _ALIGNMENT)
        length, counted = self.size // shards.size, self.size // dp.size
        self.first, self.last = length * shards.rank, length * (shards.rank + 1)
        replica = self.first + counted * (dp.rank // shards.size)
        self.share = replica, replica + counted  # of the own slice, what is counted here and not by another replica
        self.pieces = tuple(self._pieces(pp_rank))
        self._allocate(device, state)

    def _pieces(self, pp_rank: int) -> Iterator[Piece]:
        for parameter, start in zip(self.parameters, self.starts, strict=True):
            layout = layout_of(parameter)
            for part, first, last in layout.spans():
                yield Piece(part, start + first, start + last, part.copy == 0 and layout.counts(pp_rank))

    def _allocate(self, device: torch.device, state: Sequence[str]) -> None:
        plan, held, own = self.plan, held_as(self.parameters[0], self.plan), self.last - self.first
        wide = plan.masters if plan.masters.itemsize > held.itemsize else held
        self.weights = torch.zeros(self.size, dtype=held, device=device)
        gradients = plan.gradients if held == plan.parameters else held
        self.grads = torch.zeros(self.size, dtype=gradients, device=device)
        self.remainder: Tensor | None = None
        self.masters: Tensor | None = None
        if wide == held:
            self.masters = self.own(self.weights)
        elif plan.remainders:
            self.remainder = torch.zeros(own, dtype=torch.int16, device=device)
        else:
            self.masters = torch.zeros(own, dtype=wide, device=device)
        moments = plan.moments if held == plan.parameters or plan.moments.itemsize > 2 else wide
        self.state = {name: torch.zeros(own, dtype=moments, device=device) for name in state}
        for parameter, start in zip(self.parameters, self.starts, strict=True):
            self._move_in(parameter, start)

    def _move_in(self, parameter: nn.Parameter, start: int) -> None:
        values = parameter.data.reshape(-1)
        view = self.weights[start : start + values.numel()].view_as(parameter)
        parameter.data = view.copy_(parameter.data)
        parameter.main_grad = self.grads[start : start + values.numel()].view_as(parameter)  # type: ignore[attr-defined]
        parameter.register_post_accumulate_grad_hook(_accumulate)
        first, last = max(start, self.first), min(start + values.numel(), self.last)
        if first < last:
            mine = values[first - start : last - start].to(self.grads.device)
            if self.remainder is not None:
                self.put_weights(first - self.first, mine.float())
            elif self.masters is not None and self.masters.dtype != self.weights.dtype:
                self.masters[first - self.first : last - self.first].copy_(mine)

    def own(self, flat: Tensor) -> Tensor:
        """This rank's slice of `weights` or `grads` (a view)."""
        return flat[self.first : self.last]

    def wide_weights(self, first: int, last: int) -> Tensor:
        """Elements [first, last) of the own slice in the dtype that updates are made in, FP32 or wider.

        The masters themselves where they are so; otherwise a copy, which `put_weights` takes back.
        """
        if self.remainder is not None:
            return join(self.own(self.weights)[first:last], self.remainder[first:last])
        assert self.masters is not None
        return widened(self.masters[first:last])

    def put_weights(self, first: int, wide: Tensor, steps: Tensor | None = None) -> None:
        """Stores new masters from element `first` of the own slice on, and rounds them into the layers' weights.

        steps: taken so far, of which stochastic rounding is a function; None rounds to nearest.
        """
        last = first + len(wide)
        weights = self.own(self.weights)[first:last]
        if self.remainder is not None:
            split(wide, weights, self.remainder[first:last])
            return
        assert self.masters is not None
        masters = self.masters[first:last]
        if masters.dtype == wide.dtype and masters.data_ptr() != wide.data_ptr():
            masters.copy_(wide)
        if weights.data_ptr() != wide.data_ptr():
            weights.copy_(wide if steps is None else self._rounded(wide, first, "weight", steps))

    def _rounded(self, wide: Tensor, first: int, what: str, steps: Tensor) -> Tensor:
        if self.plan.rounding == "nearest" or self.weights.dtype != torch.bfloat16:
            return wide
        return stochastic(wide, self._bits(first, first + len(wide), what, steps))

    def wide_state(self, name: str, first: int, last: int) -> Tensor:
        """Elements [first, last) of one of the averages, FP32 or wider; a copy, for `put_state`, if kept narrower."""
        return widened(self.state[name][first:last])

    def put_state(self, name: str, first: int, wide: Tensor, steps: Tensor) -> None:
        """Stores an average. A narrower one is rounded stochastically, or it would stand still."""
        kept = self.state[name][first : first + len(wide)]
        if kept.dtype != wide.dtype:
            kept.copy_(stochastic(wide, self._bits(first, first + len(wide), name, steps)))
        elif kept.data_ptr() != wide.data_ptr():
            kept.copy_(wide)

    def _bits(self, first: int, last: int, what: str, steps: Tensor) -> Tensor:
        """Random int64 [last - first] for elements of the own slice, by logical place and step."""
        drawn = torch.zeros(last - first, dtype=torch.int64, device=self.weights.device)
        first, last = first + self.first, last + self.first
        for piece in self.pieces:
            low, high = max(piece.start, first), min(piece.stop, last)
            if low < high:
                index = places(piece.part, low - piece.start, high - piece.start, drawn.device)
                number = key(self.seed, "rounding", what, piece.part.name)
                drawn[low - first : high - first] = bits(number, index + (steps.long() << 40))
        return drawn

    def saved(self) -> dict[str, Tensor]:
        """What a checkpoint keeps, by name: own slices of the masters, as "weight", and of the averages."""
        kept = self.own(self.weights)
        if self.plan.masters_in_checkpoint:
            kept = self.masters if self.masters is not None else self.wide_weights(0, self.last - self.first)
        return {"weight": kept, **self.state}

    @property
    def saved_names(self) -> tuple[str, ...]:
        """The names in `saved`."""
        return ("weight", *self.state)

    def restore(self, name: str, first: int, values: Tensor) -> None:
        """Puts back what was saved, from element `first` of the own slice on; `publish` must follow for the weights."""
        if name != "weight":
            self.state[name][first : first + len(values)].copy_(values)
        elif self.remainder is not None:
            self.put_weights(first, values.to(self.weights.device, torch.float32))
        else:
            assert self.masters is not None
            self.masters[first : first + len(values)].copy_(values)

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

    def reduce(self) -> None:
        """Sums the gradients over dp: afterwards the own slice of `grads` is final, the rest of it is not."""
        travelling = self.grads
        if self.plan.reduce.itemsize < self.grads.itemsize and self.dp.size > 1:
            travelling = self.grads.to(self.plan.reduce)
        if self.shards.size == self.dp.size:
            self.dp.scatter_sum_(travelling)
        else:
            self.dp.sum_(travelling)
        if travelling is not self.grads:
            self.own(self.grads).copy_(self.own(travelling))

    def publish(self, steps: Tensor) -> None:
        """Rounds the masters into the weights anew, as the update of step number `steps` did, and collects all."""
        if self.masters is not None and self.masters.dtype != self.weights.dtype:
            self.put_weights(0, self.masters, steps)
        self.collect()

    def collect(self) -> None:
        """Under ZeRO-1, all-gathers the weights over `shards`."""
        self.shards.gather_(self.weights)

    def num_bytes(self) -> int:
        """Memory of all that this buffer keeps, in bytes."""
        kept = [self.weights, self.grads, *self.state.values()]
        if self.remainder is not None:
            kept.append(self.remainder)
        if self.masters is not None and self.masters.dtype != self.weights.dtype:
            kept.append(self.masters)
        return sum(tensor.nbytes for tensor in kept)


def held_as(parameter: nn.Parameter, plan: PrecisionPlan) -> torch.dtype:
    """The dtype in which a parameter is held. Raises UserError if the plan wants its parts in different ones."""
    parts = layout_of(parameter).parts
    wanted = {plan.holds(part.name) for part in parts}
    if len(wanted) > 1:
        names, dtypes = (" and ".join(some) for some in ((p.name for p in parts), sorted(map(dtype_name, wanted))))
        raise UserError(f"keep_fp32: {names} are one parameter, whose parts would be {dtypes}: match all or none")
    return wanted.pop()


def widened(values: Tensor) -> Tensor:
    """`values` themselves if they are FP32 or FP64, else an FP32 copy."""
    return values if values.itemsize >= 4 else values.float()


def main_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Where the gradient of `parameter` is to be added, None if it has no buffer; it counts as given from now on."""
    main = getattr(parameter, "main_grad", None)
    if main is not None:
        parameter.megaprec_given = True  # type: ignore[attr-defined]
    return main


def _accumulate(parameter: nn.Parameter) -> None:
    """Takes in a gradient that autograd made itself; layers of ours have added into `main_grad` and left none."""
    main = main_gradient(parameter)
    if parameter.grad is not None and main is not None:
        main.add_(parameter.grad)
        parameter.grad = None


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
