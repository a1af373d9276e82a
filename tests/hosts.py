"""Two hosts on one machine: network namespaces with a name of their own each, joined by a link that
can be cut."""

import os
import random
import signal
import socket
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import pytest

NAMES = ("alpha", "beta")
ADDRESSES = ("10.77.0.1", "10.77.0.2")


class Hosts:
    """Both hosts. name: the beginning of the names of everything that belongs to them."""

    def __init__(self, name: str) -> None:
        self.spaces = [f"{name}{host}" for host in NAMES]
        self.ends = [f"{name}{host[0]}" for host in NAMES]  # of the link: at most 15 letters
        self._started = list[subprocess.Popen]()

    def connect(self) -> None:
        one, other = self.ends
        for space in self.spaces:
            _ip("netns", "add", space)
        _ip("link", "add", one, "type", "veth", "peer", "name", other)
        for space, end, address in zip(self.spaces, self.ends, ADDRESSES, strict=True):
            _ip("link", "set", end, "netns", space)
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", end)
            for device in (end, "lo"):
                _ip("-n", space, "link", "set", device, "up")

    def cut(self) -> None:
        """From now on nothing that one host sends reaches the other, and neither is told so."""
        self._set_link("down")

    def mend(self) -> None:
        """From now on it does again."""
        self._set_link("up")

    def lose(self, host: int) -> None:
        """Nothing of the host runs any more, and nothing that is sent to it is answered."""
        self.cut()
        self._kill_all(self.spaces[host])

    def _kill_all(self, space: str) -> None:
        for pid in _ip("netns", "pids", space).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def _set_link(self, state: str) -> None:
        for space, end in zip(self.spaces, self.ends, strict=True):
            _ip("-n", space, "link", "set", end, state)

    def remove(self) -> None:
        """Nothing stays behind, also if a test has failed in the middle of it."""
        for process in self._started:
            process.kill()
            process.wait()
        for space in self.spaces:
            with suppress(subprocess.CalledProcessError):
                self._kill_all(space)  # what the processes have started may outlive them
                _ip("netns", "del", space)

    def start(
        self, host: int, command: Sequence[str], environ: Mapping[str, str], output: IO[bytes]
    ) -> subprocess.Popen:
        """A process on a host, which calls itself alpha or beta."""
        named = f'hostname {NAMES[host]} && exec "$@"'
        whole = [
            "ip",
            "netns",
            "exec",
            self.spaces[host],
            "unshare",
            "--uts",
            "sh",
            "-c",
            named,
            "sh",
            *command,
        ]
        own = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": self.ends[host],
            "TP_SOCKET_IFNAME": self.ends[host],
            **environ,
        }
        self._started.append(
            subprocess.Popen(whole, env=own, stdout=output, stderr=subprocess.STDOUT)
        )
        return self._started[-1]


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Two connected hosts, removed afterwards. Skips the test where this process may not make
    them."""
    if os.geteuid() != 0 or not Path("/proc/self/ns/net").exists():
        pytest.skip("network namespaces need root and Linux")
    hosts = Hosts(f"mp{uuid.uuid4().hex[:6]}")
    try:
        hosts.connect()
    except (OSError, subprocess.CalledProcessError) as error:
        hosts.remove()
        pytest.skip(f"network namespaces cannot be made here: {getattr(error, 'stderr', error)}")
    try:
        yield hosts
    finally:
        hosts.remove()


def free_port() -> int:
    """A port from 20000 to 29999 that nothing listens at. The kernel gives connections only higher
    ones."""
    while True:
        with (
            suppress(OSError),
            socket.create_server(("", random.SystemRandom().randrange(20_000, 30_000))) as server,
        ):
            return server.getsockname()[1]
