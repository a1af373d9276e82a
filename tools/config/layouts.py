"""Other layouts of a run: the [parallel] table for given axes, and the largest layout that fits
fewer ranks.

A layout is the run with another [parallel] table. Keys of that table stay as they are if they can;
those of `TIED_KEYS` are left out, as few as possible, if the rules of the run file forbid them with
the new axes. Experts are spread over as many of the ranks that the run asks for as the new axes
allow.

The largest layout keeps the replica as large as the ranks allow, for a smaller one needs more
memory per rank: first the given tensor x pipeline x context, with as many replicas as the ranks and
the global batch allow; or the largest smaller tensor x pipeline x context, of those of equal size
the one with most tensor-parallel ranks, then with the longest pipeline, and again as many replicas.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import prod
from typing import Any

from megaprec.errors import UserError
from tools.config.rules.all_rules import cross_problems
from tools.config.rules.expert_ranks import nearest_expert_keys
from tools.config.run_file import RunConfig
from tools.config.tables.settings import Parallel

# keys for a certain number of ranks
TIED_KEYS = ("cuts", "schedule_file", "zero_size", "async_tensor")
AXES: tuple[str, ...] = ("tensor", "pipeline", "context", "data")
ALONE = Parallel()


@dataclass(frozen=True)
class FittingLayout:
    """A layout that the run can have. parallel: the whole table. left_out: keys of the run that it
    lacks."""

    parallel: Parallel
    left_out: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        return self.parallel.ranks


def layout_problems(config: RunConfig, parallel: Parallel) -> list[str]:
    """Return the reasons why the run cannot have this layout; empty if it can."""
    # the rules that read no layout hold, for the run is whole
    return cross_problems({**dict(config), "parallel": parallel}, "parallel")


def fit_layout(config: RunConfig, keys: Mapping[str, Any]) -> FittingLayout | None:
    """Return a layout that has `keys`, or None if the run cannot have one. Axes that `keys` does
    not name are 1, other keys are the run's own."""
    for layout in _layouts_with(config, keys):
        if not layout_problems(config, layout.parallel):
            return layout
    return None


def barest_layout(config: RunConfig, keys: Mapping[str, Any]) -> FittingLayout:
    """Return the layout with the keys of `keys` and without any of `TIED_KEYS` that they lack: if
    the run cannot have it, for a reason that leaving out keys does not end."""
    *_, barest = _layouts_with(config, keys)
    return barest


def _layouts_with(config: RunConfig, keys: Mapping[str, Any]) -> Iterator[FittingLayout]:
    """Yield the layouts with the keys of `keys`, those with the fewest keys left out first."""
    run_keys = config.parallel.model_dump()
    given_keys = {**dict.fromkeys(AXES, 1), **keys}
    copies = given_keys["data"] * given_keys["context"]
    expert_keys = nearest_expert_keys(config.parallel, given_keys["tensor"], copies)
    # the later ones are stronger
    wanted = run_keys | expert_keys | given_keys
    tied = [key for key in TIED_KEYS if run_keys[key] and key not in keys]
    # each try validates the whole table, but there are four such keys at most
    for left_out in _subsets(tied):
        defaults = {key: getattr(ALONE, key) for key in left_out}
        yield FittingLayout(Parallel.model_validate(wanted | defaults), left_out)


def _subsets(keys: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield all subsets of the keys, the smallest first."""
    for number in range(len(keys) + 1):
        yield from combinations(keys, number)


def largest_fitting(config: RunConfig, ranks: int) -> FittingLayout | None:
    """Return the largest layout of at most `ranks` ranks, the run's own if it fits; None if there
    is none."""
    if config.world_size <= ranks:
        return FittingLayout(config.parallel)
    # the first that fits is the largest
    for sizes in _largest_first(config, ranks):
        axes = dict(zip(AXES, sizes, strict=True))
        fitting = fit_layout(config, axes)
        if fitting:
            return fitting
    return None


def _largest_first(config: RunConfig, ranks: int) -> Iterator[tuple[int, ...]]:
    """Yield sizes of AXES with at most `ranks` ranks whose replicas take whole micro-batches."""
    parallel = config.parallel
    # replicas that divide this number divide each batch of the run
    micro_batches = config.batches.common_divisor // config.train.micro_batch
    possible = product(
        range(1, parallel.tensor + 1),
        range(1, parallel.pipeline + 1),
        range(1, parallel.context + 1),
    )
    replicas = [(prod(sizes), sizes) for sizes in possible]
    # The largest replica needs the least memory per rank. Of equal ones the order of AXES decides:
    # most tensor-parallel ranks first.
    for replica_ranks, sizes in sorted(replicas, reverse=True):
        most_replicas = ranks // replica_ranks
        for data in range(most_replicas, 0, -1):
            if micro_batches % data == 0:
                yield *sizes, data


def check_world(config: RunConfig, world_size: int) -> None:
    """Raise UserError unless the number of ranks that joined is the one that the layout needs."""
    if world_size == config.world_size:
        return
    parallel = config.parallel
    replica_ranks = parallel.tensor * parallel.pipeline * parallel.context
    advice = f"start {config.world_size} ranks"
    # more or fewer replicas are the change that keeps the model as it is cut
    if world_size % replica_ranks == 0:
        advice += f" or set parallel.data = {world_size // replica_ranks}"
    raise UserError.of(
        "config.world_size",
        world_size=world_size,
        keys=in_keys(parallel),
        ranks_of_layout=config.world_size,
        advice=advice,
    )


def in_words(parallel: Parallel) -> str:
    """Return the axes in words: tensor 2 x pipeline 1 x data 2 = 4 ranks, experts over 2 in 1
    slice.

    A context of 1 is left out, and the slices of experts if they are those of tensor.
    """
    axes = " x ".join(f"{axis} {size}" for axis, size in _axis_sizes(parallel))
    unit = "rank" if parallel.ranks == 1 else "ranks"
    experts = ""
    if parallel.expert > 1:
        experts = f", experts over {parallel.expert}"
    slices = parallel.expert_tensor
    if slices > 0 and slices != parallel.tensor:
        experts = experts or ", experts"
        experts += f" in {slices} slice" if slices == 1 else f" in {slices} slices"
    return f"{axes} = {parallel.ranks} {unit}{experts}"


def zero_in_words(parallel: Parallel) -> str:
    """Return the stage of ZeRO that has an effect in words; "" if none has."""
    stage = parallel.zero_stage
    if not stage:
        return ""
    kept = parallel.zero_keep
    if stage != 3 or not kept:
        return f"ZeRO-{stage}"
    if parallel.keep_bytes:
        return f"ZeRO-{stage}, layers of {kept} kept"
    layers = "layer" if kept == 1 else "layers"
    return f"ZeRO-{stage}, {kept} {layers} kept"


def in_keys(parallel: Parallel) -> str:
    """Return the axes as keys: parallel.tensor 2 x parallel.pipeline 1 x parallel.data 2."""
    return " x ".join(f"parallel.{axis} {size}" for axis, size in _axis_sizes(parallel))


def _axis_sizes(parallel: Parallel) -> list[tuple[str, int]]:
    """Return the axes with their sizes, without a context of 1."""
    shown = [axis for axis in AXES if axis != "context" or parallel.context > 1]
    return [(axis, getattr(parallel, axis)) for axis in shown]
