"""Quantiles of Student's distribution, without a library of statistics."""

from statistics import NormalDist


def quantile(probability: float, freedom: int) -> float:
    """Return the quantile of Student's distribution with so many degrees of freedom, at least 3.

    The expansion of Cornish and Fisher (Abramowitz and Stegun, 26.7.5): to 1 % at 3 degrees for
    probabilities up to 0.975, and to 0.1 % from 8 on.
    """
    z = NormalDist().inv_cdf(probability)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))
