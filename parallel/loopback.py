"""Ranks that are all on one machine: gloo and NCCL then open no port that another machine reaches.

By themselves, gloo listens at the address of the machine's name and NCCL at that of its first
network interface, also where no rank is elsewhere.
"""

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist

from parallel.local_store import STORE, LocalStore

INTERFACE = "GLOO_SOCKET_IFNAME"
# as macOS calls it, and Linux
LOOPBACK = "lo0" if "lo0" in {name for _, name in socket.if_nameindex()} else "lo"
# NCCL takes a name for a prefix unless it begins with "="
INTERFACES = {INTERFACE: LOOPBACK, "NCCL_SOCKET_IFNAME": f"={LOOPBACK}"}
ONE_MACHINE = "all ranks are on one machine"  # key of the store; "yes" if they are


@contextmanager
def within_machine(store: dist.Store) -> Iterator[None]:
    """Let gloo and NCCL use the loopback interface alone within the context, if all ranks of a
    store are on this machine: it sets their environment variables, and restores them at the end.

    Interfaces that the environment names count only where another launcher has started the ranks:
    those for a cluster may stand in a shell's profile.
    """
    before = dict(os.environ)
    os.environ.update(_interfaces(store))
    try:
        yield
    finally:
        for name in INTERFACES:
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]


def _interfaces(store: dist.Store) -> dict[str, str]:
    """Return the variables to set."""
    if _started_here(store):
        return INTERFACES
    if store.get(ONE_MACHINE) != b"yes":
        return {}
    return {name: value for name, value in INTERFACES.items() if not os.environ.get(name)}


def listening_in_words(environment: Mapping[str, str] = os.environ) -> str:
    """Return in words where the ranks of the joined world listen, and for whom. To be called within
    `within_machine`."""
    on_loopback = environment.get(INTERFACE) == LOOPBACK
    if on_loopback and environment.get(STORE):
        return "on loopback alone, for ranks of this user"
    place = "on loopback" if on_loopback else f"on {environment.get(INTERFACE) or 'the network'}"
    if "MASTER_ADDR" not in environment:  # a program of the user's own has made the world
        return f"ranks {place}"
    store = f"the ranks' store at {environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
    return f"ranks {place}; {store} answers whoever reaches it: docs/cluster.md#who-may-connect"


def _started_here(store: dist.Store) -> bool:
    """Return True for the store of a process alone, or of local ranks."""
    return isinstance(store, dist.HashStore | LocalStore)
