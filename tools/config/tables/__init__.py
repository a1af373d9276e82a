"""The tables of a run file: every key with its type, default, unit and help."""
