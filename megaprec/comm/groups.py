"""Process groups: all groups of one kind made by one call, with the time limit of the world.

A mesh has thousands of groups of each kind, such as its pipelines or the pairs that exchange
activations. A call of torch's `new_group` makes one group and needs every rank of the world, so the
number of calls, and with NCCL an exchange among all ranks in each of them, would grow with the
world. Groups of one kind are disjoint: `split` makes all of them by one call. `pairings`
distributes pairs of ranks over the fewest such calls.

torch gives a new group its own default time limit, half an hour, whatever the limit of the world
is. A watchdog that ends a run earlier needs one limit for all groups, so that no group gives up
first.
"""

from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _world, default_pg_timeout

from megaprec.comm.gloo_threads import waiting_their_turn


def split(runs: Tensor, backend: str | None = None) -> dist.ProcessGroup:
    """Return the group of this rank, of the groups in the rows of `runs` ([groups, ranks of a
    group], world ranks).

    The rows are disjoint, and a rank in none of them gets a group of its own. Collective over the
    world: all ranks pass the same rows. One call of torch's on each rank, however many rows there
    are.
    """
    rank = dist.get_rank()
    limit = time_limit(dist.group.WORLD)
    own = runs[(runs == rank).any(1)].flatten().tolist() or [rank]
    if _splits():
        others = sorted({*range(dist.get_world_size())} - {*runs.flatten().tolist()})
        made = dist.split_group(
            split_ranks=[*runs.tolist(), *([other] for other in others)], timeout=limit
        )
    else:
        alike = _alike()
        with waiting_their_turn():
            made = _alone(own, limit, backend) if alike else _one_by_one(runs, own, limit, backend)
    assert isinstance(made, dist.ProcessGroup), "a rank is in no group of its own split"
    return made


def _splits() -> bool:
    """Return True if the world can be split by one call, as NCCL's can that is bound to a
    device."""
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is not initialized"
    device = world.bound_device_id
    return device is not None and world._get_backend(device).supports_splitting


def _alike() -> bool:
    """Return True if every rank has made the same number of groups. Collective over the world.

    torch names a group that only its members make by its ranks and this number. The members must
    agree on the name; otherwise they would wait for each other forever.
    """
    devices = dist.Backend.backend_capability.get(dist.get_backend(), ["cpu"])
    device = "cpu" if "cpu" in devices else devices[0]
    made = torch.tensor([len(_world.pg_names), -len(_world.pg_names)], device=device)
    dist.all_reduce(made, dist.ReduceOp.MAX)
    most, fewest = made.tolist()
    return most == -fewest


def _one_by_one(runs: Tensor, own: list[int], limit: timedelta, backend: str | None) -> object:
    """Make the groups in turn, all ranks each of them. A rank in no row makes one that only it
    needs."""
    groups = [dist.new_group(row, timeout=limit, backend=backend) for row in runs.tolist()]
    mine = [group for group in groups if group is not dist.GroupMember.NON_GROUP_MEMBER]
    return mine[0] if mine else _alone(own, limit, backend)


def _alone(own: list[int], limit: timedelta, backend: str | None) -> object:
    """Make a group that only its members make."""
    return dist.new_group(own, timeout=limit, backend=backend, use_local_synchronization=True)


def pairings(pairs: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Distribute the pairs over few sets in which no rank occurs twice; returns the numbers of each
    set's pairs.

    Neighbours on a line or on a ring of an even number of ranks need as many sets as a rank has
    pairs.
    """
    numbered = [(number, set(pair)) for number, pair in enumerate(pairs)]
    sets: list[tuple[list[int], set[int]]] = []
    for number, pair in sorted(
        numbered, key=lambda one: (max(one[1]) - min(one[1]) > 1, min(one[1]))
    ):
        free = next(((chosen, busy) for chosen, busy in sets if not busy & pair), None)
        if free is None:
            sets.append(free := ([], set()))
        free[0].append(number)
        free[1].update(pair)
    return [chosen for chosen, _ in sets]


def time_limit(group: dist.ProcessGroup | None) -> timedelta:
    """Return the time limit of the group's operations; torch's default for a backend that has none
    of its own."""
    assert group is not None, "torch.distributed is not initialized"
    devices = sorted(group._device_types, key=lambda device: device.type != "cpu")
    options = getattr(group._get_backend(devices[0]), "options", None) if devices else None
    return options._timeout if options is not None else default_pg_timeout
