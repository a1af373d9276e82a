"""Attention: its kernels and the choice among them, rotary positions, packed documents, sequences
cut over ranks, latent attention.
"""
