"""The watchdog that ends a run that hangs, and names the rank that does."""
