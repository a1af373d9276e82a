"""Names of Megatron-LM and DeepSpeed, answered: keys of a run file, or the reason why there is
none."""

from collections.abc import Mapping

from tools.arguments import deepspeed, megatron_idle, megatron_refused
from tools.arguments.megatron import READ


def _keys() -> dict[str, tuple[str, ...]]:
    """Return the keys of all names that are read: as typed, as kept by Megatron-LM, and the parts
    of a path."""
    found = {row.sets: row.keys for row in READ.values()} | {
        row.name: row.keys for row in READ.values()
    }
    for path, keys in deepspeed.READ.items():
        leaf = path.rpartition(".")[2]
        for name in (path, *((leaf,) if "_" in leaf else ()), path.partition(".")[0]):
            found.setdefault(name, keys)
    return found


def _reasons() -> dict[str, str]:
    refused = {path: why for path, (_, why) in deepspeed.REFUSED.items()} | dict(
        megatron_refused.WHY
    )
    return {**deepspeed.IDLE, **megatron_idle.WHY, **refused}


KEYS: Mapping[str, tuple[str, ...]] = _keys()
"""Keys of a run file by names of the other systems."""
REASONS: Mapping[str, str] = _reasons()
"""The reasons why other names have no key."""
