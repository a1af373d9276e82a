"""Process groups: all groups of one kind made by one call, with the time limit of the world.

A mesh has thousands of groups of each kind, such as its pipelines or the pairs that exchange
activations. A call of torch's `new_group` makes one group and needs every rank of the world, so the
number of calls, and with NCCL an exchange among all ranks in each of them, would grow with the
world. Groups of one kind are disjoint: `make_groups` makes all of them by one call. `pairings`
distributes pairs of ranks over the fewest such calls.

torch gives a new group its own default time limit, half an hour, whatever the limit of the world
is. A watchdog that ends a run earlier needs one limit for all groups, so that no group gives up
first.
"""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megaprec.comm.gloo_ports import making_gloo_group
from megaprec.torch_private import can_split, process_group_counts, time_limit_of


def make_groups(rank_groups: Tensor, backend: str | None = None) -> dist.ProcessGroup:
    """Make a process group of each row of `rank_groups` and return this rank's.

    rank_groups: world ranks, int64 [groups, ranks of a group]; the rows are disjoint. A rank in
        none of them gets a group of its own.
    Collective over the world: all ranks pass the same rows. torch is called once on each rank,
    however many rows there are.
    """
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is not initialized"
    rank = dist.get_rank()
    limit = time_limit_of(world)
    is_own_row = (rank_groups == rank).any(1)
    members = rank_groups[is_own_row].flatten().tolist() or [rank]  # of this rank's group
    # the groups of all ranks of the world
    grouped_ranks = set(rank_groups.flatten().tolist())
    all_rows = rank_groups.tolist()
    for other_rank in range(dist.get_world_size()):
        if other_rank not in grouped_ranks:
            all_rows.append([other_rank])
    if can_split(world):
        # a split needs every rank in a group
        group = dist.split_group(split_ranks=all_rows, timeout=limit)
    else:
        names_agree = _have_made_as_many_groups()  # a collective, outside of the changed policy
        is_gloo = (backend or dist.get_backend()) == "gloo"
        with making_gloo_group() if is_gloo else nullcontext():
            if names_agree:
                group = _make_among_members(members, limit, backend)
            else:
                group = _make_one_by_one(all_rows, limit, backend)
    assert isinstance(group, dist.ProcessGroup), "a rank is in no group of its own split"
    return group


def _have_made_as_many_groups() -> bool:
    """Return True if every rank has made as many groups. Collective over the world.

    torch names a group that only its members make by its ranks and such a number. The members must
    agree on the name; otherwise they would wait for each other forever.
    """
    devices = dist.Backend.backend_capability.get(dist.get_backend(), ["cpu"])
    device = "cpu" if "cpu" in devices else devices[0]
    counts = torch.tensor(process_group_counts(), device=device)
    # the maximum of the negative is the minimum: one collective finds both
    bounds = torch.cat((counts, -counts))
    dist.all_reduce(bounds, dist.ReduceOp.MAX)
    maximum, negative_minimum = bounds.chunk(2)
    return torch.equal(maximum, -negative_minimum)


def _make_one_by_one(
    rows: Sequence[list[int]],
    limit: timedelta,
    backend: str | None,
) -> object:
    """Make the groups in turn, each by all ranks; return the one that this rank is in.

    Also a group of one rank: torch counts the calls of each rank, and names groups by the count.
    """
    group_of_rank = None
    for row in rows:
        group = dist.new_group(row, timeout=limit, backend=backend)
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            assert group_of_rank is None, "a rank is in two groups of one split"
            group_of_rank = group
    return group_of_rank


def _make_among_members(
    members: list[int],
    limit: timedelta,
    backend: str | None,
) -> object:
    """Make a group by a call of its members only."""
    return dist.new_group(members, timeout=limit, backend=backend, use_local_synchronization=True)


@dataclass
class _PairSet:
    """Pairs of which no two have a rank in common: their numbers, and all their ranks."""

    numbers: list[int] = field(default_factory=list)
    busy_ranks: set[int] = field(default_factory=set)


def pairings(pairs: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Distribute pairs of ranks over few sets in which no rank occurs twice.

    Return, for each set, the positions of its pairs among `pairs`. Neighbours on a line or on a
    ring of an even number of ranks need as many sets as a rank has pairs.
    """
    ranks_of_pairs = [set(pair) for pair in pairs]

    def neighbours_first(number: int) -> tuple[bool, int]:
        first = min(ranks_of_pairs[number])
        last = max(ranks_of_pairs[number])
        return last - first > 1, first

    sets: list[_PairSet] = []
    # neighbours first: of a ring of even length they fill two sets completely
    for number in sorted(range(len(ranks_of_pairs)), key=neighbours_first):
        ranks = ranks_of_pairs[number]
        free_set = next((pair_set for pair_set in sets if not pair_set.busy_ranks & ranks), None)
        if free_set is None:
            free_set = _PairSet()
            sets.append(free_set)
        free_set.numbers.append(number)
        free_set.busy_ranks |= ranks
    return [pair_set.numbers for pair_set in sets]
