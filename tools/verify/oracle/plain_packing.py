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


def packed_rows(stream: Tensor, document_lengths: list[int], seq_length: int) -> list[PlainRow]:
    """Return all samples of a stream, in the order of their first tokens.

    stream: the tokens of all documents, int64.
    """
    rows = list[PlainRow]()
    document_starts = [sum(document_lengths[:number]) for number in range(len(document_lengths))]
    for sample in _samples(document_lengths, document_starts, seq_length):
        tokens = torch.zeros(seq_length + 1, dtype=torch.int64)
        documents = torch.full((seq_length + 1,), NO_DOCUMENT)
        counts = torch.zeros(seq_length + 1)
        column = 0
        for start, length, document in sample:
            document_start = document_starts[document]
            document_end = document_start + document_lengths[document]
            # the last target of a piece is the next token of its document
            end = min(start + length + 1, document_end)
            columns = slice(column, column + end - start)
            tokens[columns] = stream[start:end]
            documents[columns] = document
            counts[columns] = 1
            if start > document_start:
                counts[column] = 0
            column += length
        rows.append(PlainRow(tokens, documents, counts[1:]))
    return rows


def _samples(
    document_lengths: list[int], document_starts: list[int], seq_length: int
) -> list[list[tuple[int, int, int]]]:
    """Return start, length and document of the pieces of each sample."""
    pieces = list[tuple[int, int, int]]()
    for document, start in enumerate(document_starts):
        end = start + document_lengths[document]
        for piece_start in range(start, end, seq_length):
            pieces.append((piece_start, min(seq_length, end - piece_start), document))
    samples = list[list[tuple[int, int, int]]]()
    rooms = list[int]()
    for piece in sorted(pieces, key=lambda piece: -piece[1]):
        fitting = [(room, number) for number, room in enumerate(rooms) if room >= piece[1]]
        if not fitting:
            samples.append([piece])
            rooms.append(seq_length - piece[1])
            continue
        _, number = min(fitting)
        samples[number].append(piece)
        rooms[number] -= piece[1]
    return sorted(sorted(sample) for sample in samples)
