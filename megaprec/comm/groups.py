"""Process groups with the time limit of the world.

torch gives a new group its own default limit, half an hour, whatever the limit of the world is. A watchdog that ends a
run earlier needs one limit for all groups, so that no group gives up first.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout, default_pg_timeout


def new_group(ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup | None:
    """Return a new process group of `ranks`, None on other ranks. Collective over the world, as torch's."""
    made = dist.new_group(list(ranks), timeout=time_limit(dist.group.WORLD), backend=backend)
    return made if isinstance(made, dist.ProcessGroup) and dist.get_rank() in ranks else None


def time_limit(group: dist.ProcessGroup | None) -> timedelta:
    """Return the time limit of the group's operations; torch's default for a backend that has none of its own."""
    assert group is not None, "torch.distributed is not initialized"
    devices = sorted(group._device_types, key=lambda device: device.type != "cpu")
    options = getattr(group._get_backend(devices[0]), "options", None) if devices else None
    return options._timeout if options is not None else default_pg_timeout


def adopt_time_limit(group: dist.ProcessGroup) -> None:
    """Give a group that torch has made the time limit of the world."""
    if (limit := time_limit(dist.group.WORLD)) != time_limit(group):
        _set_pg_timeout(limit, group)
