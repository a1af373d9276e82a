"""Losses that mathematics gives, without any other model or program beside ours."""
