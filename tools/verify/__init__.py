"""Proofs that a run is right: parity of layouts, resumption, bisection, checks of the machine."""
