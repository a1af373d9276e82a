"""Measurements that anyone can repeat: `python -m tools.bench train parallel.tensor=2`."""
