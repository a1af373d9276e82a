"""Megatron-LM checkpoints, per rank and distributed, with optimizer state."""
