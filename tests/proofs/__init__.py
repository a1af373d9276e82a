"""Proof cards: what a promise of the README was proven by, when, where, and with which numbers."""
