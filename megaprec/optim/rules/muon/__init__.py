"""Muon over whole logical matrices, whatever ranks hold their slices."""
