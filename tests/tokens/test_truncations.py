"""What is said of documents that are cut is what becomes of them in samples."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megaprec.tokens.best_fit import best_fit
from megaprec.tokens.truncations import Truncations, truncations_in_order, truncations_of_packing
from tests.tokens.test_best_fit import LENGTHS, plain_best_fit


def plain_truncations(
    lengths: list[int], seq_length: int, samples: list[list[tuple[int, int]]]
) -> Truncations:
    """Count token by token. samples: the (start, length) of what each holds."""
    total = sum(lengths)
    document_of = [number for number, length in enumerate(lengths) for _ in range(length)]
    sample_of = [-1] * total
    for number, pieces in enumerate(samples):
        for start, length in pieces:
            sample_of[start : start + length] = [number] * length
    cuts = [0] * len(lengths)
    for token in range(1, total):
        is_inside = document_of[token] == document_of[token - 1]
        cuts[document_of[token]] += is_inside and sample_of[token] != sample_of[token - 1]
    unread = sample_of.count(-1)
    short = [number for number, length in enumerate(lengths) if 0 < length <= seq_length]
    return Truncations(
        samples=len(samples),
        padding=len(samples) * seq_length - (total - unread),
        unread=unread,
        short=len(short),
        short_cut=sum(cuts[number] > 0 for number in short),
        long=sum(length > seq_length for length in lengths),
        cuts=sum(cuts),
    )


@settings(deadline=None, max_examples=200)
@given(lengths=LENGTHS, seq_length=st.integers(1, 24))
def test_truncations_are_those_of_a_plain_count(lengths: list[int], seq_length: int) -> None:
    array = np.array(lengths, np.int64)
    total = sum(lengths)
    tiles = [[(i * seq_length, seq_length)] for i in range(max(0, total - 1) // seq_length)]
    in_order = truncations_in_order(array, seq_length)
    assert in_order == plain_truncations(lengths, seq_length, tiles)
    packed = truncations_of_packing(array, seq_length, best_fit(array, seq_length))
    assert packed == plain_truncations(lengths, seq_length, plain_best_fit(lengths, seq_length))
    assert packed.short_cut == packed.unread == 0
