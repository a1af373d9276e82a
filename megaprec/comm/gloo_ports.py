"""The ports of gloo, which are shut once the ranks of a group are connected.

Each process group of gloo listens on a port as long as it lives, and takes any connection: who
sends the number of a rank, which is no secret, is taken for it. The port is needed while the group
is made. Afterwards a filter of the kernel drops whatever reaches it, and the kernel tells whether
another user of this machine has connected meanwhile; then the run ends.

Linux only; elsewhere, and in a sandbox without such filters, the ports stay open.
"""

import ctypes
import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megaprec.comm.gloo_threads import waiting_their_turn
from megaprec.errors import UserError

SO_ATTACH_FILTER = 26
# "man 7 socket": a program of one instruction, which returns the bytes of a packet to keep, none
DROP_ALL = struct.pack("@HBBI", 0x06, 0, 0, 0)
# in /proc/net: of connections that are open, or that the other side alone has closed
OPEN_STATES = ("01", "08")
LAZY = "TORCH_GLOO_LAZY_INIT"  # ranks then connect at any time, and the ports have to stay open
ROOT = 0  # may read all memory anyway

Address = tuple[str, int]


@contextmanager
def making_gloo_group() -> Iterator[None]:
    """Make a process group of gloo within the context: its threads wait their turn, and its ports
    are shut afterwards.
    """
    with shut_when_connected(), waiting_their_turn():
        yield


@contextmanager
def shut_when_connected() -> Iterator[None]:
    """Shut the ports that this process opens within the context.

    Raises UserError if another user of this machine has connected to one of them meanwhile.
    """
    before = dict(_listening_sockets())
    yield
    if os.environ.get(LAZY):
        return
    for number, address in _listening_sockets():
        if before.get(number) != address:
            _shut(number)
            _require_own_connections(address)


def _listening_sockets() -> Iterator[tuple[int, Address]]:
    """Yield the file descriptors of this process at which it listens, with their addresses."""
    if sys.platform != "linux":
        return
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            # a copy of the descriptor: closing it leaves the socket open
            with socket.socket(fileno=os.dup(number)) as copy:
                if copy.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    yield number, copy.getsockname()[:2]


def _shut(number: int) -> None:
    """Let the kernel drop what reaches a listening socket from now on."""
    instructions = ctypes.create_string_buffer(DROP_ALL)
    program = struct.pack("@HP", 1, ctypes.addressof(instructions))
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as copy:
        copy.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


def _require_own_connections(address: Address) -> None:
    """Raise UserError if another user of this machine is connected to an address."""
    own_users = {os.geteuid(), ROOT}
    host, port = address
    for user in _users_connected_to(address):
        if user not in own_users:
            raise UserError.of("comm.other_user", address=host, port=port, user=user)


def _users_connected_to(address: Address) -> Iterator[int]:
    """Yield the users of this machine with a connection to an address, by the kernel's table of
    connections ("man 5 proc")."""
    host, port = address
    is_ipv6 = ":" in host
    packed = socket.inet_pton(socket.AF_INET6 if is_ipv6 else socket.AF_INET, host)
    # words of 32 bits, each as this machine writes a number
    words = [packed[start : start + 4] for start in range(0, len(packed), 4)]
    written_host = "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)
    written = f"{written_host}:{port:04X}"
    table = Path("/proc/net/tcp6" if is_ipv6 else "/proc/net/tcp")
    with suppress(OSError):
        _, *rows = table.read_text().splitlines()  # the first line has the names of columns
        for row in rows:
            _, _, remote, state, _, _, _, user, *_ = row.split()
            if remote == written and state in OPEN_STATES:
                yield int(user)
