"""Measurements that anyone can repeat: `python -m tools.bench train --tensor 2`."""
