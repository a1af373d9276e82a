"""The order of samples is a pure function of (seed, epoch, index)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaprec.tokens.order import order, permute

SEEDS = st.integers(0, 2**63)
PINNED = [0, 3, 7, 2, 4, 6, 5, 1, 0, 7, 6, 4]  # order(0 … 11) of 8 samples under seed 1234


def whole(n: int, seed: int, epoch: int) -> np.ndarray:
    return permute(np.arange(n), n, seed, epoch)


@settings(deadline=None, max_examples=200)
@given(n=st.integers(1, 5000), seed=SEEDS, epoch=st.integers(0, 1000))
def test_an_epoch_shows_every_sample_once(n: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(whole(n, seed, epoch)), np.arange(n))


@pytest.mark.parametrize("n", [2**k + d for k in range(2, 17) for d in (-1, 0, 1)])
def test_sizes_around_powers_of_two_are_permuted_too(n: int) -> None:
    assert np.array_equal(np.sort(whole(n, 1, 0)), np.arange(n))


@settings(deadline=None, max_examples=50)
@given(n=st.integers(1, 2**62), seed=SEEDS, position=st.integers(0, 2**62))
def test_a_sample_asked_alone_is_the_one_asked_in_bulk(n: int, seed: int, position: int) -> None:
    positions = position + np.arange(20)
    bulk = order(positions, n, seed)
    assert bulk.dtype == np.int64
    assert ((bulk >= 0) & (bulk < n)).all()
    assert [int(order(positions[i : i + 1], n, seed)[0]) for i in range(20)] == bulk.tolist()
    assert (
        order(positions[::-1].reshape(4, 5), n, seed).tolist() == bulk[::-1].reshape(4, 5).tolist()
    )


def test_positions_run_on_over_epochs() -> None:
    run = order(np.arange(30), 10, seed=3)
    for epoch in range(3):
        assert np.array_equal(run[10 * epoch : 10 * epoch + 10], whole(10, 3, epoch))


def test_seeds_and_epochs_give_unrelated_orders() -> None:
    n = 10_000
    orders = [whole(n, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0), (1, 1))] + [
        np.arange(n)
    ]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert (one == other).sum() < 20  # two unrelated orders agree in about 1 place
            assert abs(np.corrcoef(one, other)[0, 1]) < 0.05


def test_small_sets_are_shuffled_evenly() -> None:
    """Each of 5 samples comes first in a fifth of the epochs, give or take 5 standard
    deviations."""
    first = [int(permute(np.array([0]), 5, 0, epoch)[0]) for epoch in range(2000)]
    assert np.abs(np.bincount(first, minlength=5) - 400).max() < 5 * (2000 * 0.2 * 0.8) ** 0.5


def test_neighbours_are_scattered() -> None:
    gaps = np.abs(np.diff(whole(100_000, 7, 0)))
    # the mean distance of two random points of an interval
    assert abs(gaps.mean() / 100_000 - 1 / 3) < 0.01


def test_the_order_is_the_same_on_every_machine() -> None:
    """A change of these numbers changes the data of every run that is resumed."""
    assert order(np.arange(12), 8, seed=1234).tolist() == PINNED


def test_without_shuffling_every_epoch_is_in_file_order() -> None:
    assert order(np.arange(3, 11), 4, seed=5, shuffle=False).tolist() == [3, 0, 1, 2, 3, 0, 1, 2]
