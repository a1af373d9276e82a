"""Samples of packed documents: those that fit a sample are in one whole, and the rest is padding.

Each token of a document is an input once an epoch, and each but the first of a document is a target
once, that of the token before it. The first token of a document is a target only behind another
document in its sample, and not with `eod_mask_loss`. Targets in padding, and what stands behind a
document without being the first token of one, do not count in the loss.

A document that is longer than a sample is cut. The last token of a piece still has its target, the
first token of the next piece, which is therefore no target in the sample of that piece.

For attention and positions a piece is a document, and the padding of a sample one more behind them.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from megaprec.errors import UserError
from megaprec.tokens.best_fit import PackedPieces, best_fit
from megaprec.tokens.held_out import HeldOutRule, Ranges, all_evaluated, divide
from megaprec.tokens.indexed import IndexedDataset
from megaprec.tokens.samples import (
    CHUNK,
    NO_RESETS,
    Batch,
    Resets,
    SampleLocation,
    Samples,
    held_out_samples,
    require_fraction,
)

PADDING = 0  # an id that every vocabulary has; it is in no loss, and no token behind it is in one


class PackedSamples(Samples):
    """Samples of packed documents, in an order that `seed` determines.

    pieces: those of all samples of the data set. chosen: the numbers of the samples; at least one.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        pieces: PackedPieces,
        seq_length: int,
        seed: int,
        shuffle: bool,
        chosen: Ranges,
        resets: Resets = NO_RESETS,
    ) -> None:
        super().__init__(dataset, seq_length, seed, shuffle, chosen, resets)
        self._pieces = pieces

    @property
    def pieces(self) -> PackedPieces:
        """Return the pieces of all samples of the data set, held-out ones included."""
        return self._pieces

    @property
    def total_ids(self) -> int:
        """Return a number that all ids of the data set are below, whatever is held out."""
        return len(self._pieces)

    @property
    def tiled(self) -> "PackedSamples":
        """Return these samples, which come once an epoch."""
        return self

    def location_of(self, position: int) -> SampleLocation:
        """Return where the sample at a position of the run is on disk."""
        (sample_id,) = self._ids(np.array([position], np.int64)).tolist()
        return SampleLocation(self._dataset, sample_id, self._spans(sample_id))

    def batch(self, position: int, count: int) -> Batch:
        """Return the samples at positions [position, position + count) of the run, which may span
        epochs."""
        positions = np.arange(position, position + count, dtype=np.int64)
        ids = self._ids(positions)
        sample_ids = ids.tolist()
        spans_by_row = [self._spans(sample_id) for sample_id in sample_ids]
        # all at once, so that a file elsewhere is asked for them together
        self._dataset.prepare_spans(chain.from_iterable(spans_by_row))
        # one token more: inputs and targets are shifted against each other
        rows = np.full((count, self._seq_length + 1), PADDING, np.int64)
        for row, spans in zip(rows, spans_by_row, strict=True):
            column = 0
            for start, stop in spans:
                num_tokens = stop - start
                end_column = column + num_tokens
                row[column:end_column] = self._dataset.tokens(start, num_tokens)
                column = end_column
        masks = [self._mask(sample_id) for sample_id in sample_ids]
        mask = np.stack(masks).astype(np.float32)
        text = torch.from_numpy(rows)
        batch = Batch(
            tokens=text[:, :-1].contiguous(),
            targets=text[:, 1:].contiguous(),
            ids=torch.from_numpy(ids),
            mask=torch.from_numpy(mask),
        )
        return self._with_documents(batch, sample_ids)

    def padding(self, position: int, count: int) -> int:
        """Return how many tokens of the samples at positions [position, position + count) of the
        run are padding."""
        positions = np.arange(position, position + count, dtype=np.int64)
        sample_ids = self._ids(positions).tolist()
        num_filled = 0
        for sample_id in sample_ids:
            pieces = self._pieces.pieces_of(sample_id)
            lengths = self._pieces.lengths[pieces.start : pieces.stop]
            num_filled += int(lengths.sum())
        return count * self._seq_length - num_filled

    def require_counted(self, what: str) -> None:
        """Raise UserError if no target of an epoch counts in the loss.

        what: what the samples are for, in words.
        """
        if not self._counted_by_sample().any():
            raise UserError.of("data.no_token_counts", what=what)

    def count_without_target(self) -> int:
        """Return of how many different samples no target counts in the loss."""
        return int((self._counted_by_sample() == 0).sum())

    def tokens_by_document(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many tokens of each document are in the chosen samples, int64 [documents].

        lengths: of the documents of the data set, in tokens.
        """
        ends = np.cumsum(lengths)
        document_of_piece = np.searchsorted(ends, self._pieces.starts, side="right")
        is_chosen = np.zeros(len(self._pieces), bool)
        is_chosen[self._chosen_numbers()] = True
        chosen_piece = np.repeat(is_chosen, np.diff(self._pieces.first_pieces))
        tokens = np.zeros(len(lengths), np.int64)
        np.add.at(tokens, document_of_piece[chosen_piece], self._pieces.lengths[chosen_piece])
        return tokens

    def _chosen_numbers(self) -> NDArray[np.int64]:
        """Return the numbers of the chosen samples."""
        return self._chosen.numbers(np.arange(len(self)))

    def _spans(self, sample_id: int) -> tuple[tuple[int, int], ...]:
        """Return the tokens [start, stop) of the stream that are the inputs and targets of a
        sample."""
        spans: list[tuple[int, int]] = []
        for piece in self._pieces.pieces_of(sample_id):
            start = int(self._pieces.starts[piece])
            length = int(self._pieces.lengths[piece])
            # a document that goes on fills the sample, and has one more token, the last target
            if self._pieces.goes_on[piece]:
                length += 1
            spans.append((start, start + length))
        return tuple(spans)

    def _mask(self, sample_id: int) -> NDArray[np.bool_]:
        """Return which targets of a sample count in the loss, bool [seq]."""
        # for each token of the row, inputs and the last target: whether it counts as a target of
        # the token before it; padding does not
        counted = np.zeros(self._seq_length + 1, bool)
        column = 0
        pieces = self._pieces.pieces_of(sample_id)
        spans = self._spans(sample_id)
        for piece, (start, stop) in zip(pieces, spans, strict=True):
            num_tokens = stop - start
            end_column = column + num_tokens
            counted[column:end_column] = True
            # the first token of a piece that continues a document is a target of the piece before
            if self._resets.eod_mask_loss or self._pieces.continues[piece]:
                counted[column] = False
            if self._resets.loss_mask:
                counted[column:end_column] &= self._dataset.counted(start, num_tokens)
            column = end_column
        return counted[1:]

    def _with_documents(self, batch: Batch, ids: list[int]) -> Batch:
        """Return the batch with documents and positions, each if its reset is on."""
        documents = np.empty((len(ids), self._seq_length), np.int64)
        positions = np.empty_like(documents)
        for row, sample_id in enumerate(ids):
            pieces = self._pieces.pieces_of(sample_id)
            lengths = self._pieces.lengths[pieces.start : pieces.stop].tolist()
            num_padding = self._seq_length - sum(lengths)
            lengths.append(num_padding)  # as one more document
            numbers = np.arange(len(lengths))
            documents[row] = np.repeat(numbers, lengths)
            places_of_pieces = [np.arange(length) for length in lengths]
            positions[row] = np.concatenate(places_of_pieces)
        if self._resets.attention_mask:
            batch = replace(batch, documents=torch.from_numpy(documents))
        if self._resets.position_ids:
            batch = replace(batch, positions=torch.from_numpy(positions))
        return batch

    def _counted_by_sample(self) -> NDArray[np.int64]:
        """Return how many targets of each chosen sample count in the loss, int64 [len(self)]."""
        counted_of_piece = np.empty(len(self._pieces.starts), np.int64)
        for pieces, numbers in self._counted_by_piece():
            counted_of_piece[pieces] = numbers
        # before each piece, and at the end
        counted_before = np.concatenate(([0], np.cumsum(counted_of_piece)))
        before_samples = counted_before[self._pieces.first_pieces]
        by_sample = np.diff(before_samples)
        return by_sample[self._chosen_numbers()]

    def _counted_by_piece(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield numbers of pieces, and how many of their tokens count in the loss as targets, for
        about CHUNK tokens of the file at a time."""
        pieces = self._pieces
        in_file_order = np.argsort(pieces.starts)
        # the first token of a piece is a target only behind another piece of its sample, and only
        # if a document begins with it
        is_first_of_sample = np.zeros(len(in_file_order), bool)
        is_first_of_sample[pieces.first_pieces[:-1]] = True
        can_first_count = ~(is_first_of_sample | pieces.continues)
        if self._resets.eod_mask_loss:
            can_first_count[:] = False
        chunk_of_piece = pieces.starts[in_file_order] // CHUNK
        borders = np.flatnonzero(np.diff(chunk_of_piece)) + 1
        for group in np.split(in_file_order, borders):
            starts = pieces.starts[group]
            stops = starts + pieces.lengths[group] + pieces.goes_on[group]
            # the tokens [begin, end) of the stream, by the loss mask
            begin = int(starts[0])
            end = int(stops[-1])
            counted = np.ones(end - begin, bool)
            if self._resets.loss_mask:
                counted = self._dataset.counted(begin, end - begin)
            # before each token of the group, and at its end
            counted_before = np.concatenate(([0], np.cumsum(counted)))
            first_tokens = starts - begin
            ends = stops - begin
            behind_first = counted_before[ends] - counted_before[first_tokens + 1]
            first_counts = counted[first_tokens] & can_first_count[group]
            yield group, behind_first + first_counts


def split_packed(
    dataset: IndexedDataset,
    seq_length: int,
    held_out: float,
    seed: int,
    shuffle: bool,
    resets: Resets,
    rule: HeldOutRule,
) -> tuple[PackedSamples, PackedSamples | None]:
    """Return packed samples for training, and the `held_out` fraction of them that `rule` keeps for
    evaluation, which is never shuffled.

    At least one sample is held out, unless the fraction is 0: then the second value is None. No
    token is a target in both. Raises UserError if the fraction is outside [0, 1) or the documents
    do not fill one sample of each.
    """
    require_fraction(held_out)
    pieces = best_fit(dataset.document_lengths(), seq_length)
    total = len(pieces)
    held_out_count = held_out_samples(total, held_out)
    needed = 2 if held_out_count else 1
    _require_samples(dataset, pieces, seq_length, needed)
    if not held_out_count:
        everything = Ranges.single(0, total)
        samples = PackedSamples(dataset, pieces, seq_length, seed, shuffle, everything, resets)
        return samples, None
    # a fraction near 1 must leave one for training
    held_out_count = min(held_out_count, total - 1)
    trained, evaluated = divide(total, held_out_count, rule)
    training = PackedSamples(dataset, pieces, seq_length, seed, shuffle, trained, resets)
    # never shuffled: an evaluation takes the same samples each time
    evaluation = PackedSamples(dataset, pieces, seq_length, seed, False, evaluated, resets)
    return training, evaluation


def evaluated_packed(
    dataset: IndexedDataset,
    seq_length: int,
    seed: int,
    resets: Resets,
    rule: HeldOutRule,
) -> PackedSamples:
    """Return all packed samples of a data set that is evaluated, in the order of `rule`.

    Raises UserError if there is none.
    """
    pieces = best_fit(dataset.document_lengths(), seq_length)
    _require_samples(dataset, pieces, seq_length, 1)
    chosen = all_evaluated(len(pieces), rule)
    return PackedSamples(dataset, pieces, seq_length, seed, False, chosen, resets)


def _require_samples(
    dataset: IndexedDataset, pieces: PackedPieces, seq_length: int, needed: int
) -> None:
    """Raise UserError if documents are packed into fewer than `needed` samples."""
    if len(pieces) < needed:
        raise UserError.of(
            "data.too_few_packed",
            prefix=dataset.prefix,
            documents=dataset.num_documents,
            samples=len(pieces),
            seq_length=seq_length,
            needed=needed,
        )
