"""Digests of the whole state that a run resumes from, by logical tensor, the same in every layout.

The state is the master weights, the moments and delayed FP8 scales with their histories. Of an
element that several ranks hold, the copy that is counted in norms is digested. Parameters that are
not trained are not part of it.
"""

import json
from collections.abc import Iterator, Mapping
from hashlib import blake2b

import torch
from torch import Tensor

from megaprec.comm.gathered_texts import gather_entries
from megaprec.comm.layout import Part
from megaprec.comm.tensor_digests import digest_terms, hexadecimal
from megaprec.fp8.state import FP8State
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.state.flat_buffer import EMA, Buffer, Piece

WEIGHT = "weight"
Digests = dict[str, dict[str, str]]
"""32 hexadecimal digits by kind ("weight", the moment's name or "fp8") and logical name."""


class StateDigest:
    """The digests of an optimizer's state and of the FP8 state of its model.

    fp8: None if there is none. weights_only: leave out moments and the moving average.
    """

    def __init__(
        self,
        optimizer: ParallelAMPOptimizer,
        fp8: FP8State | None = None,
        weights_only: bool = False,
    ) -> None:
        self._optimizer = optimizer
        self._fp8 = fp8
        self._weights_only = weights_only
        self._names: list[str] | None = None  # of all ranks, "kind/logical name"

    @torch.no_grad()
    def make(self) -> Digests:
        """Return the digests, the same on every rank. Collective over the world; waits for the
        device."""
        world = self._optimizer.world
        device = self._optimizer.device
        local: dict[str, Tensor] = {}
        for tensor_name, terms in self._terms():
            if tensor_name in local:
                terms = terms + local[tensor_name]
            local[tensor_name] = terms
        # gathered once: the names are the same in every step
        if self._names is None:
            names_of_all = gather_entries(dict.fromkeys(local), world, device)
            self._names = sorted(names_of_all)
        # zeros where this rank has nothing of a tensor: all ranks sum one table
        nothing = _zero_terms(device)
        rows = [local.get(tensor_name, nothing) for tensor_name in self._names]
        table = torch.stack(rows)  # [names, 2]
        sums = world.sum_(table).cpu()
        digests: Digests = {}
        for tensor_name, sums_of_name in zip(self._names, sums, strict=True):
            kind, _, logical_name = tensor_name.partition("/")
            digests_of_kind = digests.setdefault(kind, {})
            digests_of_kind[logical_name] = hexadecimal(sums_of_name)
        return digests

    def _terms(self) -> Iterator[tuple[str, Tensor]]:
        """Yield ("kind/logical name", int64 [2]) of what this rank counts; a name may occur
        repeatedly."""
        for buffer in self._optimizer.all_buffers():
            for piece in buffer.pieces:
                span = piece.overlap(*buffer.share)
                if piece.counts and span:
                    yield from self._terms_of(buffer, piece, span)
                else:
                    yield from self._no_terms(buffer, piece)
        if self._fp8 is not None and self._fp8.names:
            yield from self._fp8_terms(self._fp8)

    def _terms_of(self, buffer: Buffer, piece: Piece, span: range) -> Iterator[tuple[str, Tensor]]:
        """Yield the terms of the elements `span` of the buffer, which are of a piece."""
        part = piece.part
        start = span.start - piece.start
        for kind, values in _state_of(buffer, span):
            if self._has(kind):
                terms = digest_terms(values, part, start)
                yield f"{kind}/{part.name}", terms

    def _no_terms(self, buffer: Buffer, piece: Piece) -> Iterator[tuple[str, Tensor]]:
        """Yield zeros for a piece that another rank counts: all ranks learn its names from them."""
        device = self._optimizer.device
        for kind in buffer.saved_names:
            if self._has(kind):
                nothing = _zero_terms(device)
                yield f"{kind}/{piece.part.name}", nothing

    def _has(self, kind: str) -> bool:
        """Return True for a kind of state that is digested."""
        return kind == WEIGHT or not self._weights_only

    def _fp8_terms(self, fp8: FP8State) -> Iterator[tuple[str, Tensor]]:
        """Yield the terms of scales and histories: a row for each data-parallel rank that has its
        own."""
        # the scales of the next pass are part of the state: all ranks of a stage compute them
        fp8.roll()
        replica_axis = fp8.dp
        optimizer = self._optimizer
        # Ranks with equal scales count them once: those of tp, and those of dp unless these differ.
        is_first_of_dp = replica_axis.size > 1 or optimizer.dp.rank == 0
        counts = optimizer.tp.rank == 0 and is_first_of_dp
        for number, tensor_name in enumerate(fp8.names):
            scale = fp8.bank.scale[number : number + 1]
            history = fp8.bank.history[:, number]
            scale_row = torch.cat((scale, history))
            # as if the rows of all ranks were one tensor, of which each rank has its row
            num_rows = replica_axis.size
            shape = (num_rows, len(scale_row))
            part = Part(tensor_name, shape, 0, num_rows, replica_axis.rank)
            if not counts:
                scale_row = scale_row[:0]  # the name is there, with terms of zero
            terms = digest_terms(scale_row, part, 0)
            yield f"fp8/{tensor_name}", terms


def masters_of(buffer: Buffer, span: range) -> Tensor:
    """Return the masters of elements `span` of the buffer, which this rank owns, in FP32 or wider,
    on the device. They may be a view."""
    shard_start = span.start - buffer.start
    shard_stop = span.stop - buffer.start
    if buffer.masters is not None:
        masters = buffer.masters[shard_start:shard_stop]
        return buffer.to_device(masters)
    # masters that are stored as weights and their lower bits: all elements in one tile
    num_elements = shard_stop - shard_start
    tiles = buffer.tiles(shard_start, shard_stop, num_elements)
    on_device = buffer.on_device(tiles, written=())
    joined_masters = [tile.wide_masters() for tile in on_device]
    return torch.cat(joined_masters)


def _state_of(buffer: Buffer, span: range) -> Iterator[tuple[str, Tensor]]:
    """Yield the masters, as "weight", the moments and the moving average of these elements of the
    buffer."""
    shard_start = span.start - buffer.start
    shard_stop = span.stop - buffer.start
    yield WEIGHT, masters_of(buffer, span)
    for kind, values in buffer.state.items():
        elements = values[shard_start:shard_stop]
        yield kind, buffer.to_device(elements)
    if buffer.ema is not None:
        # an average that has not begun becomes a copy of the masters
        buffer.begin_ema()
        averages = buffer.ema[shard_start:shard_stop]
        yield EMA, buffer.to_device(averages)


def _zero_terms(device: torch.device) -> Tensor:
    """Return what elements that are not there add to a digest: int64 [2]."""
    return torch.zeros(2, dtype=torch.int64, device=device)


def fold_digests(digests: Digests, *tables: Mapping[str, object]) -> str:
    """Return one digest of all digests and of JSON tables, as 32 hexadecimal digits."""
    text = json.dumps([digests, *tables], sort_keys=True)
    return blake2b(text.encode(), digest_size=16).hexdigest()
