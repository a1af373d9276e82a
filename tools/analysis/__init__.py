"""Runs looked at: plans, pictures and reports."""
