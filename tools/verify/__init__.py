"""Proofs that a run is right: parity of layouts, resumption, bisection, and a look at the machine."""
