"""A run trained by other code: the model by transformers or by a plain decoder of torch's own
functions, the update and the clipping by torch, and the rate by formulas of its own.

A fault that all layouts of megaprec share, such as a target that is shifted, shows beside it.
"""
