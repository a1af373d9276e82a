"""The decision on a step: statistics of gradients, loss scale, consensus, report."""
