"""Documents are packed by best-fit decreasing: as a plain loop packs them, and none is cut that
fits a sample."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaprec.tokens.best_fit import PackedPieces, _Rooms, best_fit

LENGTHS = st.lists(st.integers(0, 40), max_size=60)


def plain_best_fit(document_lengths: list[int], seq_length: int) -> list[list[tuple[int, int]]]:
    """The (start, length) of the pieces of each sample, by the definition, a piece at a time."""
    pieces = []
    start = 0
    for length in document_lengths:
        end = start + length
        pieces += [(at, min(seq_length, end - at)) for at in range(start, end, seq_length)]
        start = end
    samples: list[list[tuple[int, int]]] = []
    for piece in sorted(pieces, key=lambda piece: -piece[1]):
        rooms = [seq_length - sum(length for _, length in sample) for sample in samples]
        fitting = [(room, number) for number, room in enumerate(rooms) if room >= piece[1]]
        if not fitting:
            samples.append([piece])
            continue
        _, number = min(fitting)
        samples[number].append(piece)
    return sorted(sorted(sample) for sample in samples)


def pieces_by_sample(packing: PackedPieces) -> list[list[tuple[int, int]]]:
    samples = []
    for sample in range(len(packing)):
        pieces = packing.pieces_of(sample)
        samples.append([(int(packing.starts[i]), int(packing.lengths[i])) for i in pieces])
    return samples


@settings(deadline=None, max_examples=300)
@given(lengths=LENGTHS, seq_length=st.integers(1, 24))
def test_a_packing_is_that_of_a_plain_loop(lengths: list[int], seq_length: int) -> None:
    packing = best_fit(np.array(lengths, np.int64), seq_length)
    assert pieces_by_sample(packing) == plain_best_fit(lengths, seq_length)


@settings(deadline=None, max_examples=100)
@given(lengths=LENGTHS, seq_length=st.integers(1, 24))
def test_every_token_is_in_one_piece_and_only_longer_documents_are_cut(
    lengths: list[int], seq_length: int
) -> None:
    packing = best_fit(np.array(lengths, np.int64), seq_length)
    numbers = [number for number, length in enumerate(lengths) for _ in range(length)]
    times = np.zeros(len(numbers), int)
    for start, length, continues, goes_on in zip(
        packing.starts, packing.lengths, packing.continues, packing.goes_on, strict=True
    ):
        documents = numbers[start : start + length]
        assert len({*documents}) == 1
        times[start : start + length] += 1
        before = numbers[start - 1] if start else None
        after = numbers[start + length] if start + length < len(numbers) else None
        assert continues == (before == documents[0])
        assert goes_on == (after == documents[0])
        if continues or goes_on:
            assert lengths[documents[0]] > seq_length
    assert (times == 1).all()


def test_a_piece_goes_where_the_least_room_is_left() -> None:
    # 7 and 6 begin samples of 10; 3 fits the first exactly, 4 the second; 2 begins a third
    packing = best_fit(np.array([2, 3, 7, 4, 6]), 10)
    assert pieces_by_sample(packing) == [[(0, 2)], [(2, 3), (5, 7)], [(12, 4), (16, 6)]]


def test_of_samples_with_equal_room_the_one_begun_first_takes_the_earlier_piece() -> None:
    # 4 leaves the room of 1 in the second sample before 2 leaves it in the first
    packing = best_fit(np.array([7, 5, 4, 2, 1, 1]), 10)
    assert pieces_by_sample(packing) == plain_best_fit([7, 5, 4, 2, 1, 1], 10)
    assert pieces_by_sample(packing)[0] == [(0, 7), (16, 2), (18, 1)]


def test_pieces_of_one_length_are_placed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the steps of the loop do not grow with the documents."""
    lengths = np.random.default_rng(0).integers(1, 200, 200_000)
    steps = 0
    take_least = _Rooms.take_least

    def counting(self: _Rooms, length: int) -> tuple[np.ndarray, int]:
        nonlocal steps
        steps += 1
        return take_least(self, length)

    monkeypatch.setattr(_Rooms, "take_least", counting)
    packing = best_fit(lengths, 128)
    # many short documents fill samples to the last token
    assert len(packing) * 128 - int(packing.lengths.sum()) < 128
    assert steps < 1000
