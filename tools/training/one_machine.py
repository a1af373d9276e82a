"""The rendezvous of an agent that is alone: torch's elastic agent then meets no other.

torch's own rendezvous listens on all interfaces, for agents of other machines, and unpickles what
lies there. The agent of local ranks has no other to meet: its store is in its own memory, and its
ranks meet at the store of `parallel.local_store`.
"""

from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

LOOPBACK = "127.0.0.1"  # the name localhost need not resolve
NO_PORT = 1  # what ranks are told as MASTER_PORT, which must be a port; none is opened


class OneMachine(RendezvousHandler):
    """The rendezvous of one agent, which is there at once.

    run_id: TORCHELASTIC_RUN_ID of its ranks.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def get_backend(self) -> str:
        """Return a name for it."""
        return "one_machine"

    @property
    def use_agent_store(self) -> bool:
        """True: the launcher has the store of the ranks, and not rank 0."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the world of one agent."""
        address = RendezvousStoreInfo(LOOPBACK, NO_PORT)
        return RendezvousInfo(HashStore(), 0, 1, address)

    def is_closed(self) -> bool:
        """Return False: no other agent could close it."""
        return False

    def set_closed(self) -> None:
        """Do nothing, as no other agent could see it."""

    def num_nodes_waiting(self) -> int:
        """Return 0, as no other agent can join."""
        return 0

    def get_run_id(self) -> str:
        """Return the run's id."""
        return self._run_id

    def shutdown(self) -> bool:
        """Return True: there is nothing to end."""
        return True
