"""`metrics.jsonl` and `events.jsonl`, written and read."""
