"""Canonical numerics: sums that have the same bits in every layout."""
