"""The search for what went wrong: the monitor that stops a diverging run, the trace that finds the
first non-finite module, where each rank is, and digests that name a rank whose numbers are wrong.
"""
