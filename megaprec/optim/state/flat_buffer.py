"""Flat buffers: parameters of one kind laid end to end, with their gradients and this rank's
optimizer state.

The layers hold views of one flat weight tensor, the backward pass accumulates into views of one
flat gradient tensor (`parameter.main_grad`), and the optimizer updates one contiguous slice of
both: a shard under ZeRO-1, the whole otherwise. Reducing gradients and gathering weights is then
one collective on one tensor, and the statistics and the update read memory once, in order.

    weights    [size]   as the plan holds them   the weights that layers read; under ZeRO-3
                                                 (`weight_buffer`) they have memory only while
                                                 layers read them
    own_weights  [local]  as the plan holds them  those that the update writes: a slice of
                                                 `weights`, or under ZeRO-3 a tensor of its own
    grads      [size]   plan.gradients           accumulated over micro-batches
    local_grads  [local]  plan.gradients         those that the update reads: a slice of `grads`, or
                                                 under ZeRO-2 (`grad_buffer`) a tensor of its own
    masters    [local]  plan.masters             the optimizer's weights; the same memory as
                                                 `own_weights` if the dtypes agree, and absent if
                                                 the plan keeps remainders
    remainder  [local]  int16                    with remainders only: the bits that `weights`
                                                 lacks to be FP32 masters
    state      [local]  plan.moments, by name    the optimizer's moments
    ema        [local]  FP32, or that of wider   the moving average of the masters, if one is kept
                        masters                  (`weight_average`)

`masters` (unless they are the weights), `remainder`, `state` and `ema` may lie in other memory than
the rest (`megaprec.optim.state.host_memory`). Tiles then go to the device by `on_device`.

Where `weights` are FP8 codes (`megaprec.fp8.params`), an update changes only the masters; the codes
are computed later.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from megaprec.comm.axis import Axis
from megaprec.comm.layout import Part, layout_of
from megaprec.errors import UserError
from megaprec.fp8.params import FP8ParamShard, fp8_param_of
from megaprec.optim.state.grad_buffer import GradBuffer
from megaprec.optim.state.update_tile import Draw, DrawSpan, StateMemory, Tile
from megaprec.optim.state.weight_buffer import WeightBuffer, bytes_if_codes
from megaprec.precision.plan import PrecisionPlan, dtype_name
from megaprec.precision.rounding import split
from megaprec.torch_private import num_writes, storage_address

EMA = "ema"  # the kind of the moving average in a checkpoint and in a state
BLOCK = 1 << 18  # elements: a CPU's block stays in a core's cache between its uses
_COMPARED_ELEMENTS = 1 << 16  # at a time: they stay in a core's cache
_ALIGNMENT = 64  # elements; vector loads and GEMMs are fast for parameters that start at a multiple


Range = tuple[int, int]  # start, stop


@dataclass(frozen=True)
class Piece:
    """The span of a part of a parameter in the buffer: elements [start, stop), row-major, without
    padding."""

    part: Part
    start: int
    stop: int
    counts: bool  # True if this rank's copy is the one that is counted and saved

    def overlap(self, start: int, stop: int) -> range:
        """Return those of the elements [start, stop) of the buffer that are in this piece."""
        return range(max(self.start, start), min(self.stop, stop))


class OwnedPiece(NamedTuple):
    """The elements of a piece that a rank owns: `span` of the buffer, never empty.

    shard_start: the first element of the buffer in the rank's own slice.
    """

    piece: Piece
    span: range
    shard_start: int

    @property
    def in_buffer(self) -> slice:
        """Return the positions of the elements in `weights` and `grads`."""
        return slice(self.span.start, self.span.stop)

    @property
    def in_shard(self) -> slice:
        """Return the positions of the elements in masters, moments and other tensors [local]."""
        start = self.shard_start
        return slice(self.span.start - start, self.span.stop - start)

    @property
    def in_part(self) -> slice:
        """Return the positions of the elements in the flattened part, without its padding."""
        start = self.piece.start
        return slice(self.span.start - start, self.span.stop - start)


# an axis, gradients [size], whether only this rank's chunk is needed; returns a wait
StartSum = Callable[[Axis, Tensor, bool], Callable[[], object]]


def start_sum(dp: Axis, gradients: Tensor, only_local: bool) -> Callable[[], object]:
    """Start to sum gradients over dp in place, and return a function that waits for the result.

    only_local: True if each rank needs only its own chunk of the sum; the rest is then undefined.
    """
    start = dp.start_scatter_sum_ if only_local else dp.start_sum_
    return start(gradients)


@dataclass(frozen=True)
class GradReduction:
    """The way in which gradients are reduced over dp.

    average: the sum over dp is divided by the number of dp ranks.
    start_sum: starts the sum.
    sharded: a rank keeps the reduced gradients of its own slice only, and adds those of one
        micro-batch to the next (ZeRO-2); without effect on buffers that are not sharded.
    shards_weights: a rank keeps its own slice of the weights only too (ZeRO-3).
    """

    average: bool = False
    start_sum: StartSum = start_sum
    sharded: bool = False
    shards_weights: bool = False


@dataclass(frozen=True)
class Kept:
    """The way in which a buffer keeps its state.

    ema: True for a moving average of the weights. Parameters that balance loads have none.
    memory: of masters, moments and average; None: the device's.
    """

    ema: bool = False
    memory: StateMemory | None = None


class _Dtypes(NamedTuple):
    """The dtypes of a buffer. reduce: in which gradients travel over dp."""

    weights: torch.dtype
    grads: torch.dtype
    reduce: torch.dtype
    masters: torch.dtype
    moments: torch.dtype


class Buffer:
    """The memory of `parameters`: they become views of `weights`, and their gradients accumulate in
    `grads`.

    dp: the ranks over which gradients are reduced.
    shards: the ranks over which masters and state are sharded; of size one without ZeRO-1.
    state: names of the optimizer's moments.
    seed: of stochastic rounding.
    kept: what is kept beside masters and moments, and where.
    The masters are initialised from the original values of the parameters, before rounding.

    start, stop: this rank's slice of the buffer: its masters and state, [local] above.
    share: (start, stop) of the part of that slice which no other replica counts, saves or sends.
        Replicas that hold one slice divide it; under ZeRO-1 over all of dp it is the whole slice.
    ema_has_begun: False until the average is a copy of the masters, or was loaded.
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
        reduction: GradReduction = GradReduction(),
        kept: Kept = Kept(),
    ) -> None:
        self.memory = kept.memory
        self.parameters = tuple(parameters)
        self.plan = plan
        self.dp = dp
        self.shards = shards
        self.seed = seed
        self.reduction = reduction
        # all parameters of a buffer are of one kind (`model_buffers.buckets`)
        layout = layout_of(self.parameters[0])
        # True if the weights are FP8 codes
        self.has_fp8_weights = fp8_param_of(self.parameters[0]) is not None
        # True if the "gradients" are the tokens that each expert was given (load_balance.py): they
        # are summed, and never averaged
        self.holds_loads = layout.balancing is not None
        # True if other ranks of the stage hold other experts
        self.holds_experts = layout.expert
        self.starts: list[int] = []
        end = 0
        for parameter in self.parameters:
            self.starts.append(end)
            end += _round_up(parameter.numel(), _ALIGNMENT)
        # padded so that every dp rank has a slice of the same, aligned length
        self.size = _round_up(end, dp.size * _ALIGNMENT)
        self.local_size = self.size // shards.size
        self.start = self.local_size * shards.rank
        self.stop = self.start + self.local_size
        # The part of this rank's slice that no other replica counts. Without ZeRO-1, or with fewer
        # shards than dp ranks, several replicas hold one slice, and each counts a part of it.
        share_size = self.size // dp.size
        share_start = self.start + share_size * (dp.rank // shards.size)
        self.share = (share_start, share_start + share_size)
        self.pieces = tuple(self._pieces(pp_rank))
        self._allocate(device, state)
        self.ema: Tensor | None = None
        self.ema_has_begun = False
        if kept.ema and not self.holds_loads:
            self.ema = self._zeros(plan.average)

    def _pieces(self, pp_rank: int) -> Iterator[Piece]:
        """Yield the pieces of all parameters, in order."""
        for parameter, start in zip(self.parameters, self.starts, strict=True):
            layout = layout_of(parameter)
            for part, part_start, part_stop in layout.spans():
                counts = part.copy == 0 and layout.counts(pp_rank)
                yield Piece(part, start + part_start, start + part_stop, counts)

    def owned_pieces(
        self,
        start: int | None = None,
        stop: int | None = None,
    ) -> Iterator[OwnedPiece]:
        """Yield the non-empty pieces of this rank's slice, in order.

        start, stop: elements of the buffer to which they are restricted, in place of the slice.
        """
        if start is None:
            start = self.start
        if stop is None:
            stop = self.stop
        for piece in self.pieces:
            span = piece.overlap(start, stop)
            if span:
                yield OwnedPiece(piece, span, self.start)

    def _allocate(self, device: torch.device, state: Sequence[str]) -> None:
        """Allocate all tensors of the buffer, and move the parameters in."""
        dtypes = self._choose_dtypes()
        self.reduce_dtype = dtypes.reduce
        own_range = slice(self.start, self.stop)
        is_cut = self.shards.size > 1  # a single shard is the whole
        self._weights = WeightBuffer(
            self.parameters,
            self.size,
            own_range,
            dtypes.weights,
            device,
            sharded=self.reduction.shards_weights and is_cut,
        )
        self.weights = self._weights.whole
        self.own_weights = self._weights.own
        self._gradients = GradBuffer(
            self.parameters,
            self.starts,
            self.size,
            own_range,
            dtypes.grads,
            device,
            sharded=self.reduction.sharded and is_cut,
        )
        self.local_grads = self._gradients.local
        self._allocate_masters(dtypes.masters)
        self.state = {name: self._zeros(dtypes.moments) for name in state}
        for number in range(len(self.parameters)):
            self._move_in(number)
        self._weights.take_own()
        self._weights.free()
        # the codes that this rank computes
        self.fp8_shards = tuple(self._fp8_shards()) if self.has_fp8_weights else ()
        has_masters = self.masters is not None and dtypes.masters != dtypes.weights
        self._is_rounded = has_masters and not self.has_fp8_weights
        self._has_changed = False  # True once an update or a state was written to the weights
        self._versions = self._read_versions()

    @property
    def shards_gradients(self) -> bool:
        """Return True if `grads` has memory only until it is reduced (ZeRO-2)."""
        return self._gradients.sharded

    @property
    def shards_weights(self) -> bool:
        """Return True if `weights` has memory only while layers read it (ZeRO-3)."""
        return self._weights.sharded

    @property
    def grads_dtype(self) -> torch.dtype:
        """Return the dtype in which gradients accumulate."""
        return self._gradients.dtype

    @property
    def grads(self) -> Tensor:
        """Return the gradients [size] of all parameters. Raises RuntimeError while they have no
        memory."""
        whole = self._gradients.whole
        if whole is None:
            name = self.pieces[0].part.name
            raise RuntimeError(
                f"the gradients of {name} and others were reduced and freed, or have not come yet "
                "(ZeRO-2): local_grads has this rank's slice of their sum"
            )
        return whole

    def make_room(self) -> None:
        """Allocate `grads`, if it has no memory; its values are then undefined."""
        self._gradients.make_room()

    def forget_gradients(self) -> None:
        """Begin a new step: discard what ZeRO-2 has summed or allocated in this one."""
        self._gradients.forget()

    def _choose_dtypes(self) -> _Dtypes:
        """Return the dtypes of the parameters, which are of one kind."""
        plan = self.plan
        weights = param_dtype(self.parameters[0], plan)
        # masters are never narrower than the weights that layers read
        masters = weights
        if plan.masters.itemsize > weights.itemsize:
            masters = plan.masters
        is_usual = weights == plan.parameters and not self.holds_loads
        if is_usual or self.has_fp8_weights:
            return _Dtypes(weights, plan.gradients, plan.reduce, masters, plan.moments)
        # Weights that the plan keeps in another dtype, and counts, accumulate and travel in theirs;
        # their moments are not in 16 bits.
        moments = plan.moments if plan.moments.itemsize > 2 else masters
        return _Dtypes(weights, weights, weights, masters, moments)

    def _allocate_masters(self, dtype: torch.dtype) -> None:
        """Allocate masters, or the remainders that make masters of the weights."""
        self.remainder: Tensor | None = None
        self.masters: Tensor | None = None
        if dtype == self.weights.dtype:
            self.masters = self.own_weights
        elif self.plan.remainders and not self.has_fp8_weights:
            self.remainder = self._zeros(torch.int16)
        else:
            self.masters = self._zeros(dtype)

    def _zeros(self, dtype: torch.dtype) -> Tensor:
        """Return zeros [local] in the memory of masters and moments."""
        if self.memory is not None:
            return self.memory.zeros(self.local_size, dtype)
        return torch.zeros(self.local_size, dtype=dtype, device=self.weights.device)

    def _fp8_shards(self) -> Iterator[FP8ParamShard]:
        """Yield this rank's part of each parameter, an empty one too: all ranks have as many."""
        assert self.masters is not None
        for parameter, start in zip(self.parameters, self.starts, strict=True):
            fp8_param = fp8_param_of(parameter)
            assert fp8_param is not None
            fp8_param.inverse = fp8_param.inverse.to(self.weights.device)
            # where the elements that this rank owns lie in the buffer
            shard_start = max(start, self.start)
            shard_stop = max(shard_start, min(start + parameter.numel(), self.stop))
            # and in what the rank keeps of the buffer
            own = slice(shard_start - self.start, shard_stop - self.start)
            yield FP8ParamShard(
                fp8_param, self.own_weights[own], self.masters[own], shard_start - start
            )

    def _move_in(self, number: int) -> None:
        """Make parameter `number` a view of `weights`, and its values this rank's masters."""
        parameter = self.parameters[number]
        start = self.starts[number]
        values = parameter.data.reshape(-1)
        stop = start + values.numel()
        view = self.weights[start:stop].view_as(parameter)
        if self.remainder is not None:
            # other ranks' slices are rounded here exactly as by their owners
            unused_remainder = torch.empty_like(values, dtype=torch.int16)
            split(values.float(), view.view(-1), unused_remainder)
        elif not self.has_fp8_weights:
            # Rounded from the masters, as after every update, and not from the values: a value
            # that is wider than the masters would otherwise be rounded once only.
            assert self.masters is not None
            view.copy_(parameter.data.to(self.masters.dtype))
        parameter.data = view
        self._gradients.attach(number)
        shard_start = max(start, self.start)
        shard_stop = min(stop, self.stop)
        if shard_start < shard_stop:
            shard_values = values[shard_start - start : shard_stop - start]
            self.restore("weight", shard_start - self.start, shard_values)

    def _local_part(self, flat: Tensor) -> Tensor:
        """Return a view of this rank's slice of a flat tensor [size]."""
        return flat[self.start : self.stop]

    def tiles(self, start: int, stop: int, length: int = 0) -> Iterator[Tile]:
        """Yield elements [start, stop) of this rank's slice, in runs of `length`. 0: a length that
        suits the device."""
        if not length and self.weights.device.type == "cpu":
            length = BLOCK
        elif not length:
            # shorter runs for stochastic rounding, whose random numbers take 8 bytes per element
            num_blocks = 256 if self.plan.rounding == "nearest" else 16
            length = num_blocks * BLOCK
        if self.memory is not None:
            length = min(length, self.memory.tile_elements)
        for tile_start in range(start, stop, length):
            yield self._tile(tile_start, min(tile_start + length, stop))

    def on_device(
        self, tiles: Iterable[Tile], written: Collection[str] | None = None
    ) -> Iterable[Tile]:
        """Return tiles of this buffer with all that they store on the device, to be iterated to the
        end. What lies in other memory is copied to the device and, after each iteration, back.

        written: names of what is changed: "masters", "remainder" and moments; None: all.
        """
        return tiles if self.memory is None else self.memory.visit(self, tiles, written)

    def to_device(self, values: Tensor) -> Tensor:
        """Return values of masters, moments or average on the device, for reading."""
        return values.to(self.weights.device, non_blocking=True)

    def wait_for_state(self) -> None:
        """Wait until masters, moments and average may be read and written where they lie."""
        if self.memory is not None:
            self.memory.wait()

    def _tile(self, start: int, stop: int) -> Tile:
        """Return elements [start, stop) of this rank's slice."""
        buffer_start = self.start + start
        spans: list[DrawSpan] = []
        for owned in self.owned_pieces(buffer_start, self.start + stop):
            span = DrawSpan(
                part=owned.piece.part,
                part_start=owned.in_part.start,
                start=owned.span.start - buffer_start,
                stop=owned.span.stop - buffer_start,
            )
            spans.append(span)
        in_slice = slice(start, stop)
        masters = None if self.masters is None else self.masters[in_slice]
        # an update of FP8 weights changes their masters only
        weights = masters if self.has_fp8_weights else self.own_weights[in_slice]
        assert weights is not None
        return Tile(
            weights=weights,
            grads=self.local_grads[in_slice],
            masters=masters,
            remainder=None if self.remainder is None else self.remainder[in_slice],
            moments=tuple((name, moments[in_slice]) for name, moments in self.state.items()),
            draw=Draw(self.seed, stop - start, spans, self.weights.device),
            nearest=self.plan.rounding == "nearest" or self.weights.dtype != torch.bfloat16,
        )

    def saved(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint, by name: this rank's slices of the masters, as
        "weight", of the moments, and of the moving average, as "ema".
        """
        self.wait_for_state()
        weight = self.own_weights
        if self.plan.masters_in_checkpoint:  # always so if the weights are FP8 codes
            weight = self.joined_masters() if self.masters is None else self.masters
        tensors = {"weight": weight, **self.state}
        if self.ema is not None:
            self.begin_ema()
            tensors[EMA] = self.ema
        return tensors

    def joined_masters(self) -> Tensor:
        """Return the masters [local] of weights and their remainders, in the memory of these."""
        assert self.remainder is not None
        joined = torch.empty_like(self.remainder, dtype=torch.float32)
        start = 0
        for tile in self.on_device(self.tiles(0, self.local_size), written=()):
            stop = start + len(tile.weights)
            joined[start:stop].copy_(tile.wide_masters())
            start = stop
        return joined

    @property
    def saved_names(self) -> tuple[str, ...]:
        """Return the names of the tensors in `saved`."""
        kept = ("weight", *self.state)
        return kept if self.ema is None else (*kept, EMA)

    def saved_empty(self) -> dict[str, Tensor]:
        """Return tensors without elements, of the dtypes and on the devices of those in `saved`:
        nothing is waited for, joined or begun."""
        weight = self.own_weights[:0]
        if self.plan.masters_in_checkpoint and self.masters is not None:
            weight = self.masters[:0]
        elif self.plan.masters_in_checkpoint:
            assert self.remainder is not None
            weight = self.remainder[:0].float()
        empty = {"weight": weight}
        for name, moments in self.state.items():
            empty[name] = moments[:0]
        if self.ema is not None:
            empty[EMA] = self.ema[:0]
        return empty

    def begin_ema(self) -> None:
        """Make the moving average a copy of the masters, if there is one that has not begun."""
        if self.ema is None or self.ema_has_begun:
            return
        self.ema_has_begun = True
        self.wait_for_state()
        start = 0
        for tile in self.on_device(self.tiles(0, self.local_size, BLOCK), written=()):
            stop = start + len(tile.weights)
            self.ema[start:stop].copy_(tile.wide_masters())
            start = stop

    def restore(self, name: str, start: int, values: Tensor) -> None:
        """Load saved values, from element `start` of this rank's slice on. For weights, call
        `publish` afterwards."""
        self.wait_for_state()
        stop = start + len(values)
        if name == "weight" and self.masters is None:
            offset = 0
            for tile in self.on_device(self.tiles(start, stop), written=("remainder",)):
                of_tile = values[offset : offset + len(tile.weights)]
                wide = of_tile.to(self.weights.device, torch.float32)
                tile.store_and_round_masters(wide)
                offset += len(of_tile)
            return
        if name == EMA:
            target = self.ema
            self.ema_has_begun = True
        else:
            target = self.masters if name == "weight" else self.state[name]
        assert target is not None
        target[start:stop].copy_(values)

    def counted(self) -> list[Range]:
        """Return the ranges of this rank's slice that hold logical elements which no other rank
        counts."""
        spans: list[Range] = []
        for owned in self.owned_pieces(*self.share):
            if owned.piece.counts:
                spans.append((owned.span.start, owned.span.stop))
        return self._ranges(spans)

    def counted_elsewhere(self) -> list[Range]:
        """Return the ranges of this rank's slice that hold logical elements which another rank
        counts."""
        share_start, share_stop = self.share
        elsewhere: list[Range] = []
        for piece in self.pieces:
            if piece.counts:
                elsewhere.append((piece.start, min(piece.stop, share_start)))
                elsewhere.append((max(piece.start, share_stop), piece.stop))
            else:
                elsewhere.append((piece.start, piece.stop))
        return self._ranges(sorted(elsewhere))

    def _ranges(self, spans: Iterable[Range]) -> list[Range]:
        """Return what of the spans of the buffer, in order, lies in this rank's slice, as positions
        in the slice. A span that begins where the last one ends is joined to it."""
        ranges: list[Range] = []
        for span_start, span_stop in spans:
            start = max(span_start, self.start) - self.start
            stop = min(span_stop, self.stop) - self.start
            if start >= stop:
                continue
            if ranges:
                last_start, last_stop = ranges[-1]
                if last_stop == start:
                    ranges.pop()
                    start = last_start
            ranges.append((start, stop))
        return ranges

    def start_reduce(self) -> Callable[[], None]:
        """Start to sum or average the gradients over dp, and return a function that waits for the
        result.

        After the wait `local_grads` is final, and the rest of `grads` is not. To average, the
        gradients are divided before the sum, because a half-precision sum could overflow.

        Under ZeRO-2 the wait adds the sum to `local_grads`, and `grads` is given up. Further
        gradients of the step are reduced by another call.
        """
        # A reduce-scatter leaves each dp rank the sum of 1 / dp of the buffer. With fewer shards
        # this rank's slice is longer, and needs an all-reduce.
        only_local = self.shards.size == self.dp.size
        sent = self.grads
        # loads (`holds_loads`) are counts of tokens, which are only summed
        if self.reduction.average and not self.holds_loads:
            sent.div_(self.dp.size)
        # a copy only if gradients travel in another dtype than they are accumulated in
        is_copied = self.dp.size > 1 and self.reduce_dtype != sent.dtype
        if is_copied:
            sent = sent.to(self.reduce_dtype)
        self._gradients.release_for_reduction()
        wait = self.reduction.start_sum(self.dp, sent, only_local)

        def finish() -> None:
            wait()
            if self.shards_gradients:
                self._gradients.add_reduced(self._local_part(sent))
                # at once: a thread of gloo may refer to the tensor a little longer
                sent.untyped_storage().resize_(0)
            elif is_copied:
                self.local_grads.copy_(self._local_part(sent))

        return finish

    def renew_weights(self, applied: Tensor) -> None:
        """Round the masters to the weights again, as the update of step number `applied` did, and
        all-gather the weights.

        FP8 codes are not computed here.
        """
        if self.has_fp8_weights:
            return
        if self.masters is not None and self.masters.dtype != self.weights.dtype:
            tiles = self.tiles(0, self.local_size)
            for tile in self.on_device(tiles, written=()):
                tile.store_and_round_masters(tile.wide_masters(), applied)
        wait = self.start_all_gather()
        wait()

    def start_all_gather(self) -> Callable[[], object]:
        """Under ZeRO-1, start to all-gather the weights over `shards`, and return a function that
        waits for the result. Under ZeRO-3, give up what layers have read until now: each gathers
        its weights when it reads them.

        Every change of the weights ends with this call, so it also increments their version
        counters, which writes to the flat memory do not do. Layers that cache casts of weights then
        know that their casts are outdated.
        """
        increment_version(self.parameters)
        self._has_changed = True
        self._versions = self._read_versions()
        if self.shards_weights:
            self._weights.free()
            return lambda: None
        return self.shards.start_gather_(bytes_if_codes(self.weights))

    def start_gather_for_layer(self, tag: int) -> None:
        """Under ZeRO-3, start to all-gather the weights for a layer that will read them, unless
        they are there or on their way. Collective over `shards`.

        tag: of this buffer, the same on all ranks, as in `Axis.start_gather_from`.
        """
        self._weights.start_gather(self.shards, tag)

    def wait_for_weights(self) -> None:
        """Wait for what `start_gather_for_layer` has started."""
        self._weights.wait()

    def free_weights(self) -> None:
        """Under ZeRO-3, give up the memory of `weights`."""
        self._weights.free()

    def take_written_weights(self) -> None:
        """Under ZeRO-3, make this rank's slice of `weights`, which have memory now, its own."""
        self._weights.take_own()

    def reclaim_parameters(self) -> list[str]:
        """Return the names of parameters that are no longer views of `weights`, for instance after
        a cast.

        Values of a parameter that was given other memory of its own kind, as by `p.data = other`,
        are moved into `weights` again. torch can also exchange a parameter in place
        (`torch.utils.swap_tensors`), which then has lost its `main_grad`, and another optimizer can
        have taken it over.
        """
        lost = set[int]()
        # not by the address of memory: without memory a tensor has none
        storage = storage_address(self.weights)
        for number, parameter in enumerate(self.parameters):
            start = self.starts[number]
            shares_storage = storage_address(parameter) == storage
            is_view = shares_storage and parameter.storage_offset() == start
            # a tensor without elements has no place
            is_elsewhere = not is_view and parameter.numel() > 0
            if not self._can_reclaim(number, is_elsewhere):
                lost.add(start)
            elif is_elsewhere:
                self._weights.write(start, parameter.data.reshape(-1))
                view = self.weights[start : start + parameter.numel()]
                parameter.data = view.view_as(parameter)
        if not lost:
            return []
        return [piece.part.name for piece in self.pieces if piece.start in lost]

    def _can_reclaim(self, number: int, is_elsewhere: bool) -> bool:
        """Return True if gradients of parameter `number` come here, and its values are of a kind
        that can be kept here. is_elsewhere: they are not here."""
        # codes without the scales that belong to them are no values
        if self.has_fp8_weights and is_elsewhere:
            return False
        parameter = self.parameters[number]
        same_dtype = parameter.dtype == self.weights.dtype
        same_device = parameter.device == self.weights.device
        return same_dtype and same_device and self._gradients.collects(number)

    def _read_versions(self) -> list[int]:
        """Return torch's counters of writes to the parameters; writes through `data` are not in
        them."""
        return [num_writes(parameter) for parameter in self.parameters]

    def adopt_weights(self, everything: bool, applied: Tensor) -> None:
        """Take weights that someone else has written to as masters, if the weights are rounded from
        masters.

        A weight that is still its master, rounded as after step number `applied`, keeps that
        master: values that were exchanged and put back bit for bit lose nothing.
        everything: compare all weights, because a write through `data` leaves no version; else
            only after a version has changed, and before the first update.
        """
        if not self._is_rounded:
            return
        versions = self._read_versions()
        is_written = versions != self._versions
        self._versions = versions
        if everything or is_written or not self._has_changed:
            # a GPU compares longer runs, because each launch has a cost
            length = _COMPARED_ELEMENTS
            if self.weights.device.type != "cpu":
                length *= 64
            tiles = self.tiles(0, self.local_size, length)
            for tile in self.on_device(tiles, written=("masters",)):
                tile.adopt_weights(is_written, applied)

    def num_bytes(self) -> int:
        """Return the memory of all tensors of this buffer, in bytes."""
        return sum(self.bytes_by_kind().values())

    def host_bytes(self) -> int:
        """Return the bytes of masters, moments and average that lie in other memory than the
        weights."""
        if self.memory is None:
            return 0
        by_kind = self.bytes_by_kind()
        return by_kind["masters"] + by_kind["moments"] + by_kind[EMA]

    def bytes_by_kind(self) -> dict[str, int]:
        """Return the memory of this buffer in bytes: of weights, gradients, masters, moments and
        the moving average, which is "ema".

        Scales of weights in FP8 belong to the weights, remainders to the masters. Masters that are
        the weights take no memory of their own. Of gradients only what is held between steps
        counts.
        """
        masters: list[Tensor] = []
        if self.remainder is not None:
            masters.append(self.remainder)
        if self.masters is not None and self.masters.dtype != self.weights.dtype:
            masters.append(self.masters)
        scales = [shard.param.inverse for shard in self.fp8_shards]
        return {
            "weights": self._weights.lasting_bytes() + _num_bytes(scales),
            "gradients": self._gradients.lasting_bytes(),
            "masters": _num_bytes(masters),
            "moments": _num_bytes(self.state.values()),
            EMA: 0 if self.ema is None else self.ema.nbytes,
        }


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def param_dtype(parameter: nn.Parameter, plan: PrecisionPlan) -> torch.dtype:
    """Return the dtype in which a parameter is held. Raise UserError if its parts would need
    different dtypes."""
    layout = layout_of(parameter)
    if layout.balancing is not None:
        return plan.sensitive
    fp8_param = fp8_param_of(parameter)
    if fp8_param is not None:
        return fp8_param.dtype
    names = [part.name for part in layout.parts]
    dtypes = {plan.param_dtype(name) for name in names}
    if len(dtypes) > 1:
        raise UserError.of(
            "optimizer.keep_fp32_part_of_parameter",
            names=" and ".join(names),
            dtypes=" and ".join(sorted(map(dtype_name, dtypes))),
        )
    return dtypes.pop()


def require_in_place(buffers: Iterable[Buffer]) -> None:
    """Raise RuntimeError if a parameter no longer lies in its buffer: a step would not update the
    model."""
    lost: list[str] = []
    for buffer in buffers:
        lost += buffer.reclaim_parameters()
    if lost:
        others = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
        raise RuntimeError(
            f"{lost[0]}{others} was cast or moved after the optimizer had taken over its memory, "
            "or is another optimizer's by now, so no step would update it: cast and move a model "
            "(to, half, cuda) before building its only optimizer; nothing was changed"
        )


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
