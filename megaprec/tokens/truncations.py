"""Counts of the documents of a data set that samples hold whole or cut, and of padding."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megaprec.tokens.best_fit import PackedPieces

Integers = NDArray[np.int64]


class Truncations(NamedTuple):
    """Counts of documents cut and padded in an epoch by a way to make samples of them, held-out
    samples included.

    samples: number of samples.
    padding: number of tokens of samples that are of no document.
    unread: number of tokens of documents that are in no sample.
    short: number of documents that fit into one sample, without empty ones.
    short_cut: number of those of them that are cut anyway.
    long: number of documents that do not fit into one sample.
    cuts: number of cuts in all documents. A document with n cuts is in n + 1 pieces.
    """

    samples: int
    padding: int
    unread: int
    short: int
    short_cut: int
    long: int
    cuts: int


def truncations_in_order(document_lengths: Integers, seq_length: int) -> Truncations:
    """Return what samples do to documents that lie one behind the other.

    document_lengths: tokens of each document, int64 [documents].
    """
    ends = np.cumsum(document_lengths)
    starts = ends - document_lengths
    num_tokens = int(document_lengths.sum())
    # the last target needs one token more
    samples = max(0, num_tokens - 1) // seq_length
    # borders of samples that lie within each document
    cuts = (ends - 1) // seq_length - starts // seq_length
    cuts[document_lengths == 0] = 0
    return _truncations(
        document_lengths, seq_length, cuts, samples, unread=num_tokens - samples * seq_length
    )


def truncations_of_packing(
    document_lengths: Integers, seq_length: int, pieces: PackedPieces
) -> Truncations:
    """Return what a packing of these documents into samples of this length does to them."""
    ends = np.cumsum(document_lengths)
    # a piece that continues a document begins at a cut of it
    places_of_cuts = pieces.starts[pieces.continues]
    document_of_cut = np.searchsorted(ends, places_of_cuts, side="right")
    cuts = np.bincount(document_of_cut, minlength=len(document_lengths))
    return _truncations(document_lengths, seq_length, cuts, len(pieces), unread=0)


def _truncations(
    document_lengths: Integers, seq_length: int, cuts: Integers, samples: int, unread: int
) -> Truncations:
    """Return the counts of a way to make samples. cuts: in each document, int64 [documents];
    samples, unread: as in `Truncations`."""
    is_short = (document_lengths > 0) & (document_lengths <= seq_length)
    num_read = int(document_lengths.sum()) - unread
    return Truncations(
        samples=samples,
        padding=samples * seq_length - num_read,
        unread=unread,
        short=int(is_short.sum()),
        short_cut=int((is_short & (cuts > 0)).sum()),
        long=int((document_lengths > seq_length).sum()),
        cuts=int(cuts.sum()),
    )
