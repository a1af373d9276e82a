"""Packing: whole documents put into samples, by their lengths.

A document of at most `seq_length` tokens is one piece. A longer one is cut into pieces of that
length, and its rest is a piece of its own. Best-fit decreasing puts the pieces into samples: the
longest first, each into the sample with the least room that it fits in ("Fewer Truncations Improve
Language Modeling", arXiv 2404.10830). What remains of a sample is padding.

Pieces of one length fit the same samples, so they are placed together: the sample with the least
room is also that with the least room after it took one of them, as long as it fits another. So a
whole group of samples with equal room is filled by one division. Nothing is drawn: a packing is a
function of the lengths alone, the same in every process.

Samples are numbered by their first piece in the file, and pieces of a sample stand in the order of
the file. So neighbouring samples are of neighbouring documents, and a held-out part is not one of
the longest or shortest documents.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PackedPieces:
    """The pieces of documents that each sample holds.

    starts: the first token of each piece in the stream, int64 [pieces]; pieces of a sample stand
        together, in the order of the file.
    lengths: tokens of each piece, int32 [pieces].
    continues: whether the document of a piece began before it, [pieces].
    goes_on: whether the document of a piece has tokens after it, [pieces].
    first_pieces: of each sample, and the number of pieces, int64 [samples + 1].
    """

    starts: Integers
    lengths: NDArray[np.int32]
    continues: NDArray[np.bool_]
    goes_on: NDArray[np.bool_]
    first_pieces: Integers

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.first_pieces) - 1

    def pieces_of(self, sample: int) -> range:
        """Return the numbers of the pieces of a sample."""
        first, end = self.first_pieces[sample : sample + 2].tolist()
        return range(first, end)


def best_fit(document_lengths: Integers, seq_length: int) -> PackedPieces:
    """Return the packing of documents into samples of `seq_length` tokens.

    document_lengths: tokens of each document of a stream, in its order; int64 [documents]. Empty
        documents are in no sample.
    Takes time in n log n for n pieces, and about 100 bytes for each while it runs.
    """
    starts, lengths, continues, goes_on = _cut(document_lengths, seq_length)
    sample_of_piece = _assign(lengths, seq_length)
    sample_of_piece = _in_file_order(sample_of_piece)
    # stable: pieces of a sample stay in the order of the file
    by_sample = np.argsort(sample_of_piece, kind="stable")
    pieces_of_sample = np.bincount(sample_of_piece)
    end_pieces = np.cumsum(pieces_of_sample)
    first_pieces = np.concatenate(([0], end_pieces))
    return PackedPieces(
        starts=starts[by_sample],
        lengths=lengths[by_sample],
        continues=continues[by_sample],
        goes_on=goes_on[by_sample],
        first_pieces=first_pieces,
    )


def _in_file_order(sample_of_piece: Integers) -> Integers:
    """Return the sample of each piece, with samples numbered anew by their first piece in the file.

    sample_of_piece: of pieces in the order of the file, int64 [pieces]; each sample has a piece.
    """
    num_pieces = len(sample_of_piece)
    num_samples = 0
    if num_pieces:
        num_samples = int(sample_of_piece.max()) + 1
    first_piece = np.full(num_samples, num_pieces, np.int64)  # of each sample
    # from the last piece to the first: of several writes the last one stays
    last_to_first = np.arange(num_pieces)[::-1]
    sample_of_each = sample_of_piece[::-1]
    first_piece[sample_of_each] = last_to_first
    in_file_order = np.argsort(first_piece)
    new_number = np.empty(num_samples, np.int64)
    new_number[in_file_order] = np.arange(num_samples)
    return new_number[sample_of_piece]


def _cut(
    document_lengths: Integers, seq_length: int
) -> tuple[Integers, NDArray[np.int32], NDArray[np.bool_], NDArray[np.bool_]]:
    """Return the first token, the length, `continues` and `goes_on` of each piece into which the
    documents of a stream are cut, in its order (`PackedPieces`)."""
    pieces_of_document = -(-document_lengths // seq_length)  # rounded up
    num_pieces = int(pieces_of_document.sum())
    documents = np.arange(len(document_lengths))
    document_of_piece = np.repeat(documents, pieces_of_document)
    pieces_before_document = np.cumsum(pieces_of_document) - pieces_of_document
    first_of_document = pieces_before_document[document_of_piece]
    number_in_document = np.arange(num_pieces) - first_of_document
    offset_in_document = number_in_document * seq_length
    left_of_document = document_lengths[document_of_piece] - offset_in_document
    document_starts = np.cumsum(document_lengths) - document_lengths
    starts = document_starts[document_of_piece] + offset_in_document
    lengths = np.minimum(left_of_document, seq_length)
    continues = number_in_document > 0
    goes_on = left_of_document > seq_length
    return starts, lengths.astype(np.int32), continues, goes_on


def _assign(lengths: NDArray[np.int32], seq_length: int) -> Integers:
    """Return the sample of each piece by best-fit decreasing, samples numbered as they are begun;
    int64 [pieces].

    Of equally long pieces, and of samples with equal room, the earlier comes first.
    """
    sample_of_piece = np.empty(len(lengths), np.int64)
    longest_first = np.argsort(-lengths, kind="stable")
    pieces_by_length = np.bincount(lengths, minlength=seq_length + 1)
    rooms = _Rooms()
    num_samples = 0
    placed = 0  # number of pieces that have a sample
    # from the longest to the shortest
    present_lengths = np.flatnonzero(pieces_by_length)[::-1]
    for length in present_lengths.tolist():
        end = placed + int(pieces_by_length[length])  # of the pieces of this length
        while placed < end:
            # all samples with the least room that a piece of this length fits in
            samples, room = rooms.take_least(length)
            fitting = room // length  # pieces that fit each of these samples
            remaining = end - placed
            if not len(samples):  # begin as many samples as the remaining pieces need
                room = seq_length
                fitting = room // length
                num_begun = -(-remaining // fitting)  # rounded up
                samples = np.arange(num_samples, num_samples + num_begun)
                num_samples += num_begun
            # fill one of these samples after the other
            count = min(remaining, len(samples) * fitting)
            pieces = longest_first[placed : placed + count]
            places = np.repeat(samples, fitting)
            sample_of_piece[pieces] = places[:count]
            placed += count
            # the last sample that took any piece may have taken fewer than fit
            num_full, rest = divmod(count, fitting)
            filled = samples[:num_full]
            rooms.put(filled, room - fitting * length)
            num_touched = num_full
            if rest:
                partly_filled = samples[num_full : num_full + 1]
                rooms.put(partly_filled, room - rest * length)
                num_touched += 1
            untouched = samples[num_touched:]
            rooms.put(untouched, room)
    return sample_of_piece


class _Rooms:
    """Samples that are not full, by their room in tokens."""

    def __init__(self) -> None:
        self._rooms: list[int] = []  # those of any sample, ascending
        self._samples: dict[int, list[Integers]] = {}  # by room

    def put(self, samples: Integers, room: int) -> None:
        """Add samples of equal room; those that are full are left out."""
        if not len(samples) or not room:
            return
        if room not in self._samples:
            insort(self._rooms, room)
            self._samples[room] = []
        self._samples[room].append(samples)

    def take_least(self, length: int) -> tuple[Integers, int]:
        """Remove and return all samples with the least room of at least `length` tokens, in
        ascending order, and that room; no samples and 0 if there are none."""
        index = bisect_left(self._rooms, length)
        if index == len(self._rooms):
            return np.empty(0, np.int64), 0
        room = self._rooms.pop(index)
        groups = self._samples.pop(room)
        samples = np.concatenate(groups)
        samples.sort()
        return samples, room
