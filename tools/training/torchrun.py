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
LOOK = 1.0  # seconds between two looks
PROBE = 5  # seconds between the kernel's probes of a connection without traffic
PROBES = 127  # unanswered ones after which the kernel gives up: never before this module does
ESTABLISHED = 1  # the first number of the kernel's tcp_info, which has 8 bytes and then words
LAST_ACK = 20  # milliseconds since the other side has acknowledged something


class Connection:
    """The connections of this process to the store at `address`, (host, port), of torchrun's
    agents."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address
        self.lost = ""  # why they were shut down; "" if they were not

    def watch(self) -> None:
        """Look at them, and at the ranks of this machine, as long as this process lives."""
        without = time.monotonic()  # when there was a rank last
        told = without
        while not self.lost:
            time.sleep(LOOK)
            now = time.monotonic()
            if any(_living_children()):
                without = told = now
                continue
            self._end_silent(now - without)
            if not self.lost and now > told + SILENCE:
                told = now
                _tell(
                    f"this machine has had no ranks for {now - without:.0f} s: torchrun waits for "
                    "other machines"
                )

    def _end_silent(self, alone: float) -> None:
        """Shut them down if the other side is silent. alone: seconds without a rank, in which it
        was probed."""
        for one in _connected(self.address[1]):
            _probe(one)
            silence = _silence(one)
            if min(silence, alone) > SILENCE:
                host, port = self.address
                self.lost = (
                    f"{host}:{port}, where torchrun's agents meet, has acknowledged nothing for "
                    f"{silence:.0f} s, and no rank of this machine is left: the machine is down, "
                    "or the link to it is cut"
                )
                one.shutdown(socket.SHUT_RDWR)


def _living_children() -> Iterator[int]:
    """Yield the processes that this one has started and that have not ended; torchrun may be too
    busy to bury them."""
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            for pid in (task / "children").read_text().split():
                with suppress(OSError):
                    if (
                        Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                        not in "ZX"
                    ):
                        yield int(pid)


def _connected(port: int) -> Iterator[socket.socket]:
    """Yield this process' connections to the port of another process."""
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(number))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.getpeername()[1] == port:
                    yield one


def _probe(one: socket.socket) -> None:
    """Let the kernel ask the other side for an answer when there is no traffic."""
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, PROBE),
        (socket.TCP_KEEPINTVL, PROBE),
        (socket.TCP_KEEPCNT, PROBES),
    ):
        one.setsockopt(socket.IPPROTO_TCP, option, value)


def _silence(one: socket.socket) -> float:
    """Return the seconds since the kernel of the other side has acknowledged something."""
    told = struct.unpack("8B24I", one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104))
    return told[LAST_ACK] / 1000 if told[0] == ESTABLISHED else 0.0


def _tell(what: str) -> None:
    print(f"torchrun   {socket.gethostname()}: {what}", file=sys.stderr, flush=True)


def _reason(error: RendezvousError) -> str:
    if isinstance(error, RendezvousTimeoutError):
        return (
            "other machines did not come in the time for it (--rdzv-conf join_timeout=SECONDS, "
            "600 unless set)"
        )
    return f"the machines could not meet: {error}"


def main(argv: Sequence[str]) -> int:
    """Run torchrun with these options; return the exit code. Failures of ranks are raised, as
    torchrun does."""
    endpoint = run.parse_args(list(argv)).rdzv_endpoint
    meeting = Connection(parse_rendezvous_endpoint(endpoint, DEFAULT_PORT))
    if sys.platform == "linux":
        Thread(target=meeting.watch, daemon=True, name="connection to torchrun's store").start()
    try:
        run.main(list(argv))
    except RendezvousError as error:
        _tell(meeting.lost or _reason(error))
        return 1
    except Exception:
        if not meeting.lost:
            raise
        _tell(meeting.lost)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
