"""Ranks: the mesh, layers cut over tp, pipeline schedules and what carries them out."""
