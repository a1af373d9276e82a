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

MOST_LISTED = 4  # ranks or hosts that a line names at most
HOSTS_SECONDS = 10.0  # to wait for the hosts of all ranks, which rank 0 publishes
POLL_SECONDS = 0.005  # between two looks at the store
Answer = dict[str, Any]  # what a rank reports: JSON values by name


@dataclass(frozen=True)
class RankContext:
    """One rank.

    local: its index on its host. layout: pipeline, data and tensor ranks. device: cpu or cuda.
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
        """Wait for the JSON value of `key` and return it. Raises TimeoutError after `seconds`."""
        deadline = time.monotonic() + seconds
        store_key = f"doctor/{key}"
        # Polls: a blocking `get` would wait for the store's own, long timeout.
        while not self.store.check([store_key]):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{key} was not told within {seconds:g} s")
            time.sleep(POLL_SECONDS)
        return json.loads(self.store.get(store_key))

    def first_ranks(self) -> list[int]:
        """Return the first rank of each host, in order of ranks.

        All ranks must have answered before.
        """
        hosts: list[str] = self.told("hosts", HOSTS_SECONDS)
        return [hosts.index(host) for host in dict.fromkeys(hosts)]

    def host_of(self, rank: int) -> str:
        """Return the host of a rank. All ranks must have answered before."""
        return self.told("hosts", HOSTS_SECONDS)[rank]


def format_ranks(hosts_by_rank: Mapping[int, str]) -> str:
    """Return "rank 3 on node1" or "ranks 3 and 4 on node1".

    hosts_by_rank: the host of each rank, "" if it is not known.
    """
    hosts = sorted({host or "a host that is not known" for host in hosts_by_rank.values()})
    ranks = [str(rank) for rank in sorted(hosts_by_rank)]
    plural = "s" if len(ranks) > 1 else ""
    return f"rank{plural} {_enumerate_words(ranks)} on {_enumerate_words(hosts)}"


def _enumerate_words(words: list[str]) -> str:
    """Return "a, b and c"; of many words the first ones and the number of the others."""
    if len(words) > MOST_LISTED:
        listed = ", ".join(words[:MOST_LISTED])
        return f"{listed} and {len(words) - MOST_LISTED} more"
    *first_ones, last = words
    if not first_ones:
        return last
    return f"{', '.join(first_ones)} and {last}"
