"""Flat buffers: parameters of one kind laid end to end, with their gradients and this rank's
optimizer state.

The layers hold views of one flat weight tensor, the backward pass accumulates into views of one
flat gradient tensor (`parameter.main_grad`), and the optimizer updates one contiguous slice of
both: a shard under ZeRO-1, the whole otherwise. Reducing gradients and gathering weights is then
one collective on one tensor, and the statistics and the update read memory once, in order.

    weights    [size]  as the plan holds them    the weights that layers read
    grads      [size]  plan.gradients            accumulated over micro-batches
    masters    [own]   plan.masters              the optimizer's weights; the same memory as `weights` if the dtypes
                                                 agree, and absent if the plan keeps remainders
    remainder  [own]   int16                     with remainders only: the bits that `weights` lacks to be FP32 masters
    state      [own]   plan.moments, by name     the optimizer's moments

Where `weights` are FP8 codes (`megaprec.fp8.params`), an update changes only the masters; the codes
are computed later.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from megaprec.comm.axis import Axis
from megaprec.comm.layout import Part, layout_of
from megaprec.comm.tree import start_tree_scatter_sum_, start_tree_sum_
from megaprec.errors import UserError
from megaprec.fp8.params import FP8ParamShard, fp8_param_of
from megaprec.optim.main_grad import collect, has_main_grad
from megaprec.optim.update_tile import Draw, Tile
from megaprec.precision.plan import PrecisionPlan, dtype_name
from megaprec.precision.rounding import split

BLOCK = 1 << 18  # elements: a CPU's block stays in a core's cache between its uses
_COMPARED = 1 << 16  # elements that are compared at a time: they stay in a core's cache
_ALIGNMENT = 64  # elements; vector loads and GEMMs are fast for parameters that start at a multiple


@dataclass(frozen=True)
class Piece:
    """The place of a part of a parameter in the buffer: elements [start, stop), row-major, without
    padding."""

    part: Part
    start: int
    stop: int
    counts: bool  # True if this rank's copy is the one that is counted and saved


class Buffer:
    """The memory of `parameters`: they become views of `weights`, and their gradients accumulate in
    `grads`.

    dp: the ranks over which gradients are reduced. shards: the ranks over which masters and state
    are sharded; of size one without ZeRO-1.
    state: names of the optimizer's moments. seed: of stochastic rounding. average: True if the sum
    over dp is divided by the number of dp ranks. canonical: True if the sum over dp is the upper
    part of a tree over micro-batches. The masters are initialised from the original values of the
    parameters, before rounding.
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
        average: bool = False,
        canonical: bool = False,
    ) -> None:
        self.parameters = tuple(parameters)
        self.plan = plan
        self.dp = dp
        self.shards = shards
        self.seed = seed
        self.average = average
        self.canonical = canonical
        # True if the weights are FP8 codes
        self.in_codes = fp8_param_of(self.parameters[0]) is not None
        # True if the gradients are counts
        self.balances = layout_of(self.parameters[0]).balancing is not None
        self.of_experts = layout_of(
            self.parameters[0]
        ).expert  # True if other ranks of the stage hold other experts
        self.starts = []
        end = 0
        for parameter in self.parameters:
            self.starts.append(end)
            end += _up(parameter.numel(), _ALIGNMENT)
        self.size = _up(end, dp.size * _ALIGNMENT)
        length = self.size // shards.size
        counted = self.size // dp.size
        self.first = length * shards.rank
        self.last = length * (shards.rank + 1)
        replica = self.first + counted * (dp.rank // shards.size)
        # the part of this rank's slice that no other replica counts
        self.share = (
            replica,
            replica + counted,
        )
        self.pieces = tuple(self._pieces(pp_rank))
        self._allocate(device, state)

    def _pieces(self, pp_rank: int) -> Iterator[Piece]:
        for parameter, start in zip(self.parameters, self.starts, strict=True):
            layout = layout_of(parameter)
            for part, first, last in layout.spans():
                yield Piece(
                    part, start + first, start + last, part.copy == 0 and layout.counts(pp_rank)
                )

    def _allocate(self, device: torch.device, state: Sequence[str]) -> None:
        plan = self.plan
        held = param_dtype(self.parameters[0], self.plan)
        own = self.last - self.first
        wide = plan.masters if plan.masters.itemsize > held.itemsize else held
        as_planned = (held == plan.parameters and not self.balances) or self.in_codes
        self.weights = torch.zeros(self.size, dtype=held, device=device)
        self.grads = torch.zeros(
            self.size, dtype=plan.gradients if as_planned else held, device=device
        )
        self.travels = plan.reduce if as_planned else held
        self.remainder: Tensor | None = None
        self.masters: Tensor | None = None
        if wide == held:
            self.masters = self.own(self.weights)
        elif plan.remainders and not self.in_codes:
            self.remainder = torch.zeros(own, dtype=torch.int16, device=device)
        else:
            self.masters = torch.zeros(own, dtype=wide, device=device)
        moments = plan.moments if as_planned or plan.moments.itemsize > 2 else wide
        self.state = {name: torch.zeros(own, dtype=moments, device=device) for name in state}
        for parameter, start in zip(self.parameters, self.starts, strict=True):
            self._move_in(parameter, start)
        # the codes that this rank computes
        self.owned = tuple(self._owned()) if self.in_codes else ()
        self._rounded = self.masters is not None and wide != held and not self.in_codes
        self._has_changed = False  # True once an update or a state was written to the weights
        self._versions = [p._version for p in self.parameters]

    def _owned(self) -> Iterator[FP8ParamShard]:
        assert self.masters is not None
        for parameter, start in zip(self.parameters, self.starts, strict=True):
            held = fp8_param_of(parameter)
            assert held is not None
            held.inverse = held.inverse.to(self.weights.device)
            first = max(start, self.first)
            last = max(start, self.first, min(start + parameter.numel(), self.last))
            masters = self.masters[first - self.first : last - self.first]
            yield FP8ParamShard(held, parameter.data.view(-1), masters, first - start)

    def _move_in(self, parameter: nn.Parameter, start: int) -> None:
        values = parameter.data.reshape(-1)
        view = self.weights[start : start + values.numel()].view_as(parameter)
        if self.remainder is None and not self.in_codes:
            view.copy_(
                parameter.data if self.masters is None else parameter.data.to(self.masters.dtype)
            )
        elif (
            self.remainder is not None
        ):  # other ranks' slices are rounded here exactly as by their owners
            split(values.float(), view.view(-1), torch.empty_like(values, dtype=torch.int16))
        parameter.data = view
        collect(parameter, self.grads[start : start + values.numel()].view_as(parameter))
        first = max(start, self.first)
        last = min(start + values.numel(), self.last)
        if first < last:
            self.restore("weight", first - self.first, values[first - start : last - start])

    def own(self, flat: Tensor) -> Tensor:
        """Return a view of this rank's slice of `weights` or `grads`."""
        return flat[self.first : self.last]

    def blocks(self, first: int, last: int, length: int = 0) -> Iterator[Tile]:
        """Yield elements [first, last) of this rank's slice, in runs of `length`. 0: a length that
        suits the device."""
        # random numbers take at least 8 bytes per element
        gpu = BLOCK << (8 if self.plan.rounding == "nearest" else 4)
        length = length or (BLOCK if self.weights.device.type == "cpu" else gpu)
        for start in range(first, last, length):
            yield self._block(start, min(start + length, last))

    def _block(self, first: int, last: int) -> Tile:
        low = first + self.first
        high = last + self.first
        overlaps = [(p, max(p.start, low), min(p.stop, high)) for p in self.pieces]
        spans = [(p.part, a - p.start, a - low, b - low) for p, a, b in overlaps if a < b]
        weights = self.masters if self.in_codes else self.own(self.weights)
        assert weights is not None
        return Tile(
            weights=weights[first:last],
            grads=self.own(self.grads)[first:last],
            masters=None if self.masters is None else self.masters[first:last],
            remainder=None if self.remainder is None else self.remainder[first:last],
            state=tuple((name, values[first:last]) for name, values in self.state.items()),
            draw=Draw(self.seed, last - first, spans, self.weights.device),
            nearest=self.plan.rounding == "nearest" or self.weights.dtype != torch.bfloat16,
        )

    def saved(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint, by name: this rank's slices of the masters, as
        "weight", and of the moments.
        """
        kept = self.own(self.weights)
        if self.plan.masters_in_checkpoint:  # always so if the weights are FP8 codes
            if self.masters is not None:
                kept = self.masters
            else:
                kept = self._block(0, len(kept)).wide_weights()
        return {"weight": kept, **self.state}

    @property
    def saved_names(self) -> tuple[str, ...]:
        """Return the names of the tensors in `saved`."""
        return ("weight", *self.state)

    def restore(self, name: str, first: int, values: Tensor) -> None:
        """Load saved values, from element `first` of this rank's slice on. For weights, call
        `publish` afterwards."""
        last = first + len(values)
        if name == "weight" and self.masters is None:
            self._block(first, last).keep_weights(values.to(self.weights.device, torch.float32))
            return
        kept = self.masters if name == "weight" else self.state[name]
        assert kept is not None
        kept[first:last].copy_(values)

    def counted(self) -> list[tuple[int, int]]:
        """Return the ranges of this rank's slice that hold logical elements which no other rank
        counts."""
        first, last = self.share
        return self._ranges(
            (max(p.start, first), min(p.stop, last)) for p in self.pieces if p.counts
        )

    def copies(self) -> list[tuple[int, int]]:
        """Return the ranges of this rank's slice that hold logical elements which another rank
        counts."""
        first, last = self.share
        counted = [p for p in self.pieces if p.counts]
        outside = [(p.start, min(p.stop, first)) for p in counted] + [
            (max(p.start, last), p.stop) for p in counted
        ]
        return self._ranges(
            sorted([(p.start, p.stop) for p in self.pieces if not p.counts] + outside)
        )

    def _ranges(self, spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the intersection of the spans with this rank's slice, as positions in it;
        neighbours are joined."""
        ranges: list[tuple[int, int]] = []
        for start, stop in spans:
            first = max(start, self.first) - self.first
            last = min(stop, self.last) - self.first
            if first >= last:
                continue
            if ranges and ranges[-1][1] == first:
                first = ranges.pop()[0]
            ranges.append((first, last))
        return ranges

    def start_reduce(self) -> Callable[[], None]:
        """Start to sum or average the gradients over dp, and return a function that waits for the
        result.

        After the wait this rank's slice of `grads` is final, and the rest of `grads` is not. To
        average, the gradients are divided before the sum, because a half-precision sum could
        overflow.
        """
        sharded = self.shards.size == self.dp.size
        if self.canonical:
            return (start_tree_scatter_sum_ if sharded else start_tree_sum_)(self.dp, self.grads)
        if self.average and not self.balances:
            self.grads.div_(self.dp.size)
        travelling = self.grads if self.dp.size == 1 else self.grads.to(self.travels)
        start = self.dp.start_scatter_sum_ if sharded else self.dp.start_sum_
        wait = start(travelling)

        def finish() -> None:
            wait()
            if travelling is not self.grads:
                self.own(self.grads).copy_(self.own(travelling))

        return finish

    def publish(self, steps: Tensor) -> None:
        """Round the masters to the weights again, as the update of step number `steps` did, and
        all-gather the weights.

        FP8 codes are not computed here.
        """
        if self.in_codes:
            return
        if self.masters is not None and self.masters.dtype != self.weights.dtype:
            for block in self.blocks(0, self.last - self.first):
                block.keep_weights(block.wide_weights(), steps)
        self.start_collect()()

    def start_collect(self) -> Callable[[], object]:
        """Under ZeRO-1, start to all-gather the weights over `shards`, and return a function that
        waits for the result.

        Every change of the weights ends with this call, so it also increments their version
        counters, which writes to the flat memory do not do. Layers that cache casts of weights then
        know that their casts are outdated.
        """
        increment_version(self.parameters)
        self._has_changed = True
        self._versions = [p._version for p in self.parameters]
        return self.shards.start_gather_(
            self.weights.view(torch.uint8) if self.in_codes else self.weights
        )

    def strayed(self) -> list[str]:
        """Return the names of parameters that are no longer views of `weights`, for instance after
        a cast.

        Values of a parameter that was given other memory of its own kind, as by `p.data = other`,
        are moved into `weights` again. torch can also exchange a parameter in place
        (`torch.utils.swap_tensors`), which then has lost its `main_grad`, and another optimizer can
        have taken it over.
        """
        away = set[int]()
        for parameter, start in zip(self.parameters, self.starts, strict=True):
            if not self._is_ours(parameter, start):
                away.add(start)
            elif parameter.data_ptr() != self._address(self.weights, start) and parameter.numel():
                view = self.weights[start : start + parameter.numel()].view_as(parameter)
                view.copy_(parameter.data)
                parameter.data = view
        return [piece.part.name for piece in self.pieces if piece.start in away]

    def _is_ours(self, parameter: nn.Parameter, start: int) -> bool:
        """Return True if gradients of the parameter come here, and its values are of a kind that
        can be kept here."""
        if not has_main_grad(parameter):
            return False
        main: Tensor = parameter.main_grad  # type: ignore[attr-defined]
        if parameter.numel() and main.data_ptr() != self._address(self.grads, start):
            return False
        if (
            self.in_codes
            and parameter.numel()
            and parameter.data_ptr() != self._address(self.weights, start)
        ):
            return False
        same_kind = (
            parameter.dtype == self.weights.dtype and parameter.device == self.weights.device
        )
        return same_kind and parameter.shape == main.shape

    @staticmethod
    def _address(flat: Tensor, start: int) -> int:
        return flat.data_ptr() + start * flat.itemsize

    def take_up(self, everything: bool, steps: Tensor) -> None:
        """Make masters of weights that someone else has written to, if the weights are rounded from
        masters.

        A weight that is its master, rounded as in step number `steps`, keeps it: values that were
        exchanged and put back bit for bit lose nothing.
        everything: compare all weights, because what was written through `data` has left no
            version; else only after a version has changed, and before the first update.
        """
        if not self._rounded:
            return
        versions = [p._version for p in self.parameters]
        has_version = versions != self._versions
        self._versions = versions
        if everything or has_version or not self._has_changed:
            length = _COMPARED if self.weights.device.type == "cpu" else _COMPARED << 6
            for tile in self.blocks(0, self.last - self.first, length):
                tile.take_up(has_version, steps)

    def num_bytes(self) -> int:
        """Return the memory of all tensors of this buffer, in bytes."""
        return sum(self.bytes_by_kind().values())

    def bytes_by_kind(self) -> dict[str, int]:
        """Return the memory of this buffer in bytes: of weights, gradients, masters and moments.

        Scales of weights in FP8 belong to the weights, remainders to the masters. Masters that are
        the weights take no memory of their own.
        """
        own = [] if self.remainder is None else [self.remainder]
        if self.masters is not None and self.masters.dtype != self.weights.dtype:
            own.append(self.masters)
        kept = {
            "weights": [self.weights, *(one.param.inverse for one in self.owned)],
            "gradients": [self.grads],
            "masters": own,
            "moments": [*self.state.values()],
        }
        return {kind: sum(tensor.nbytes for tensor in tensors) for kind, tensors in kept.items()}


def param_dtype(parameter: nn.Parameter, plan: PrecisionPlan) -> torch.dtype:
    """Return the dtype in which a parameter is held. Raise UserError if its parts would need
    different dtypes."""
    if layout_of(parameter).balancing is not None:
        return plan.sensitive
    if (held := fp8_param_of(parameter)) is not None:
        return held.dtype
    parts = layout_of(parameter).parts
    wanted = {plan.param_dtype(part.name) for part in parts}
    if len(wanted) > 1:
        names, dtypes = (
            " and ".join(some)
            for some in ((p.name for p in parts), sorted(map(dtype_name, wanted)))
        )
        raise UserError(
            f"keep_fp32: {names} are one parameter, whose parts would be {dtypes}: match all "
            "or none"
        )
    return wanted.pop()


def require_in_place(among: Iterable[Buffer]) -> None:
    """Raise RuntimeError if a parameter no longer lies in its buffer: a step would not update the
    model."""
    if strayed := [name for buffer in among for name in buffer.strayed()]:
        more = f" (and {len(strayed) - 1} others)" if len(strayed) > 1 else ""
        raise RuntimeError(
            f"{strayed[0]}{more} was cast or moved after the optimizer had taken over its "
            "memory, or is another "
            "optimizer's by now, so no step would update it: cast and move a model (to, "
            "half, cuda) before building "
            "its only optimizer; nothing was changed"
        )


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
