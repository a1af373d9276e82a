"""A training run: launcher, data, trainer, resume."""
