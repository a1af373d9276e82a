"""The learning rate by formulas of its own, which a run's schedule is checked with.

They are written from docs/runs.md and not from `megaprec.optim.rules.lr`, and share no code with
it: a fault in one of the two shows.
"""

import math

from tools.config.tables.settings import LR


def rate_of(lr: LR, completed: int, length: int) -> float:
    """Return the learning rate of the step after `completed` steps of a run of `length` steps, both
    in samples if lr.unit is."""
    if completed < lr.warmup:
        done = completed / lr.warmup
        return lr.peak * done + lr.initial * (1 - done)
    begin = length - lr.decay if lr.schedule == "wsd" else lr.warmup
    shape = lr.wsd_decay if lr.schedule == "wsd" else lr.schedule
    # from 0 where the rate begins to fall to 1 where the schedule ends
    done = (completed - begin) / max(1, length - begin)
    # after the length of the schedule the rate stays
    done = min(1.0, max(0.0, done))
    # 1 is lr.peak, 0 is lr.final
    heights = {
        "constant": 1.0,
        "linear": 1 - done,
        "cosine": (1 + math.cos(math.pi * done)) / 2,
        "sqrt": 1 - math.sqrt(done),
        "exponential": 2 ** (1 - done) - 1,
    }
    height = heights[shape]
    return lr.peak * height + lr.final * (1 - height)
