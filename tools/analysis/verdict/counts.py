"""Models of counts: how often single tokens, and pairs of neighbours, occur in a text.

The probability of token w of V is (c(w) + 1) / (N + V), where c(w) is how often it was counted
among N tokens: add-one smoothing, so that no token is impossible. That of w after u is
(c(u, w) + T(u) p(w)) / (c(u) + T(u)), where c(u) pairs were counted that begin with u, with T(u)
different followers: the interpolation of Witten and Bell ("The zero-frequency problem", 1991). A
token that was never followed leaves p(w). Neither has a parameter to choose.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Numbers = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Counts:
    """Counts of a text.

    singles: int64 [vocabulary]. pairs: int64 [n], the different pairs u * vocabulary + w, in
    ascending order. pair_counts: int64 [n]. begun, followers: int64 [vocabulary], pairs that begin
    with a token, and the different ones of them.
    """

    singles: Ids
    pairs: Ids
    pair_counts: Ids
    begun: Ids
    followers: Ids

    @classmethod
    def of(cls, before: Ids, tokens: Ids, vocabulary: int) -> "Counts":
        """Return the counts of tokens, each with the one before it. before, tokens: int64 [n]."""
        # a pair of ids as one number
        pairs, pair_counts = np.unique(before * vocabulary + tokens, return_counts=True)
        return cls(
            singles=np.bincount(tokens, minlength=vocabulary),
            pairs=pairs,
            pair_counts=pair_counts.astype(np.int64),
            begun=np.bincount(before, minlength=vocabulary),
            followers=np.bincount(pairs // vocabulary, minlength=vocabulary),
        )

    def single_losses(self, tokens: Ids) -> Numbers:
        """Return the losses, in nats, of tokens [n] by the counts of single tokens."""
        return -np.log(self._single_probabilities(tokens))

    def pair_losses(self, before: Ids, tokens: Ids) -> Numbers:
        """Return the losses, in nats, of tokens [n] after those before them."""
        keys = before * len(self.singles) + tokens
        places = np.searchsorted(self.pairs, keys)
        places = np.minimum(places, len(self.pairs) - 1)
        is_counted = self.pairs[places] == keys
        counted = np.where(is_counted, self.pair_counts[places], 0)
        followers = self.followers[before]
        # smoothed (Witten and Bell): the more followers a token has, the more counts the loss of
        # tokens alone; a token that was never followed counts as one with one unknown follower
        weight = np.maximum(followers, 1)
        probabilities = counted + weight * self._single_probabilities(tokens)
        return -np.log(probabilities / (self.begun[before] + weight))

    def _single_probabilities(self, tokens: Ids) -> Numbers:
        vocabulary = len(self.singles)
        return (self.singles[tokens] + 1) / (self.singles.sum() + vocabulary)
