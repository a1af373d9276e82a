"""Checkpoints of InternEvo, NxD, NeMo and Colossal-AI."""
