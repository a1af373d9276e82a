"""Configurations of precision as users of other systems have them, read without running anything."""
