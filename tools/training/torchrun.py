"""torchrun with an end for a machine that is cut off: python -P -m tools.training.torchrun, with
torchrun's options.

The agents of torchrun meet at a store on one machine. When that machine is lost, or the link to it,
the ranks elsewhere leave by their watchdogs, but their agent waits for an answer of the store until
the kernel gives up the connection: about a quarter of an hour. Here a thread of the agent looks at
the connection. Once no rank of this machine is left and the kernel of the other machine has
acknowledged nothing for SILENCE seconds, the connection is shut down, and the agent ends with one
line. While it has no ranks and waits for other machines, it says so from time to time.

The options must give --rdzv-backend c10d and --rdzv-endpoint. The connection is looked at on Linux
only; elsewhere this is torchrun as it is.
"""

import os
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread

from torch.distributed import run
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

SILENCE = 30.0  # seconds
POLL_SECONDS = 1.0  # between two looks
PROBE_SECONDS = 5  # between the kernel's probes of a connection without traffic
PROBES = 127  # unanswered ones after which the kernel gives up: never before this module does
# The kernel's tcp_info: 8 bytes, then words of 32 bits.
TCP_INFO = struct.Struct("8B24I")
STATE = 0  # its index in tcp_info
LAST_ACK = 20  # index of the milliseconds since the other side has acknowledged something
ESTABLISHED = 1  # the state of a connection that is open


class Connection:
    """The connections of this process to the store of torchrun's agents.

    address: (host, port) of the store.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address
        self.lost = ""  # why they were shut down; "" if they were not

    def watch(self) -> None:
        """Look at the connections, and at the ranks of this machine, until the connections are shut
        down or this process ends."""
        last_with_ranks = time.monotonic()
        last_message = last_with_ranks
        while not self.lost:
            time.sleep(POLL_SECONDS)
            now = time.monotonic()
            if any(_living_children()):
                last_with_ranks = now
                last_message = now
                continue
            without_ranks = now - last_with_ranks
            self._end_silent(without_ranks)
            if not self.lost and now > last_message + SILENCE:
                last_message = now
                _print_message(
                    f"this machine has had no ranks for {without_ranks:.0f} s: torchrun waits for "
                    "other machines"
                )

    def _end_silent(self, without_ranks: float) -> None:
        """Shut the connections down if the other side is silent.

        without_ranks: seconds without a rank, in which the other side was probed.
        """
        host, port = self.address
        for connection in _connections_to(port):
            _enable_probes(connection)
            silence = _seconds_of_silence(connection)
            # Silence says nothing before the other side was probed, as it is without ranks here.
            if min(silence, without_ranks) > SILENCE:
                self.lost = (
                    f"{host}:{port}, where torchrun's agents meet, has acknowledged nothing for "
                    f"{silence:.0f} s, and no rank of this machine is left: the machine is down, "
                    "or the link to it is cut"
                )
                connection.shutdown(socket.SHUT_RDWR)


def _living_children() -> Iterator[int]:
    """Yield the processes that this one has started and that have not ended."""
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            for pid in (task / "children").read_text().split():
                with suppress(OSError):  # it may end while it is looked at
                    # One that has ended is listed, as a zombie, until torchrun waits for it.
                    if _process_state(pid) not in "ZX":
                        yield int(pid)


def _process_state(pid: str) -> str:
    """Return the letter of /proc/PID/stat for a process' state."""
    # After the command's name in parentheses, which may hold spaces and parentheses itself.
    _, _, fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    return fields.split()[0]


def _connections_to(port: int) -> Iterator[socket.socket]:
    """Yield this process' connections to the port of another process."""
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            # A copy of the descriptor: closing it leaves the connection open.
            with socket.socket(fileno=os.dup(int(number))) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                _, peer_port, *_ = connection.getpeername()
                if peer_port == port:
                    yield connection


def _enable_probes(connection: socket.socket) -> None:
    """Let the kernel ask the other side for an answer when there is no traffic."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)


def _seconds_of_silence(connection: socket.socket) -> float:
    """Return the seconds since the kernel of the other side has acknowledged something."""
    content = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO.size)
    tcp_info = TCP_INFO.unpack(content)
    return tcp_info[LAST_ACK] / 1000 if tcp_info[STATE] == ESTABLISHED else 0.0


def _print_message(message: str) -> None:
    print(f"torchrun   {socket.gethostname()}: {message}", file=sys.stderr, flush=True)


def _describe_failure(error: RendezvousError) -> str:
    if isinstance(error, RendezvousTimeoutError):
        return (
            "other machines did not come in the time for it (--rdzv-conf join_timeout=SECONDS, "
            "600 unless set)"
        )
    return f"the machines could not meet: {error}"


def main(argv: Sequence[str]) -> int:
    """Run torchrun with these options; return the exit code. Failures of ranks are raised, as
    torchrun does.
    """
    endpoint = run.parse_args(list(argv)).rdzv_endpoint
    connection = Connection(parse_rendezvous_endpoint(endpoint, DEFAULT_PORT))
    if sys.platform == "linux":
        Thread(target=connection.watch, daemon=True, name="connection to torchrun's store").start()
    try:
        run.main(list(argv))
    except RendezvousError as error:
        _print_message(connection.lost or _describe_failure(error))
        return 1
    except Exception:
        if not connection.lost:
            raise
        _print_message(connection.lost)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
