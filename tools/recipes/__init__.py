"""Run files with published settings, each with its sources, and how they are read."""
