"""Pictures: timelines, loss curves, FP8 shadows."""
