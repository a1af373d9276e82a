"""The rules between the keys of a run file: errors, keys without effect, advice."""
