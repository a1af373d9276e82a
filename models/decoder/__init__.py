"""Layers and stages of a decoder, its cut into stages, multi-token prediction, own models."""
