"""A rank among those that are checked, and the words that name it.

Everything that ranks tell each other goes through the store, which answers although a rank hangs.
Only the checks of links and clocks send messages between ranks, with a short time limit.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

SHOWN = 4  # ranks or hosts that a line names at most


@dataclass(frozen=True)
class Place:
    """One rank. local: its index on its host. layout: pipeline, data and tensor ranks. device: cpu
    or cuda.

    folder: the folder whose filesystem is checked. bytes_needed: what the run will write there.
    """

    rank: int
    size: int
    local: int
    host: str
    store: dist.Store
    layout: tuple[int, int, int]
    device: str
    folder: Path
    bytes_needed: int

    def tell(self, key: str, value: Any) -> None:
        """Put a JSON value into the store."""
        self.store.set(f"doctor/{key}", json.dumps(value))

    def told(self, key: str, seconds: float) -> Any:
        """Return the JSON value of `key`, once it is there. Raises TimeoutError."""
        deadline = time.monotonic() + seconds
        name = f"doctor/{key}"
        while not self.store.check([name]):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{key} was not told within {seconds:g} s")
            time.sleep(0.005)
        return json.loads(self.store.get(name))

    def firsts(self) -> list[int]:
        """Return the first rank of each host, in order of ranks. All ranks must have answered
        before."""
        hosts = self.told("hosts", 10.0)
        return [rank for rank, host in enumerate(hosts) if host not in hosts[:rank]]

    def host_of(self, rank: int) -> str:
        """Return the host of a rank. All ranks must have answered before."""
        return self.told("hosts", 10.0)[rank]


def named(ranks: Mapping[int, str]) -> str:
    """Return "rank 3 on node1" or "ranks 3 and 4 on node1". ranks: rank -> its host, "" if it is
    not known."""
    hosts = sorted({host or "a host that is not known" for host in ranks.values()})
    shown = [str(rank) for rank in sorted(ranks)]
    listed = _listed(shown)
    return f"rank{'s' if len(ranks) > 1 else ''} {listed} on {_listed(hosts)}"


def _listed(words: list[str]) -> str:
    if len(words) > SHOWN:
        return f"{', '.join(words[:SHOWN])} and {len(words) - SHOWN} more"
    return " and ".join(", ".join(words).rsplit(", ", 1))
