"""Rules between the tables of a run file, each a function of the tables that it reads.

A table that could not be read skips only the checks that need it, so one pass reports all problems.
Every problem is a line with the key, its value, the reason and the nearest values that are allowed.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cache

from pydantic import BaseModel

from tools.config.rules import batches, data, layout, optimizer, precision
from tools.config.rules.canonical import (
    unequal_models,
    unequal_scales,
    unequal_stages,
    unequal_steps,
    unequal_sums,
    unequal_tasks,
    virtual_ranks,
    virtual_sizes,
)
from tools.config.rules.expert_ranks import expert_layout, expert_numerics, expert_scales


def cross_problems(tables: Mapping[str, BaseModel], changed: str = "") -> list[str]:
    """Return the problems of all rules whose tables could be read.

    changed: a table, if all rules hold that do not read it.
    """
    problems: list[str] = []
    for check in CHECKS:
        required = _tables_of(check)
        may_fail = not changed or changed in required
        if may_fail and required <= tables.keys():
            problems += check(**{name: tables[name] for name in required})
    return problems


@cache
def _tables_of(check: Callable[..., object]) -> frozenset[str]:
    """Return the names of the tables that a rule reads: those of its parameters."""
    return frozenset(inspect.signature(check).parameters)


CHECKS: tuple[Callable[..., Iterator[str]], ...] = (
    *layout.CHECKS,
    *batches.CHECKS,
    *data.CHECKS,
    *optimizer.CHECKS,
    *precision.CHECKS,
    expert_layout,
    expert_numerics,
    expert_scales,
    virtual_ranks,
    virtual_sizes,
    unequal_steps,
    unequal_models,
    unequal_tasks,
    unequal_stages,
    unequal_scales,
    unequal_sums,
)
