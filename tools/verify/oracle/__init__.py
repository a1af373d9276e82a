"""A run trained by other people's code: the model by transformers, the update and the clipping by
torch, and the rate by formulas of its own.

A fault that all layouts of megaprec share, such as a target that is shifted, shows beside it.
"""
