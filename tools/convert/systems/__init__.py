"""Checkpoints of torchtitan, FSDP, InternEvo, NxD, NeMo and Colossal-AI."""
