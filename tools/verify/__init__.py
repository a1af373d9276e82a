"""Whether a run is right: parity of layouts, proofs of resumption, bisection, and the machine's
checks.
"""
