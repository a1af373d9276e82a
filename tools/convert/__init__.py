"""Weights, optimizer state and tokenizers of other systems: read, written, compared."""
