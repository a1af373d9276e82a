"""The times of a step, by kind: one module for each."""
