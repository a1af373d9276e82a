"""The verdict on a run: whether its model is any good, and whether it still learns."""
