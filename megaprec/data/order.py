"""The order of samples: a shuffle that is computed, never stored.

Sample `index` of epoch `epoch` under `seed` is a pure function of those three numbers. A Feistel network is a
bijection whatever its round function is: cut a number into two halves, (left, right) -> (right, left ^ f(right)),
and each round can be undone. Keyed by (seed, epoch), it permutes the 2**(2h) numbers of two h-bit halves; to
permute [0, n) for any n, a number that lands outside is sent through again until it lands inside (cycle walking),
which ends because the walk is a cycle that started inside, and takes fewer than four steps on average.

So no rank stores or sends an order, a run resumes anywhere at once, and the order cannot depend on how many ranks
read it or on how a batch is cut.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8


def order(positions: NDArray[np.int64], samples: int, seed: int, shuffle: bool = True) -> NDArray[np.int64]:
    """Sample numbers in [0, samples) at these positions of an endless run over epochs; int64, same shape.

    Position p is number p % samples of epoch p // samples; each epoch shows every sample once.
    Without `shuffle` every epoch is in file order.
    """
    epochs, indices = np.divmod(positions, samples)
    if not shuffle:
        return indices
    chosen = np.empty_like(indices)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        chosen[here] = permute(indices[here], samples, seed, int(epoch))
    return chosen


def permute(indices: NDArray[np.int64], n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Images of `indices` (each in [0, n)) under the permutation of [0, n) that (seed, epoch) names."""
    half = np.uint64(((n - 1).bit_length() + 1) // 2)
    digest = hashlib.blake2b(f"{seed}:{epoch}".encode(), digest_size=8 * ROUNDS).digest()
    keys = np.frombuffer(digest, dtype="<u8")
    images = _feistel(indices.astype(np.uint64), half, keys)
    while (outside := images >= n).any():
        images[outside] = _feistel(images[outside], half, keys)
    return images.astype(np.int64)


def _feistel(numbers: NDArray[np.uint64], half: np.uint64, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A permutation of the numbers of 2 * `half` bits."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = numbers >> half, numbers & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << half) | right


def _mix(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread every bit over all 64 (the finaliser of SplitMix64; products wrap)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
