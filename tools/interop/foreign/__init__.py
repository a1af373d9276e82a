"""Precision settings in the configuration files of other systems, read without running them."""
