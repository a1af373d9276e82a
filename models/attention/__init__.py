"""Attention: its kernels and the choice among them, rotary positions, packed documents, sequences that
are cut over ranks, latent attention.
"""
