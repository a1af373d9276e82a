"""Is a model any good, is it still learning: a run's held-out losses judged."""
