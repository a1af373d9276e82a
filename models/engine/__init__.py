"""The engine: passes through the stages of a rank, the sentinel, replays, and evaluation."""
