"""Other layouts of a run: the [parallel] table for given axes, and the largest layout that fits fewer ranks.

A layout is the run with another [parallel] table. Keys of that table stay as they are if they can; those of `TIED` are
left out, as few as possible, if the rules of the run file forbid them with the new axes.

The largest layout keeps the replica as large as the ranks allow, for a smaller one needs more memory per rank: first
the given tensor x pipeline, with as many replicas as the ranks and the global batch allow; otherwise the largest
smaller tensor x pipeline, of those of equal size the one with most tensor-parallel ranks, and again as many replicas.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from megaprec.errors import UserError
from tools.config.checks import cross_problems
from tools.config.run_file import RunConfig
from tools.config.settings import Parallel

TIED = ("cuts", "schedule_file", "zero_size")  # keys for a certain number of ranks
AXES = ("tensor", "pipeline", "data")
ALONE = Parallel()


@dataclass(frozen=True)
class Fitting:
    """A layout that the run can have. parallel: the whole table. left_out: keys of the run that it lacks."""

    parallel: Parallel
    left_out: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        return self.parallel.tensor * self.parallel.pipeline * self.parallel.data


def problems(config: RunConfig, parallel: Parallel) -> list[str]:
    """Return the reasons why the run cannot have this layout; empty if it can."""
    return cross_problems({**dict(config), "parallel": parallel})


def fitted(config: RunConfig, said: Mapping[str, Any]) -> Fitting | None:
    """Return the layout with the keys of `said`; axes that it does not name are 1, other keys are the run's own.

    None if the run cannot have it.
    """
    own = config.parallel.model_dump()
    wanted = {**own, **dict.fromkeys(AXES, 1), **said}
    tied = [key for key in TIED if own[key] and key not in said]
    for left_out in (keys for number in range(len(tied) + 1) for keys in combinations(tied, number)):
        parallel = Parallel.model_validate({**wanted, **{key: getattr(ALONE, key) for key in left_out}})
        if not problems(config, parallel):
            return Fitting(parallel, left_out)
    return None


def largest_fitting(config: RunConfig, ranks: int) -> Fitting | None:
    """Return the largest layout of at most `ranks` ranks, the run's own if it fits; None if there is none."""
    if config.world_size <= ranks:
        return Fitting(config.parallel)
    made = (fitted(config, dict(zip(AXES, axes, strict=True))) for axes in _largest_first(config, ranks))
    return next((fitting for fitting in made if fitting), None)


def _largest_first(config: RunConfig, ranks: int) -> Iterator[tuple[int, int, int]]:
    """Yield (tensor, pipeline, data) of at most `ranks` ranks whose replicas take whole micro-batches."""
    p, micro_batches = config.parallel, config.train.global_batch // config.train.micro_batch
    replicas = [(t, s) for t in range(1, p.tensor + 1) for s in range(1, p.pipeline + 1) if t * s <= ranks]
    for tensor, pipeline in sorted(replicas, key=lambda axes: (axes[0] * axes[1], axes[0]), reverse=True):
        for data in range(ranks // (tensor * pipeline), 0, -1):
            if micro_batches % data == 0:
                yield tensor, pipeline, data


def check_world(config: RunConfig, world_size: int) -> None:
    """Raise UserError unless the number of ranks that joined is the one that the layout needs."""
    if world_size == config.world_size:
        return
    p = config.parallel
    replica = p.tensor * p.pipeline
    advice = f"start {config.world_size} ranks"
    if world_size % replica == 0:
        advice += f" or set parallel.data = {world_size // replica}"
    raise UserError(
        f"world size {world_size} != parallel.tensor {p.tensor} x parallel.pipeline {p.pipeline} x "
        f"parallel.data {p.data} = {config.world_size}: {advice}"
    )


def in_words(parallel: Parallel) -> str:
    """Return the axes in words: tensor 2 x pipeline 1 x data 2 = 4 ranks."""
    sizes = [getattr(parallel, axis) for axis in AXES]
    count = sizes[0] * sizes[1] * sizes[2]
    named = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, sizes, strict=True))
    return f"{named} = {count} rank{'' if count == 1 else 's'}"
