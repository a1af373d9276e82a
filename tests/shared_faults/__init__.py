"""Faults that all layouts share: they pass every comparison of layouts, and other gates must find
them."""
