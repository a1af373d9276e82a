"""Packed samples, a piece of a document at a time, by the definition of best-fit decreasing."""

from typing import NamedTuple

import torch
from torch import Tensor

NO_DOCUMENT = -1


class PlainRow(NamedTuple):
    """A packed sample: its tokens and the documents of these, int64 [seq + 1], and whether each of
    its targets is a token of the text after the one before it, or the first of a document,
    [seq]."""

    tokens: Tensor
    documents: Tensor
    counts: Tensor


class _Piece(NamedTuple):
    """A part of a document within one sample.

    start: its first token in the stream. length: in tokens. document: number of the document.
    """

    start: int
    length: int
    document: int


def packed_rows(stream: Tensor, document_lengths: list[int], seq_length: int) -> list[PlainRow]:
    """Return all samples of a stream, in the order of their first tokens.

    stream: the tokens of all documents, int64.
    """
    rows = list[PlainRow]()
    document_starts = list[int]()
    for number in range(len(document_lengths)):
        document_starts.append(sum(document_lengths[:number]))
    for sample in _samples(document_lengths, document_starts, seq_length):
        tokens = torch.zeros(seq_length + 1, dtype=torch.int64)
        documents = torch.full((seq_length + 1,), NO_DOCUMENT)
        counts = torch.zeros(seq_length + 1)
        column = 0
        for start, length, document in sample:
            document_start = document_starts[document]
            document_end = document_start + document_lengths[document]
            # The last target of a piece is the next token of its document. The next piece of the
            # sample writes its first token over it.
            end = min(start + length + 1, document_end)
            num_tokens = end - start
            columns = slice(column, column + num_tokens)
            tokens[columns] = stream[start:end]
            documents[columns] = document
            counts[columns] = 1
            # the token before it in the sample is not the one before it in the text
            if start > document_start:
                counts[column] = 0
            column += length
        # the first token of a sample is no target
        counts_of_targets = counts[1:]
        rows.append(PlainRow(tokens, documents, counts_of_targets))
    return rows


def _samples(
    document_lengths: list[int], document_starts: list[int], seq_length: int
) -> list[list[_Piece]]:
    """Return the pieces of each sample, in the order of the stream.

    The longest pieces are placed first, each into the sample whose room it fills best.
    """
    pieces = list[_Piece]()
    for document, start in enumerate(document_starts):
        end = start + document_lengths[document]
        for piece_start in range(start, end, seq_length):
            length = min(seq_length, end - piece_start)
            pieces.append(_Piece(piece_start, length, document))
    samples = list[list[_Piece]]()
    rooms = list[int]()  # tokens that each sample still has room for
    longest_first = sorted(pieces, key=lambda piece: -piece.length)
    for piece in longest_first:
        fitting = [(room, number) for number, room in enumerate(rooms) if room >= piece.length]
        if not fitting:
            room_left = seq_length - piece.length
            samples.append([piece])
            rooms.append(room_left)
            continue
        _, number = min(fitting)  # the least room; of equal ones the first sample
        samples[number].append(piece)
        rooms[number] -= piece.length
    in_order_of_stream = [sorted(sample) for sample in samples]
    return sorted(in_order_of_stream)
