"""Order of samples, computed instead of stored: a pseudorandom permutation, or numbers drawn with
replacement.

The sample at `index` of epoch `epoch` under `seed` is a pure function of these three numbers. A
Feistel network is a bijection for any round function: a round maps the halves of a number (left,
right) -> (right, left ^ f(right)), which can be undone. Keyed by (seed, epoch), it permutes the
2**(2h) numbers of two h-bit halves. To permute [0, n) for any n, a number outside [0, n) is mapped
again until it is inside (cycle walking). This ends because the walk follows a cycle that started
inside, and takes fewer than four steps on average.

Hence no rank stores or sends an order, a run resumes at any position at once, and the order does
not depend on the number of ranks or on how a batch is split.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

# Of the Feistel network: more than the four that suffice where a round is random (Luby and Rackoff,
# 1988), for `_mix` is not.
ROUNDS = 8
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # between two states of SplitMix64


def order(
    positions: NDArray[np.int64],
    samples: int,
    seed: int,
    shuffle: bool = True,
) -> NDArray[np.int64]:
    """Return the sample numbers in [0, samples) at `positions` of an endless sequence of epochs;
    int64, same shape.

    Position p is number p % samples of epoch p // samples; each epoch shows every sample once.
    Without `shuffle` every epoch is in file order.
    """
    epochs, indices = np.divmod(positions, samples)
    if not shuffle:
        return indices
    sample_numbers = np.empty_like(indices)
    # not np.unique, which imports numpy.ma, in every process
    epoch_of_each = epochs.ravel().tolist()
    distinct_epochs = set(epoch_of_each)
    for epoch in distinct_epochs:
        is_of_epoch = epochs == epoch
        indices_of_epoch = indices[is_of_epoch]
        sample_numbers[is_of_epoch] = permute(indices_of_epoch, samples, seed, epoch)
    return sample_numbers


def draw(positions: NDArray[np.int64], n: int, seed: int) -> NDArray[np.int64]:
    """Return the numbers in [0, n) at `positions` of an endless sequence that `seed` determines, in
    which each is drawn from all n with replacement; int64, same shape.

    The number at a position is that of SplitMix64 (Steele et al., "Fast splittable pseudorandom
    number generators", 2014), modulo n: for n tokens, which are fewer than 2**48, no number is more
    likely than another by more than one part in 2**16.
    """
    name = f"{seed}:draw".encode()
    digest = hashlib.blake2b(name, digest_size=8).digest()
    start = np.frombuffer(digest, dtype="<u8")
    steps = positions.astype(np.uint64)
    states = start + steps * GOLDEN
    numbers = _mix(states) % np.uint64(n)
    return numbers.astype(np.int64)


def permute(
    indices: NDArray[np.int64],
    n: int,
    seed: int,
    epoch: int,
) -> NDArray[np.int64]:
    """Return the images of `indices` (each in [0, n)) under the permutation of [0, n) keyed by
    (seed, epoch)."""
    num_bits = (n - 1).bit_length()
    half_bits = np.uint64((num_bits + 1) // 2)  # rounded up
    # a key for each round, of eight bytes
    name = f"{seed}:{epoch}".encode()
    digest = hashlib.blake2b(name, digest_size=8 * ROUNDS).digest()
    keys = np.frombuffer(digest, dtype="<u8")
    numbers = indices.astype(np.uint64)
    images = _feistel(numbers, half_bits, keys)
    # cycle walking
    while (outside := images >= n).any():
        images[outside] = _feistel(images[outside], half_bits, keys)
    return images.astype(np.int64)


def _feistel(
    numbers: NDArray[np.uint64],
    half_bits: np.uint64,
    keys: NDArray[np.uint64],
) -> NDArray[np.uint64]:
    """Return the images of `numbers` under a permutation of all numbers of 2 * `half_bits` bits."""
    one = np.uint64(1)
    mask = (one << half_bits) - one  # the lower half of the bits
    left = numbers >> half_bits
    right = numbers & mask
    for key in keys:
        # can be undone for any function of `right`, so it is a permutation
        masked_mix = _mix(right ^ key) & mask
        left, right = right, left ^ masked_mix
    return (left << half_bits) | right


def _mix(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return numbers in which each bit depends on all 64 bits of the input (SplitMix64's finaliser;
    products wrap)."""
    numbers = numbers ^ (numbers >> np.uint64(30))
    numbers = numbers * np.uint64(0xBF58476D1CE4E5B9)
    numbers = numbers ^ (numbers >> np.uint64(27))
    numbers = numbers * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
