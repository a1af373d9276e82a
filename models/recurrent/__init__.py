"""Layers with a recurrent state in place of attention: gated delta nets, Mamba-2 mixers, the choice
of their kernels.
"""
